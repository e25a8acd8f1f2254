"""Merging any run of a chain changes no value that is read, at its end or at any later version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cnr_store.format.layout import segment_prefix
from cnr_store.format.manifest import recorded_digest
from cnr_store.read.plan import TablePlan
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment.codes import array_specs
from cnr_store.segment.reader import SegmentReader
from cnr_store.storage import Storage
from cnr_store.types import Rectangle
from tests.read.test_replay_reference import ENCODINGS, part_ops, saves, write
from tests.segment.test_rectangles import build
from tests.store.test_store_machine import State, StoreMachine
from tests.support.memory import store_in_memory
from tests.support.merging import common_columns, merge, pieces_of, state_of
from tests.support.row_algebra import AddMode, RowOps, compose

CHUNK_BYTES = (16, 40, 200, 1 << 20)
CHUNKS = st.sampled_from(CHUNK_BYTES)
SOAK_LIVES = 2_000
SEEDS = st.integers(0, 2**32 - 1)


class Life(StoreMachine):
    """A store to which deltas are added on the head, so that its chain grows."""

    def delta(self) -> None:
        state: State = self.state.copy()
        state.step = next(self.steps)
        new = None
        if self.rng.random() < 0.2:
            new = str(self.rng.choice(["affine", "exact_element", "lattice", "bfloat16", "float16"]))
        what = str(self.rng.choice(["rows", "rows", "resize", "resize", "drop", "hashed", "empty"]))
        changed: dict[str, set[int]] = {}
        with self.writer.begin(state.step) as txn:
            self.fill_delta(txn, state, changed, int(self.rng.integers(0, 15)), new, what, False)
        self.won(state, changed)


def live(seed: int) -> Life:
    """Some saves of tables with random encodings, and a few restarts after which scales are refined."""
    rng = np.random.default_rng(seed)
    life = Life()
    life.create(mirror="memory", seed=seed)
    for _ in range(int(rng.integers(1, 8))):
        if rng.random() < 0.2:
            life.reopen(mirror="none" if rng.random() < 0.2 else "memory", in_outputs=False)
        life.delta()
    return life


def never_shrinks(plan: TablePlan, before: int | None) -> bool:
    """Keep the statuses of changed rows only, where possible."""
    return before is None or all(batch.num_rows >= before for batch in plan.batches)


def check_merges(storage: Storage, readers: Sequence[SegmentReader], seed: int, workers: Workers, merges: int) -> None:
    """Merge random runs, each in the chain after the last merge, and compare every later state."""
    rng = np.random.default_rng(seed)
    original = {reader.manifest.l1: readers[: at + 1] for at, reader in enumerate(readers)}
    chain = list(readers)
    for number in range(merges):
        if len(chain) < 2:
            return
        start = int(rng.integers(len(chain) - 1)) if rng.random() < 0.7 else 0
        stop = int(rng.integers(start + 2, len(chain) + 1))
        pieces = pieces_of([reader.manifest for reader in chain[:stop]], start, rng)
        if pieces is None:
            continue
        merged = merge(
            storage, chain[:stop], (start, stop), pieces, workers,
            name=f"{900 + number:020d}-{number:032x}", cache_bytes=int(rng.choice([1, 300, 1 << 20])),
        )  # fmt: skip
        chain[start:stop] = [merged]
        for at in range(start, len(chain)):
            check_same(chain[: at + 1], original[chain[at].manifest.l1], workers)
        check_digests(merged, original[merged.manifest.l1], workers)
        check_inventory(storage, merged)


def check_same(chain: Sequence[SegmentReader], original: Sequence[SegmentReader], workers: Workers) -> None:
    columns = common_columns(chain, original)
    found, expected = state_of(chain, workers, columns), state_of(original, workers, columns)
    assert found.keys() == expected.keys()
    for key, state in expected.items():
        assert found[key] == state, key


def check_digests(merged: SegmentReader, original: Sequence[SegmentReader], workers: Workers) -> None:
    """A part of a merged baseline has the digest of its codes, a part of a delta that of the run's last segment.

    Where that states none, a merged delta of unchanged rows may have the digest of a baseline merged before it.
    """
    last = original[-1].manifest
    for table, schema in merged.manifest.tables.items():
        parts = [part for part in merged.manifest.parts if part.table == table]
        whole = Rectangle((0, schema.num_rows), (0, schema.dim))
        stated = recorded_digest(parts, whole)
        before = recorded_digest((part for part in last.parts if part.table == table), whole)
        has_rows = schema.keys == "dense" and schema.num_rows > 0
        if merged.manifest.kind == "delta" and (stated == before or not has_rows):
            assert stated == before, table
        elif has_rows:
            state = state_of(original, workers, common_columns(original))
            total = sum(one[2] for key, one in state.items() if key[0] == table) % (1 << 64)
            assert stated == (total if any(spec.is_additive for spec in array_specs(schema).values()) else None), table
            assert before in (None, stated)
        if merged.manifest.kind == "baseline" and has_rows:
            assert all(part.base_digest is None and part.add is None and part.delete is None for part in parts)


def check_inventory(storage: Storage, merged: SegmentReader) -> None:
    """The segment has the objects that its manifest lists, its manifest, and no others."""
    prefix = segment_prefix(merged.name)
    listed = {stat.key.removeprefix(prefix) for stat in storage.list_objects(prefix)}
    named = {entry.path for entry in merged.manifest.objects}
    assert listed - named == {"_segment.json.zst"}
    assert named <= listed


def some_workers(seed: int) -> Workers:
    """Threads for every fourth life; those of small merges cost more than the merges."""
    return Workers(2) if seed % 4 == 0 else Inline()


def merge_encodings(seed: int, chunk_bytes: int, merged_chunk_bytes: int) -> None:
    """A chain of tables with several encodings, and merges of it."""
    with pytest.MonkeyPatch.context() as patch, some_workers(seed) as workers:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        life = live(seed)
        readers = life.store.snapshot().readers
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", merged_chunk_bytes)
        if seed % 2:
            patch.setattr("cnr_store.maintenance.compaction.statuses._is_sparse", never_shrinks)
        check_merges(life.store.storage, readers, seed, workers, merges=3)
        life.teardown()


def merge_tilings(
    seed: int, additive: bool, row_slot: bool, states_digest: bool, chunk_bytes: int, merged_chunk_bytes: int
) -> None:
    """A chain of segments with many parts, cut differently each time, and merges of it."""
    store = store_in_memory()
    with pytest.MonkeyPatch.context() as patch, some_workers(seed) as workers:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        build(store, seed, additive=additive, row_slot=row_slot, saves=5, states_digest=states_digest)
        readers = store.snapshot().readers
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", merged_chunk_bytes)
        if seed % 2:
            patch.setattr("cnr_store.maintenance.compaction.statuses._is_sparse", never_shrinks)
        check_merges(store.storage, readers, seed, workers, merges=3)
    store.close()


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS, chunk_bytes=CHUNKS, merged_chunk_bytes=CHUNKS)
@example(seed=2_203_071_688, chunk_bytes=16, merged_chunk_bytes=16)  # a run without digests behind a merged baseline
def test_merged_chains_of_any_encoding_lead_to_the_same_bits(
    seed: int, chunk_bytes: int, merged_chunk_bytes: int
) -> None:
    merge_encodings(seed, chunk_bytes, merged_chunk_bytes)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    seed=SEEDS, additive=st.booleans(), row_slot=st.booleans(), states_digest=st.booleans(), chunk_bytes=CHUNKS,
    merged_chunk_bytes=CHUNKS,
)  # fmt: skip
def test_merged_chains_of_any_tiling_lead_to_the_same_bits(
    seed: int, additive: bool, row_slot: bool, states_digest: bool, chunk_bytes: int, merged_chunk_bytes: int
) -> None:
    merge_tilings(seed, additive, row_slot, states_digest, chunk_bytes, merged_chunk_bytes)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_merged_chains_lead_to_the_same_bits_over_many_lives() -> None:
    rng = np.random.default_rng(0)
    for _ in range(SOAK_LIVES):
        seed = int(rng.integers(2**32))
        chunk_bytes, merged_chunk_bytes = (int(one) for one in rng.choice(CHUNK_BYTES, 2))
        additive, row_slot, states_digest = (bool(one) for one in rng.random(3) < 0.5)
        merge_encodings(seed, chunk_bytes, merged_chunk_bytes)
        merge_tilings(seed, additive, row_slot, states_digest, chunk_bytes, merged_chunk_bytes)


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(chain=saves(), chunk_bytes=CHUNKS)
def test_a_merged_run_of_deltas_is_the_composition_of_its_row_lists(
    encoding: str, chain: list[tuple[int, list[str]]], chunk_bytes: int
) -> None:
    store = store_in_memory()
    with pytest.MonkeyPatch.context() as patch, Inline() as workers:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        write(store, encoding, chain)
        readers = store.snapshot().readers
        slots = readers[-1].manifest.tables["t"].slots
        modes: dict[str, AddMode] = {"codes": "checked" if encoding == "lattice" else "wrapping"}
        modes |= {f"slots/{name}": "wrapping" for name, slot in slots.items()}
        pieces = pieces_of([reader.manifest for reader in readers], 1, np.random.default_rng(0))
        assert pieces is not None

        merged = merge(store.storage, readers, (1, len(readers)), pieces, workers)

        expected = part_ops(readers[1], "t")
        for reader in readers[2:]:
            expected = compose(expected, part_ops(reader, "t"), modes)
        check_same_lists(part_ops(merged, "t"), expected)
        first, last, part = (reader.manifest.parts[0] for reader in (readers[1], readers[-1], merged))
        assert (part.base_digest, part.state_digest) == (first.base_digest, last.state_digest)
    store.close()


def check_same_lists(found: RowOps, expected: RowOps) -> None:
    assert found.delete.tolist() == expected.delete.tolist()
    for name in ("add", "set", "escape"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.rows.tolist() == right.rows.tolist(), name
        for array, values in right.arrays.items() if len(right) else ():
            kept = left.arrays[array]
            assert kept.dtype.kind == values.dtype.kind
            assert kept.astype(np.float64).tobytes() == values.astype(np.float64).tobytes(), (name, array)
