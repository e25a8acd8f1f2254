"""The operators against sets of ids, and what compiled models mark and count."""

from __future__ import annotations

import copy
import pickle
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cnr_store.errors import BadInput
from cnr_store_gpu import RowBitmap, RowTracker, WatchedShard, operators
from cnr_store_gpu.words import NO_ROW

law = settings(max_examples=40)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
pytestmark = [
    # torch's own, inside inductor and in its sparse tensors.
    pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@law
@given(
    ids=st.lists(st.integers(-3, 1200), max_size=40),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.int16]),
    num_rows=st.sampled_from([0, 1, 33, 1025]),
    skip_row=st.integers(-1, 5),
    columns=st.sampled_from([1, 2]),
)
def test_mark_sets_the_rows_inside_the_table(
    ids: list[int], dtype: torch.dtype, num_rows: int, skip_row: int, columns: int
) -> None:
    bitmap = RowBitmap({"before": 5, "t": num_rows, "after": 5})
    given_ids = torch.tensor(ids * columns, dtype=dtype).reshape(columns, -1).T  # not contiguous

    operators.mark(bitmap.words, given_ids, *bitmap.span("t"), skip_row)

    assert bitmap.take("t").tolist() == sorted({row for row in ids if 0 <= row < num_rows and row != skip_row})
    assert not bitmap.any()


@law
@given(data=st.data())
def test_slices_are_marked_as_one_by_one(data: st.DataObject) -> None:
    rows = {"a": 33, "b": 1, "c": 2000}
    names = data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=1, max_size=6))
    parts = [data.draw(st.lists(st.integers(-2, 2002), max_size=8)) for _ in names]
    ids = torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    ends = torch.tensor(np.cumsum([0, *map(len, parts)]))
    device = torch.get_default_device()
    together, one_by_one = RowBitmap(rows, device), RowBitmap(rows, device)
    spans = torch.tensor([together.span(name) for name in names], dtype=torch.int64)

    operators.mark_slices(together.words, ids, ends, spans[:, 0].contiguous(), spans[:, 1].contiguous())

    for name, (start, stop) in zip(names, pairwise(ends.tolist()), strict=True):
        one_by_one.mark(name, ids[start:stop], out_of_range="ignore")
    assert torch.equal(together.words, one_by_one.words)


def test_operators_keep_their_declared_schemas() -> None:
    words, ids = torch.zeros(64, dtype=torch.int32), torch.tensor([1, 40])
    counts = torch.zeros(2, dtype=torch.int64, device="cpu")
    places = torch.tensor([0, 32]), torch.tensor([33, 70])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")

    torch.library.opcheck(operators.mark, (words, ids, 0, 64, NO_ROW), test_utils=checks)
    torch.library.opcheck(operators.mark_slices, (words, ids, torch.tensor([0, 1, 2]), *places), test_utils=checks)
    torch.library.opcheck(
        operators.note_lookup, (counts, ids, None, [1], NO_ROW, operators.NO_LEDGER, False), test_utils=checks
    )


