"""Memory of tables that is freed or replaced between the marks of their changes and their copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cnr_store.errors import MemoryMoved
from cnr_store_gpu import Movement, RowTracker, WatchedShard
from cnr_store_gpu.memory import Memories, check_held, memory_of, needed_bytes

ROWS, DIM = 20, 3


def learn(model: nn.Embedding, optimizer: torch.optim.Optimizer, *rows: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor(rows)).sum().backward()
    optimizer.step()


def tracked() -> tuple[nn.Embedding, torch.optim.Optimizer, RowTracker]:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, RowTracker(model, optimizers=[optimizer])


def free(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_(0)


def shorten(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_((ROWS - 1) * DIM * weight.itemsize)


def zeros_instead(weight: torch.Tensor) -> None:
    weight.data = torch.zeros(ROWS, DIM)


@pytest.mark.parametrize("take_away", [free, shorten, zeros_instead])
def test_rows_without_their_memory_are_not_taken(take_away: Callable[[torch.Tensor], None]) -> None:
    model, optimizer, tracker = tracked()
    learn(model, optimizer, 3, 5)
    kept = model.weight.detach().clone()

    take_away(model.weight)
    with pytest.raises(MemoryMoved, match=r"memory of 'weight' was (freed|replaced)") as raised:
        tracker.take()

    assert (raised.value.kind, raised.value.table) == ("memory_moved", "weight")
    with pytest.raises(MemoryMoved):
        tracker.take()
    model.weight.data = kept
    tracker.mark_all("weight")
    assert len(tracker.take()["weight"]) == ROWS


def test_memory_that_comes_back_is_the_tables() -> None:
    """As TorchRec's stashing does it: other memory for the parameter, the old storage freed, and given back."""
    model, optimizer, tracker = tracked()
    learn(model, optimizer, 3, 5)
    own, kept = model.weight.data, model.weight.detach().clone()
    size, address = own.untyped_storage().nbytes(), own.data_ptr()

    model.weight.data = kept
    own.untyped_storage().resize_(0)
    with pytest.raises(MemoryMoved):
        tracker.take()
    others = [torch.empty_like(kept) for _ in range(1000)]  # the address that was freed is theirs
    own.untyped_storage().resize_(size)
    assert own.data_ptr() not in {one.data_ptr() for one in others}
    own.copy_(kept)
    model.weight.data = own

    # The allocator chooses the address: at another one, every row counts as changed.
    if own.data_ptr() == address:
        assert tracker.take()["weight"].row_ids.tolist() == [3, 5]
    else:
        with pytest.warns(RuntimeWarning, match="no hook saw"):
            assert len(tracker.take()["weight"]) == ROWS


def test_memory_at_the_address_of_the_freed_one_is_other_memory() -> None:
    model, optimizer, tracker = tracked()
    learn(model, optimizer, 3)
    base = torch.zeros(ROWS * DIM)
    address = model.weight.data_ptr()

    free(model.weight)
    found = [torch.zeros(ROWS, DIM) for _ in range(50)]  # the allocator often gives it again
    model.weight.data = next((one for one in found if one.data_ptr() == address), base.view(ROWS, DIM))

    with pytest.raises(MemoryMoved, match="replaced"):
        tracker.take()


def test_marking_all_rows_accepts_a_replaced_parameter() -> None:
    model, optimizer, tracker = tracked()
    learn(model, optimizer, 3)

    zeros_instead(model.weight)
    tracker.mark_all("weight")

    assert len(tracker.take()["weight"]) == ROWS
    learn(model, optimizer, 7)
    assert tracker.take()["weight"].row_ids.tolist() == [7]


def test_an_optimizer_that_replaces_its_parameters_is_followed() -> None:
    class Replacing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - group["lr"] * parameter.grad

    model = nn.Embedding(ROWS, DIM)
    optimizer = Replacing(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], assume={"Replacing": Movement.TOUCHED})

    for row in (3, 5):
        learn(model, optimizer, row)
        assert tracker.take()["weight"].row_ids.tolist() == [row]


def test_reset_takes_the_present_memory_as_the_tables() -> None:
    model, optimizer, tracker = tracked()
    zeros_instead(model.weight)

    tracker.reset()

    learn(model, optimizer, 7)
    assert tracker.take()["weight"].row_ids.tolist() == [7]


def test_a_shard_is_read_where_its_owner_has_its_rows() -> None:
    owner = nn.Parameter(torch.zeros(2 * ROWS * DIM))
    view = owner.detach()[: ROWS * DIM].view(ROWS, DIM)
    tracker = RowTracker(nn.Module(), shards=[WatchedShard("shard", ROWS, view, memory=lambda: [owner])])
    tracker.take()
    kept = owner.data

    owner.data = torch.zeros(2 * ROWS * DIM)
    with pytest.raises(MemoryMoved, match="create a new manager"):
        tracker.take()
    tracker.mark_all("shard")
    with pytest.raises(MemoryMoved):  # whoever copies its rows has the view of the old memory
        tracker.take()
    owner.data = kept
    assert len(tracker.take()["shard"]) == ROWS


@given(st.lists(st.sampled_from(["stays", "freed", "replaced", "back"]), max_size=5), st.booleans())
def test_checking_all_tables_is_checking_each(fates: list[str], accepts: bool) -> None:
    tensors = [torch.zeros(ROWS, DIM) for _ in fates]
    memories = [memory for tensor in tensors if (memory := memory_of("table", tensor, None)) is not None]
    together = Memories(memories)
    together.check()
    for fate, tensor in zip(fates, tensors, strict=True):
        own = tensor.data
        if fate == "freed":
            free(tensor)
        elif fate != "stays":
            zeros_instead(tensor)
        if fate == "back":
            tensor.data = own

    def moved(check: Callable[[], None]) -> bool:
        try:
            check()
        except MemoryMoved:
            return True
        return False

    each = [moved(memory.check) for memory in memories]
    assert each == [fate in ("freed", "replaced") for fate in fates]
    assert moved(together.check) == any(each)
    for memory, one in zip(memories, each, strict=True):
        if one and accepts:
            memory.accept()
    assert moved(together.check) == any(moved(memory.check) for memory in memories)


@given(st.data())
def test_needed_bytes_end_with_the_last_element(data: st.DataObject) -> None:
    whole = torch.zeros(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)), 3)
    view = whole[data.draw(st.integers(0, 3)) :, :: data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)) :]
    if data.draw(st.booleans()):
        view = view.transpose(0, 2)

    needed = needed_bytes(view)

    reached = [
        view[index].data_ptr() + view.itemsize - whole.untyped_storage().data_ptr()
        for index in (
            (i, j, k) for i in range(view.shape[0]) for j in range(view.shape[1]) for k in range(view.shape[2])
        )
    ]
    assert needed == max(reached, default=0)
    check_held(view, "view")
    if needed:
        whole.untyped_storage().resize_(needed - 1)
        with pytest.raises(MemoryMoved, match="view"):
            check_held(view, "view")
