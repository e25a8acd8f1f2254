"""Read the side objects that a record names; delete those no record needs (spec, 3.4 and annex F).

Only the newest record of a log needs its side objects. A record names only side objects of its parent and its own new
one, so a side object that the newest record does not name is never named again. It may be deleted if the log position
that it was written for is occupied; otherwise its record may still be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from cnr_store.errors import CorruptStore, MissingObject
from cnr_store.format.commit_record import Layer, LogEntry
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.layout import STATE, state_digest_of, state_key
from cnr_store.format.limits import MAX_LISTS_BYTES
from cnr_store.format.records import Lists, Overflow
from cnr_store.log.clock import read_store_clock
from cnr_store.log.layers import merge_lists
from cnr_store.storage import ObjectStat, Storage

_BATCH = 500
"""Number of side objects deleted by one call."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Keys and bytes of the deleted objects, and whether the deadline passed before the last one."""

    keys: tuple[str, ...] = ()
    size_bytes: int = 0
    was_stopped: bool = False


def complete(storage: Storage, entry: LogEntry, known: dict[str, Layer]) -> LogEntry:
    """Return an entry with the lists of its side objects. One GET for each new one, added to ``known``.

    Raises
    ------
    MissingObject
        A side object is missing.
    CorruptStore
        A side object differs from its digest, exceeds the size limit, or is inconsistent.
    StorageFailure
    """
    layers: list[Layer] = []
    limit_bytes = MAX_LISTS_BYTES
    for digest in entry.record.state or ():
        layer = known.get(digest) or read_layer(storage, entry.record.v, digest, limit_bytes)
        known[digest] = layer
        layers.append(layer)
        limit_bytes = layer.size_bytes // 2  # so that all together have less than twice the bytes of the first
    return merge_lists(entry, tuple(layers)) if layers else entry


def read_layer(storage: Storage, version: int, digest: str, limit_bytes: int = MAX_LISTS_BYTES) -> Layer:
    """Return one side object that the record of ``version`` names. One GET; raises as `complete` does."""
    key = state_key(digest)
    where = f"side object {key} of commit record {version}"
    data = storage.read_document(key, limit_bytes)
    if data is None:
        raise MissingObject(f"{where} is missing; restore it from a backup", version=version, path=key)
    if sha256(data) != digest:
        raise CorruptStore(
            f"{where} differs from the digest in the record; run `cnr verify`",
            version=version, path=key, expected=digest, found=sha256(data),
        )  # fmt: skip
    found = decode_document(data, Overflow, where)
    lists = Lists(**{name: getattr(found, name) for name in Lists.__struct_fields__})
    return Layer(digest, len(data), lists)


def find_unneeded(
    storage: Storage,
    needed: Collection[str],
    *,
    age_ms: int,
    is_left: Callable[[str, int], bool],
    now_ms: int | None = None,
) -> Iterator[ObjectStat]:
    """Yield the side objects that no record needs and that are older than ``age_ms``.

    Blocks: one listing, and one GET for each old one. Skips those that cannot be read.

    Parameters
    ----------
    needed
        The sha256 of the side objects that the newest records name, and of others to keep.
    is_left
        Called with a log (uuid of its branch, or empty) and a position. Returns whether the position is occupied or the
        log is closed, from reads made before ``needed`` was computed.
    now_ms
        The current time; None reads the store's clock, which needs write access.

    Raises
    ------
    StorageFailure
    """
    spared = {None, *needed}
    listed = [stat for stat in storage.list_objects(STATE) if state_digest_of(stat.key) not in spared]
    now_ms = read_store_clock(storage) if listed and now_ms is None else now_ms
    if now_ms is None:
        return
    for stat in listed:
        is_old = stat.modified_ms is not None and now_ms - stat.modified_ms >= age_ms
        if is_old and (put_for := _put_for(storage, stat.key)) is not None and is_left(*put_for):
            yield stat


def delete_found(storage: Storage, found: Iterable[ObjectStat], is_late: Callable[[], bool] = lambda: False) -> Deleted:
    """Delete side objects in batches until ``is_late`` returns True. Blocks.

    Raises
    ------
    StorageFailure
    """
    going: list[ObjectStat] = []
    gone: list[ObjectStat] = []
    was_stopped = False

    def delete() -> None:
        storage.delete(stat.key for stat in going)
        gone.extend(going)
        going.clear()

    for stat in found:
        was_stopped = is_late()
        if was_stopped:
            break
        going.append(stat)
        if len(going) == _BATCH:
            delete()
    delete()
    return Deleted(tuple(stat.key for stat in gone), sum(stat.size_bytes for stat in gone), was_stopped)


def _put_for(storage: Storage, key: str) -> tuple[str, int] | None:
    try:
        data = storage.read_document(key, MAX_LISTS_BYTES)
        found = None if data is None else decode_document(data, Overflow, key)
    except CorruptStore:
        return None
    return None if found is None else (found.branch, found.v)
