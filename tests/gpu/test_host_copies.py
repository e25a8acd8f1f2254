"""Many small tables are listed and copied by one call each, and get what one call per table gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadRowIds, BadShape
from cnr_store.training.tensors import as_array
from cnr_store_gpu import Cumulative, RowBitmap, RowRequest, RowTracker, StagingBuffers
from cnr_store_gpu.bitmap import RowLists, TakenRows
from cnr_store_gpu.host_copies import TASK_BYTES, RowRequests, TensorLists, host_copies
from cnr_store_gpu.tables import rows_with_gradient
from cnr_store_gpu.words import rows_of, rows_of_spans

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 70), max_size=6), seed=st.integers(0, 99))
def test_rows_of_spans_are_those_of_each_span(sizes: list[int], seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, sum(sizes), np.uint32)
    words[::3] = 0
    ends = np.cumsum([0, *sizes])
    spans = np.array([(ends[k], sizes[k]) for k in reversed(range(len(sizes)))], np.int64).reshape(-1, 2)

    rows, counts = rows_of_spans(words, spans)

    found = np.split(rows, np.cumsum(counts)[:-1]) if sizes else []
    for (first, size), one in zip(spans, found, strict=True):
        assert one.tolist() == rows_of(words[first : first + size]).tolist()


@settings(max_examples=60)
@given(data=st.data())
def test_gradients_marked_together_are_those_of_each_table(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    model = torch.nn.ModuleList(
        torch.nn.Embedding(data.draw(st.sampled_from([1, 33, 70])), data.draw(st.integers(1, 5)), dtype=dtype)
        for dtype in data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracker = RowTracker(model, optimizers=[optimizer])
    for weight in model.parameters():
        weight.grad = torch.from_numpy(random.integers(-1, 2, tuple(weight.shape)) * 1.0).to(weight.dtype)
        weight.grad[random.random(len(weight)) < 0.5] = 0.0
        if data.draw(st.booleans()):
            weight.grad = weight.grad.T.contiguous().T

    optimizer.step()

    for name, weight in tracker.weights.items():
        assert weight.grad is not None
        assert tracker.bitmap.of(name).row_ids(name).tolist() == rows_with_gradient(weight.grad).tolist()


def test_a_take_of_some_tables_leaves_the_marks_of_the_others() -> None:
    bitmap = RowBitmap({"a": 40, "b": 5000, "c": 0, "d": 7})
    marks = {"a": [0, 39], "b": [31, 32, 4999], "c": [], "d": [6]}
    for table, rows in marks.items():
        bitmap.mark(table, rows)

    some = bitmap.take_all(["d", "a"])
    rest = bitmap.take_all()

    assert {table: one.row_ids.tolist() for table, one in some.items()} == {"d": [6], "a": [0, 39]}
    assert {table: one.row_ids.tolist() for table, one in rest.items()} == {**marks, "a": [], "d": []}
    bitmap.give_back(some)
    assert {table: bitmap.row_ids(table).tolist() for table in marks} == {"a": [0, 39], "b": [], "c": [], "d": [6]}


@settings(max_examples=60)
@given(data=st.data())
def test_a_union_of_rows_that_are_taken_together_is_that_of_each_table(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = {"a": 40, "b": 5000, "c": 0, "d": 1025}
    bitmap, together, alone = RowBitmap(rows), Cumulative(rows), Cumulative(rows)
    for _ in range(data.draw(st.integers(1, 5))):
        for table in data.draw(st.lists(st.sampled_from(["a", "b", "d"]), max_size=3)):
            bitmap.mark(table, random.integers(0, rows[table], 3))
        taken = bitmap.take_all(data.draw(st.sampled_from([None, None, None, ["d", "a"]])))
        assert isinstance(taken, TakenRows)
        names = data.draw(st.permutations([*taken]))
        assert taken.rows.joined(names).tolist() == [row for name in names for row in taken[name].row_ids.tolist()]
        together.add(taken)
        alone.add(dict(taken))
        match data.draw(st.sampled_from(["add", "clear", "clear a", "add rows", "add rows"])):
            case "clear":
                together.clear()
                alone.clear()
            case "clear a":
                together.clear("a")
                alone.clear("a")
            case "add rows":
                together.add_rows("b", [7])
                alone.add_rows("b", [7])
    for table in rows:
        assert together.row_ids(table).tolist() == alone.row_ids(table).tolist()
        assert together.words(table).tolist() == alone.words(table).tolist()


def selected(tensors: Mapping[str, torch.Tensor], row_ids: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach()[torch.from_numpy(row_ids)] for name, one in tensors.items()}


@settings(max_examples=60)
@given(data=st.data())
def test_host_copies_equal_selected_rows(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    requests = {}
    for number in range(data.draw(st.integers(1, 5))):
        num_rows, dim = data.draw(st.sampled_from([0, 1, 9, 64])), data.draw(st.integers(1, 5))
        weight = torch.from_numpy(random.standard_normal((num_rows, dim))).to(data.draw(st.sampled_from(DTYPES)))
        tensors = {"weight": torch.nn.Parameter(weight), "sum": torch.arange(float(num_rows))}
        if data.draw(st.booleans()):
            tensors["wide"] = torch.arange(float(num_rows * dim)).view(dim, num_rows).T
        ids = random.integers(0, num_rows, data.draw(st.integers(0, 30)) if num_rows else 0)
        if data.draw(st.booleans()):
            ids = np.repeat(ids, 2)[::2]  # not one after the other
        requests[f"t{number}"] = RowRequest(ids, tensors)

    staged = StagingBuffers().gather(requests)

    for table, request in requests.items():
        expected = selected(request.tensors, request.row_ids)
        assert staged.row_ids[table].tolist() == request.row_ids.tolist()
        assert staged.tensors[table].keys() == expected.keys()
        for name, one in staged.tensors[table].items():
            assert one.dtype == expected[name].dtype
            assert torch.equal(one, expected[name]), (table, name)
        arrays = staged.arrays(table, as_array)
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            assert array.dtype == as_array(expected[name]).dtype
            assert array.tobytes() == as_array(expected[name]).tobytes()
    assert staged.size_bytes == sum(one.nbytes for named in staged.tensors.values() for one in named.values())


@settings(max_examples=60)
@given(data=st.data())
def test_host_copies_that_are_alike_lie_end_to_end(data: st.DataObject) -> None:
    """Also in the gathers after the first, of other rows and tables that are not small any more."""
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(data.draw(st.integers(1, 6))):
        dim, dtype = data.draw(st.sampled_from([2, 4, 6])), data.draw(st.sampled_from(DTYPES[::2]))
        weight = torch.from_numpy(random.standard_normal((1 << 12, dim))).to(dtype)
        tables[f"t{number}"] = {"weight": weight, "sum": torch.arange(float(1 << 12))}
        if data.draw(st.booleans()):
            tables[f"t{number}"]["exact"] = weight.to(torch.float64)
    buffers = StagingBuffers()
    for _ in range(2):
        counts = {name: data.draw(st.sampled_from([0, 1, 7, 1 << 15])) for name in tables}
        requests = {name: RowRequest(random.integers(0, 1 << 12, counts[name]), own) for name, own in tables.items()}
        staged = buffers.gather(requests)

        found = staged.joined(as_array)

        seen = [name for one in found for name in one.tables]
        assert len(seen) == len({*seen})
        assert {name for name in tables if counts[name] < 8} <= {*seen}
        for one in found:
            assert one.counts.tolist() == [counts[name] for name in one.tables]
            assert all(array.flags.c_contiguous for array in one.arrays.values())
            stops = np.cumsum(one.counts)
            for name, start, stop in zip(one.tables, stops - one.counts, stops, strict=True):
                alone = staged.arrays(name, as_array)
                assert alone.keys() == one.arrays.keys()
                assert all(array[start:stop].tobytes() == alone[key].tobytes() for key, array in one.arrays.items())
        staged.release()


@settings(max_examples=60)
@given(data=st.data())
def test_requests_end_to_end_copy_what_requests_by_table_do(data: st.DataObject) -> None:
    """Also of tables that are not small, or lie otherwise: these are made into single requests again."""
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(data.draw(st.integers(1, 5))):
        num_rows, dim = data.draw(st.sampled_from([1, 9, 1 << 12])), data.draw(st.integers(1, 5))
        weight = torch.from_numpy(random.standard_normal((num_rows, dim))).to(data.draw(st.sampled_from(DTYPES)))
        tables[f"t{number}"] = {"weight": weight, "sum": torch.arange(float(num_rows))}
        if data.draw(st.booleans()):
            tables[f"t{number}"]["wide"] = torch.arange(float(num_rows * dim)).view(dim, num_rows).T
    lists = TensorLists(
        [*tables], [name for own in tables.values() for name in own], [len(own) for own in tables.values()]
    )
    tensors = [one for own in tables.values() for one in own.values()]
    buffers, kind = StagingBuffers(), object()
    for _ in range(2):
        ids = [
            np.sort(random.integers(0, len(own["sum"]), data.draw(st.sampled_from([0, 1, 7, 1 << 16]))))
            for own in tables.values()
        ]
        rows = RowLists([*tables], np.concatenate(ids), np.array([*map(len, ids)]))
        requests = {name: RowRequest(own, tables[name]) for name, own in zip(tables, ids, strict=True)}
        known = np.array([
            one.data_ptr() if one.is_contiguous() and random.random() < 0.5 else 0 for one in tensors
        ], np.int64)  # fmt: skip
        together = RowRequests(lists, tensors, rows, known if random.random() < 0.7 else None)
        assert [*together] == [*requests]
        assert len(together) == len(requests)
        assert "none" not in together

        staged, alone = buffers.gather(together, like=kind), StagingBuffers().gather(requests)

        assert [*staged.tensors] == [*alone.tensors]
        assert (staged.size_bytes, staged.host_bytes) == (alone.size_bytes, alone.host_bytes)
        for name, found in alone.tensors.items():
            assert staged.row_ids[name].tolist() == alone.row_ids[name].tolist() == requests[name].row_ids.tolist()
            assert [*staged.tensors[name]] == [*found]
            for key, one in found.items():
                assert one.dtype == staged.tensors[name][key].dtype
                assert as_array(one).tobytes() == as_array(staged.tensors[name][key]).tobytes()
        assert [one.tables for one in staged.joined(as_array)] == [one.tables for one in alone.joined(as_array)]
        staged.release()


def test_copies_that_threads_share_equal_selected_rows() -> None:
    random = np.random.default_rng(0)
    requests = {}
    for number, (count, dim, dtype) in enumerate(
        [(9_000, 64, torch.float32), (0, 8, torch.float32), (5, 2, torch.float64), (300, 2_048, torch.float16)] * 2
    ):
        weight = torch.from_numpy(random.standard_normal((4_000, dim))).to(dtype)
        slots = {"sum": torch.arange(4_000.0), "wide": weight.double()}
        requests[f"t{number}"] = RowRequest(random.integers(0, 4_000, count), {"weight": weight, **slots})
    buffers = StagingBuffers()

    staged = buffers.gather(requests)

    assert staged.size_bytes > 8 * TASK_BYTES
    for table, request in requests.items():
        expected = selected(request.tensors, request.row_ids)
        assert all(torch.equal(staged.tensors[table][name], one) for name, one in expected.items()), table
    staged.release()
    request = requests["t4"]
    assert isinstance(request.row_ids, np.ndarray)
    request.row_ids[-1] = 4_000
    with pytest.raises(BadRowIds, match="between 0 and 4000"):
        buffers.gather(requests)
    buffers.free()


def test_room_that_was_made_is_what_the_next_gather_takes() -> None:
    """Behind the stall, so that a gather of more rows pays for no pages. Copies that are held stay as they are."""
    tensors = {"weight": torch.randn(1000, 8)}
    buffers = StagingBuffers()
    staged = buffers.gather({"t": RowRequest(np.arange(10), tensors)})
    taken, before = staged.tensors["t"]["weight"], buffers.capacity_bytes

    staged.make_room()

    assert torch.equal(taken, tensors["weight"][:10])
    assert buffers.capacity_bytes == before + 1000 * 8 * 4
    staged.release()
    again = buffers.gather({"t": RowRequest(np.arange(1000), tensors)})
    assert buffers.capacity_bytes == 1000 * 8 * 4
    again.make_room()
    assert buffers.capacity_bytes == 1000 * 8 * 4


def test_a_gather_like_the_one_before_copies_the_tensors_as_they_are_now() -> None:
    buffers, kind = StagingBuffers(), object()
    tensors = {"weight": torch.arange(8.0).view(4, 2), "sum": torch.arange(4.0)}
    for rows in ([0, 3], [1, 2, 3], []):
        tensors["sum"] += 1
        staged = buffers.gather({"t": RowRequest(np.array(rows, np.int64), tensors)}, like=kind)
        expected = selected(tensors, np.array(rows, np.int64))
        assert all(torch.equal(staged.tensors["t"][name], one) for name, one in expected.items())
        staged.release()

    tensors["sum"].resize_(2)
    with pytest.raises(BadShape):
        buffers.gather({"t": RowRequest(np.array([0]), tensors)}, like=kind)


def test_a_row_outside_of_its_table_is_refused() -> None:
    buffers, good = StagingBuffers(), torch.ones(4, 2)
    buffers.gather({"good": RowRequest(np.arange(4), {"weight": good})}).release()
    requests = {
        "good": RowRequest(np.arange(4), {"weight": torch.zeros(4, 2)}),
        "bad": RowRequest(np.array([0, 4]), {"weight": torch.zeros(4, 2)}),
    }

    with pytest.raises(BadRowIds, match="rows 0 to 3"):
        buffers.gather(requests)
    with pytest.raises(BadRowIds):
        buffers.gather({"bad": RowRequest(np.array([-1]), {"weight": good})})
    with pytest.raises(BadShape):
        buffers.gather({"bad": RowRequest(np.array([0]), {"weight": good, "sum": torch.ones(3)})})


def test_what_is_quantized_strided_or_odd_is_not_copied_with_others() -> None:
    rows, table = np.arange(2), torch.ones(4, 2)

    def is_taken(row_ids: np.ndarray, **tensors: torch.Tensor) -> bool:  # type: ignore[type-arg]
        return "t" in host_copies({"t": RowRequest(row_ids, tensors)}, without={"coded"})

    assert is_taken(rows, weight=table)
    assert "t" not in host_copies({"t": RowRequest(rows, {"weight": table})}, without={"t"})
    assert not is_taken(rows, weight=torch.ones(2, 4).T)
    assert not is_taken(rows, weight=torch.ones(4, 3, dtype=torch.float16))
    assert not is_taken(rows, weight=table, momentum=table.to_sparse(1))
    assert not is_taken(rows[:, None], weight=table)
    assert not is_taken(rows.astype(np.int32), weight=table)
    assert not is_taken(rows)
