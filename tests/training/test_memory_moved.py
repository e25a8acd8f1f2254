"""Memory of a table that is freed or replaced while its rows wait to be saved: no save reads it, no row is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from cnr_store import Store
from cnr_store.errors import MemoryMoved
from cnr_store.training import CheckpointManager
from cnr_store_gpu import RowRequest, Staged, StagingBuffers
from tests.training.runs import Training, assert_same, go_on, manager_of, uninterrupted

GiveBack = Callable[[], None]


def freed(weight: torch.Tensor) -> GiveBack:
    """The storage has no bytes meanwhile; it is the same one when they are back."""
    kept, size = weight.detach().clone(), weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)

    def give_back() -> None:
        weight.untyped_storage().resize_(size)
        weight.data.copy_(kept)

    return give_back


def shown_as_zeros(weight: torch.Tensor) -> GiveBack:
    """The parameter has other memory meanwhile; its own stays as it is."""
    own = weight.data
    weight.data = torch.zeros_like(own)

    def give_back() -> None:
        weight.data = own

    return give_back


def stashed(weight: torch.Tensor) -> GiveBack:
    """As TorchRec's `MemoryStashingManager` does it: a copy in host memory meanwhile, and the own storage freed."""
    own, kept = weight.data, weight.detach().clone()
    size = own.untyped_storage().nbytes()
    weight.data = kept
    own.untyped_storage().resize_(0)

    def give_back() -> None:
        own.untyped_storage().resize_(size)
        own.copy_(kept)
        weight.data = own

    return give_back


# On a CPU torch does not resize storages that numpy has seen, and a first save shows them to numpy.
@pytest.mark.parametrize(("take_away", "saved_before"), [
    (freed, 0), (stashed, 0), (shown_as_zeros, 0), (shown_as_zeros, 2),
])  # fmt: skip
def test_no_save_reads_memory_that_was_taken_away(
    take_away: Callable[[torch.Tensor], GiveBack], saved_before: int, tmp_path: Path
) -> None:
    training = Training()
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, saved_before, saves=True)
    go_on(training, manager, saved_before, saved_before + 1)
    before = len(manager.all_steps())

    give_back = take_away(training.model.user.weight)
    for _ in range(2):
        with pytest.raises(MemoryMoved, match=r"user\.weight"):
            manager.save()
    assert len(manager.all_steps()) == before

    give_back()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written without a hook: its whole table is saved
        manager.save()
    manager.close()
    expected = uninterrupted("rowwise_adagrad", saved_before + 1)
    assert_same(training.state(), expected)
    found = Training()
    manager_of(tmp_path, found).restore()
    assert_same(found.state(), expected)


def test_memory_taken_away_while_rows_are_copied_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, 1, saves=True)
    go_on(training, manager, 1, 2)
    gather, back = StagingBuffers.gather, list[GiveBack]()

    def gather_and_stash(self: StagingBuffers, requests: Mapping[str, RowRequest], *, like: object = None) -> Staged:
        staged = gather(self, requests, like=like)
        back.append(shown_as_zeros(training.model.item.weight))
        return staged

    monkeypatch.setattr(StagingBuffers, "gather", gather_and_stash)
    with pytest.raises(MemoryMoved, match=r"item\.weight"):
        manager.save()
    assert manager.all_steps() == [1]

    monkeypatch.setattr(StagingBuffers, "gather", gather)
    back[0]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save()
    manager.close()
    found = Training()
    manager_of(tmp_path, found).restore()
    assert_same(found.state(), training.state())


def test_a_replaced_parameter_is_saved_as_it_is_now(tmp_path: Path) -> None:
    """A save once read the memory that the parameter had when the manager was made."""
    training = Training()
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, 2, saves=True)

    training.model.user.weight.data = torch.randn_like(training.model.user.weight)
    manager.tracker.mark_all("user.weight")
    manager.save()
    go_on(training, manager, 2, 4, saves=True)
    manager.close()

    found = Training()
    manager_of(tmp_path, found).restore()
    assert_same(found.state(), training.state())


def test_an_optimizer_that_replaces_its_parameters_is_saved_as_they_are(tmp_path: Path) -> None:
    """A save once read the memory that they had before the first step."""

    def assign(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()

    training = Training()
    training.optimizers[0].register_step_post_hook(assign)  # before the manager's: a part of the step
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, 3, saves=True)
    manager.close()

    found = Training()
    manager_of(tmp_path, found).restore()
    assert_same(found.state(), training.state())
    assert_same(found.state(), uninterrupted("rowwise_adagrad", 3))


def test_rows_are_restored_into_the_memory_that_is_used(tmp_path: Path) -> None:
    source, training = Training(), Training()
    with manager_of(tmp_path, source) as manager:
        go_on(source, manager, 0, 2, saves=True)

    manager = manager_of(tmp_path, training)
    training.model.user.weight.data = torch.zeros_like(training.model.user.weight)
    manager.restore()

    assert_same(training.state(), source.state())
    manager.close()


def test_nothing_is_restored_into_memory_that_was_freed(tmp_path: Path) -> None:
    source, training = Training(), Training()
    with manager_of(tmp_path, source) as manager:
        go_on(source, manager, 0, 2, saves=True)
    manager = manager_of(tmp_path, training)
    before = training.state()

    give_back = freed(training.model.item.weight)
    with pytest.raises(MemoryMoved, match=r"item\.weight"):
        manager.restore()

    give_back()
    assert_same(training.state(), before)
    manager.restore()
    assert_same(training.state(), source.state())
    manager.close()


def test_a_dense_tensor_without_its_memory_is_not_saved(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, 1, saves=True)

    give_back = freed(training.model.out.weight)
    with pytest.raises(MemoryMoved, match=r"out\.weight"):
        manager.save()

    give_back()
    manager.save()
    manager.close()


def test_a_table_whose_dtype_changed_is_written_anew(tmp_path: Path) -> None:
    """A save once compared the parameter's object alone, and failed for good."""
    model = nn.EmbeddingBag(50, 4, sparse=True)
    with CheckpointManager(tmp_path / "store", model=model) as manager:
        manager.save()
        model.half()
        manager.tracker.mark_all("weight")
        report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    assert Store.open(str(tmp_path / "store")).snapshot().tables["weight"].dtype == "float16"
