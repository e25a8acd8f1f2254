"""Any tiling of a table into parts, cut anew at each save: every rectangle reads as the elements that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cnr_store import Store, Unsupported, verify_store
from cnr_store.read.table_view import TableView
from cnr_store.segment.codes import TableCodes
from cnr_store.types import Rectangle
from format_spec.reader.compare import compare
from tests.support.memory import store_in_memory
from tests.support.rectangles import ABSENT, CODED, ESCAPED, TABLE, Model, Parts, schema_of, tiling

ROWS, DIM = 9, 6
SPLITS = [((0, 6),), ((0, 3), (3, 6)), ((0, 1), (1, 2), (2, 6))]


def build(store: Store, seed: int, *, additive: bool, row_slot: bool, saves: int, states_digest: bool = True) -> Parts:
    """A baseline and deltas, each with another tiling; now and then the table changes its size."""
    rng = np.random.default_rng(seed)
    ranges = SPLITS[rng.integers(len(SPLITS))] if row_slot else ((0, DIM),)
    parts = Parts(store, Model(schema_of(ROWS, DIM, additive=additive, row_slot=row_slot), ranges), seed)
    for index in range(saves):
        if index and rng.random() < 0.3:
            parts.model.resize(int(rng.integers(0, ROWS + 4)))
        tiles = tiling(rng, parts.model.schema.num_rows, ranges, free=not row_slot)
        parts.save(tiles, full=index == 0, states_digest=states_digest)
    parts.close()
    return parts


def random_rectangles(rng: np.random.Generator, parts: Parts) -> list[Rectangle]:
    rows, dim = parts.model.schema.num_rows, DIM
    chosen = [Rectangle((0, rows), (0, dim)), *parts.tiles]
    for _ in range(4):
        low, high = sorted(rng.integers(0, rows + 1, 2).tolist())
        left, right = sorted(rng.choice(dim + 1, 2, replace=False).tolist())
        chosen.append(Rectangle((low, high), (left, right)))
    return chosen


def check_rectangle(view: TableView, model: Model, rectangle: Rectangle) -> None:
    """Values and element slots into columns of larger arrays, in one pass with what the rule leaves of the row slot."""
    box = (slice(*rectangle.rows), slice(*rectangle.columns))
    large = np.full((2, rectangle.num_rows, DIM + 2), np.float32(99))
    values, element = large[0][:, 1 : 1 + rectangle.width], large[1][:, 1 : 1 + rectangle.width]
    slots: dict[str, Any] = {"v": element}
    rule: Any = "exact"
    if "m" in model.schema.slots:
        slots["m"] = np.full(rectangle.num_rows, np.float32(77))
        if rectangle.columns not in model.ranges:
            with pytest.raises(Unsupported, match=r"stored for columns \[\("):
                view.read_rectangle(rectangle, slots=slots)
            view.read_rectangle(rectangle, slots=slots, slots_rule="drop")
            assert (slots["m"] == 77).all()
            rule = "mean"
    filled = view.read_rectangle(rectangle, values=values, slots=slots, slots_rule=rule)

    assert set(filled) == {"values", *slots}
    assert values.tobytes() == np.ascontiguousarray(model.values()[box]).tobytes()
    assert element.tobytes() == np.ascontiguousarray(model.elements()[box]).tobytes()
    assert (np.delete(large, range(1, 1 + rectangle.width), axis=2) == 99).all()
    if "m" in slots:
        widths = [max(0, min(b, box[1].stop) - max(a, box[1].start)) for a, b in model.ranges]
        expected = (model.row_slots().astype(np.float64) @ widths / sum(widths))[box[0]].astype(np.float32)
        np.testing.assert_allclose(slots["m"], expected, rtol=1e-6)
        if rule == "exact":
            assert slots["m"].tobytes() == model.row_slots()[box[0], model.ranges.index(rectangle.columns)].tobytes()


def check_mirror(view: TableView, model: Model, rectangle: Rectangle) -> None:
    """The codes of the rectangle, or None where no mirror can be one; outputs are filled in either case."""
    box = (slice(*rectangle.rows), slice(*rectangle.columns))
    values = np.empty((rectangle.num_rows, rectangle.width), np.float32)
    mirror = view.load({"codes": values}, rectangle, "drop", allocate=np.zeros)

    assert values.tobytes() == np.ascontiguousarray(model.values()[box]).tobytes()
    status = model.status[box]
    lost = "m" in model.schema.slots and rectangle.columns not in model.ranges
    assert (mirror is None) == bool(lost or (status != status[:, :1]).any())
    if mirror is not None:
        check_codes(mirror, model, rectangle)


def check_codes(mirror: TableCodes, model: Model, rectangle: Rectangle) -> None:
    box = (slice(*rectangle.rows), slice(*rectangle.columns))
    states = model.status[box][:, 0]
    rows = np.flatnonzero(states == CODED) + rectangle.rows[0]
    assert mirror.columns == rectangle.columns
    assert np.array_equal(np.flatnonzero(mirror.is_coded(np.arange(*rectangle.rows))) + rectangle.rows[0], rows)
    assert np.array_equal(mirror.arrays["codes"][rows - mirror.start], model.codes[rows, box[1]])
    assert np.array_equal(mirror.escapes.rows, np.flatnonzero(states == ESCAPED) + rectangle.rows[0])
    assert mirror.digest() == model.digest(rectangle)
    if mirror.status is not None:
        assert np.array_equal(mirror.status == ABSENT, states == ABSENT)


@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
@pytest.mark.parametrize(("additive", "row_slot"), [(True, False), (True, True), (False, False), (False, True)])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), saves=st.integers(1, 3), chunk_bytes=st.sampled_from([16, 1 << 20]))
def test_every_rectangle_reads_as_written(
    additive: bool, row_slot: bool, window_bytes: int, seed: int, saves: int, chunk_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        patch.setattr("cnr_store.read.table_reader.WINDOW_BYTES", window_bytes)
        store = store_in_memory()
        parts = build(store, seed, additive=additive, row_slot=row_slot, saves=saves)
        view, rng = store.snapshot().table(TABLE), np.random.default_rng(seed)
        for rectangle in random_rectangles(rng, parts):
            check_rectangle(view, parts.model, rectangle)
            if additive:
                check_mirror(view, parts.model, rectangle)
        if view.shape[0]:
            rows = rng.integers(0, view.shape[0], 5)
            assert view.read_rows(rows).tobytes() == parts.model.values()[rows].tobytes()
            assert view.read_rows(rows, slot="v").tobytes() == parts.model.elements()[rows].tobytes()
        store.close()


@pytest.mark.parametrize(("additive", "row_slot"), [(True, False), (True, True), (False, True)])
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), saves=st.integers(1, 3))
def test_the_independent_reader_and_a_deep_check_agree(
    tmp_path_factory: pytest.TempPathFactory, additive: bool, row_slot: bool, seed: int, saves: int
) -> None:
    root = tmp_path_factory.mktemp("parts") / "store"
    with Store.create(str(root), fsync=False, threads=1) as store:
        build(store, seed, additive=additive, row_slot=row_slot, saves=saves)
        report = verify_store(store, deep=True, threads=1)

    assert report.problems == ()
    assert compare(Path(root)) > 0
