"""The state that a chain leads to, from what its manifests state; and the way back: what a manifest leaves out.

A baseline states everything. A delta states what it changes: tables with their schema and all their parts, tables that
are dropped, dense tensors that are written, dense tensors that end. Everything else is as the segment before left it
(spec, CNR-DOC-24). Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from cnr_store.format.records import Manifest, PartEntry, PartLine, TableSchema, TensorLine


def fold(before: Manifest | None, own: Manifest) -> Manifest:
    """Return a manifest with the state that it leads to.

    Parameters
    ----------
    before
        That of the segment before it in the chain, with its state; None of a baseline.
    own
        As `manifest.decode_manifest` gives it: with what the document states.
    """
    if before is None:
        return own
    gone = {*own.dropped, *own.stated}
    tables = {name: schema for name, schema in before.tables.items() if name not in gone} | own.tables
    parts = {name: _untouched(ends) for name, ends in before.parts_of.items() if name not in gone} | own.parts_of
    dense = {name: entry for name, entry in before.dense.items() if name not in own.ended} | own.dense
    whole = tuple(chain.from_iterable(parts.values()))
    folded = msgspec.structs.replace(own, tables=tables, parts=whole, dense=dense)
    folded.__dict__["parts_of"] = parts  # what the property would work out again
    return folded


def _untouched(parts: tuple[PartEntry, ...]) -> tuple[PartEntry, ...]:
    """Parts as a segment leaves them that does not state them: without rows, at the digest that they had."""
    if all(_is_untouched(part) for part in parts):
        return parts
    return tuple(
        msgspec.structs.replace(part, base_digest=part.state_digest, add=None, set=None, delete=None, escape=None)
        for part in parts
    )


def _is_untouched(part: PartEntry | PartLine) -> bool:
    lists = (part.add, part.set, part.delete, part.escape)
    return part.base_digest == part.state_digest and lists == (None, None, None, None)


def is_same_tensor(a: TensorLine, b: TensorLine) -> bool:
    """Return whether two entries are of equal tensors, wherever their bytes are. Pure."""
    return (a.digest, a.dtype, a.shape) == (b.digest, b.dtype, b.shape)


class Stated(NamedTuple):
    """What a manifest states of tables and of dense tensors that end: as the fields of `SegmentDocument`."""

    tables: dict[str, TableSchema]
    dropped: tuple[str, ...]
    parts: tuple[PartLine, ...]
    ended: tuple[str, ...]


def stated(
    base: Manifest | None, tables: Mapping[str, TableSchema], parts: Sequence[PartLine], dense: Iterable[str]
) -> Stated:
    """Return what a segment has to state for its state to be the one given.

    Parameters
    ----------
    base
        The manifest of the segment before it, with its state; None of a baseline.
    tables, dense
        Every table, and the names of all dense tensors, of the segment's state.
    parts
        In the order in which their rows stand in the arrays. Of a table without one nothing has changed.
    """
    if base is None:
        return Stated(dict(tables), (), tuple(parts), ())
    by_table: dict[str, list[PartLine]] = {}
    for part in parts:
        by_table.setdefault(part.table, []).append(part)
    changed = {
        name: schema
        for name, schema in tables.items()
        if schema != base.tables.get(name) or not _is_as_before(by_table.get(name), base.parts_of.get(name, ()))
    }
    return Stated(
        changed,
        tuple(sorted(base.tables.keys() - tables.keys())),
        tuple(part for part in parts if part.table in changed),
        tuple(sorted(base.dense.keys() - set(dense))),
    )


def _is_as_before(parts: Sequence[PartLine] | None, before: Iterable[PartEntry]) -> bool:
    """Whether parts without rows are cut as those before, and end with the same digests."""
    if parts is None:
        return True
    ends = {(part.rows, part.columns): part.state_digest for part in before}
    if len(parts) != len(ends):
        return False
    return all(
        (part.add, part.set, part.delete, part.escape) == (None, None, None, None)
        and (part.rows, part.columns) in ends
        and ends[part.rows, part.columns] == part.state_digest
        for part in parts
    )
