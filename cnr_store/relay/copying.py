"""Copy one segment to another place, bit for bit: objects first, each checked, the manifest last.

So a segment whose manifest is there is whole, and a copy that was cut off is taken up by the next. Knows no log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cnr_store.errors import CorruptObject, CorruptStore, MissingObject
from cnr_store.format import layout
from cnr_store.format.documents import sha256
from cnr_store.format.limits import MAX_LISTS_BYTES, MAX_MANIFEST_BYTES
from cnr_store.format.records import ChainEntry, ObjectEntry
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.reader import read_manifest
from cnr_store.storage import Storage, read_verified


@dataclass(frozen=True, slots=True)
class Copied:
    """What the copy of a segment took.

    Attributes
    ----------
    objects, size_bytes
        Put at the target by this copy, the manifest among them.
    reused_objects
        Put by a copy that was cut off before, and found right.
    """

    objects: int
    size_bytes: int
    reused_objects: int


def copy_segment(source: Storage, target: Storage, entry: ChainEntry, workers: Workers, throttle: Throttle) -> Copied:
    """Copy the segment that a chain entry names; durable when this returns. Blocks, and may be repeated.

    Takes memory for one object per thread, and the manifest. Receipts are left out: no reader needs them.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore
        Of the source. Nothing that is wrong is put at the target.
    AccessDenied, StorageFailure
        Of either.
    """
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    document, manifest = read_manifest(source, entry)
    objects = manifest.objects
    there = {stat.key: stat.size_bytes for stat in target.list_objects(layout.segment_prefix(entry.seg))}
    sizes = workers.run(
        partial(_copy_object, source, target, entry.seg, item, throttle, there) for item in objects
    )  # fmt: skip
    # All that the manifest names is durable before it is put: whoever finds it finds a whole segment.
    target.sync_folders(layout.segment_key(entry.seg, item.path) for item in objects)
    target.put(key, document)
    target.sync_folders([key])
    put = [size for size in sizes if size is not None]
    return Copied(len(put) + 1, sum(put) + len(document), len(sizes) - len(put))


def has_segment(target: Storage, entry: ChainEntry) -> bool:
    """Return whether the segment was copied whole; then it is durable, too. One GET.

    Raises
    ------
    AccessDenied, StorageFailure
    """
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    try:
        document = target.read_document(key, MAX_MANIFEST_BYTES)
    except CorruptObject:
        return False
    if document is None or sha256(document) != entry.sha256:
        return False
    # Whoever put it may have been killed before its name was safe; that of the objects was, before it was put.
    target.sync_folders([key])
    return True


def delete_segment(target: Storage, name: str, written_before_ms: int) -> int | None:
    """Delete a segment's objects, its manifest first, and return their bytes. One listing; may be repeated.

    One without a manifest, to which something was written since ``written_before_ms``, is being copied by another
    relay: it is left alone, and this returns None.

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
    """Copy the side object of that sha256. Durable when this returns.

    Raises
    ------
    MissingObject, CorruptStore
        Of the source.
    AccessDenied, StorageFailure
        Of either.
    """
    key = layout.state_key(digest)
    data = source.read_document(key, MAX_LISTS_BYTES)
    if data is None:
        raise MissingObject(f"{key} is missing in {source.url}; run `cnr verify` there", path=key)
    if sha256(data) != digest:
        raise CorruptStore(f"{key} in {source.url} has other bytes than its name says", path=key)
    throttle.take(len(data))
    target.put(key, data)
    target.sync_folders([key])


def _copy_object(
    source: Storage, target: Storage, segment: str, item: ObjectEntry, throttle: Throttle, there: dict[str, int]
) -> int | None:
    """The bytes that were put, or None where they were right already."""
    key = layout.segment_key(segment, item.path)
    if there.get(key) == item.size:
        try:
            read_verified(target, key, size_bytes=item.size, digest=item.xxh3_128)
        except (CorruptObject, MissingObject):
            pass  # Put anew below.
        else:
            return None
    throttle.take(item.size)
    target.put(key, read_verified(source, key, size_bytes=item.size, digest=item.xxh3_128))
    return item.size
