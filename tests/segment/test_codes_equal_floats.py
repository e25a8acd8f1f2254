"""Rows given as lattice codes are stored as the floats that they were made from: objects, digests and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import Store, TableOptions
from cnr_store.encodings import widths
from cnr_store.errors import BadDtype, BadShape, NonFiniteValues
from cnr_store.types import MAX_CODE, TableDtype
from tests.support import encoding_reference as reference
from tests.support.encoders import lattice_floats
from tests.support.memory import store_in_memory

LAWS = settings(max_examples=25)
ROWS, DIM, SCALE = 24, 3, 0.25
Array = Any


@dataclass
class Step:
    """Rows of one save: floats, the codes of these floats, a slot, and which of the two is given."""

    rows: Array
    floats: Array
    codes: Array
    slot: Array
    gives_codes: bool


@dataclass
class Run:
    """A table and what is saved of it one after the other; ``base`` is that of the last save, which has all rows."""

    dtype: TableDtype
    start: Array
    steps: list[Step]
    mirror: Literal["memory", "none"]
    base: Literal["head", "baseline"]
    shift: int


def carried(values: Array, dtype: TableDtype) -> Array:
    return np.asarray(widths.from_float32(np.ascontiguousarray(values, np.float32), dtype))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    dtype: TableDtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    mirror = draw(st.sampled_from(["memory", "memory", "none"]))
    shift = draw(st.integers(0, 2)) if mirror == "memory" else 0
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    deviation = SCALE * draw(st.sampled_from([3, 300, 60_000]))
    start = carried(random.normal(0, deviation, (ROWS, DIM)), dtype)
    slots = np.ones(ROWS, np.float32)
    steps, held, last = [], start.copy(), draw(st.integers(0, 2))
    for number in range(last + 1):
        count = ROWS if number == last else draw(st.integers(1, ROWS))
        rows = np.sort(random.choice(ROWS, count, replace=False)).astype(np.int64)
        is_same = random.random(count) < 0.3
        floats = carried(random.normal(0, deviation, (count, DIM)), dtype)
        floats[is_same] = held[rows[is_same]]
        slots[rows[~is_same]] += 1
        held[rows] = floats
        codes, bad = reference.lattice_codes(widths.to_float32(floats, dtype), SCALE * 0.5**shift)
        assert not bad.any()
        given_as = widths.narrowest(int(np.abs(codes).max())) if draw(st.booleans()) else np.int32
        steps.append(Step(rows, floats, codes.astype(given_as), slots[rows].copy(), draw(st.booleans())))
    return Run(dtype, start, steps, mirror, draw(st.sampled_from(["head", "baseline"])), shift)


def contents(store: Store) -> tuple[Any, ...]:
    """The newest segment without the names that differ from one to the next, and the table that it leads to."""
    head = store.snapshot()
    manifest = head.manifests[-1]
    parts = [(part.table, part.rows, part.base_digest, part.state_digest) for part in manifest.parts]
    objects = sorted((entry.path.partition("/")[2], entry.size, entry.xxh3_128) for entry in manifest.objects)
    return parts, objects, head.tables["t"], head.table("t").read().tobytes(), head.table("t").read(slot="m").tobytes()


def saved(run: Run, *, codes: bool) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    store = store_in_memory(threads=2)
    slot = {"m": np.ones(ROWS, np.float32)}
    with store, store.writer(mirror=run.mirror) as writer:
        with writer.begin(0, "baseline") as transaction:
            transaction.write_table("t", run.start, slots=slot, options=TableOptions(encoding="lattice", scale=SCALE))
        writer.restore()
        for number, step in enumerate(run.steps):
            base = run.base if number == len(run.steps) - 1 and number else "head"
            with writer.begin(number + 1, "delta", base=base) as transaction:
                if run.shift and not number:
                    transaction.refine_scale("t", run.shift)
                values = step.codes.copy() if codes and step.gives_codes else step.floats.copy()
                kept = transaction.write_rows("t", step.rows, values, slots={"m": step.slot})
                values.view(np.uint8)[...] = 255  # not kept
            found.append((kept, *contents(store)))
            if run.mirror == "memory":
                mirror = next(iter(writer.mirrors.get(shard) for shard in writer.shards(["t"])["t"]))
                assert mirror is not None
                found.append((mirror.digest(), mirror.arrays["codes"].dtype, mirror.arrays["codes"].tobytes()))
    return found


@LAWS
@given(runs())
def test_codes_are_stored_as_the_floats_they_were_made_from(run: Run) -> None:
    assert saved(run, codes=True) == saved(run, codes=False)


def test_unchanged_rows_leave_whether_codes_or_floats_came_before() -> None:
    rows, codes = np.arange(4, dtype=np.int64), np.arange(4 * DIM, dtype=np.int16).reshape(4, DIM)
    floats = lattice_floats(codes, SCALE)
    with store_in_memory(threads=2) as store, store.writer() as writer:
        with writer.begin(0, "baseline") as transaction:
            transaction.write_table("t", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=SCALE))
        kept = []
        for step, values in enumerate((codes, floats, codes.astype(np.int32), floats + 1, codes + np.int16(4))):
            with writer.begin(step + 1, "delta") as transaction:
                kept.append(transaction.write_rows("t", rows, values))
        assert kept == [4, 0, 0, 4, 0]
        assert np.array_equal(store.snapshot().table("t").read(0, 4), floats + 1)


@pytest.mark.parametrize("keys", ["dense", "hashed"])
@pytest.mark.parametrize("code", [MAX_CODE + 1, -MAX_CODE - 1, np.iinfo(np.int32).min])
def test_codes_beyond_the_range_are_bad_rows_and_the_largest_is_not(keys: str, code: int) -> None:
    codes = np.zeros((3, DIM), np.int32)
    codes[1, 2] = code
    with store_in_memory(threads=2) as store, store.writer() as writer:
        with writer.begin(0, "baseline") as transaction:
            if keys == "dense":
                transaction.write_table("t", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=SCALE))
            else:
                transaction.create_table("t", dim=DIM, options=TableOptions(scale=SCALE))
        with writer.begin(1, "delta") as transaction:
            with pytest.raises(NonFiniteValues, match="row 7 of table 't'"):
                transaction.write_rows("t", np.array([5, 7, 9]), codes)
            codes[1, 2] = np.sign(code) * MAX_CODE
            assert transaction.write_rows("t", np.array([5, 7, 9]), codes) == (1 if keys == "dense" else 3)
        view = store.snapshot().table("t")
        found = view.read(7, 8) if keys == "dense" else view.read_all()[1]["values"][1:2]
        assert np.array_equal(found, SCALE * codes[1:2])


def test_rows_that_escape_are_kept_as_what_their_codes_stand_for() -> None:
    rows, codes = np.arange(4, dtype=np.int64), np.arange(4 * DIM, dtype=np.int32).reshape(4, DIM)
    codes[1, 0] = 3 * MAX_CODE
    slot = np.array([1, 1, np.nan, 1], np.float32)
    results = []
    for values in (codes, np.float32(SCALE) * codes.astype(np.float32)):
        with store_in_memory(threads=2) as store, store.writer() as writer:
            with writer.begin(0, "baseline") as transaction:
                transaction.write_table(
                    "t", np.zeros((ROWS, DIM), np.float32), slots={"m": np.zeros(ROWS, np.float32)},
                    options=TableOptions(scale=SCALE, nonfinite="escape"),
                )  # fmt: skip
            with writer.begin(1, "delta") as transaction:
                transaction.write_rows("t", rows, values, slots={"m": slot})
            results.append(contents(store))
            assert np.array_equal(store.snapshot().table("t").read(0, 4), SCALE * codes)
    assert results[0] == results[1]


def test_codes_are_taken_for_the_rows_of_lattices_only() -> None:
    codes, rows = np.ones((2, DIM), np.int16), np.arange(2)
    zeros = np.zeros((ROWS, DIM), np.float32)
    with store_in_memory(threads=2) as store, store.writer() as writer, writer.begin(0, "baseline") as transaction:
        with pytest.raises(BadDtype):
            transaction.write_table("t", codes, options=TableOptions(scale=SCALE))
        transaction.write_table("t", zeros, slots={"m": zeros}, options=TableOptions(scale=SCALE))
        transaction.write_table("exact", zeros, options=TableOptions.exact())
        transaction.commit()
        with writer.begin(1, "delta") as delta:
            with pytest.raises(BadDtype, match="values of table 'exact': dtype int16, expected float32"):
                delta.write_rows("exact", rows, codes)
            with pytest.raises(BadDtype, match="slot 'm' of table 't'"):
                delta.write_rows("t", rows, codes, slots={"m": codes})
            with pytest.raises(BadDtype, match="int64, expected float32, or its codes as int16 or int32"):
                delta.write_rows("t", rows, codes.astype(np.int64), slots={"m": zeros[:2]})
            with pytest.raises(BadShape):
                delta.write_rows("t", rows, codes[:, :2], slots={"m": zeros[:2]})
            assert delta.write_rows("t", rows, codes, slots={"m": zeros[:2]}) == 2
