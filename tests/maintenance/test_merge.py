"""Merging one part: what is copied, what is written again, what a run of deltas becomes, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.format.layout import segment_prefix, writer_name
from cnr_store.format.records import PartEntry
from cnr_store.maintenance.compaction.merge import merge_piece
from cnr_store.maintenance.compaction.tasks import MergePiece
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.writer import SegmentWriter
from cnr_store.types import Rectangle
from tests.support.memory import store_in_memory
from tests.support.merging import common_columns, merge, state_of

Array = np.ndarray[Any, Any]
NAME = f"{7:020d}-{'e' * 32}"


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory(threads=2) as made:
        yield made


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as made:
        yield made


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 64)


def write(store: Store, *saves: Any, table: str = "t") -> tuple[SegmentReader, ...]:
    """Commit each save (a function of a transaction), and return the chain."""
    with store.writer() as writer:
        for step, save in enumerate(saves):
            with writer.begin(step) as txn:
                save(txn)
    return store.snapshot().readers


def whole(rows: Any, columns: tuple[int, int] | int, table: str = "t") -> MergePiece:
    rows = (0, rows) if isinstance(rows, int) else rows
    return MergePiece(table, Rectangle(rows, (0, columns) if isinstance(columns, int) else columns))


def rows_of(reader: SegmentReader, part: PartEntry, operation: str) -> list[int]:
    entry = getattr(part, operation)
    if entry is None:
        return []
    return [int(row) for k in range(len(entry.first)) for row in reader.read_rows(entry, k, Scratch())]


def array_of(reader: SegmentReader, part: PartEntry, operation: str, name: str) -> Array:
    entry = getattr(part, operation)
    chunks = range(len(entry.first))
    return np.concatenate([reader.read_chunk(entry.arrays[name], k, Scratch()).copy() for k in chunks])


def ids(*rows: int) -> Array:
    return np.asarray(rows, np.int64)


def same_state(left: Any, right: Any, workers: Workers) -> bool:
    columns = common_columns(left, right)
    return state_of(left, workers, columns) == state_of(right, workers, columns)


# ---- what is copied ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_affine_rows_are_copied_as_they_are_stored(store: Store, workers: Workers, bits: Any) -> None:
    values = np.random.default_rng(bits).standard_normal((40, 11)).astype(np.float32)
    options = TableOptions(encoding="affine", bits=bits)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=options),
        lambda txn: txn.write_rows("t", ids(3, 30), values[[5, 6]] * 7),
    )

    merged = merge(store.storage, readers, (0, 2), [whole((0, 9), 11), whole((9, 40), 11)], workers)

    for name in ("codes", "scale", "zero_point"):
        expected = array_of(readers[0], readers[0].manifest.parts[0], "set", name)
        expected[[3, 30]] = array_of(readers[1], readers[1].manifest.parts[0], "set", name)
        found = np.concatenate([array_of(merged, part, "set", name) for part in merged.manifest.parts])
        assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes()), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_columns_cut_out_of_affine_rows_decode_to_the_same_bits(store: Store, workers: Workers, bits: Any) -> None:
    values = np.random.default_rng(bits).standard_normal((40, 11)).astype(np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(encoding="affine", bits=bits)),
        lambda txn: txn.write_rows("t", ids(3, 30), values[[5, 6]] * 7),
    )

    merged = merge(store.storage, readers, (0, 2), [whole(40, (0, 5)), whole(40, (5, 11))], workers)

    assert same_state([merged], readers, workers)
    assert [part.columns for part in merged.manifest.parts] == [(0, 5), (5, 11)]


def test_exact_rows_stay_exact(store: Store, workers: Workers) -> None:
    values = np.ones((6, 3), np.float32)
    values[2] = [np.nan, -0.0, 1e30]
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=0.5, nonfinite="escape")),
        lambda txn: txn.write_rows("t", ids(4), np.full((1, 3), np.inf, np.float32), nonfinite="escape"),
    )

    merged = merge(store.storage, readers, (0, 2), [whole(6, 3)], workers)

    part = merged.manifest.parts[0]
    assert rows_of(merged, part, "escape") == [2, 4]
    found = array_of(merged, part, "escape", "values")
    assert found.tobytes() == np.stack([values[2], np.full(3, np.inf, np.float32)]).tobytes()
    assert part.state_digest == readers[1].manifest.parts[0].state_digest


# ---- narrow and wide codes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("start", [0, 1])
def test_codes_that_outgrow_int16_are_rewritten_and_leave_no_other_object(
    store: Store, workers: Workers, start: int
) -> None:
    values = np.full((200, 2), 20_000, np.float32)
    moved = values.copy()
    moved[150:] += 9_000
    again = moved.copy()
    again[150:] += 29_000
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_rows("t", np.arange(200), moved + np.float32(1)),
        lambda txn: txn.write_rows("t", np.arange(200), again),
    )

    merged = merge(store.storage, readers, (start, 3), [whole(200, 2)], workers, name=NAME)

    part = merged.manifest.parts[0]
    row_list = part.set if start == 0 else part.add
    assert row_list is not None
    assert row_list.arrays["codes"].dtype == "int32"
    assert all(m.arrays["codes"].dtype == "int16" for m in (readers[0].manifest.parts[0].set,) if m is not None)
    assert same_state([*readers[:start], merged], readers, workers)
    prefix = segment_prefix(NAME)
    listed = {stat.key.removeprefix(prefix) for stat in store.storage.list_objects(prefix)}
    named = {entry.path for entry in merged.manifest.objects}
    assert {path.rpartition("/")[2] for path in listed - named} == {"_segment.json.zst"}
    assert named <= listed


@pytest.mark.usefixtures("small_chunks")
def test_a_repeated_task_never_puts_other_bytes_where_the_result_is(
    store: Store, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: int16 codes replaced int32 ones until the task was repeated; a reader in between found damage."""
    values = np.full((200, 2), 20_000, np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_rows("t", np.arange(200), values + np.arange(200, dtype=np.float32)[:, None]),
        lambda txn: txn.write_rows("t", np.arange(150, 200), values[150:] * 2),
    )
    merged = merge(store.storage, readers, (0, 3), [whole(200, 2)], workers, name=NAME)
    prefix, put = segment_prefix(NAME), store.storage.put
    before = {f"{prefix}{entry.path}": store.storage.read(f"{prefix}{entry.path}") for entry in merged.manifest.objects}
    puts: list[str] = []

    def checked(key: str, data: bytes) -> None:
        assert before.get(key, data) == data
        puts.append(key)
        put(key, data)

    monkeypatch.setattr(store.storage, "put", checked)
    merge(store.storage, readers, (0, 3), [whole(200, 2)], workers, name=NAME)

    assert len(puts) > len(before.keys() & set(puts)) == len(before)