class Two(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.one = nn.Embedding(50, 3, padding_idx=0, sparse=sparse)
        self.bag = nn.EmbeddingBag(2000, 3, mode="sum", sparse=sparse)
        self.head = nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor, bags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        # The ids of the bag are made inside the graph.
        return self.head(self.one(rows) * self.bag(input=bags * 2, offsets=offsets)).sum()


@pytest.mark.parametrize(
    ("backend", "sparse"),
    # torch compiles a sparse gradient with a padding row by no backend but the first.
    [("eager", False), ("eager", True), ("aot_eager", False), pytest.param("inductor", False, marks=needs_compiler)],
)
def test_compiled_model_marks_and_counts_in_every_call(backend: str, sparse: bool) -> None:
    model = Two(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    storage = tracker.bitmap.of("one.weight").words.data_ptr()

    for first in (1, 7, 33):
        optimizer.zero_grad()
        for step in range(2):  # accumulation
            rows, bags = torch.tensor([0, first + step]), torch.tensor([first, first + step, 999])
            compiled(rows, bags, torch.tensor([0, 1])).backward()
        assert tracker.pending == 4
        with pytest.raises(BadInput, match="between forward and optimizer step"):
            tracker.take()
        optimizer.step()
        taken = tracker.take()
        assert taken["one.weight"].row_ids.tolist() == [first, first + 1]
        assert taken["bag.weight"].row_ids.tolist() == [2 * first, 2 * first + 2, 1998]

    with torch.no_grad():
        compiled(torch.tensor([0, 9]), torch.tensor([1, 2, 3]), torch.tensor([0, 1]))
    model.eval()
    compiled(torch.tensor([0, 9]), torch.tensor([1, 2, 3]), torch.tensor([0, 1]))
    assert tracker.pending == 0
    assert not tracker.bitmap.any()
    assert tracker.bitmap.of("one.weight").words.data_ptr() == storage


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_lookups_in_shards_mark_and_count(backend: str) -> None:
    shards = [WatchedShard("a", 40), WatchedShard("b", 3000)]
    tracker = RowTracker(nn.Identity(), shards=shards)

    def look(one: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        tracker.lookup("a", one + 1)
        tracker.lookup_slices(["b", "a", "b"], both, [2, 3, 4])
        return one.sum() + both.sum()

    compiled = torch.compile(look, backend=backend, fullgraph=True)
    for first in (0, 10):
        compiled(torch.tensor([first]), torch.tensor([2000 + first, 1, first + 5, 9]))
        assert tracker.pending == 4
        tracker.updated("a")
        tracker.updated("b")
        taken = tracker.take()
        assert taken["a"].row_ids.tolist() == [first + 1, first + 5]
        assert taken["b"].row_ids.tolist() == [1, 9, 2000 + first]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_ids_made_in_a_compiled_graph_are_marked_again(backend: str) -> None:
    shard = WatchedShard("t", 5000)
    tracker = RowTracker(nn.Identity(), shards=[shard], in_flight="remark")

    def look(rows: torch.Tensor) -> torch.Tensor:
        hashed = rows * 3 + 1
        tracker.lookup("t", hashed)
        return hashed * 2 + rows

    compiled = torch.compile(look, backend=backend, fullgraph=True)
    for first in (5, 100, 200):
        compiled(torch.arange(first, first + 64))

    expected = sorted({3 * row + 1 for first in (5, 100, 200) for row in range(first, first + 64)})
    assert tracker.take()["t"].row_ids.tolist() == expected
    assert tracker.take()["t"].row_ids.tolist() == expected
    tracker.updated("t")
    tracker.updated("t")
    assert tracker.take()["t"].row_ids.tolist() == expected
    assert tracker.take()["t"].row_ids.tolist() == []


def test_replaced_parameter_stops_a_compiled_model() -> None:
    model = nn.Embedding(20, 3)
    tracker = RowTracker(model)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.tensor([1]))
    model.weight = nn.Parameter(torch.zeros(20, 3))

    with pytest.raises(BadInput, match="another parameter"):
        compiled(torch.tensor([2]))

    assert tracker.bitmap.of("weight").row_ids("weight").tolist() == [1]


def test_copy_of_a_model_is_not_the_model() -> None:
    model = nn.Sequential(nn.Embedding(20, 3), nn.Embedding(20, 3, max_norm=0.1))
    tracker = RowTracker(model)

    average = copy.deepcopy(model)
    average[0](torch.tensor([3]))
    average[1](torch.tensor([3]))

    assert tracker.pending == 0
    assert not tracker.bitmap.any()


def test_tracked_model_is_pickled_without_its_tracker() -> None:
    model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Embedding(20, 3, max_norm=0.1))
    tracker = RowTracker(model)

    sent = pickle.loads(pickle.dumps(model))
    rows = sent[0](torch.tensor([3]))
    sent[1](torch.tensor([3]))

    assert torch.equal(rows, model[0].weight[3:4])
    assert not tracker.bitmap.any()
    sent_tracker = RowTracker(sent)
    sent[0](torch.tensor([4]))
    assert sent_tracker.bitmap.of("0.weight").row_ids("0.weight").tolist() == [4]


def test_lookups_of_a_tracker_that_is_gone_are_nobodys() -> None:
    tracker = RowTracker(nn.Identity(), shards=[WatchedShard("t", 5)], in_flight="remark")
    key, counts = tracker._ledger.key, tracker._ledger.counts
    assert key != operators.NO_LEDGER
    del tracker

    operators.note_lookup(counts, torch.tensor([1]), None, [0], NO_ROW, key, False)

    assert counts.tolist() == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_marks_are_made_on_each_replay() -> None:
    bitmap = RowBitmap({"before": 5, "t": 100_000}, "cuda")
    ids = torch.zeros(4096, dtype=torch.int64, device="cuda")
    span = bitmap.span("t")
    operators.mark(bitmap.words, ids, *span, NO_ROW)  # compiles the kernel
    bitmap.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operators.mark(bitmap.words, ids, *span, NO_ROW)

    for seed in range(3):
        rows = torch.randint(0, 100_000, (4096,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        ids.copy_(rows)
        graph.replay()
        assert bitmap.take("t").tolist() == torch.unique(rows).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("sparse", [False, True])
def test_training_on_a_gpu_waits_for_nothing_until_rows_are_taken(sparse: bool) -> None:
    model: Any = nn.Embedding(1000, 8, sparse=sparse).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    ids = torch.tensor([1, 500, 999], device="cuda")
    before = model.weight.detach().clone()

    def step() -> None:
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if not sparse:  # torch's own sparse SGD waits
            step()
        else:
            model(ids).sum().backward()
            tracker._following._before_step(optimizer, (optimizer,), {})
            optimizer.zero_grad()
            tracker.declare_boundary()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    changed = (before != model.weight.detach()).any(dim=1).nonzero().flatten().tolist()
    assert tracker.take()["weight"].row_ids.tolist() == changed == [1, 500, 999]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gradients_of_many_tables_on_a_gpu_are_marked_without_a_wait() -> None:
    model = nn.ModuleList([nn.Embedding(size, 8, sparse=True) for size in (1000, 5, 70_000)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    looked_up = [torch.tensor(rows, device="cuda") for rows in ([999, 0, 999], [4], [69_999, 32, 31])]
    for mode in ("default", "error"):  # the first time compiles the kernel, and copies where the tables are
        tracker.bitmap.clear()
        sum(table(rows).sum() for table, rows in zip(model, looked_up, strict=True)).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            tracker._following._before_step(optimizer, (optimizer,), {})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()

    tracker.declare_boundary()
    assert [one.row_ids.tolist() for one in tracker.take().values()] == [[0, 999], [4], [31, 32, 69_999]]
