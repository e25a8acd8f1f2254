"""The fast replay against the row algebra: chunks decoded one by one, composed and applied in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cnr_store import Store, TableOptions
from cnr_store.runtime.threads import Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Shard
from cnr_store.types import RowRange
from tests.support.memory import store_in_memory
from tests.support.row_algebra import AddMode, RowArrays, RowOps, RowState, apply, compose

ROWS, DIM = 12, 2
SCALE = 0.25
ENCODINGS = {
    "lattice": TableOptions(scale=SCALE, nonfinite="escape"),
    "exact": TableOptions.exact(nonfinite="escape"),
    "raw": TableOptions(encoding="raw", nonfinite="escape"),
}


def part_ops(reader: SegmentReader, table: str) -> RowOps:
    """A part's four row lists, every chunk decoded on its own."""
    part = next(part for part in reader.manifest.parts if part.table == table)

    def arrays(entry: Any) -> RowArrays:
        if entry is None:
            return RowArrays()
        chunks = range(len(entry.first))
        rows = np.concatenate([reader.read_chunk(entry.arrays["rows"], k, Scratch()).copy() for k in chunks])
        return RowArrays(
            rows,
            {
                "codes" if name == "values" else name: np.concatenate(
                    [reader.read_chunk(array, k, Scratch()).copy() for k in chunks]
                )
                for name, array in entry.arrays.items()
                if name != "rows"
            },
        )

    return RowOps(arrays(part.add), arrays(part.set), arrays(part.delete).rows, arrays(part.escape))


def decoded(state: RowState, name: str, encoding: str) -> np.ndarray[Any, Any]:
    """The floats of a state, absent rows zero, by the definitions alone."""
    width = (DIM,) if name == "codes" else (() if name == "slots/m" else (DIM,))
    out = np.zeros((ROWS, *width), np.float32)
    for row, content in state.items():
        held = np.asarray(content.arrays[name])
        if content.escaped or (encoding == "raw" and name == "codes"):
            out[row] = held
        elif name == "codes" and encoding == "lattice":
            out[row] = np.float32(SCALE) * held.astype(np.float32)
        else:
            bits = 23 if encoding == "exact" else 7
            wide = held.astype(np.int64)
            magnitude = np.where(wide < 0, -1 - wide, wide) << (23 - bits)
            out[row] = (magnitude | np.where(wide < 0, 1 << 31, 0)).astype(np.uint32).view(np.float32)
    return out


@st.composite
def saves(draw: st.DrawFn) -> list[tuple[int, list[str]]]:
    fates = st.lists(
        st.sampled_from(["keep", "keep", "small", "new", "same", "nan", "delete"]), min_size=ROWS, max_size=ROWS
    )
    return draw(st.lists(st.tuples(st.integers(0, 2**32 - 1), fates), min_size=1, max_size=6))


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20])
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(chain=saves())
def test_replay_equals_compose_and_apply(encoding: str, chunk_bytes: int, chain: list[tuple[int, list[str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        store = store_in_memory(threads=2)
        write(store, encoding, chain)
    snapshot = store.snapshot()
    slots = snapshot.tables["t"].slots
    modes: dict[str, AddMode] = {"codes": "checked" if encoding == "lattice" else "wrapping"}
    modes |= {f"slots/{name}": "wrapping" for name, slot in slots.items()}
    parts = [part_ops(reader, "t") for reader in snapshot.readers]

    stepwise: RowState = {}
    for ops in parts:
        stepwise = apply(stepwise, ops, modes)
    compacted = parts[0]
    for ops in parts[1:]:
        compacted = compose(compacted, ops, modes)
    at_once = apply({}, compacted, modes)

    view = snapshot.table("t")
    values = np.empty((ROWS, DIM), np.float32)
    given_slots = {"m": np.empty(ROWS, np.float32), "e": np.empty((ROWS, DIM), np.float32)}
    view.read_rectangle(values=values, slots=given_slots)
    assert set(stepwise) == set(at_once)
    for name, found in {"codes": values, "slots/m": given_slots["m"], "slots/e": given_slots["e"]}.items():
        for state in (stepwise, at_once):
            assert decoded(state, name, encoding).tobytes() == found.tobytes(), name
    window = RowRange(3, 9)
    assert view.read(window.start, window.stop).tobytes() == values[3:9].tobytes()
    if encoding != "raw":
        with store.writer() as writer:
            writer.restore()
            mirror = writer.mirrors.get(Shard("t"))
            assert mirror is not None
            for row, content in stepwise.items():
                if not content.escaped:
                    assert np.array_equal(mirror.arrays["codes"][row], content.arrays["codes"])
            with Workers(1) as workers:
                assert mirror.digest(workers) == writer.mirrors.digest(Shard("t"))
    store.close()


def write(store: Store, encoding: str, chain: list[tuple[int, list[str]]]) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    row_slot, element_slot = rng.random(ROWS).astype(np.float32), rng.random((ROWS, DIM)).astype(np.float32)
    slots = {"m": row_slot, "e": element_slot}
    with store.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", values, slots=slots, options=ENCODINGS[encoding])
        for step, (seed, fates) in enumerate(chain, start=1):
            rng = np.random.default_rng(seed)
            fate = np.asarray(fates)
            rows = np.flatnonzero((fate != "keep") & (fate != "delete")).astype(np.int64)
            fresh = rng.standard_normal((ROWS, DIM)).astype(np.float32)
            values[np.isnan(values).any(axis=1)] = 1
            values[fate == "small"] += fresh[fate == "small"] * np.float32(0.2)
            values[fate == "new"] = fresh[fate == "new"] * 50_000
            values[fate == "nan"] = np.nan
            row_slot[fate != "same"] += 1
            element_slot[fate != "same"] += 1
            with writer.begin(step) as txn:
                txn.write_rows("t", rows, values[rows], slots={name: slot[rows] for name, slot in slots.items()})
                txn.delete_rows("t", np.flatnonzero(fate == "delete").astype(np.int64))
