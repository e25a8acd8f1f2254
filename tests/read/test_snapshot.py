"""Opening states and reading them: by version, step, tag and time; whole, by range, by rows, into given arrays."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions
from cnr_store.errors import BadDtype, BadRowIds, BadShape, TableNotFound, VersionNotFound
from cnr_store.segment.shards import Shard
from tests.support.memory import store_in_memory
from tests.support.store_oracle import KINDS, TableModel, same_bits, training_slots, training_values

ROWS, DIM = 50, 3


def filled(store: Store, value: float, step: int, writer: Any) -> int:
    with writer.begin(step) as txn:
        values = np.full((4, 2), value, np.float32)
        if txn.kind == "baseline" and not writer.snapshot.tables:
            txn.write_table("t", values, options=TableOptions(scale=0.5))
        else:
            txn.write_rows("t", np.arange(4), values)
    assert txn.version is not None
    return txn.version


def test_by_version_step_tag_and_time() -> None:
    store = store_in_memory()
    with store.writer() as writer:
        versions = []
        for value in (1, 2, 3):
            versions.append(filled(store, value, 10 * value, writer))
            time.sleep(0.002)
        store.tag("good", versions[1])
        store.rollback(versions[0])
        writer.restore()
        again = filled(store, 9, 20, writer)

    def first(**which: Any) -> float:
        return float(store.snapshot(**which).table("t").read()[0, 0])

    assert [first(version=version) for version in (*versions, again)] == [1, 2, 3, 9]
    assert [first(step=step) for step in (10, 20, 30)] == [1, 9, 3]
    assert first(tag="good") == 2
    assert first() == 9
    for version, value in zip(versions, (1, 2, 3), strict=True):
        at = dt.datetime.fromtimestamp(store.record(version).ts_ms / 1000, dt.UTC)
        assert first(time=at) == value
    with pytest.raises(VersionNotFound):
        store.snapshot(time=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))
    with pytest.raises(BadInput, match="at most one"):
        store.snapshot(step=10, tag="good")
    assert store.snapshot(version=0).is_empty


@pytest.mark.parametrize("time", [1_700_000_000_000, 1.7e9, "2023-11-14T22:13:20Z", dt.date(2023, 11, 14)])
def test_a_time_that_is_no_datetime_is_refused(time: Any) -> None:
    store = store_in_memory()

    with pytest.raises(BadInput, match=r"expected a datetime\.datetime; convert ms since 1970") as refused:
        store.snapshot(time=time)
    assert refused.value.found == repr(time)


def test_a_time_without_a_zone_is_of_this_machine() -> None:
    store = store_in_memory()
    with store.writer() as writer:
        version = filled(store, 1, 10, writer)
    at = dt.datetime.fromtimestamp(store.record(version).ts_ms / 1000 + 1)  # noqa: DTZ006

    assert store.snapshot(time=at).version == version
    with pytest.raises(VersionNotFound):
        store.snapshot(time=at - dt.timedelta(days=1))
    with pytest.raises(BadInput, match="cannot be converted to UTC"):
        store.snapshot(time=dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14))))


@pytest.fixture(scope="module")
def worlds() -> dict[str, tuple[Store, TableModel]]:
    """Every kind of table after a baseline, changed rows, deletes, a resize and escape rows."""
    made: dict[str, tuple[Store, TableModel]] = {}
    for name in KINDS:
        store, rng = store_in_memory(), np.random.default_rng(3)
        values, slots = training_values(name, rng, ROWS, DIM), training_slots(name, rng, ROWS, DIM)
        table = TableModel(name, values.copy(), {n: s.copy() for n, s in slots.items()}, np.zeros(ROWS, np.uint8))
        with store.writer() as writer:
            with writer.begin(1) as txn:
                txn.write_table("t", values, slots=slots, options=KINDS[name].options)
            for step in range(2, 5):
                with writer.begin(step) as txn:
                    if step == 3:
                        txn.resize_table("t", ROWS + 7)
                        table.resize(ROWS + 7)
                    rows = np.flatnonzero(rng.random(table.num_rows) < 0.3).astype(np.int64)
                    values = training_values(name, rng, len(rows), DIM)
                    values[1] = np.asarray([np.nan, 1, 1]) if KINDS[name].dtype != "bfloat16" else 0x7FC0
                    slots = training_slots(name, rng, len(rows), DIM)
                    txn.write_rows("t", rows, values, slots=slots)
                    gone = np.setdiff1d(np.asarray([2, 3, 17]), rows)
                    txn.delete_rows("t", gone)
                table.write(rows, values, slots)
                table.status[gone] = 1
        made[name] = (store, table)
    return made


@pytest.mark.parametrize("window_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_reads_equal_slices_of_the_training_values_by_any_window(
    worlds: dict[str, tuple[Store, TableModel]], kind: str, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.read.table_reader.WINDOW_BYTES", window_bytes)
    store, table = worlds[kind]
    view, expected = store.snapshot().table("t"), table.expected()
    slots = {name: np.empty_like(slot) for name, slot in table.slots.items()}
    values = np.empty_like(table.values)
    view.read_rectangle(values=values, slots=slots)
    assert same_bits(values, expected["values"])
    assert all(same_bits(slots[name], expected[name]) for name in slots)
    spaced = np.empty((table.num_rows, 2 * DIM), values.dtype)[:, ::2]
    assert same_bits(np.ascontiguousarray(view.read(out=spaced)), expected["values"])
    for start, stop in ((0, 0), (0, 1), (7, 31), (table.num_rows - 3, table.num_rows)):
        assert same_bits(view.read(start, stop), expected["values"][start:stop])
        part = np.empty((stop - start, DIM), values.dtype)
        view.read(start, start + len(part), out=part)
        assert same_bits(part, expected["values"][start:stop])
    rows = np.asarray([5, 2, 2, table.num_rows - 1, 0])
    assert same_bits(view.read_rows(rows), expected["values"][rows])
    assert view.read_rows(np.empty(0, np.int64)).shape == (0, DIM)
    for name in slots:
        assert same_bits(view.read(3, 20, slot=name), expected[name][3:20])
        assert same_bits(view.read_rows(rows, slot=name), expected[name][rows])


def test_a_schema_that_is_asked_for_rows_names_the_table_that_reads_them(
    worlds: dict[str, tuple[Store, TableModel]],
) -> None:
    store, _ = worlds["lattice"]
    schema: Any = store.snapshot().tables["t"]

    with pytest.raises(AttributeError, match=r"'read_rows'.*snapshot\.table\(name\)"):
        schema.read_rows([0])


def test_reads_refuse_what_does_not_fit(worlds: dict[str, tuple[Store, TableModel]]) -> None:
    view = worlds["lattice"][0].snapshot().table("t")
    refused: list[tuple[type[Exception], Any]] = [
        (BadShape, lambda: view.read(out=np.empty((3, DIM), np.float32))),
        (BadDtype, lambda: view.read(out=np.empty(view.shape, np.float64))),
        (BadInput, lambda: view.read(-1, 3)),
        (BadInput, lambda: view.read(4, 3)),
        (BadInput, lambda: view.read(0, view.shape[0] + 1)),
        (BadInput, view.read_all),
        (TableNotFound, lambda: view.read(slot="v")),
        (BadRowIds, lambda: view.read_rows(np.asarray([-1]))),
        (BadRowIds, lambda: view.read_rows(np.asarray([view.shape[0]]))),
        (BadRowIds, lambda: view.read_rows(np.asarray([1.5]))),
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()


def test_outputs_that_overlap_are_refused(worlds: dict[str, tuple[Store, TableModel]]) -> None:
    """A read filled them with rows of both, and said nothing."""
    view = worlds["lattice"][0].snapshot().table("t")
    rows = view.shape[0]
    wide = np.zeros((rows + 1, 2 * DIM), np.float32)
    slots: dict[str, Any] = dict.fromkeys(view.schema.slots)
    vector = next(name for name in slots if view.read(slot=name).ndim == 1)
    twice = np.lib.stride_tricks.as_strided(wide, (rows, DIM), (wide.itemsize, wide.itemsize))

    for call in (
        lambda: view.read(out=twice),
        lambda: view.read_rectangle(values=wide[1:, :DIM], slots={**slots, vector: wide[1:, 0]}),
    ):
        with pytest.raises(BadInput, match="overlap in memory"):
            call()
    assert not wide.any()
    view.read_rectangle(values=wide[1:, ::2], slots={**slots, vector: wide[1:, 1]})
    view.read(1, 1, out=twice[:0])


@pytest.mark.parametrize("mirror", ["memory", "mmap"])
def test_codes_that_outgrow_int16_widen_the_mirror_in_deltas_and_restores(mirror: Any) -> None:
    store = store_in_memory()
    values = np.ones((6, 2), np.float32)
    writer = store.writer(mirror=mirror)
    with writer.begin(1) as txn:
        txn.write_table("t", values, options=TableOptions(scale=0.5))
    for step, peak in enumerate((30_000.0, -1_000_000.0, 1.0), start=2):
        values[[1, 4]] = [[peak, 1], [2, peak]]
        with writer.begin(step) as txn:
            txn.write_rows("t", np.asarray([1, 4]), values[[1, 4]])
        codes = writer.mirrors.get(Shard("t"))
        assert codes is not None
        assert codes.arrays["codes"].dtype == np.int32
        assert codes.digest() == writer.mirrors.digest(Shard("t"))
        assert isinstance(codes.arrays["codes"], np.memmap) == (mirror == "mmap")
        assert np.array_equal(store.snapshot().table("t").read(), values)
    again = store.writer(mirror=mirror)
    out = np.empty_like(values)
    again.restore({"t": {"values": out}})
    assert np.array_equal(out, values)
    restored = again.mirrors.get(Shard("t"))
    assert restored is not None
    assert restored.arrays["codes"].dtype == np.int32
    assert restored.digest() == again.mirrors.digest(Shard("t"))
    again.close()
    writer.close()


def test_a_mirror_over_parts_without_a_digest_keeps_one_from_then_on() -> None:
    """A store written without a mirror named no state digest, and the next writer's deltas named none either."""
    store = store_in_memory()
    with store.writer(mirror="none") as writer:
        filled(store, 1, 1, writer)
        assert store.snapshot().manifests[-1].parts[0].state_digest is None
    with store.writer() as writer:
        writer.restore()
        filled(store, 2, 2, writer)
        assert store.snapshot().manifests[-1].parts[0].state_digest is not None
        writer.restore()


