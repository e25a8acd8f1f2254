"""Large dense layers stored as tables are: which ones, how exact they come back, and what a delta of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store import BadInput, Store, TableOptions
from cnr_store.training import CheckpointManager, PrecisionPolicy, load
from tests.training.runs import assert_same

ABOVE = 64 * 32 * 4


class Tower(nn.Module):
    """An embedding, two large layers, and what is never taken as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.user = nn.Embedding(100, 32, sparse=True)
        self.first = nn.Linear(32, 64)
        self.conv = nn.Conv1d(1, 64, 32)
        self.last = nn.Linear(64, 64)
        self.small = nn.Linear(64, 1)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.first(self.user(users)))
        result: torch.Tensor = self.small(torch.relu(self.last(found)))
        return result


class Run:
    """The tower and its optimizers, trained on batches that their number alone decides."""

    def __init__(self) -> None:
        self.model = Tower()
        dense = [p for name, p in self.model.named_parameters() if name != "user.weight"]
        self.optimizers = [torch.optim.SparseAdam([self.model.user.weight]), torch.optim.Adam(dense, lr=1e-2)]

    def state(self) -> dict[str, Any]:
        """Weights and the state of Adam, copied."""
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for number, one in self.optimizers[1].state_dict()["state"].items():
            found |= {f"{number}/{key}": value.clone() for key, value in one.items()}
        return found

    def train(self, number: int) -> None:
        users = torch.randint(0, 100, (16,), generator=torch.Generator(torch.get_default_device()).manual_seed(number))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(users).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()


def manager_of(root: Path, run: Run, dense: TableOptions | None, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        str(root / "store"), model=run.model, optimizer=run.optimizers,
        precision=PrecisionPolicy(dense=dense, dense_above_bytes=ABOVE), **options,
    )  # fmt: skip


def saved(root: Path, dense: TableOptions | None, steps: int = 3, **options: Any) -> tuple[Run, list[int]]:
    """Train and save at every step; the run, and the bytes of each save."""
    run = Run()
    with manager_of(root, run, dense, **options) as manager:
        for number in range(steps):
            run.train(number)
            manager.step()
            manager.save()
            manager.wait_until_finished()
        sizes = [report.size_bytes for report in manager.history]
    return run, sizes


def test_large_layers_are_tables_and_the_rest_stays_exact(tmp_path: Path) -> None:
    run, _ = saved(tmp_path, TableOptions(max_error=1e-3))

    snapshot = Store.open(str(tmp_path / "store")).snapshot()
    assert snapshot.tables.keys() == {"user.weight", "first.weight", "last.weight"}
    assert snapshot.tables["last.weight"].slots.keys() == {"exp_avg", "exp_avg_sq"}
    assert {"first.bias", "conv.weight", "small.weight"} <= snapshot.dense.keys()
    found = torch.from_numpy(snapshot.table("last.weight").read())
    assert (found - run.model.last.weight.detach().cpu()).abs().max() <= 1e-3 * (1 + 1e-5)


def test_a_delta_of_a_large_layer_holds_every_row_as_a_difference(tmp_path: Path) -> None:
    saved(tmp_path, TableOptions(bits=8))

    manifest = Store.open(str(tmp_path / "store")).snapshot().manifests[-1]
    part = next(part for part in manifest.parts if part.table == "last.weight")
    assert part.add is not None
    assert (part.add.count, part.set, part.escape) == (64, None, None)


def test_exact_layers_go_on_as_the_uninterrupted_run(tmp_path: Path) -> None:
    exact = TableOptions.exact()
    whole, _ = saved(tmp_path / "whole", exact, steps=5, options=exact)
    saved(tmp_path, exact, options=exact)

    again = Run()
    with manager_of(tmp_path, again, exact, options=exact) as manager:
        assert manager.restore() is not None
        for number in (3, 4):
            again.train(number)

    assert_same(again.state(), whole.state())


def test_load_needs_not_be_told_of_large_layers(tmp_path: Path) -> None:
    run, _ = saved(tmp_path, TableOptions(max_error=1e-3))

    model = Tower()
    loaded = load(str(tmp_path / "store"), model)

    assert "last.weight" in loaded.tables
    assert torch.allclose(model.last.weight, run.model.last.weight, atol=1.1e-3)


def test_a_layer_has_options_of_its_own(tmp_path: Path) -> None:
    run, _ = saved(tmp_path, TableOptions(bits=2), options={"last.weight": TableOptions.exact()})

    snapshot = Store.open(str(tmp_path / "store")).snapshot()
    assert torch.equal(torch.from_numpy(snapshot.table("last.weight").read()), run.model.last.weight.cpu())
    assert not torch.equal(torch.from_numpy(snapshot.table("first.weight").read()), run.model.first.weight.cpu())


def test_without_the_option_every_dense_tensor_is_exact(tmp_path: Path) -> None:
    run, _ = saved(tmp_path, None)

    snapshot = Store.open(str(tmp_path / "store")).snapshot()
    assert snapshot.tables.keys() == {"user.weight"}
    assert torch.equal(torch.from_numpy(snapshot.read_dense("last.weight")), run.model.last.weight.cpu())


@pytest.mark.parametrize(("before", "now"), [(TableOptions(bits=8), None), (None, TableOptions(bits=8))])
def test_a_manager_without_the_option_refuses_it_and_names_the_layers(
    before: TableOptions | None, now: TableOptions | None, tmp_path: Path
) -> None:
    """A regression: the error offered only strict=False, which leaves these layers untrained."""
    saved(tmp_path, before)

    said = r"last\.weight.* in the checkpoint and .* here: give PrecisionPolicy\(dense="
    with manager_of(tmp_path, Run(), now) as manager, pytest.raises(BadInput, match=said):
        manager.restore()


@pytest.mark.parametrize("wrong", [{"dense": 8}, {"dense_above_bytes": -1}])
def test_what_is_no_option_for_dense_layers_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        PrecisionPolicy(**wrong)
