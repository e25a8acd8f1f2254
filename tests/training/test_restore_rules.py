"""What a restore must refuse or take away: a state of another digest, and optimizer state of after the checkpoint."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import CorruptStore, TableOptions
from cnr_store.errors import BadInput
from cnr_store.format.records import Manifest
from cnr_store.training import CheckpointManager, StoreOptions
from cnr_store.write.mirrors import MirrorMode
from cnr_store.write.writer import Writer
from tests.tools.sample_store import Forgery, forge_head
from tests.training.runs import grouped

ROWS = 30


def moved_by_one(manifest: Manifest, forgery: Forgery) -> Manifest:
    """Every code of the added rows one step off; what the manifest says of the state stays."""
    for part in manifest.parts:
        if part.add is not None:
            array = part.add.arrays["codes"]
            forgery.write(array, forgery.read(array) + np.asarray(1, array.dtype))
    return manifest


@pytest.mark.parametrize("mirror", ["memory", "mmap", "none"])
def test_a_state_of_another_digest_is_not_resumed(mirror: MirrorMode, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    folder = str(tmp_path) if mirror == "mmap" else None
    table, other = nn.Embedding(ROWS, 4, sparse=True), nn.Embedding(ROWS, 4, sparse=True)
    with CheckpointManager(url, model=table, options=TableOptions(bits=8)) as manager:
        manager.save()
        with torch.no_grad():
            table.weight[3:5] += 1
        manager.tracker.mark("weight", torch.tensor([3, 4]))
        manager.save()
        forge_head(manager.store, moved_by_one)

    manager = CheckpointManager(url, model=other, store_options=StoreOptions(mirror=mirror, mirror_folder=folder))
    with pytest.raises(CorruptStore, match="state digest"):
        manager.restore()
    manager.close()


class Refusing:
    """An extra state that is saved, and that nothing can be loaded into."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("it loads nothing")


def test_a_restore_that_fails_frees_the_mirrors_it_has_read(tmp_path: Path) -> None:
    """The error, which a program may keep, kept the writer and its mirrors."""
    url, table = str(tmp_path / "store"), nn.Embedding(ROWS, 4, sparse=True)
    with CheckpointManager(url, model=table, extras={"own": Refusing()}) as manager:
        manager.save()
    manager = CheckpointManager(url, model=nn.Embedding(ROWS, 4, sparse=True), extras={"own": Refusing()})
    of_others = writers_alive()

    with pytest.raises(RuntimeError, match="loads nothing") as kept:
        manager.restore()

    [writer] = [one for one in writers_alive() if one not in of_others]
    assert kept.value is not None
    assert writer.mirror_bytes == 0
    manager.close()


def test_an_extra_that_does_not_take_its_state_is_named_and_left_out(tmp_path: Path) -> None:
    """Averages of a model that has got a table were refused by torch, which did not say what they belong to."""
    url, table = str(tmp_path / "store"), nn.Embedding(ROWS, 4, sparse=True)
    with CheckpointManager(url, model=table, extras={"own": Refusing()}) as manager:
        manager.save()
    other = nn.Embedding(ROWS, 4, sparse=True)

    manager = CheckpointManager(url, model=other, extras={"own": Refusing()})
    with pytest.raises(RuntimeError, match="loads nothing") as told:
        manager.restore()
    manager.close()
    with CheckpointManager(url, model=other, extras={"own-2": Refusing()}) as manager:
        manager.restore(strict=False)

    assert "extras['own'], a Refusing, does not take its state of version 2" in told.value.__notes__[0]
    torch.testing.assert_close(other.weight, table.weight, rtol=0, atol=0.1)