def test_differences_of_16_bit_floats_may_need_int32_where_codes_do_not(store: Store, workers: Workers) -> None:
    low, high = np.full((3, 2), -60_000, np.float16), np.full((3, 2), 60_000, np.float16)
    small = np.full((3, 2), 1, np.float16)
    readers = write(
        store,
        lambda txn: txn.write_table("t", low, options=TableOptions()),
        lambda txn: txn.write_rows("t", ids(0, 1), small[:2]),
        lambda txn: txn.write_rows("t", ids(0), high[:1]),
    )
    added = [reader.manifest.parts[0].add for reader in readers[1:]]
    assert [entry is not None and entry.arrays["codes"].dtype for entry in added] == ["int32", "int16"]

    delta = merge(store.storage, readers, (1, 3), [whole(3, 2)], workers)
    baseline = merge(store.storage, readers, (0, 3), [whole(3, 2)], workers)

    assert same_state([readers[0], delta], readers, workers)
    assert same_state([baseline], readers, workers)
    assert baseline.manifest.parts[0].set is not None
    assert baseline.manifest.parts[0].set.arrays["codes"].dtype == "int16"


def test_a_difference_before_a_rows_first_set_counts_for_nothing(store: Store, workers: Workers) -> None:
    """Regression: the difference was added to uninitialized memory, and refused as out of range for 16-bit floats."""
    low, high = np.full((3, 2), -60_000, np.float16), np.full((3, 2), 60_000, np.float16)
    readers = write(
        store,
        lambda txn: txn.write_table("t", low, options=TableOptions()),
        lambda txn: txn.write_rows("t", ids(0, 1), high[:2]),
        lambda txn: txn.delete_rows("t", ids(1)),
        lambda txn: txn.write_rows("t", ids(1), high[:1]),
    )

    merged = merge(store.storage, readers, (1, 4), [whole(3, 2)], workers)

    part = merged.manifest.parts[0]
    assert (rows_of(merged, part, "add"), rows_of(merged, part, "set")) == ([0], [1])
    assert part.set is not None
    assert part.set.arrays["codes"].dtype == "int16"
    assert same_state([readers[0], merged], readers, workers)


