"""What a stall would have to compile in a new environment is compiled when a manager is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program

PROGRAM = """
import torch
from cnr_store.encodings import affine_kernels, kernels
from cnr_store.runtime import addresses
from cnr_store.training import CheckpointManager
from cnr_store_gpu import host_copies, words

STALL = [
    affine_kernels.greedy_params, affine_kernels.squared_errors, affine_kernels.first_bad_row,
    kernels.lattice_squared_error, kernels.lattice_squared_errors, words._count_spans, words._list_spans,
    host_copies._gather_parts, addresses._are_equal,
]
model = torch.nn.ModuleList([torch.nn.Embedding(rows, 4, sparse=True) for rows in (500, 5)])
optimizer = torch.optim.Adagrad(model.parameters())
manager = CheckpointManager("memory://compiling", model=model, optimizer=optimizer, every_steps=1)
compiled = [(one.__name__, list(one.signatures)) for one in STALL]
for step in range(2):
    for table in model:
        table(torch.tensor([step])).sum().backward()
    optimizer.step()
    manager.step()
manager.close()
assert [report.kind for report in manager.history] == ["baseline", "delta"]
assert all(signatures for _, signatures in compiled), compiled
assert [(one.__name__, list(one.signatures)) for one in STALL] == compiled
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("cnr_store.training")
    yield launcher
    launcher.close()


def test_a_stall_does_not_compile_what_finds_rows_and_scales(launcher: Launcher, tmp_path: Path) -> None:
    (ended,) = launcher.run(Program(["-c", PROGRAM]), folder=tmp_path)

    assert ended.returncode == 0, ended.stderr
