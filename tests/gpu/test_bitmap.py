"""The bitmap against sets of ids: marks, takes, refunds, edges of words and tables."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadInput, BadRowIds, BadShape, TableNotFound
from cnr_store_gpu import Cumulative, DeviceBitmaps, RowBitmap
from cnr_store_gpu import words as packed
from cnr_store_gpu.kernels import reference
from cnr_store_gpu.words import mark_words, pack_mask, rows_of, words_full, words_of_rows

ODD_SIZES = [0, 1, 31, 32, 33, 1023, 1024, 1025, 5000]

sizes = st.sampled_from(ODD_SIZES)
raw_ids = st.lists(st.integers(-3, 5003), max_size=60)
law = settings(max_examples=60)


def bitmap_of(rows: dict[str, int], *, on_host: bool | None = None) -> RowBitmap:
    device = torch.get_default_device()
    return RowBitmap(rows, device, on_host=on_host if device.type == "cpu" else None)


def inside(ids: list[int], num_rows: int) -> set[int]:
    return {row for row in ids if 0 <= row < num_rows}


@law
@given(tables=st.lists(sizes, min_size=1, max_size=4), data=st.data())
def test_bitmap_equals_a_set_per_table(tables: list[int], data: st.DataObject) -> None:
    rows = {f"t{i}": size for i, size in enumerate(tables)}
    # False: the path of other devices, run on the CPU.
    bitmap = bitmap_of(rows, on_host=data.draw(st.sampled_from([None, False])))
    model: dict[str, set[int]] = {table: set() for table in rows}

    for _ in range(data.draw(st.integers(1, 12))):
        table = data.draw(st.sampled_from(sorted(rows)))
        action = data.draw(st.sampled_from(["mark", "mark", "mark", "mask", "all", "take", "clear", "give_back"]))
        if action == "mark":
            ids = data.draw(raw_ids)
            bitmap.mark(table, torch.tensor(ids, dtype=torch.int64), out_of_range="ignore")
            model[table] |= inside(ids, rows[table])
        elif action == "mask":
            ids = data.draw(raw_ids)
            mask = torch.zeros(rows[table], dtype=torch.bool)
            mask[sorted(inside(ids, rows[table]))] = True
            bitmap.mark_mask(table, mask)
            model[table] |= inside(ids, rows[table])
        elif action == "all":
            bitmap.mark_all(table)
            model[table] = set(range(rows[table]))
        elif action == "take":
            assert bitmap.take(table).tolist() == sorted(model[table])
            model[table] = set()
        elif action == "clear":
            bitmap.clear(table)
            model[table] = set()
        else:
            taken = bitmap.take_all()
            assert not bitmap.any()
            ids = data.draw(raw_ids)
            bitmap.mark(table, np.array(ids, np.int64), out_of_range="ignore")
            bitmap.give_back(taken)
            bitmap.give_back(taken)
            model[table] |= inside(ids, rows[table])

    assert {table: bitmap.row_ids(table).tolist() for table in rows} == {t: sorted(m) for t, m in model.items()}
    assert {table: bitmap.count(table) for table in rows} == {table: len(m) for table, m in model.items()}
    assert bitmap.any() == any(model.values())


@pytest.mark.parametrize("on_host", [None, False])
def test_what_was_taken_is_a_copy(on_host: bool | None) -> None:
    bitmap = bitmap_of({"t": 100}, on_host=on_host)
    bitmap.mark("t", np.array([1, 2]))

    taken = bitmap.take_all()
    bitmap.mark("t", np.array([70]))
    bitmap.give_back(taken)

    assert bitmap.row_ids("t").tolist() == [1, 2, 70]


@law
@given(num_rows=sizes, ids=raw_ids, skip=st.integers(-1, 40), is_int32=st.booleans())
def test_kernel_equals_the_numpy_and_the_torch_reference(
    num_rows: int, ids: list[int], skip: int, is_int32: bool
) -> None:
    first_word = 32
    words = np.zeros(first_word + words_of_rows(num_rows) + 1, np.uint32)
    array = np.array(ids, np.int32 if is_int32 else np.int64)
    by_torch = torch.zeros(len(words), dtype=torch.int32)
    by_numpy = words.copy()
    kept = array[(array >= 0) & (array < num_rows) & (array != skip)].astype(np.int64)
    np.bitwise_or.at(by_numpy, first_word + (kept >> 5), np.uint32(1) << (kept & 31).astype(np.uint32))

    outside = mark_words(words, array, first_word, num_rows, skip)
    marked = torch.from_numpy(array).to(by_torch.device)
    reference.mark(by_torch, marked, first_word, num_rows, skip)
    reference.mark(by_torch, marked, first_word, num_rows, skip)

    np.testing.assert_array_equal(words, by_numpy)
    np.testing.assert_array_equal(by_torch.cpu().numpy().view(np.uint32), by_numpy)
    assert outside == len(ids) - len([row for row in ids if 0 <= row < num_rows])


@law
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_listed_rows_are_the_bits_that_numpy_unpacks(words: list[int]) -> None:
    array = np.array(words, np.uint32)

    unpacked = np.flatnonzero(np.unpackbits(array.view(np.uint8), bitorder="little"))

    np.testing.assert_array_equal(rows_of(array), unpacked)


@pytest.mark.parametrize("num_rows", ODD_SIZES)
def test_all_rows_and_no_more(num_rows: int) -> None:
    bitmap = bitmap_of({"before": 3, "t": num_rows, "after": 3})

    bitmap.mark_all("t")

    np.testing.assert_array_equal(bitmap.take("t"), np.arange(num_rows))
    assert not bitmap.any()
    assert len(words_full(num_rows)) == words_of_rows(num_rows)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("outside", [-1, 5, 2**31, -(2**62)])
def test_id_outside_is_named_and_marks_nothing_anywhere(outside: int, on_host: bool) -> None:
    bitmap = bitmap_of({"a": 5, "b": 2000}, on_host=on_host)

    with pytest.raises(BadRowIds, match="1 of the ids") as caught:
        bitmap.mark("a", torch.tensor([2, outside]))

    assert caught.value.table == "a"
    assert bitmap.take("a").tolist() == [2]
    assert not bitmap.any()


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), np.array([0.5]), np.array([True]), ["x"]])
def test_ids_that_are_no_integers_are_refused(ids: object) -> None:
    bitmap = bitmap_of({"t": 5})

    with pytest.raises(BadRowIds, match="integers"):
        bitmap.mark("t", ids)  # type: ignore[arg-type]

    assert not bitmap.any()


@pytest.mark.parametrize(
    "ids",
    [
        [4, 2, 4],
        np.array([[4, 2]], np.uint8),
        torch.tensor([[4], [2]], dtype=torch.int32),
        torch.tensor([4, 9, 2, 9])[::2],
        np.array([4, 9, 2, 9])[::2],
    ],
)
def test_ids_may_have_any_integer_form(ids: object) -> None:
    bitmap = bitmap_of({"t": 10})

    bitmap.mark("t", ids)  # type: ignore[arg-type]

    assert bitmap.take("t").tolist() == [2, 4]


def test_empty_ids_mark_nothing() -> None:
    bitmap = bitmap_of({"t": 10, "empty": 0})

    bitmap.mark("t", [])
    bitmap.mark("empty", torch.empty(0, dtype=torch.int64))

    assert not bitmap.any()


def test_padding_row_is_skipped() -> None:
    bitmap = bitmap_of({"t": 10})

    bitmap.mark("t", [0, 3, 0], skip_row=0)

    assert bitmap.take("t").tolist() == [3]


def test_unknown_table_is_named() -> None:
    bitmap = bitmap_of({"t": 10})

    with pytest.raises(TableNotFound, match="'other'"):
        bitmap.mark("other", [1])
    with pytest.raises(TableNotFound, match="'other'"):
        Cumulative({"t": 10}).row_ids("other")


def test_negative_table_is_refused() -> None:
    with pytest.raises(BadInput, match="-1 rows"):
        bitmap_of({"t": -1})


def test_rows_taken_from_a_device_stay_there_too() -> None:
    on_host, on_device = RowBitmap({"a": 100, "b": 5}), bitmap_of({"a": 100, "b": 5}, on_host=False)
    for bitmap in (on_host, on_device):
        bitmap.mark("a", [1, 99])
        bitmap.mark("b", [4])

    taken = on_device.take_all(["b", "a"])

    assert list(taken) == ["b", "a"]
    assert all(torch.equal(one.device_rows.cpu(), torch.from_numpy(one.row_ids)) for one in taken.values())
    for table, one in on_host.take_all().items():
        assert one.device_rows is None
        np.testing.assert_array_equal(one.words, taken[table].words)
        np.testing.assert_array_equal(one.row_ids, taken[table].row_ids)


@law
@given(mask=st.lists(st.booleans(), max_size=130))
def test_packed_mask_is_what_numpy_packs(mask: list[bool]) -> None:
    packed = pack_mask(torch.tensor(mask, dtype=torch.bool))

    padded = mask + [False] * (-len(mask) % 32)
    np.testing.assert_array_equal(
        packed.cpu().numpy().view(np.uint8), np.packbits(np.array(padded, bool), bitorder="little")
    )


@pytest.mark.parametrize("mask", [torch.ones(6, dtype=torch.bool), torch.ones(5), torch.ones(5, 1, dtype=torch.bool)])
def test_mask_of_another_form_is_refused(mask: torch.Tensor) -> None:
    bitmap = bitmap_of({"t": 5})

    with pytest.raises(BadShape, match=r"\(5,\)"):
        bitmap.mark_mask("t", mask)

    assert not bitmap.any()


def test_tables_of_several_devices_are_one_set_of_names() -> None:
    devices = {"a": torch.device("cpu"), "b": torch.device("cpu", 0), "c": torch.device("cpu")}
    bitmaps = DeviceBitmaps({table: (40 * (n + 1), device) for n, (table, device) in enumerate(devices.items())})
    assert bitmaps.of("a") is bitmaps.of("c") is not bitmaps.of("b")

    for row, table in enumerate(devices):
        bitmaps.of(table).mark(table, [row])
    bitmaps.of("a").mark_all("a")
    taken = bitmaps.take_all()

    assert {table: len(one) for table, one in taken.items()} == {"a": 40, "b": 1, "c": 1}
    assert list(taken) == list(devices)
    assert not any(bitmaps.of(table).any() for table in devices)
    bitmaps.of("b").give_back({"b": taken["b"]})
    assert bitmaps.of("b").take("b").tolist() == [1]
    with pytest.raises(TableNotFound, match="'d'"):
        bitmaps.of("d")


def test_taken_words_survive_later_marks() -> None:
    bitmap = bitmap_of({"t": 100})
    bitmap.mark("t", [1, 99])

    taken = bitmap.take_all()["t"]
    bitmap.mark("t", [50])

    assert rows_of(taken.words).tolist() == taken.row_ids.tolist() == [1, 99]


def test_take_all_of_some_tables_leaves_the_others() -> None:
    bitmap = bitmap_of({"a": 10, "b": 10})
    bitmap.mark("a", [1])
    bitmap.mark("b", [2])

    taken = bitmap.take_all(["a"])

    assert list(taken) == ["a"]
    assert bitmap.take("b").tolist() == [2]


def test_tables_start_at_multiples_of_1024_rows_and_cost_a_bit_per_row() -> None:
    bitmap = bitmap_of({"a": 1, "b": 1025, "c": 1_000_000})

    assert bitmap.words.numel() == 32 + 64 + 977 * 32
    assert bitmap.size_bytes == 4 * bitmap.words.numel()


def test_or_adds_words() -> None:
    bitmap = bitmap_of({"t": 40})
    bitmap.mark("t", [1, 39])
    words = bitmap.copy_words("t")
    bitmap.clear()
    bitmap.mark("t", [2])

    bitmap.or_words("t", words)
    assert bitmap.row_ids("t").tolist() == [1, 2, 39]


def test_words_of_another_table_are_refused() -> None:
    bitmap = bitmap_of({"t": 40})

    with pytest.raises(BadShape, match=r"\(2,\)"):
        bitmap.or_words("t", np.zeros(3, np.uint32))
    with pytest.raises(BadShape):
        bitmap.or_words("t", np.zeros(2, np.int64))
    with pytest.raises(BadRowIds, match="past its last row"):
        bitmap.or_words("t", np.array([0, 1 << 8], np.uint32))

    assert not bitmap.any()


def test_marks_of_many_threads_are_all_kept() -> None:
    bitmap = bitmap_of({"t": 100_000})
    parts = np.array_split(np.random.default_rng(0).permutation(100_000), 8)
    threads = [threading.Thread(target=bitmap.mark, args=("t", part)) for part in parts]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert bitmap.count("t") == 100_000


def test_marks_wait_until_what_is_there_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the copy of the words and their clearing a mark would be in no take."""
    bitmap = RowBitmap({"t": 100}, "cpu")  # another device has no copy of words to look into
    bitmap.mark("t", [3])
    real, seen = RowBitmap._copy, []

    def copy(self: RowBitmap, place: Any) -> Any:
        def could_mark() -> None:
            seen.append(packed.LOCK.acquire(blocking=False))

        other = threading.Thread(target=could_mark)
        other.start()
        other.join()
        return real(self, place)

    monkeypatch.setattr(RowBitmap, "_copy", copy)

    assert bitmap.take("t").tolist() == [3]
    assert seen == [False]