# ---- what a run of deltas leaves ---------------------------------------------------------------------------------


def test_rows_that_were_cut_and_brought_back_within_a_run_are_deleted(store: Store, workers: Workers) -> None:
    values = np.ones((10, 2), np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.resize_table("t", 6),
        lambda txn: (txn.resize_table("t", 14), txn.write_rows("t", ids(7, 12, 13), values[:3])),
        lambda txn: txn.delete_rows("t", ids(1, 13)),
    )

    merged = merge(store.storage, readers, (1, 4), [whole(14, 2)], workers)

    part = merged.manifest.parts[0]
    assert rows_of(merged, part, "delete") == [1, 6, 8, 9]
    assert rows_of(merged, part, "set") == [7, 12]
    assert same_state([readers[0], merged], readers, workers)


def test_a_table_that_begins_within_a_run_is_set_and_nothing_else(store: Store, workers: Workers) -> None:
    values = np.ones((4, 2), np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("other", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_rows("t", ids(0, 1), values[:2] * 3),
        lambda txn: txn.delete_rows("t", ids(2)),
    )

    merged = merge(store.storage, readers, (1, 4), [whole(4, 2, "other"), whole(4, 2)], workers)

    part = merged.manifest.parts[1]
    assert rows_of(merged, part, "set") == [0, 1, 3]
    assert (part.add, part.delete, part.base_digest) == (None, None, None)
    assert part.state_digest == next(one.state_digest for one in readers[3].manifest.parts if one.table == "t")
    assert same_state([readers[0], merged], readers, workers)


def test_a_part_without_changed_rows_is_a_line_and_no_object(store: Store, workers: Workers) -> None:
    values = np.ones((4, 2), np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: None,
        lambda txn: None,
    )

    merged = merge(store.storage, readers, (1, 3), [whole(4, 2)], workers)

    part, last = merged.manifest.parts[0], readers[2].manifest.parts[0]
    assert [item.path for item in merged.manifest.objects] == ["zarr.json"]
    assert (part.base_digest, part.state_digest) == (last.base_digest, last.state_digest)


def test_a_run_that_changes_the_unit_states_no_digest_that_it_starts_from(store: Store, workers: Workers) -> None:
    values = np.ones((4, 2), np.float32)
    write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_rows("t", ids(0), values[:1] * 3),
    )
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2) as txn:
            txn.refine_scale("t")
            txn.write_rows("t", ids(1), values[:1] * 0.5)
    readers = store.snapshot().readers

    merged = merge(store.storage, readers, (1, 3), [whole(4, 2)], workers)

    part = merged.manifest.parts[0]
    assert merged.manifest.tables["t"].shift == 1
    assert array_of(merged, part, "add", "codes").tolist() == [[4, 4], [-1, -1]]
    assert (part.base_digest, part.state_digest) == (None, readers[2].manifest.parts[0].state_digest)
    assert same_state([readers[0], merged], readers, workers)