# A scale refined by halvings.


@pytest.mark.parametrize("mirror", ["memory", "mmap"])
def test_a_refined_scale_goes_over_exactly_and_is_finer_from_then_on(mirror: Any) -> None:
    store, rng = store_in_memory(), np.random.default_rng(5)
    options = TableOptions(scale=0.5, nonfinite="escape")
    table = TableModel("lattice_wide", np.zeros((20, DIM), np.float32), {}, np.zeros(20, np.uint8), scale=0.5)
    values = (rng.standard_normal((20, DIM)) * 100).astype(np.float32)
    values[3, 0], values[4, 1] = np.nan, 16_000  # an escape row, and a code that needs int32 after a halving
    with store.writer(mirror=mirror) as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", values, options=options)
        with writer.begin(2) as txn:
            txn.delete_rows("t", np.asarray([7]))
    table.write(np.arange(20), values, {})
    before = store.snapshot().table("t").read()
    with store.writer(mirror=mirror) as writer:
        writer.restore()
        with writer.begin(3) as txn:
            txn.refine_scale("t", 2)
            rows = np.asarray([0, 5, 7, 19])
            fresh = (rng.standard_normal((4, DIM)) * 100).astype(np.float32)
            txn.write_rows("t", rows, fresh)
        view = store.snapshot().table("t")
        assert (view.schema.shift, view.schema.generation) == (2, 1)
        expected = before.copy()
        expected[rows] = np.float32(0.125) * (np.rint(fresh / np.float32(0.125)) + np.float32(0))
        assert same_bits(view.read(), expected)
        assert same_bits(view.read_rows(np.asarray([4, 0, 3])), expected[[4, 0, 3]])
        codes = writer.mirrors.get(Shard("t"))
        assert codes is not None
        assert codes.digest() == writer.mirrors.digest(Shard("t"))
        with writer.begin(4) as txn:
            txn.write_rows("t", rows[:1], fresh[1:2])
        expected[0] = expected[5]
        assert same_bits(store.snapshot().table("t").read(), expected)
        assert same_bits(store.snapshot(version=2 + 1).table("t").read(), before)
        with writer.begin(5, "baseline"):
            pass
        assert same_bits(store.snapshot().table("t").read(), expected)
    with store.writer() as writer:
        writer.restore()
        assert same_bits(store.snapshot().table("t").read(), expected)


def test_a_scale_is_refined_in_the_first_save_after_a_restore_only() -> None:
    store = store_in_memory()
    with store.writer() as writer:
        filled(store, 1, 1, writer)
        with writer.begin(2) as txn, pytest.raises(BadInput, match="first delta after a restore"):
            txn.refine_scale("t")
        writer.restore()
        refused: list[tuple[str, Any]] = [("t", 0), ("t", 40), ("t", 1.0), ("t", 22)]
        txn = writer.begin(3)
        for table, halvings in refused:
            with pytest.raises(BadInput):
                txn.refine_scale(table, halvings)
        with pytest.raises(TableNotFound):
            txn.refine_scale("nobody")
        txn.refine_scale("t")
        with pytest.raises(BadInput, match="once"):
            txn.refine_scale("t")
        txn.abort()
        filled(store, 3, 4, writer)
        assert store.snapshot().tables["t"].shift == 0
        assert (store.snapshot().table("t").read() == 3).all()
