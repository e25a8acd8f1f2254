"""The state of a chain from its manifests, and the changes that a delta's manifest must record.

A baseline records everything. A delta records its changes: changed tables with their schema and all their parts,
dropped tables, written dense tensors, ended dense tensors, stored and kept documents. The rest is unchanged (spec,
CNR-DOC-24). Pure, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from cnr_store.format.records import Manifest, PartEntry, PartLine, TableSchema, TensorLine


def with_state(before: Manifest | None, own: Manifest) -> Manifest:
    """Return a segment's manifest with the whole state at its ``l1``. Pure.

    Parameters
    ----------
    before
        The manifest of the segment before it in the chain, with its state; None for a baseline.
    own
        The manifest as `manifest.decode_manifest` returns it, with the tables and tensors of the document alone.
    """
    if before is None:
        return own
    gone = {*own.dropped, *own.recorded}
    tables = {name: schema for name, schema in before.tables.items() if name not in gone}
    # An equal schema stays the same object, so that who compares thousands of them each time sees it at once.
    tables |= {name: same if (same := before.tables.get(name)) == one else one for name, one in own.tables.items()}
    parts = {name: _untouched(ends) for name, ends in before.parts_of.items() if name not in gone} | own.parts_of
    dense = {name: entry for name, entry in before.dense.items() if name not in own.ended} | own.dense
    kept = {name: before.documents[name] for name in own.kept_documents if name in before.documents}
    whole = tuple(chain.from_iterable(parts.values()))
    found = msgspec.structs.replace(own, tables=tables, parts=whole, dense=dense, documents=kept | own.documents)
    found.__dict__["parts_of"] = parts  # the cached property would compute the same
    return found


def _untouched(parts: tuple[PartEntry, ...]) -> tuple[PartEntry, ...]:
    """Return the parts of a table that a segment does not change: without rows, with the same state digests."""
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
    """Return whether two tensors have equal digest, dtype and shape. Their bytes may be in different segments. Pure."""
    return (a.digest, a.dtype, a.shape) == (b.digest, b.dtype, b.shape)


class ManifestChanges(NamedTuple):
    """The changes of tables and the ended dense tensors: fields of `SegmentDocument`."""

    tables: dict[str, TableSchema]
    dropped: tuple[str, ...]
    parts: tuple[PartLine, ...]
    ended: tuple[str, ...]


def changes_of(
    base: Manifest | None, tables: Mapping[str, TableSchema], parts: Sequence[PartLine], dense: Iterable[str]
) -> ManifestChanges:
    """Return what a segment's manifest must record so that its state is the given one. Pure.

    Parameters
    ----------
    base
        The manifest of the segment before it, with its state; None for a baseline.
    tables, dense
        Every table, and the names of all dense tensors, of the segment's state.
    parts
        In the order of their rows in the arrays. A table without parts has not changed.
    """
    if base is None:
        return ManifestChanges(dict(tables), (), tuple(parts), ())
    has_rows = {one.table for one in parts if one.add or one.set or one.delete or one.escape}
    by_table: dict[str, list[PartLine]] = {}
    for part in parts:
        if part.table not in has_rows:
            by_table.setdefault(part.table, []).append(part)
    changed = {
        name: schema
        for name, schema in tables.items()
        if name in has_rows  # most that were given, told without looking at those before
        or schema != base.tables.get(name)
        or not _is_as_before(by_table.get(name), base.parts_of.get(name, ()))
    }
    return ManifestChanges(
        changed,
        tuple(sorted(base.tables.keys() - tables.keys())),
        tuple(part for part in parts if part.table in changed),
        tuple(sorted(base.dense.keys() - set(dense))),
    )


def _is_as_before(parts: Sequence[PartLine] | None, before: Iterable[PartEntry]) -> bool:
    """Whether parts without rows have the same rectangles and state digests as those before."""
    if parts is None:
        return True
    # Counted: a hashed table has a part of the same (no) rows from each of several writers.
    return Counter((part.rows, part.columns, part.state_digest) for part in parts) == Counter(
        (part.rows, part.columns, part.state_digest) for part in before
    )