def test_few_changed_rows_of_a_large_table_merge_as_many_do(
    store: Store, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.ones((5_000, 2), np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.write_rows("t", ids(4, 4_000), values[:2] * 3),
        lambda txn: (txn.resize_table("t", 5_002), txn.write_rows("t", ids(4, 5_001), values[:2] * 9)),
        lambda txn: txn.delete_rows("t", ids(4_000, 5_001)),
    )
    assert readers[1].manifest.parts[0].add is not None

    few = merge(store.storage, readers, (1, 4), [whole(5_002, 2)], workers)
    monkeypatch.setattr("cnr_store.maintenance.compaction.statuses._is_sparse", lambda plan, before: False)
    many = merge(store.storage, readers, (1, 4), [whole(5_002, 2)], workers, name=NAME)

    assert few.manifest == msgspec.structs.replace(many.manifest, txn=few.manifest.txn, base=few.manifest.base)
    assert rows_of(few, few.manifest.parts[0], "delete") == [4_000]


def test_a_run_that_cuts_a_large_table_deletes_rows_that_no_list_names(store: Store, workers: Workers) -> None:
    values = np.ones((5_000, 2), np.float32)
    readers = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: txn.resize_table("t", 4_997),
        lambda txn: (txn.resize_table("t", 5_000), txn.write_rows("t", ids(4_998), values[:1])),
    )

    merged = merge(store.storage, readers, (1, 3), [whole(5_000, 2)], workers)

    part = merged.manifest.parts[0]
    assert (rows_of(merged, part, "delete"), rows_of(merged, part, "set")) == ([4_997, 4_999], [4_998])
    assert same_state([readers[0], merged], readers, workers)


@pytest.mark.parametrize("start", [0, 1])
def test_the_keys_of_a_hashed_table_keep_their_newest_content(store: Store, workers: Workers, start: int) -> None:
    values = np.ones((3, 2), np.float32)
    readers = write(
        store,
        lambda txn: (
            txn.create_table("h", dim=2, options=TableOptions(scale=1.0)),
            txn.write_rows("h", ids(-(2**63), -5, 2**63 - 1), values),
        ),
        lambda txn: (txn.write_rows("h", ids(-5, 7), values[:2] * 2), txn.delete_rows("h", ids(-(2**63)))),
        lambda txn: (txn.write_rows("h", ids(7), values[:1] * 3), txn.delete_rows("h", ids(2**63 - 1))),
    )

    merged = merge(store.storage, readers, (start, 3), [whole(0, 2, "h")], workers)

    part = merged.manifest.parts[0]
    assert rows_of(merged, part, "set") == ([-5, 7] if start == 0 else [7])
    assert rows_of(merged, part, "add") == ([] if start == 0 else [-5])
    assert rows_of(merged, part, "delete") == ([] if start == 0 else [-(2**63), 2**63 - 1])
    assert same_state([*readers[:start], merged], readers, workers)


# ---- each chunk once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_bytes", "times"), [(1 << 20, 1), (1, 20)])
def test_a_chunk_that_spans_many_chunks_of_the_result_is_decoded_once(
    store: Store, workers: Workers, monkeypatch: pytest.MonkeyPatch, cache_bytes: int, times: int
) -> None:
    values = np.ones((200, 2), np.float32)
    changed = np.arange(0, 200, 3)
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 40)
    readers = write(store, lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)))
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1 << 20)
    readers = write_more(store, lambda txn: txn.write_rows("t", changed, values[changed] * 2))
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 40)
    decoded: Counter[tuple[str, int]] = Counter()
    decode = SegmentReader._decode

    def counted(self: SegmentReader, entry: Any, index: int, scratch: Scratch) -> Any:
        decoded[entry.path, index] += 1
        return decode(self, entry, index, scratch)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentReader, "_decode", counted)
        merged = merge(store.storage, readers, (0, 2), [whole(200, 2)], workers, cache_bytes=cache_bytes)

    part = merged.manifest.parts[0]
    assert part.set is not None
    assert len(part.set.first) == 20
    codes = {key: count for key, count in decoded.items() if key[0].endswith(".codes")}
    assert [count for key, count in codes.items() if ".add-" in key[0]] == [times]
    assert {count for key, count in codes.items() if ".set-" in key[0]} == {1}
    assert same_state([merged], readers, workers)


def write_more(store: Store, *saves: Any) -> tuple[SegmentReader, ...]:
    with store.writer() as writer:
        writer.restore()
        for step, save in enumerate(saves, start=10):
            with writer.begin(step) as txn:
                save(txn)
    return store.snapshot().readers


