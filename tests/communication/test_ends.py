"""A rank of a test ends without threads of gloo: one that drops its tensors while the interpreter ends aborts it."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import ThresholdedGradients
from tests.communication.conftest import RunRanks
from tests.communication.models import Clicks


def count_threads_at_exit() -> None:
    """Leave a model in a reference cycle. The last line that the rank prints is its number of threads."""
    model = DistributedDataParallel(Clicks().layers)
    hook = ThresholdedGradients()
    hook.register(model)
    model(torch.randn(4, 20)).sum().backward()
    cycle: list[object] = [model, hook]
    cycle.append(cycle)
    atexit.register(lambda: print(json.dumps(len(list(Path("/proc/self/task").iterdir())))))  # noqa: T201


def test_no_thread_of_gloo_is_left_when_a_rank_ends(run_ranks: RunRanks) -> None:
    assert run_ranks(2, count_threads_at_exit) == [1, 1]
