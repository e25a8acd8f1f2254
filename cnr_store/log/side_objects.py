"""Side objects in storage: read those that a record names, delete those that none needs (spec, 3.4 and annex F).

Only the newest record of a log needs its own. One that it does not name was left behind for good: a record names what
the one before it named, and what it puts itself. So whatever position it was put for has to be taken; else it may be of
a record that is on its way.
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
"""Side objects deleted by one call."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """The keys of the objects that went, and their bytes; and whether the time was over before all had gone."""

    keys: tuple[str, ...] = ()
    size_bytes: int = 0
    was_stopped: bool = False


def complete(storage: Storage, entry: LogEntry, known: dict[str, Layer]) -> LogEntry:
    """Return an entry with the lists of its side objects. A GET for each that is not ``known``, where it is noted.

    Raises
    ------
    MissingObject
        One is not there.
    CorruptStore
        One has other bytes than its name says, is larger than it may be, or says what cannot be.
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
            f"{where} has another digest than the record names; run `cnr verify`",
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
    """Yield the side objects that no record needs, and that are older than ``age_ms``.

    Blocks: one listing, and a GET for each that is old; what cannot be read is passed by.

    Parameters
    ----------
    needed
        The sha256 of those that the newest records name, and of others that are to stay.
    is_left
        Of a log (uuid of its branch, or empty) and a position: whether that is taken, or nothing may be appended to the
        log any more, by what was read before ``needed`` was made.
    now_ms
        Instead of the store's own clock, which takes requests that write.

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
    """Delete side objects as they are found, some at once, until it is late. Blocks.

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
