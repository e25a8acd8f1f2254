"""Where a rank does not come to a step, that step fails: nobody trains on what did not arrive."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import QuantizedGradients, ThresholdedGradients
from tests.communication.conftest import RunRanks


def step_alone(kind: str) -> bool:
    """Take two steps (DDP builds its buckets anew in the second), and on rank 0 one for which rank 1 does not come.

    Returns whether that one gave gradients.
    """
    group = dist.new_group(timeout=timedelta(seconds=2))
    module = nn.EmbeddingBag(20, 8, sparse=True) if kind == "sparse" else nn.Linear(20, 8)
    model = DistributedDataParallel(module, process_group=group)
    hook = QuantizedGradients() if kind == "levels" else ThresholdedGradients(keep=0.1)
    hook.register(model)
    given = torch.arange(20).view(4, 5) if kind == "sparse" else torch.ones(4, 20)
    for _ in range(2):
        model(given).sum().backward()
    if dist.get_rank() == 1:
        return True
    try:
        model(given).sum().backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kind", ["thresholds", "levels", "sparse"])
def test_a_step_without_a_rank_fails_instead_of_averaging_garbage(run_ranks: RunRanks, kind: str) -> None:
    assert run_ranks(2, step_alone, kind) == [False, True]
