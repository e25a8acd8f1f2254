"""Deletes a segment of a relay, and copies the side objects of its records."""

from __future__ import annotations

from cnr_store.errors import CorruptStore, MissingObject
from cnr_store.format import layout
from cnr_store.format.documents import sha256
from cnr_store.format.limits import MAX_LISTS_BYTES
from cnr_store.runtime.threads import Throttle
from cnr_store.storage import Storage


def delete_segment(target: Storage, name: str, written_before_ms: int) -> int | None:
    """Delete a segment's objects, its manifest first, and return their bytes. One listing. May be repeated.

    If it has no manifest and an object newer than ``written_before_ms``, another relay is copying it. Then nothing is
    deleted, and this returns None.

    Raises
    ------
    AccessDenied, StorageFailure
    """
    manifest = layout.segment_key(name, layout.MANIFEST)
    found = list(target.list_objects(layout.segment_prefix(name)))
    is_whole = any(stat.key == manifest for stat in found)
    if not is_whole and any((stat.modified_ms or 0) > written_before_ms for stat in found):
        return None
    target.delete([manifest])
    target.delete(stat.key for stat in found if stat.key != manifest)
    return sum(stat.size_bytes for stat in found)


def copy_side_object(source: Storage, target: Storage, digest: str, throttle: Throttle) -> None:
    """Copy the side object with this sha256. Durable when this returns.

    Raises
    ------
    MissingObject, CorruptStore
        The source is damaged.
    AccessDenied, StorageFailure
        A request to either failed.
    """
    key = layout.state_key(digest)
    data = source.read_document(key, MAX_LISTS_BYTES)
    if data is None:
        raise MissingObject(f"{key} is missing in {source.url}; run `cnr verify` there", path=key)
    if sha256(data) != digest:
        raise CorruptStore(f"{key} in {source.url} does not match its name; run `cnr verify` there", path=key)
    throttle.take(len(data))
    target.put(key, data)
    target.sync_folders([key])
