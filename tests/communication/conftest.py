"""Programs of several ranks under gloo, forked from one process that has imported torch and trained."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import Launcher, Program

_RUN = "import sys; from tests.communication.rank import main; main(*sys.argv[1:])"

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(launcher: Launcher, tmp_path: Path) -> RunRanks:
    """``run_ranks(world, function, *arguments)``: what a module-level function returns on each rank, as JSON.

    The function runs in a process of its own per rank, with ``torch.distributed`` initialised.
    ``codes``: the exit codes that are expected.
    """
    runs = itertools.count()

    def run(world: int, function: Callable[..., Any], *arguments: Any, codes: set[int] = {0}) -> list[Any]:  # noqa: B006
        meeting = tmp_path / f"meeting-{next(runs)}"
        name = f"{function.__module__}:{function.__qualname__}"
        given = [name, str(world), str(meeting), json.dumps(arguments)]
        programs = [Program(["-c", _RUN, str(rank), *given], {"OMP_NUM_THREADS": "1"}) for rank in range(world)]
        ended = launcher.run(*programs, folder=tmp_path)
        assert {one.returncode for one in ended} <= codes, "\n".join(one.stderr[-3000:] for one in ended)
        return [json.loads(one.stdout.splitlines()[-1]) if one.stdout else None for one in ended]

    return run
