"""A compacted state is loaded straight into floats: the same bits, the same checks, as by way of codes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import CorruptStore, Store, TableOptions, TableView
from cnr_store.encodings import digest, kernels
from cnr_store.errors import CorruptObject
from cnr_store.read.direct_load import is_direct
from cnr_store.read.plan import TablePlan
from cnr_store.read.replay import Replay
from cnr_store.segment.codes import array_specs
from cnr_store.segment.decoded import InPlace
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Shard
from cnr_store.types import Rectangle
from tests.support import encoding_reference as reference
from tests.support.memory import store_in_memory
from tests.support.store_oracle import KINDS, same_bits, training_slots, training_values

ROWS, DIM, CHUNK_BYTES = 100, 6, 6 * 16 * 2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("cnr_store.read.direct_load.BLOCK_ROWS", 5)
    monkeypatch.setattr("cnr_store.read.replay.PIECE_BYTES", 7 * DIM * 2)


def new_store(folder: Path) -> Store:
    return Store.create(str(folder), fsync=False, threads=2)


def baseline(folder: Path, kind: str) -> Store:
    store, rng = new_store(folder), np.random.default_rng(4)
    with store.writer() as writer, writer.begin(1) as txn:
        slots = training_slots(kind, rng, ROWS, DIM)
        txn.write_table("t", training_values(kind, rng, ROWS, DIM), slots=slots, options=KINDS[kind].options)
    return store


def plan_of(view: TableView, *rows: int) -> TablePlan:
    return view._snapshot.plan("t", *rows)


@pytest.mark.parametrize("rows", [(0, ROWS), (0, 1), (16, 32), (17, 90), (40, 40), (99, 100)])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_baseline_is_direct_and_reads_as_by_way_of_codes(
    tmp_path: Path, kind: str, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with baseline(tmp_path / "s", kind) as store:
        view = store.snapshot().table("t")
        assert is_direct(plan_of(view, *rows))

        def read(columns: tuple[int, int]) -> dict[str, Any]:
            names: dict[str, None] = dict.fromkeys(view.schema.slots)
            wide = np.empty((rows[1] - rows[0], 2 * DIM), view.read(0, 0).dtype)
            found = view.read_rectangle(Rectangle(rows, columns), slots=names, slots_rule="mean")
            found["spaced"] = view.read(*rows, out=wide[:, ::2]).copy()
            return found | view.read_rectangle(Rectangle(rows, columns))

        straight = [read(columns) for columns in ((0, DIM), (2, 5))]
        monkeypatch.setattr("cnr_store.read.table_reader.is_direct", lambda plan: False)
        by_codes = [read(columns) for columns in ((0, DIM), (2, 5))]

    for one, other in zip(straight, by_codes, strict=True):
        assert one.keys() == other.keys()
        assert all(same_bits(np.ascontiguousarray(one[name]), np.ascontiguousarray(other[name])) for name in one)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_decoded_into_a_mirror_are_those_that_are_copied_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []

    class Recorded(InPlace):
        def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
            found = super().take(shape, dtype)
            placed.append(np.shares_memory(found, self._block))
            return found

    with baseline(tmp_path / "s", kind) as store:

        def mirror() -> dict[str, npt.NDArray[Any]]:
            with store.writer() as writer:
                writer.restore()
                codes = writer.mirrors.get(Shard("t"))
                return {} if codes is None else {name: array.copy() for name, array in codes.arrays.items()}

        monkeypatch.setattr("cnr_store.read.replay.InPlace", Recorded)
        in_place = mirror()
        monkeypatch.setattr("cnr_store.read.replay.InPlace", lambda block, other: other)
        copied = mirror()

    assert in_place.keys() == copied.keys()
    assert all(same_bits(in_place[name], copied[name]) for name in copied)
    assert any(placed) == (in_place != {})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_chunk_in_pieces_has_the_rows_of_the_whole_one(tmp_path: Path, kind: str) -> None:
    with baseline(tmp_path / "s", kind) as store:
        view = store.snapshot().table("t")
        plan, engine = plan_of(view), Replay(store.snapshot().readers, store.internals.workers)
        step = plan.batches[0].steps[2]
        for spec in array_specs(plan.schema, plan.columns).values():
            whole = engine.values(step, plan, spec)[1:-1].copy()
            pieces = [(first, one.copy()) for first, one in engine.pieces(step, plan, spec, 1, step.num_rows - 1)]

            assert [first for first, _ in pieces] == [1, *(first + len(one) for first, one in pieces[:-1])]
            assert same_bits(np.concatenate([one for _, one in pieces]), whole)
            assert (len(pieces) > 1) == (spec.is_integer and spec.width == DIM)


def test_rows_that_a_refined_scale_moves_are_read_straight_too(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32) * 100
    with new_store(tmp_path / "s") as store:
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=0.5))
        before = store.snapshot().table("t").read()
        with store.writer() as writer:
            writer.restore()
            with writer.begin(2) as txn:
                txn.refine_scale("t", 3)
                txn.write_rows("t", np.asarray([50]), values[:1])
        view = store.snapshot().table("t")

        assert is_direct(plan_of(view, 0, 40))
        assert same_bits(view.read(0, 40), before[:40])


def test_what_is_not_settled() -> None:
    """Pure: of a plan of three chunks, each way in which it is not a baseline alone."""
    plan = chunked_plan()
    batch = plan.batches[0]
    first, second, third = batch.steps

    def with_steps(*steps: Any) -> TablePlan:
        return replace(plan, batches=(replace(batch, steps=steps),))

    assert is_direct(plan)
    assert is_direct(with_steps(third, first, second)), "in any order"
    assert not is_direct(replace(plan, tracks_status=True))
    assert not is_direct(with_steps(first, third)), "a gap"
    assert not is_direct(with_steps(first, second)), "the end is missing"
    assert not is_direct(with_steps(second, third)), "the start is missing"
    assert not is_direct(with_steps(first, second, second, third)), "rows twice"
    assert not is_direct(with_steps(replace(first, operation="add"), second, third))
    sparse = msgspec.structs.replace(first.row_list, last=(first.last + 1, *first.row_list.last[1:]))
    assert not is_direct(with_steps(replace(first, row_list=sparse), second, third)), "fewer rows than their range"


def chunked_plan() -> TablePlan:
    with store_in_memory() as store:
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", np.ones((48, DIM), np.float32), options=TableOptions(scale=0.5))
        return plan_of(store.snapshot().table("t"))


def test_a_later_delta_of_the_rows_goes_by_way_of_codes(tmp_path: Path) -> None:
    with baseline(tmp_path / "s", "lattice") as store:
        with store.writer() as writer:
            writer.restore()
            with writer.begin(2) as txn:
                slots = training_slots("lattice", np.random.default_rng(5), 1, DIM)
                txn.write_rows("t", np.asarray([20]), np.ones((1, DIM), np.float32), slots=slots)
        view = store.snapshot().table("t")

        assert not is_direct(plan_of(view))
        assert is_direct(plan_of(view, 32, 64))


def test_a_wrong_code_is_found_by_the_state_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_chunk = SegmentReader.open_chunk

    def altered(self: SegmentReader, entry: Any, index: int, scratch: Any) -> Any:
        chunk = open_chunk(self, entry, index, scratch)
        if index == 3 and chunk is not None:
            chunk.planes[1] ^= 1
        return chunk

    with baseline(tmp_path / "s", "lattice") as store:
        view = store.snapshot().table("t")
        monkeypatch.setattr(SegmentReader, "open_chunk", altered)
        slots: dict[str, None] = dict.fromkeys(view.schema.slots)

        with pytest.raises(CorruptStore, match="decodes to state digest"):
            view.read_rectangle(Rectangle((0, ROWS), (0, DIM)), values=np.empty((ROWS, DIM), np.float32), slots=slots)


def test_chunks_that_change_places_are_found_before_they_are_decoded(tmp_path: Path) -> None:
    with baseline(tmp_path / "s", "lattice") as store:
        chunks = next(tmp_path.glob("s/data/*/*set-0.codes"))
        shutil.copy(chunks / "c.1.0", chunks / "c.2.0")

        with pytest.raises(CorruptObject):
            store.snapshot().table("t").read()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (1, 1), (7, 5), (33, 64)])
def test_decoding_and_counting_in_one_pass_equals_the_references(dtype: Any, rows: int, dim: int) -> None:
    limits = np.iinfo(dtype)
    codes = np.random.default_rng(6).integers(limits.min, limits.max, (rows, dim), dtype, endpoint=True)
    multipliers, scale = digest.column_multipliers(0, dim), np.float32(0.37)

    for presence in (digest.PRESENCE_CODED, digest.NO_PRESENCE):
        out = np.full((rows, dim), np.nan, np.float32)
        found = kernels.lattice_decode_digest(codes, scale, out, 11, multipliers, presence)

        assert same_bits(out, reference.lattice_values(codes, scale))
        assert int(found) == int(kernels.digest_block(codes, 11, multipliers, presence))
