"""Contradictions between the manifests of one chain, and between a record and its last manifest. Pure, no I/O.

Opening a chain (`segment.open_chain`) raises at the first contradiction. `cnr verify` lists all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cnr_store.format.limits import MAX_SHIFT_IN_CHAIN
from cnr_store.format.manifest import recorded_digest, started_digest
from cnr_store.format.records import CommitRecord, Manifest, PartEntry, TableSchema
from cnr_store.types import Rectangle


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A field of segment ``index`` of the chain that contradicts the segments before it."""

    index: int
    message: str
    table: str | None = None


def chain_problems(manifests: Sequence[Manifest], known: int = 0) -> Iterator[Contradiction]:
    """Yield the contradictions in a chain: wrong start digests, changed schemas, drops of absent tables. Pure.

    Parameters
    ----------
    manifests
        Those of the chain with their states (`manifest_state.with_state`), baseline first.
    known
        How many of the first manifests were checked together before.
    """
    for index in range(known, len(manifests)):
        before = manifests[index - 1] if index else None
        yield from _check_lives(index, manifests)
        yield from _check_ends(index, before, manifests[index])
        if before is not None:
            yield from _check_starts(index, before, manifests[index])


def record_problems(record: CommitRecord, last: Manifest) -> Iterator[str]:
    """Yield where a ``baseline`` or ``delta`` record differs from the manifest that it made visible. Pure."""
    if record.kind not in ("baseline", "delta"):
        return
    if record.step != last.step:
        yield f"has step {record.step}, its segment has step {last.step}"


def is_one_life(first: TableSchema, schema: TableSchema) -> bool:
    """Return whether two schemas differ at most in number of rows, shift and fill. Pure."""
    return msgspec.structs.replace(first, num_rows=schema.num_rows, shift=schema.shift, fill=schema.fill) == schema


def _check_lives(index: int, manifests: Sequence[Manifest]) -> Iterator[Contradiction]:
    """Yield schemas that change within a generation beyond what `is_one_life` allows."""
    manifest, earlier = manifests[index], manifests[:index]
    for table in manifest.recorded if earlier else ():
        schema, old = manifest.tables[table], earlier[-1].tables.get(table)
        # Nearly all tables have the schema that they had, as one object (`manifest_state.with_state`).
        first = None if schema is old else _first_of_life(table, earlier)
        if first is None:
            continue
        if schema.generation != first.generation or old is None:
            if schema.generation <= first.generation:
                message = f"table {table!r} begins again in generation {schema.generation}, after {first.generation}"
                yield Contradiction(index, message, table)
            continue
        if not is_one_life(first, schema):
            message = f"table {table!r} changes its shape, encoding or slots within generation {schema.generation}"
            yield Contradiction(index, message, table)
        if schema.shift < old.shift:
            yield Contradiction(index, f"table {table!r}: shift goes back from {old.shift} to {schema.shift}", table)
        if schema.shift - first.shift > MAX_SHIFT_IN_CHAIN:
            message = f"table {table!r}: shift goes from {first.shift} to {schema.shift} within one chain"
            yield Contradiction(index, message, table)


def _first_of_life(table: str, earlier: Iterable[Manifest]) -> TableSchema | None:
    """Return the schema with which the newest life of a table began; None of a table that was never there."""
    first: TableSchema | None = None
    for schema in (manifest.tables.get(table) for manifest in earlier):
        if schema is not None and (first is None or first.generation != schema.generation):
            first = schema
    return first


def _check_starts(index: int, before: Manifest, after: Manifest) -> Iterator[Contradiction]:
    """Yield parts whose base digest is not the state digest of the segment before, if both are recorded."""
    ends, starts = before.parts_of, after.parts_of
    changed = [table for table in after.recorded if not continues(ends.get(table, ()), starts.get(table, ()))]
    whole = {
        (part.table, part.rows, part.columns): part.state_digest for table in changed for part in ends.get(table, ())
    }
    for part in (part for table in changed for part in _starts(starts.get(table, ()), after.tables[table])):
        old, new = before.tables.get(part.table), after.tables[part.table]
        if part.base_digest is None or old is None or (old.generation, old.shift) != (new.generation, new.shift):
            continue  # After a new shift the same codes are in a finer unit, so their digest differs.
        rows = _rows_before(part.rows, new.num_rows, old.num_rows)
        if rows is None:
            continue
        end = whole.get((part.table, rows, part.columns)) if rows[0] < rows[1] else None
        if end is None:
            total = recorded_digest(before.parts_of.get(part.table, ()), Rectangle(rows, part.columns))
            end = None if total is None else f"{total:016x}"
        if end is not None and part.base_digest != end:
            message = (
                f"a part of table {part.table!r} starts from state digest {part.base_digest}, the segment before it "
                f"ends with {end}"
            )
            yield Contradiction(index, message, part.table)


def _starts(parts: Sequence[PartEntry], schema: TableSchema) -> Sequence[PartEntry]:
    """Return the parts whose starts are compared; of a hashed table, whose keys change their writer, one for all."""
    if schema.keys == "dense" or len(parts) < 2:
        return parts
    total = started_digest(parts, Rectangle(parts[0].rows, parts[0].columns))
    return (msgspec.structs.replace(parts[0], base_digest=None if total is None else f"{total:016x}"),)


def continues(before: Sequence[PartEntry], after: Sequence[PartEntry]) -> bool:
    """Return whether a table is in one part that starts from what the same part before ended with: as most are."""
    if not len(before) == len(after) == 1:
        return False
    old, new = before[0], after[0]
    return old.state_digest == new.base_digest and old.rows == new.rows and old.columns == new.columns


def _rows_before(rows: tuple[int, int], num_rows: int, num_rows_before: int) -> tuple[int, int] | None:
    """Return a part's rows in the state before; the last part of a resized table ended at the old size."""
    start, stop = rows[0], num_rows_before if rows[1] == num_rows else min(rows[1], num_rows_before)
    return None if stop < start else (start, stop)


def _check_ends(index: int, before: Manifest | None, manifest: Manifest) -> Iterator[Contradiction]:
    """Yield dropped tables, ended tensors and kept documents that the state before does not have."""
    lost = set(manifest.dropped).difference(() if before is None else before.tables)
    lost |= set(manifest.ended).difference(() if before is None else before.dense)
    for name in sorted(lost):
        yield Contradiction(index, f"{name!r} is dropped, and the state before does not have it")
    for name in sorted(set(manifest.kept_documents).difference(() if before is None else before.documents)):
        yield Contradiction(index, f"document {name!r} is kept, and the state before does not have it")
