"""What the segments of one chain say about each other, by their manifests alone. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from cnr_store import layout
from cnr_store.planning import generations
from cnr_store.records import CommitRecord, DenseEntry, Manifest, PartEntry, stated_digest
from cnr_store.snapshot import find_dense
from cnr_store.types import Rectangle


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A statement of segment ``index`` of the chain that cannot be true."""

    index: int
    message: str
    table: str | None = None


def check_chain_statements(names: Sequence[str], manifests: Sequence[Manifest]) -> Iterator[Contradiction]:
    """Yield what is contradictory in a chain: starts that are not the ends before, schemas, dense references. Pure."""
    for index, manifest in enumerate(manifests):
        yield from _check_parts(index, manifest)
        yield from _check_dense(index, names, manifests)
        if index:
            yield from _check_step(index, manifests[index - 1], manifest)


def check_record(record: CommitRecord, last: Manifest) -> Iterator[str]:
    """Yield where a ``full`` or ``delta`` record differs from the manifest that it made visible. Pure."""
    if record.kind not in ("full", "delta"):
        return
    key = layout.commit_key(record.v)
    if record.step != last.step:
        yield f"{key} says step {record.step}, its segment says {last.step}"
    # Where a record has a side object they are in there.
    if record.state is None and record.tables != generations(last.tables, last.parts):
        yield f"{key} names other generations or scales of its tables than its segment"


def _check_parts(index: int, manifest: Manifest) -> Iterator[Contradiction]:
    for part in manifest.parts:
        if part.add is not None and manifest.tables[part.table].keys == "hashed":
            yield Contradiction(index, f"hashed table {part.table!r} has add rows; only set rows are legal", part.table)
    by_table: dict[str, list[PartEntry]] = {}
    for part in (part for part in manifest.parts if part.rows[0] < part.rows[1]):
        by_table.setdefault(part.table, []).append(part)
    for table, parts in by_table.items():
        if any(_meets(a.rows, b.rows) and _meets(a.columns, b.columns) for a, b in combinations(parts, 2)):
            yield Contradiction(index, f"two parts of table {table!r} overlap", table)


def _check_step(index: int, before: Manifest, after: Manifest) -> Iterator[Contradiction]:
    for table, schema in after.tables.items():
        old = before.tables.get(table)
        if old is None or old.generation != schema.generation:
            continue
        if (old.dim, old.dtype, old.keys, old.encoding) != (schema.dim, schema.dtype, schema.keys, schema.encoding):
            yield Contradiction(index, f"table {table!r} changes its shape or encoding within a generation", table)
        if schema.shift < old.shift:
            yield Contradiction(index, f"table {table!r}: shift goes back from {old.shift} to {schema.shift}", table)
    ends: dict[str, list[PartEntry]] = {}
    for part in before.parts:
        ends.setdefault(part.table, []).append(part)
    for part in after.parts:
        old = before.tables.get(part.table)
        if part.base_digest is None or old is None or old.shift != after.tables[part.table].shift:
            continue  # Of another shift it starts from the same codes in a finer unit, which have another digest.
        end = _end_of(part, after.tables[part.table].num_rows, ends.get(part.table, []), old.num_rows)
        if end is not None and part.base_digest != end:
            yield Contradiction(
                index,
                f"a part of table {part.table!r} starts from state digest {part.base_digest}, the segment before it "
                f"ends with {end}",
                part.table,
            )


def _end_of(part: PartEntry, num_rows: int, before: list[PartEntry], rows_before: int) -> str | None:
    """The state digest that the parts before end with in the part's rectangle; None where they do not make it up.

    The rectangle at the end of a table that was resized ended where the table did.
    """
    start, stop = part.rows[0], rows_before if part.rows[1] == num_rows else min(part.rows[1], rows_before)
    if stop < start:
        return None
    end = stated_digest(before, Rectangle((start, stop), part.columns))
    return None if end is None else f"{end:016x}"


def _check_dense(index: int, names: Sequence[str], manifests: Sequence[Manifest]) -> Iterator[Contradiction]:
    for name, entry in manifests[index].dense.items():
        if entry.segment in ("", names[index]):
            continue
        found = find_dense(names[: index + 1], manifests[: index + 1], name)
        if found is None:
            message = f"dense tensor {name!r} lies in {entry.segment}, which is not in the chain, nor is it in another"
            yield Contradiction(index, message)
        elif not _is_there(found[1], name, manifests[found[0]]):
            yield Contradiction(index, f"dense tensor {name!r} is not in {entry.segment} as it is referenced")


def _is_there(entry: DenseEntry, name: str, holder: Manifest) -> bool:
    held = holder.dense.get(name)
    return held is not None and held.segment == "" and msgspec.structs.replace(entry, segment="") == held


def _meets(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
