"""The law that rows tracked are rows changed, for each optimizer; shards that others look up; batches in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cnr_store.errors import BadInput, BadRowIds, BadShape
from cnr_store_gpu import Movement, RowMovement, RowTracker, WatchedShard
from tests.gpu.tracked import changed_rows, ids, sgd, taken

# torch's own SGD and Adagrad make sparse tensors without saying whether they want them checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Mixed(nn.Module):
    """Embeddings and bags of both gradient kinds, with and without a padding row and max_norm, the first one tied."""

    def __init__(self, sizes: list[int], kinds: list[str], options: list[dict[str, Any]], tied: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        for size, kind, own in zip(sizes, kinds, options, strict=True):
            sparse = kind.endswith("sparse")
            make = nn.EmbeddingBag if kind.startswith("bag") else nn.Embedding
            mode = {"mode": "sum"} if kind.startswith("bag") else {}
            own = own | {"padding_idx": own["padding_idx"] % size if own["padding_idx"] is not None else None}
            self.tables.append(make(size, 3, sparse=sparse, **own, **mode))
        if tied:
            self.twin = nn.Embedding(sizes[0], 3, padding_idx=self.tables[0].padding_idx)
            self.twin.weight = self.tables[0].weight
            self.twin.sparse = self.tables[0].sparse

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for table, rows in zip(self.tables, batch, strict=True):
            if isinstance(table, nn.EmbeddingBag):  # a bag, an empty bag, a bag
                total = total + table(rows, torch.tensor([0, len(rows) // 2, len(rows) // 2])).sum()
            else:
                total = total + table(rows).sum()
        if hasattr(self, "twin"):
            total = total + self.twin(batch[0].flip(0) // 2).sum()
        return total


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.05),
}
GRADIENTS = {"sparse adam": [" sparse"], "adam": [""], "rmsprop": [""]}
EXACT = {"sgd", "adagrad", "sparse adam"}  # elsewhere a row may stand still, or only its slots move


@settings(max_examples=60)
@given(data=st.data())
def test_tracked_rows_are_the_changed_rows(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    sizes = data.draw(st.lists(st.sampled_from([1, 31, 33, 64, 1025]), min_size=1, max_size=3))
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    kind = st.sampled_from([base + g for base in ("embedding", "bag") for g in GRADIENTS.get(name, ["", " sparse"])])
    kinds = [data.draw(kind) for _ in sizes]
    tied = data.draw(st.booleans())
    options = [
        {
            "padding_idx": data.draw(st.sampled_from([None, 0, 3])),
            "max_norm": None if tied and number == 0 else data.draw(st.sampled_from([None, None, 1.0])),
        }
        for number in range(len(sizes))
    ]
    model = Mixed(sizes, kinds, options, tied)
    optimizer = OPTIMIZERS[name](model.parameters())
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise", verify_rows=8)
    if data.draw(st.booleans()):
        for table in tracker.weights:
            tracker.bitmap.of(table)._host = None  # the path of other devices, on the CPU
    rewritten = {f"tables.{number}.weight" for number, own in enumerate(options) if own["max_norm"] is not None}

    for _ in range(data.draw(st.integers(1, 4))):
        before = {table: weight.detach().clone() for table, weight in tracker.weights.items()}
        for _ in range(data.draw(st.integers(0, 3))):
            optimizer.zero_grad()
            for _ in range(data.draw(st.integers(1, 2))):  # accumulation
                batch = [torch.tensor(random.integers(0, size, 5)) for size in sizes]
                model(batch).backward()
            with torch.no_grad():
                model([torch.tensor(random.integers(0, size, 5)) for size in sizes])
            optimizer.step()
            model.eval()
            model([torch.tensor(random.integers(0, size, 5)) for size in sizes])
            model.train()
        rows = taken(tracker)

        for table, weight in tracker.weights.items():
            changed = changed_rows(before[table], weight)
            assert set(changed) <= set(rows[table])
            if name in EXACT and table not in rewritten:
                assert changed == rows[table]


class Interleaved:
    """A training whose parts come in any order, and what a slow reference says of its rows.

    Two optimizers step three tables, one of which both have; the ids of a lookup are written again through numpy, which
    no version of torch counts.
    """

    ROWS = 70

    def __init__(self, in_flight: Any, on_host: bool) -> None:
        dense, sparse = nn.Embedding(self.ROWS, 3), nn.EmbeddingBag(self.ROWS, 3, mode="sum", sparse=True)
        padded = nn.EmbeddingBag(self.ROWS, 3, mode="sum", padding_idx=2)
        self.model = nn.ModuleDict({"dense": dense, "sparse": sparse, "padded": padded})
        weights = {name: module.weight for name, module in self.model.items()}
        self.owned = [["dense", "sparse"], ["sparse", "padded"]]
        self.optimizers = [torch.optim.SGD([weights[name] for name in own], lr=0.05) for own in self.owned]
        self.tracker = RowTracker(self.model, optimizers=self.optimizers, in_flight=in_flight, on_bypass="raise")
        if not on_host:
            for table in self.tracker.weights:
                self.tracker.bitmap.of(table)._host = None
        self.ids = {name: torch.zeros(4, 2, dtype=torch.int64) for name in self.model}
        self.outputs: list[torch.Tensor] = []
        self.known = {name: weight.detach().clone() for name, weight in weights.items()}
        self.waiting: set[str] = set()
        self.expected: dict[str, set[int]] = {name: set() for name in self.model}

    def look_up(self, name: str, rows: list[int], learns: bool) -> None:
        self.ids[name] = torch.tensor(rows).view(4, 2)
        with torch.set_grad_enabled(learns):
            output = self.model[name](self.ids[name])
        if learns:
            self.outputs.append(output)
            self.waiting |= {name} if self.model.training else set()

    def use_outside(self, name: str, rows: list[int]) -> None:
        self.outputs.append(self.model[name].weight[rows])

    def backward(self) -> None:
        if self.outputs:
            sum(output.sum() for output in self.outputs).backward()
            self.outputs = []

    def step(self, which: int, name: str, rows: list[int], *, in_closure: bool) -> None:
        def closure() -> float:
            self.look_up(name, rows, True)
            self.backward()
            return 0.0

        if in_closure:
            self.optimizers[which].step(closure)
        gradients = {own: self.model[own].weight.grad for own in self.owned[which]}
        for own, gradient in gradients.items():
            if gradient is not None:
                found = gradient._indices()[0] if gradient.is_sparse else gradient.any(dim=1).nonzero()
                self.expected[own] |= set(found.flatten().tolist())
        if not in_closure:
            self.optimizers[which].step()
        self.waiting -= set(self.owned[which])

    def take(self, is_exact: bool) -> None:
        assert self.tracker.at_step_boundary == (not is_exact or not self.waiting)
        if not self.tracker.at_step_boundary:
            with pytest.raises(BadInput, match="between forward and optimizer step"):
                self.tracker.take()
            self.tracker.declare_boundary()
            self.waiting.clear()
        rows = taken(self.tracker)
        for name, module in self.model.items():
            found = set(rows[f"{name}.weight"])
            assert set(changed_rows(self.known[name], module.weight)) <= self.expected[name] <= found
            if is_exact:
                assert found == self.expected[name]
            self.known[name], self.expected[name] = module.weight.detach().clone(), set()


PARTS = ("look up", "write ids", "outside", "backward", "step", "zero", "eval", "take")


@settings(max_examples=150)
@given(data=st.data())
def test_no_row_is_lost_in_any_order_of_lookups_id_changes_and_steps(data: st.DataObject) -> None:
    in_flight = data.draw(st.sampled_from(["refuse", "remark"]))
    training = Interleaved(in_flight, data.draw(st.booleans()))
    eight = st.lists(st.integers(0, Interleaved.ROWS - 1), min_size=8, max_size=8)
    name = st.sampled_from(["dense", "sparse", "padded"])
    for _ in range(data.draw(st.integers(1, 14))):
        match data.draw(st.sampled_from(PARTS)):
            case "look up":
                training.look_up(data.draw(name), data.draw(eight), data.draw(st.integers(0, 3)) > 0)
            case "write ids":
                training.ids[data.draw(name)].view(-1).numpy()[:] = data.draw(eight)
            case "outside":
                training.use_outside(data.draw(name), data.draw(eight))
            case "backward":
                training.backward()
            case "step":
                which, in_closure = data.draw(st.integers(0, 1)), data.draw(st.booleans())
                training.step(which, data.draw(name), data.draw(eight), in_closure=in_closure)
            case "zero":
                training.model.zero_grad(set_to_none=data.draw(st.booleans()))
            case "eval":
                training.model.train(not training.model.training)
            case "take":
                training.take(in_flight == "refuse")
    training.take(in_flight == "refuse")


# ---- shards, which others look up


def shard_tracker(rows: int = 100, **options: Any) -> tuple[torch.Tensor, RowTracker]:
    weight = torch.randn(rows, 3)
    tracker = RowTracker(nn.Identity(), shards=[WatchedShard("t", rows, weight)], **options)
    return weight, tracker


def test_lookup_in_a_shard_is_taken_once_its_update_is_written() -> None:
    weight, tracker = shard_tracker(on_bypass="raise", verify_rows=100)

    tracker.lookup("t", ids(5, 7))
    with pytest.raises(BadInput, match="updated"):
        tracker.take()
    weight[[5, 7]] += 1
    tracker.updated("t")
    tracker.lookup("t", [9], learns=False)

    assert tracker.at_step_boundary
    assert taken(tracker) == {"t": [5, 7, 9]}
    assert taken(tracker) == {"t": []}


def test_write_to_a_shard_that_nobody_told_of_marks_all_of_it() -> None:
    weight, tracker = shard_tracker(10)
    tracker.lookup("t", ids(5))
    weight[5] += 1
    tracker.updated("t")
    weight[6] += 1

    with pytest.warns(RuntimeWarning, match="no hook saw"):
        rows = taken(tracker)

    assert rows == {"t": list(range(10))}


def test_update_of_a_shard_is_no_unknown_write_to_its_neighbour_in_memory() -> None:
    memory = torch.randn(30, 3)
    shards = [WatchedShard("a", 10, memory[:10]), WatchedShard("b", 20, memory[10:])]
    tracker = RowTracker(nn.Identity(), shards=shards, on_bypass="raise")

    for row in range(3):
        tracker.lookup("a", ids(row))
        memory[row] += 1
        tracker.lookup("b", ids(row))
        memory[10 + row] += 1
        tracker.updated("a")
        tracker.updated("b")

    assert taken(tracker) == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_slices_go_to_their_shards_also_when_a_name_repeats() -> None:
    shards = [WatchedShard("a", 10), WatchedShard("b", 2000), WatchedShard("far", 5, device=torch.device("cpu", 0))]
    tracker = RowTracker(nn.Embedding(4, 2), shards=shards)

    tracker.lookup_slices(["b", "a", "b"], ids(1, 1999, 3, 99, 2), [2, 4, 5])
    tracker.lookup_slices(["a", "b"], np.array([8, 7]), torch.tensor([1, 2]), learns=False)

    assert tracker.pending == 3
    for name in ("a", "b"):
        tracker.updated(name)
    assert taken(tracker) == {"weight": [], "a": [3, 8], "b": [1, 2, 7, 1999], "far": []}
    with pytest.raises(BadShape, match="2 names"):
        tracker.lookup_slices(["a", "b"], ids(1), [1])
    for ends in ([2, 1], [1, 3], [-1, 2]):
        with pytest.raises(BadShape, match="ascending"):
            tracker.lookup_slices(["a", "b"], ids(1, 2), ends)
    with pytest.raises(BadInput, match="devices"):
        tracker.lookup_slices(["a", "far"], ids(1, 2), [1, 2])
    with pytest.raises(BadRowIds, match="integers"):
        tracker.lookup_slices(["a", "b"], torch.tensor([0.5, 1.0]), [1, 2])
    assert taken(tracker) == {"weight": [], "a": [], "b": [], "far": []}


def test_shard_in_an_attached_optimizer_is_followed_by_its_steps() -> None:
    weight = nn.Parameter(torch.randn(20, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    tracker = RowTracker(
        nn.Identity(), shards=[WatchedShard("t", 20, weight)], optimizers=[optimizer], on_bypass="raise"
    )

    for row in (3, 8):
        optimizer.zero_grad()
        tracker.lookup("t", ids(row))
        assert tracker.pending == 1
        weight[[row]].sum().backward()
        optimizer.step()
        assert tracker.at_step_boundary
        before = weight.detach().clone()

    assert taken(tracker) == {"t": [3, 8]}
    optimizer.zero_grad()
    weight[[9]].sum().backward()
    optimizer.step()
    assert taken(tracker) == {"t": changed_rows(before, weight)} == {"t": [3, 8, 9]}
    assert tracker.slots("t")["momentum_buffer"] is optimizer.state[weight]["momentum_buffer"]


@pytest.mark.parametrize(
    ("rows", "expected"), [(Movement.TOUCHED, [4]), (Movement.EVER_TOUCHED, list(range(10))), (Movement.ALL, None)]
)
def test_movement_of_a_shard_is_added_at_each_update(rows: Movement, expected: list[int] | None) -> None:
    shard = WatchedShard("t", 10, movement=RowMovement(rows, rows, "the caller says so"))
    if expected is None:
        with pytest.raises(BadInput, match="the caller says so"):
            RowTracker(nn.Identity(), shards=[shard])
        expected = list(range(10))
    tracker = RowTracker(nn.Identity(), shards=[shard], allow_dense=True)
    assert taken(tracker) == {"t": []}

    tracker.lookup("t", ids(4))
    tracker.updated("t")

    assert taken(tracker) == {"t": expected}


def test_shards_are_marked_given_back_and_reset_like_tables() -> None:
    _, tracker = shard_tracker(10)
    tracker.mark("t", [1])
    lost = tracker.take()
    tracker.mark_all("t")
    tracker.reset()

    tracker.give_back(lost)

    assert taken(tracker) == {"t": [1]}


def test_shards_that_cannot_be_tracked_are_refused() -> None:
    model = nn.Embedding(5, 2)

    with pytest.raises(BadInput, match="has this name"):
        RowTracker(model, shards=[WatchedShard("weight", 5)])
    with pytest.raises(BadInput, match="another name"):
        RowTracker(model, shards=[WatchedShard("t", 5, model.weight)])
    with pytest.raises(BadShape, match=r"\(6, dim\)"):
        RowTracker(model, shards=[WatchedShard("t", 6, torch.zeros(5, 2))])
    with pytest.raises(BadInput, match="in_flight"):
        RowTracker(model, in_flight="maybe")  # type: ignore[arg-type]


class Source:
    """Rows that something else says have changed."""

    def __init__(self, *rows: int) -> None:
        self.rows = list(rows)

    def take(self) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


def test_rows_of_a_source_are_taken_with_the_others() -> None:
    weight, tracker = shard_tracker(10, on_bypass="raise")
    one, two = Source(3, 4), Source(9)
    tracker.add_source("t", one)
    tracker.add_source("t", two)
    weight[3] += 1

    tracker.mark("t", [1])

    assert taken(tracker) == {"t": [1, 3, 4, 9]}
    assert taken(tracker) == {"t": []}
    one.rows = [5]
    tracker.reset()
    assert taken(tracker) == {"t": []}
    two.rows = [2, 10]
    with pytest.raises(BadRowIds, match="rows 0 to 9"):
        tracker.take()
    assert taken(tracker) == {"t": [2]}


# ---- batches in flight


@settings(max_examples=50)
@given(data=st.data())
def test_every_change_of_a_pipelined_shard_is_taken_wherever_it_is_cut(data: st.DataObject) -> None:
    ahead = data.draw(st.integers(0, 3))
    told_ahead = data.draw(st.integers(ahead, 3))
    weight, tracker = shard_tracker(60, in_flight="remark", steps_ahead=told_ahead, on_bypass="raise")
    batches = data.draw(st.lists(st.lists(st.integers(0, 59), max_size=4), min_size=1, max_size=8))
    cuts = data.draw(st.lists(st.booleans(), min_size=4 * len(batches) + 8, max_size=4 * len(batches) + 8))
    known, position = weight.clone(), 0

    def maybe_take() -> None:
        nonlocal known, position
        position += 1
        if cuts[position - 1]:
            assert set(changed_rows(known, weight)) <= set(tracker.take()["t"].row_ids.tolist())
            known = weight.clone()

    for number in range(len(batches) + ahead):
        if number < len(batches):
            tracker.lookup("t", torch.tensor(batches[number], dtype=torch.int64))
            maybe_take()
        if number >= ahead:
            weight[batches[number - ahead]] += 1
            maybe_take()
            tracker.updated("t")
            maybe_take()

    assert set(changed_rows(known, weight)) <= set(tracker.take()["t"].row_ids.tolist())
    for _ in range(told_ahead + 1):
        tracker.updated("t")
    assert tracker.pending == 0
    tracker.take()
    assert taken(tracker) == {"t": []}


@settings(max_examples=30)
@given(cuts=st.lists(st.booleans(), min_size=16, max_size=16), sparse=st.booleans(), seed=st.integers(0, 99))
def test_every_change_of_a_pipelined_model_is_taken_wherever_it_is_cut(
    cuts: list[bool], sparse: bool, seed: int
) -> None:
    model = nn.Embedding(60, 3, sparse=sparse)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer], in_flight="remark", on_bypass="raise")
    random = np.random.default_rng(seed)
    known = model.weight.detach().clone()
    waiting = model(torch.tensor(random.integers(0, 60, 3)))
    for number in range(8):
        following = model(torch.tensor(random.integers(0, 60, 3)))
        for part in range(2):
            if cuts[2 * number + part]:
                assert set(changed_rows(known, model.weight)) <= set(taken(tracker)["weight"])
                known = model.weight.detach().clone()
            if part == 0:
                optimizer.zero_grad()
                waiting.sum().backward()
                optimizer.step()
        waiting = following
    assert set(changed_rows(known, model.weight)) <= set(taken(tracker)["weight"])
    assert tracker.pending <= 2


def test_slices_in_flight_are_marked_again() -> None:
    shards = [WatchedShard("a", 10), WatchedShard("b", 2000)]
    tracker = RowTracker(nn.Identity(), shards=shards, in_flight="remark", steps_ahead=0)
    tracker.lookup_slices(["b", "a"], ids(1, 1999, 3), [2, 3])

    assert taken(tracker) == taken(tracker) == {"a": [3], "b": [1, 1999]}
    tracker.updated("a")
    tracker.updated("b")
    tracker.take()
    assert taken(tracker) == {"a": [], "b": []}


def test_ids_in_flight_that_were_overwritten_mark_the_whole_table() -> None:
    _, tracker = shard_tracker(10, in_flight="remark")
    rows = ids(1, 2)
    tracker.lookup("t", rows)
    rows.fill_(0)

    with pytest.warns(RuntimeWarning, match="overwritten"):
        tracker.take()

    tracker.declare_boundary()
    assert taken(tracker) == {"t": list(range(10))}


def test_lookups_in_flight_that_were_overwritten_are_one_warning() -> None:
    """Regression: there was a warning for each lookup, with the names of all its tables."""
    shards = [WatchedShard(f"t{number}", 10) for number in range(8)]
    tracker = RowTracker(nn.Identity(), shards=shards, in_flight="remark", steps_ahead=0)
    rows = ids(1, 2)
    for number in range(8):
        tracker.lookup(f"t{number}", rows)
    rows.fill_(0)

    with pytest.warns(RuntimeWarning, match=r"8 tables, \['t0', .* and 3 more: ids of a lookup were overw") as warned:
        tracker.take()

    assert len(warned) == 1


def test_ids_of_tables_that_nothing_updates_are_not_kept() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    tracker = RowTracker(model, optimizers=[sgd(model["a"])], in_flight="remark")

    for row in range(5):
        model["b"](ids(row))

    assert tracker.pending == 0
    assert tracker._ledger.in_flight() == []
