"""Replay tables window by window and compare the state digest after every segment: the deep check.

It finds errors that no single object shows: an ``add`` to a row without codes, codes out of range, and a segment that
was computed against a different state than the one it is applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cnr_store.encodings.digest import add_digests
from cnr_store.errors import CorruptStore
from cnr_store.format.manifest import recorded_digest
from cnr_store.format.records import Manifest
from cnr_store.read.joined_replay import right_states
from cnr_store.read.plan import TablePlan, by_columns, clip, is_sparse, plan_table
from cnr_store.read.replay import Replay, finish, named_rows
from cnr_store.runtime.threads import Workers, windows
from cnr_store.segment.codes import ABSENT, ESCAPED, ArraySpec, TableCodes, array_specs
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import whole_of

WINDOW_BYTES = 64 * 1024 * 1024
"""Bytes of codes in memory at once."""


@dataclass(frozen=True, slots=True)
class WrongState:
    """Segment ``index`` of a chain whose recorded state digest differs from the replayed one."""

    index: int
    table: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class FailedReplay:
    """The error of replaying segment ``index`` of a chain; later states of the table are not checked."""

    index: int
    error: CorruptStore


def replayed_rows(manifests: Sequence[Manifest]) -> int:
    """Return how many rows `check_states` will replay, for a progress bar. Pure."""
    return sum(_num_rows(manifests, table, run) for table, run in _runs(manifests))


def check_states(
    readers: Sequence[SegmentReader], workers: Workers, advance: Callable[[int], None]
) -> Iterator[WrongState | FailedReplay]:
    """Yield the wrong states of every table of a chain, and the errors that stopped a table's replay.

    Small tables are replayed together first; what is wrong in one of them is found by its own replay.

    Blocks. Memory: `WINDOW_BYTES` of codes, a status per row of the window, chunks in flight, and the window's escape
    rows. Each chunk is read once per window that it overlaps. For a sparse table (far fewer stored than declared rows)
    the row ids are read once more, and kept at 8 bytes each.
    """
    manifests = [reader.manifest for reader in readers]
    runs = [*_runs(manifests)]
    right = right_states(readers, [table for table, run in runs if run.stop == len(readers)], workers)
    for table, run in runs:
        if run.stop == len(readers) and table in right:
            advance(_num_rows(manifests, table, run))
        else:
            yield from _check_run(readers[: run.stop], table, run, workers, advance)


def _runs(manifests: Sequence[Manifest]) -> Iterator[tuple[str, range]]:
    """Yield each table with additive codes, with each range of segments of one generation and shift.

    Each range is one replay, which starts where the generation does. Digests are compared from the range's start on.
    """
    for table in sorted({name for manifest in manifests for name in manifest.tables}):
        keys = [
            None if schema is None else (schema.generation, schema.shift)
            for schema in (manifest.tables.get(table) for manifest in manifests)
        ]
        start = 0
        for index in range(1, len(keys) + 1):
            if index < len(keys) and keys[index] == keys[start]:
                continue
            schema = manifests[start].tables.get(table)
            if schema is not None and array_specs(schema).are_additive:
                yield table, range(start, index)
            start = index


def _num_rows(manifests: Sequence[Manifest], table: str, run: range) -> int:
    return max(manifests[index].tables[table].num_rows for index in run)


def _check_run(
    readers: Sequence[SegmentReader], table: str, run: range, workers: Workers, advance: Callable[[int], None]
) -> Iterator[WrongState | FailedReplay]:
    manifests = [reader.manifest for reader in readers]
    num_rows = _num_rows(manifests, table, run)
    try:
        plan = plan_table(manifests, table, 0, num_rows)
        pieces = by_columns(plan)
        # Rows in no list need no check, so the cost of a sparse table depends on its stored rows.
        is_keyed = plan.schema.keys == "hashed"
        listed = named_rows(readers, plan) if is_keyed or is_sparse(plan) else None
    except CorruptStore as error:
        yield FailedReplay(run.stop - 1, error)
        return
    found = dict.fromkeys(run, 0)
    engine = Replay(readers, workers)
    widest = max(sum(spec.width * spec.memory_dtype.itemsize for spec in _additive(piece)) for piece in pieces)
    for start, stop in windows(num_rows if listed is None else len(listed), widest, WINDOW_BYTES):
        rows = None if listed is None else listed[start:stop]
        for piece in pieces:
            clipped = clip(piece, start, stop) if rows is None else clip(piece, int(rows[0]), int(rows[-1]) + 1)
            # Track statuses even if the plan claims that every row has codes: the claim is checked here.
            window = replace(clipped, tracks_status=True)
            first = start if rows is None else 0
            codes = TableCodes.allocate(
                piece.schema, first, first + stop - start, names=tuple(spec.name for spec in _additive(piece)),
                mirror=False, columns=piece.columns,
                allocate=np.zeros,  # rows that no segment sets must not change the digest
            )  # fmt: skip
            for batch in window.batches:
                try:
                    engine.run(replace(window, batches=(batch,)), codes, rows)
                except CorruptStore as error:
                    yield FailedReplay(batch.segment, error)
                    return
                _drop_replaced_escapes(codes)
                if batch.segment in found:
                    state = (
                        finish(codes, {}, workers, with_digest=True)
                        if rows is None
                        else codes.digest_by_key(rows, workers)
                    )
                    found[batch.segment] = add_digests(found[batch.segment], state)
        advance(stop - start)
    for index in run:
        schema = manifests[index].tables[table]
        expected = recorded_digest(manifests[index].parts_of.get(table, ()), whole_of(schema))
        if expected is not None and expected != found[index]:
            yield WrongState(index, table, f"{expected:016x}", f"{found[index]:016x}")


def _additive(plan: TablePlan) -> list[ArraySpec]:
    return [spec for spec in array_specs(plan.schema, plan.columns).values() if spec.is_additive]


def _drop_replaced_escapes(codes: TableCodes) -> None:
    """Drop escape rows that a later set or delete replaced: that batch updated only their status."""
    status = codes.track_status(ABSENT)
    rows = codes.escapes.rows
    codes.escapes.drop(rows[status[rows - codes.start] != ESCAPED])
