"""Codes of a baseline as int8 where that is as small: chosen by a sample, read by everything, named in the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CompactionPolicy, CorruptStore, Store, TableOptions, verify_store
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.packed import pack
from cnr_store.format.records import INT8_CODES, Manifest, RowListEntry
from cnr_store.maintenance.compaction import compact_run
from cnr_store.types import Float32s, Profile, Rectangle
from cnr_store.write.code_width import LEAST_CODES, sample_blocks, stored_dtype
from format_spec.reader.compare import compare
from tests.support.store_oracle import same_bits

ROWS, DIM, STEP = 3000, 24, 0.25
SPREAD = 3.5 * STEP
"""The standard deviation of values of which codes take about four bits."""


def codes(spread: float, count: int = LEAST_CODES) -> Any:
    return np.rint(np.random.default_rng(1).standard_normal(count) * spread).astype(np.int16)


# The choice.


@pytest.mark.parametrize(("spread", "dtype"), [(0.94, "int16"), (3.5, "int8"), (12.0, "int8"), (25.0, "int8")])
def test_codes_of_four_bits_and_more_are_int8_and_smaller_ones_int16(spread: float, dtype: str) -> None:
    assert stored_dtype(127, LEAST_CODES, codes(spread)) == dtype


def test_codes_that_do_not_fit_few_codes_and_codes_without_a_sample_are_not_int8() -> None:
    sample = codes(3.5)

    assert stored_dtype(128, LEAST_CODES, sample) == np.int16
    assert stored_dtype(40_000, LEAST_CODES, sample) == np.int32
    assert stored_dtype(20, LEAST_CODES - 1, sample) == np.int16
    assert stored_dtype(20, LEAST_CODES, None) == np.int16
    assert stored_dtype(20, LEAST_CODES, sample[:0]) == np.int16
    assert stored_dtype(20, LEAST_CODES, np.append(sample, np.int16(-128))) == np.int16


@pytest.mark.parametrize("num_rows", [0, 1, 15, 1000, 10**6])
@pytest.mark.parametrize("width", [1, 64, 10**6])
def test_samples_are_spread_over_the_table(num_rows: int, width: int) -> None:
    found = sample_blocks(num_rows, width)

    assert all(0 <= start < stop <= num_rows for start, stop in found)
    assert sorted(set(found)) == found
    if num_rows:
        assert (found[0][0], found[-1][1]) == (0, num_rows)
    assert sum(stop - start for start, stop in found) * width <= max(1 << 17, 16 * width)


# A store of them.


def values(seed: int, rows: int = ROWS) -> Float32s:
    return (np.random.default_rng(seed).standard_normal((rows, DIM)) * SPREAD).astype(np.float32)


def on_lattice(given: Float32s) -> Float32s:
    return np.float32(STEP) * (np.rint(given / np.float32(STEP)) + np.float32(0))


def set_list(store: Store, segment: int = 0) -> RowListEntry:
    found = store.snapshot().manifests[segment].parts[0].set
    assert found is not None
    return found


@pytest.fixture(params=["compact", "portable"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 24 * 1000)
    profile: Profile = request.param
    with Store.create(str(tmp_path / "store"), profile=profile, fsync=False, threads=2) as store:
        yield store


def write(store: Store, given: Float32s, **options: Any) -> None:
    with store.writer(**options) as writer, writer.begin(1) as txn:
        txn.write_table("t", given, options=TableOptions(scale=STEP))


@pytest.mark.parametrize("mirror", ["memory", "none"])
def test_a_baseline_is_int8_and_reads_as_ever(store: Store, mirror: Any) -> None:
    given = values(1)
    write(store, given, mirror=mirror)

    entry = set_list(store).arrays["codes"]
    assert (entry.dtype, entry.codec) == ("int8", "zstd")
    assert store.head().record.reader_features == (INT8_CODES,)
    view = store.snapshot().table("t")
    assert same_bits(view.read(), on_lattice(given))
    assert same_bits(view.read(100, 2345), on_lattice(given)[100:2345])
    cut = view.read_rectangle(Rectangle((100, 2345), (3, 9)))["values"]
    assert same_bits(cut, np.ascontiguousarray(on_lattice(given)[100:2345, 3:9]))
    assert same_bits(view.read_rows(np.asarray([7, 2999])), on_lattice(given)[[7, 2999]])
    assert verify_store(store, deep=True).problems == ()


def test_deltas_and_later_baselines_go_on_from_it(store: Store) -> None:
    given = values(1)
    write(store, given)
    rows = np.arange(0, ROWS, 3)
    fresh = values(2, len(rows))
    given[rows] = fresh
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2) as txn:
            txn.write_rows("t", rows, fresh)
        assert same_bits(store.snapshot().table("t").read(), on_lattice(given))
        given[5] = 200 * STEP  # no int8 any more
        with writer.begin(3) as txn:
            txn.write_rows("t", np.asarray([5]), given[[5]])
        assert same_bits(store.snapshot().table("t").read(), on_lattice(given))
        given[5] = 0
        with writer.begin(4, "full") as txn:
            txn.write_rows("t", np.asarray([5]), given[[5]])
        assert same_bits(store.snapshot().table("t").read(), on_lattice(given))
    assert set_list(store).arrays["codes"].dtype in ("int8", "int16")
    with store.writer() as writer:
        writer.restore()
        with writer.begin(5, "full"):
            pass
    assert set_list(store).arrays["codes"].dtype == "int8", "written from the mirror"
    assert same_bits(store.snapshot().table("t").read(), on_lattice(given))


@pytest.mark.parametrize(("peak", "dtype"), [(100, "int8"), (300, "int16"), (40_000, "int32")])
def test_compaction_keeps_int8_until_a_code_outgrows_it(store: Store, peak: int, dtype: str) -> None:
    given = values(1)
    write(store, given)
    with store.writer() as writer:
        writer.restore()
        for step in (2, 3):
            rows = np.arange(step, ROWS, 5)
            given[rows] = values(step, len(rows))
            given[rows[0]] = peak * STEP
            with writer.begin(step) as txn:
                txn.write_rows("t", rows, given[rows])

    compact_run(store, policy=CompactionPolicy(max_chain=1))

    assert len(store.snapshot().readers) == 1
    assert set_list(store).arrays["codes"].dtype == dtype
    assert same_bits(store.snapshot().table("t").read(), on_lattice(given))
    assert INT8_CODES in store.head().record.reader_features
    assert verify_store(store, deep=True).problems == ()


def test_the_independent_reader_reads_it(store: Store, tmp_path: Path) -> None:
    write(store, values(1))

    assert compare(tmp_path / "store") > 0


def test_small_and_coarse_tables_stay_int16_and_name_no_feature(store: Store) -> None:
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("small", values(1, 100), options=TableOptions(scale=STEP))
        txn.write_table("coarse", values(1), options=TableOptions(scale=4 * STEP))

    dtypes = {part.set.arrays["codes"].dtype for part in store.snapshot().manifests[0].parts if part.set is not None}
    assert dtypes == {"int16"}
    assert store.head().record.reader_features == ()


@pytest.mark.parametrize("where", ["add", "slots/m"])
def test_int8_elsewhere_is_refused(tmp_path: Path, where: str) -> None:
    with Store.create(str(tmp_path / "store"), fsync=False, threads=1) as store:
        with store.writer() as writer:
            with writer.begin(1) as txn:
                slots = {"m": np.ones(8, np.float32)}
                txn.write_table("t", np.ones((8, 2), np.float32), slots=slots, options=TableOptions(scale=STEP))
            with writer.begin(2) as txn:
                slots = {"m": np.ones(1, np.float32)}
                txn.write_rows("t", np.asarray([3]), np.zeros((1, 2), np.float32), slots=slots)
        manifest = store.snapshot().manifests[1 if where == "add" else 0]

    document = msgspec.to_builtins(manifest)
    arrays = document["parts"][0]["add" if where == "add" else "set"]["arrays"]
    arrays["codes" if where == "add" else where]["dtype"] = "int8"

    with pytest.raises(CorruptStore, match="int8"):
        decode_manifest(pack(msgspec.convert(document, Manifest)), "key")
