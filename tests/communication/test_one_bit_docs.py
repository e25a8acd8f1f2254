"""The examples of docs/communication.md run on ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.communication.conftest import RunRanks
from tests.support.pages import DOCS, python_blocks, run_example


def run_examples() -> int:
    own = Path(str(dist.get_rank()))
    own.mkdir()
    os.chdir(own)
    blocks = python_blocks(DOCS / "communication.md")
    for block in blocks:
        given: dict[str, Any] = {}
        run_example(block, given)
    return len(blocks)


def test_the_examples_of_the_page_run(run_ranks: RunRanks) -> None:
    assert min(run_ranks(2, run_examples)) >= 3
