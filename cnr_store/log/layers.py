"""Split the lists of a record into layers: side objects, largest first, then the record's own changes.

This is a log-structured merge. When the changes inside a record exceed a limit they are written to a side object, which
also replaces the layers that are less than twice as large. So each change is written O(log n) times in all, and a
record names O(log n) side objects (spec, section 3.4). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cnr_store.format.commit_record import Layer, LogEntry, check_statements
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.limits import MAX_CHANGES_BYTES, MAX_INLINE_BYTES
from cnr_store.format.records import CommitRecord, Lists, Overflow, Removed

_NAMES = Removed.__struct_fields__
_NOWHERE = object()


def stack(layers: Iterable[Lists]) -> dict[str, dict[Any, Any]]:
    """Return the lists that the layers, lowest first, add up to: name to entries; versions map to None."""
    found: dict[str, dict[Any, Any]] = {name: {} for name in _NAMES}
    for layer in layers:
        for name, entries in found.items():
            for key in getattr(layer.removed, name, ()):
                entries.pop(key, None)
            entries.update(_mapping(getattr(layer, name)))
    return found


def difference(below: Mapping[str, Mapping[Any, Any]], above: Mapping[str, Mapping[Any, Any]]) -> Lists:
    """Return the layer that turns ``below`` into ``above``."""
    changed: dict[str, Any] = {
        name: {key: value for key, value in above[name].items() if below[name].get(key, _NOWHERE) != value}
        for name in _NAMES
    }
    for name in ("kept", "expired"):
        changed[name] = tuple(sorted(changed[name]))
    removed = Removed(**{name: tuple(sorted(below[name].keys() - above[name].keys())) for name in _NAMES})
    return Lists(**changed, removed=msgspec.UNSET if removed == Removed() else removed)


def split_lists(
    record: CommitRecord, layers: Sequence[Layer], branch: str
) -> tuple[CommitRecord, tuple[Layer, ...], bytes | None]:
    """Split a record with all its lists into the record to send and its layers.

    Parameters
    ----------
    layers
        The layers of the parent record; empty if its lists belong to another log.
    branch
        The log: uuid of a branch, or empty for the store's own.

    Returns
    -------
    The record to send, its layers, and the bytes of a new last layer, which must be written before the record; None if
    there is no new layer.
    """
    above = stack([_lists_of(record)])
    for count in range(len(layers), -1, -1):
        below = tuple(layers[:count])
        own = difference(stack(layer.lists for layer in below), above)
        if len(canonical_json(own)) <= (MAX_CHANGES_BYTES if below else MAX_INLINE_BYTES):
            return _with_lists(record, own, below), below, None
        data = canonical_json(Overflow(v=record.v, branch=branch, **_fields(own)))
        if not below or 2 * len(data) <= below[-1].size_bytes:
            below = (*below, Layer(sha256(data), len(data), own))
            return _with_lists(record, Lists(), below), below, data
    raise AssertionError("unreachable: without layers below, the loop returns")


def merge_lists(entry: LogEntry, layers: tuple[Layer, ...]) -> LogEntry:
    """Return an entry with all of its lists, from the layers that its record names.

    Raises
    ------
    CorruptRecord
        The combined lists are inconsistent.
    """
    found = stack([*(layer.lists for layer in layers), _lists_of(entry.record)])
    lists = difference(stack([]), found)
    record = msgspec.structs.replace(entry.record, state=None, **_fields(lists))
    check_statements(record)
    return LogEntry(record, entry.digest, entry.extra, layers)


def _with_lists(record: CommitRecord, lists: Lists, layers: Sequence[Layer]) -> CommitRecord:
    names = tuple(layer.digest for layer in layers)
    return msgspec.structs.replace(record, state=names or None, **_fields(lists))


def _lists_of(record: CommitRecord) -> Lists:
    return Lists(**{name: getattr(record, name) for name in Lists.__struct_fields__})


def _fields(lists: Lists) -> dict[str, Any]:
    return {name: getattr(lists, name) for name in Lists.__struct_fields__}


def _mapping(entries: Any) -> Mapping[Any, Any]:
    return entries if isinstance(entries, dict) else dict.fromkeys(entries)