def test_frozen_tables_are_restored_without_their_slots_as_the_error_says(tmp_path: Path) -> None:
    """The error named the slots that nothing takes, and no way to go on."""
    url, (model, other) = str(tmp_path / "store"), (nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 1)) for _ in "ab")
    optimizer = torch.optim.Adagrad(model.parameters())
    with CheckpointManager(url, model=model, optimizer=optimizer, options=TableOptions.exact()) as manager:
        manager.save()

    optimizer = torch.optim.Adagrad(other[1].parameters())
    with CheckpointManager(url, model=other, optimizer=optimizer, options=TableOptions.exact()) as manager:
        with pytest.raises(BadInput, match=r"has slots \['sum'\].* strict=False"):
            manager.restore()
        restored = manager.restore(strict=False)

    assert restored is not None
    assert "0.weight/sum" in restored.unexpected
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_replaced_parameter_asks_for_a_new_manager_which_saves_it(tmp_path: Path) -> None:
    """A save before the next lookup wrote the parameter of before, without an error."""
    url, model = str(tmp_path / "store"), nn.Sequential(nn.Embedding(ROWS, 4))
    manager = CheckpointManager(url, model=model, options=TableOptions.exact())
    manager.save()
    model[0].weight = nn.Parameter(torch.ones(ROWS, 4))

    with pytest.raises(BadInput, match="got other weights"):
        manager.save()
    with pytest.raises(BadInput, match="close the manager and make a new one"):
        model(torch.tensor([1]))
    manager.close()
    with CheckpointManager(url, model=model, options=TableOptions.exact()) as manager:
        manager.save()
        stored = manager.store.snapshot().table("0.weight").read()

    np.testing.assert_array_equal(stored, np.ones((ROWS, 4), np.float32))


def test_a_part_that_is_compiled_in_place_keeps_its_names(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    model = nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 1))
    with CheckpointManager(url, model=model) as manager:
        manager.save()

    model[1].compile(backend="eager")
    with CheckpointManager(url, model=torch.compile(model, backend="eager")) as manager:
        restored = manager.restore()

    assert restored is not None
    assert restored.tables == ("0.weight",)


def writers_alive() -> list[Writer]:
    return [one for one in gc.get_objects() if type(one) is Writer]  # isinstance would ask what dead proxies were of


class Lazy(torch.optim.Optimizer):
    """Plain steps that are counted; from the third on towards a mean of the weights, which is state made there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter -= group["lr"] * parameter.grad
                if state["step"] >= 3:
                    mean = state.setdefault("mean", parameter.clone())
                    mean.lerp_(parameter, 0.5)
                    parameter.copy_(mean)


@pytest.mark.parametrize("saved_at", [0, 1, 3])
def test_optimizer_state_made_since_the_checkpoint_is_gone(saved_at: int) -> None:
    """Kept, it would take the place of what the optimizer makes anew when it comes there again."""

    def train(module: nn.Linear, optimizer: Lazy, number: int) -> None:
        optimizer.zero_grad()
        module(torch.full((1, 3), float(number + 1))).square().sum().backward()
        optimizer.step()

    torch.manual_seed(2)
    module = nn.Linear(3, 2)
    optimizer = Lazy(module.parameters())
    with CheckpointManager(f"memory://rules-{uuid.uuid4().hex}", model=module, optimizer=optimizer) as manager:
        for number in range(5):
            if number == saved_at:
                manager.save()
            train(module, optimizer, number)
            manager.step()
        expected = module.weight.detach().clone()

        manager.restore()
        state = dict(optimizer.state[module.weight])
        for number in range(saved_at, 5):
            train(module, optimizer, number)

    assert state.keys() == ({"step", "mean"} if saved_at == 3 else {"step"} if saved_at else set())
    assert torch.equal(module.weight, expected)


def test_slots_of_a_table_made_since_the_checkpoint_are_gone() -> None:
    table = nn.Embedding(ROWS, 4)
    optimizer = Lazy(table.parameters())
    options: dict[str, Any] = {"assume": {"Lazy": "ever_touched"}, "options": TableOptions.exact()}
    url = f"memory://rules-{uuid.uuid4().hex}"
    with CheckpointManager(url, model=table, optimizer=optimizer, **grouped(**options)) as manager:
        for number in range(4):
            optimizer.zero_grad()
            table(torch.tensor([number, 5])).sum().backward()
            optimizer.step()
            manager.step()
            if number == 0:
                manager.save()

        manager.restore()

        assert optimizer.state[table.weight].keys() == {"step"}
