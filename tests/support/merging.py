"""Merge a run of a chain without a commit, and compare what two chains lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cnr_store.encodings.widths import carrier
from cnr_store.format import layout
from cnr_store.format.records import MAJOR, ChainEntry, Manifest, SegmentDocument
from cnr_store.maintenance.compaction.merge import CACHE_BYTES, merge_piece
from cnr_store.maintenance.compaction.tasks import MergePiece
from cnr_store.read.plan import plan_table
from cnr_store.read.replay import finish, replay
from cnr_store.read.table_reader import read_keyed
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.codes import TableCodes, array_specs
from cnr_store.segment.reader import SegmentReader, in_chain
from cnr_store.segment.writer import SegmentWriter, merge_receipts, write_manifest
from cnr_store.storage import Storage
from cnr_store.types import Rectangle

Array = np.ndarray[Any, Any]


def pieces_of(manifests: Sequence[Manifest], start: int, rng: np.random.Generator) -> list[MergePiece] | None:
    """Pieces of a run [start, end of ``manifests``): any row cuts for a baseline, the last parts for a delta.

    None where columns of a table are cut in more ways than one within a run of deltas.
    """
    last = manifests[-1]
    pieces = []
    for table, schema in last.tables.items():
        whole = Rectangle((0, schema.num_rows), (0, schema.dim))
        if schema.keys == "hashed":
            pieces.append(MergePiece(table, whole))
        elif start == 0:
            has_row_slots = any(slot.kind == "row" for slot in schema.slots.values())
            for columns in _cut_columns(plan_table(manifests, table).stored, rng, cuts=not has_row_slots):
                cuts = sorted({0, schema.num_rows, *rng.integers(0, schema.num_rows + 1, 2).tolist()})
                rows = list(pairwise(cuts)) or [(0, 0)]
                pieces += [MergePiece(table, Rectangle(one, columns)) for one in rows]
        else:
            ranges = {
                part.columns
                for manifest in manifests[start:]
                if table in manifest.tables and manifest.tables[table].generation == schema.generation
                for part in manifest.parts
                if part.table == table and part.rows[0] < part.rows[1]
            }
            if any(right[0] < left[1] for left, right in pairwise(sorted(ranges))):
                return None
            parts = [part for part in last.parts if part.table == table]
            pieces += [MergePiece(table, Rectangle(part.rows, part.columns)) for part in parts]
    return pieces


def _cut_columns(stored: Sequence[tuple[int, int]], rng: np.random.Generator, *, cuts: bool) -> list[tuple[int, int]]:
    """Stored intervals, some of them in two: what was stored wider is cut out of it."""
    intervals = []
    for low, high in stored:
        at = int(rng.integers(low + 1, high)) if cuts and high - low > 1 and rng.random() < 0.3 else high
        intervals += [(low, at), (at, high)] if at < high else [(low, high)]
    return intervals


def merge(
    storage: Storage,
    readers: Sequence[SegmentReader],
    run: tuple[int, int],
    pieces: Sequence[MergePiece],
    workers: Workers,
    *,
    name: str | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> SegmentReader:
    """Write the segment that the run merges to, and open it through its manifest."""
    before = readers[run[0] - 1].manifest if run[0] else None
    first, last = readers[run[0]].manifest, readers[run[1] - 1].manifest
    txn = f"{run[0]:016x}{run[1]:016x}"
    name = name or layout.segment_name(last.base, txn)
    base, txn = int(name[:20]), name[21:]
    out = SegmentWriter(
        storage, name, writer=layout.writer_name(0, "0" * 8), workers=workers,
        throttle=Throttle(None),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cnr_store.maintenance.compaction.merge.CACHE_BYTES", cache_bytes)
        parts = tuple(merge_piece(readers, run, piece, out, workers) for piece in pieces)
    receipt = out.finish(txn=txn, rank=0, world=1, attempt="0" * 8, base=base, l0=first.l0, parts=parts)
    kind = "baseline" if run[0] == 0 else "delta"
    document = SegmentDocument(
        format=MAJOR, txn=txn, base=base, kind=kind, l0=first.l0, l1=last.l1, step=last.step,
        **merge_receipts([receipt], before, last.tables, last.dense),
    )  # fmt: skip
    sha, size, manifest = write_manifest(storage, name, document)
    entry = ChainEntry(
        seg=name, sha256=sha, kind=kind, l0=first.l0, l1=last.l1, rows=manifest.changed_rows,
        size_bytes=size + sum(item.size for item in manifest.objects),
    )  # fmt: skip
    return in_chain([*readers[: run[0]], SegmentReader.open(storage, entry)])[-1]


def common_columns(*chains: Sequence[SegmentReader]) -> dict[str, list[tuple[int, int]]]:
    """Per table column intervals that lie in one stored interval of each chain."""
    cuts: dict[str, set[int]] = {}
    for chain in chains:
        manifests = [reader.manifest for reader in chain]
        for table in manifests[-1].tables:
            found = plan_table(manifests, table).stored
            cuts.setdefault(table, set()).update(edge for interval in found for edge in interval)
    return {table: list(pairwise(sorted(edges))) for table, edges in cuts.items()}


def state_of(
    readers: Sequence[SegmentReader], workers: Workers, columns: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[Any, Any]:
    """Everything that a chain leads to: per table and ``columns`` the floats, statuses and the state digest.

    The columns lie in one stored interval each.
    """
    manifests = [reader.manifest for reader in readers]
    found: dict[Any, Any] = {}
    for table, schema in manifests[-1].tables.items():
        plan = plan_table(manifests, table)
        if schema.keys == "hashed":
            keys, arrays = read_keyed(readers, plan, tuple(array_specs(schema)), workers)
            found[table, (0, schema.dim)] = (keys.tobytes(), {name: array.tobytes() for name, array in arrays.items()})
            continue
        if schema.num_rows == 0:
            found[table, (0, schema.dim)] = schema  # nothing is stored, so there are no stored columns
            continue
        for piece in (plan_table(manifests, table, columns=interval) for interval in columns[table]):
            specs = array_specs(schema, piece.columns)
            codes = TableCodes.allocate(
                schema, 0, schema.num_rows, names=tuple(specs), mirror=False, allocate=np.zeros, columns=piece.columns
            )
            replay(readers, replace(piece, tracks_status=True), codes, workers)
            outputs = {
                name: np.zeros((schema.num_rows, spec.width), carrier(spec.dtype)) for name, spec in specs.items()
            }
            digest = finish(codes, outputs, workers, with_digest=True)
            assert codes.status is not None
            floats = {name: array.tobytes() for name, array in outputs.items()}
            found[table, piece.columns] = (floats, codes.status.tobytes(), digest)
    return found