@pytest.mark.usefixtures("small_chunks")
def test_neither_threads_nor_the_cache_change_a_byte(store: Store) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 2)).astype(np.float32) * 4_000
    slot = rng.random(300).astype(np.float32)
    options = TableOptions(scale=1.0, nonfinite="escape")
    saves: list[Any] = [lambda txn: txn.write_table("t", values, slots={"m": slot}, options=options)]
    for seed in range(6):
        rows = np.sort(np.random.default_rng(seed).choice(300, 90, replace=False)).astype(np.int64)
        moved = (values[rows] + np.float32(5_000 * seed), slot[rows] * np.float32(seed))
        saves.append(lambda txn, r=rows, m=moved: txn.write_rows("t", r, m[0], slots={"m": m[1]}))
        saves.append(lambda txn, r=rows: txn.delete_rows("t", r[::9]))
    readers = write(store, *saves)
    lists = [one for r in readers for part in r.manifest.parts for one in (part.add, part.set) if one is not None]
    assert {one.arrays["codes"].dtype for one in lists} == {"int16"}

    for start in (0, 1):
        manifests = []
        for number, (threads, cache_bytes) in enumerate([(1, 1), (4, 1 << 20), (3, 200)]):
            with Workers(threads) as workers:
                name = f"{start:019d}{number}-{'e' * 32}"
                run = (start, len(readers))
                merged = merge(
                    store.storage, readers, run, [whole(300, 2)], workers, name=name, cache_bytes=cache_bytes
                )
                manifests.append(msgspec.structs.replace(merged.manifest, base=0))

        assert manifests[0] == manifests[1] == manifests[2]
        found = manifests[0].parts[0].set
        assert found is not None
        assert found.arrays["codes"].dtype == "int32", "the list was written twice"


# ---- what is refused ---------------------------------------------------------------------------------------------


def refused(store: Store, readers: Any, run: tuple[int, int], piece: MergePiece, workers: Workers) -> None:
    out = SegmentWriter(
        store.storage, NAME, writer=writer_name(0, "0" * 8), workers=workers,
        throttle=Throttle(None),
    )  # fmt: skip
    merge_piece(readers, run, piece, out, workers)


def three_saves(store: Store, *, last: str = "delete") -> list[SegmentReader]:
    values = np.ones((4, 2), np.float32)
    exact = np.full((1, 2), np.inf, np.float32)
    return list(
        write(
            store,
            lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0, nonfinite="escape")),
            lambda txn: txn.write_rows("t", ids(0, 3), values[:2] * 3),
            lambda txn: (
                txn.delete_rows("t", ids(3))
                if last == "delete"
                else txn.write_rows("t", ids(3), exact, nonfinite="escape")
            ),
        )
    )


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("how", ["delete", "escape"])
def test_a_difference_to_a_row_that_the_run_takes_the_codes_of_is_corrupt(
    store: Store, workers: Workers, how: str, start: int
) -> None:
    readers = three_saves(store, last=how)
    readers[1], readers[2] = readers[2], readers[1]

    with pytest.raises(CorruptStore, match=r"row 3 .* segment 2 after it was deleted, escaped"):
        refused(store, readers, (start, 3), whole(4, 2), workers)


def test_a_difference_to_a_row_that_did_not_exist_before_is_corrupt(store: Store, workers: Workers) -> None:
    values = np.ones((4, 2), np.float32)
    first, grown, moved = write(
        store,
        lambda txn: txn.write_table("t", values, options=TableOptions(scale=1.0)),
        lambda txn: (txn.resize_table("t", 6), txn.write_rows("t", ids(5), values[:1])),
        lambda txn: txn.write_rows("t", ids(5), values[:1] * 3),
    )

    with pytest.raises(CorruptStore, match=r"row 5 .* never set"):
        refused(store, [first, moved, grown], (1, 3), whole(6, 2), workers)


def test_columns_that_are_not_those_of_a_runs_parts_are_refused(store: Store, workers: Workers) -> None:
    readers = three_saves(store)

    with pytest.raises(ValueError, match=r"columns \(0, 1\) of table 't' cannot be merged as one piece"):
        refused(store, readers, (1, 3), whole(4, (0, 1)), workers)


def test_columns_that_cut_one_dimensional_slots_are_refused(store: Store, workers: Workers) -> None:
    values, slot = np.ones((4, 2), np.float32), np.ones(4, np.float32)
    readers = write(store, lambda txn: txn.write_table("t", values, slots={"m": slot}, options=TableOptions(scale=1.0)))

    with pytest.raises(ValueError, match=r"columns \(0, 1\) of table 't' cannot be merged as one piece"):
        refused(store, readers, (0, 1), whole(4, (0, 1)), workers)