@law
@given(intervals=st.lists(raw_ids, max_size=6), num_rows=sizes)
def test_cumulative_is_the_union_of_the_intervals(intervals: list[list[int]], num_rows: int) -> None:
    bitmap, union = bitmap_of({"t": num_rows, "u": 5}), Cumulative({"t": num_rows, "u": 5})
    expected: set[int] = set()

    for ids in intervals:
        bitmap.mark("t", ids, out_of_range="ignore")
        taken = bitmap.take_all()
        union.add(taken)
        union.add(taken["t"])
        expected |= inside(ids, num_rows)

    assert union.row_ids("t").tolist() == sorted(expected)
    assert union.count("t") == len(expected)
    assert union.row_ids("u").tolist() == []


def test_cumulative_takes_rows_and_starts_over() -> None:
    union = Cumulative({"t": 10, "u": 10})
    union.add_rows("t", [1, 3])
    union.add_rows("u", torch.tensor([9]))

    with pytest.raises(BadRowIds):
        union.add_rows("t", [10, 4])
    assert union.row_ids("t").tolist() == [1, 3, 4]

    union.clear("t")
    assert (union.count("t"), union.count("u")) == (0, 1)
    union.clear()
    assert union.count("u") == 0


def test_cumulative_keeps_no_reference_to_the_callers_words() -> None:
    union = Cumulative({"t": 32})
    words = np.array([1], np.uint32)
    union.add_words("t", words)

    words[0] = 0
    union.words("t")[0] = 0

    assert union.row_ids("t").tolist() == [0]
