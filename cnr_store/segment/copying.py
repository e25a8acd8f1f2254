"""Copies one segment bit for bit: objects first, each checked, the manifest last.

So a segment with a manifest is complete, and the next run continues an interrupted copy. Does not depend on the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cnr_store.errors import CorruptObject, MissingObject
from cnr_store.format import layout
from cnr_store.format.documents import sha256
from cnr_store.format.limits import MAX_MANIFEST_BYTES
from cnr_store.format.records import ChainEntry, ObjectEntry
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.reader import read_manifest
from cnr_store.storage import Storage, read_verified


@dataclass(frozen=True, slots=True)
class CopiedObjects:
    """What a copy of a segment wrote, and how many objects the target had already."""

    objects: int
    size_bytes: int
    reused: int


def copy_segment(
    source: Storage, target: Storage, entry: ChainEntry, workers: Workers, throttle: Throttle
) -> CopiedObjects:
    """Copy the segment of a chain entry; durable when this returns. Blocks. May be repeated.

    Uses memory for one object per thread and the manifest. Does not copy receipts, because no reader needs them.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore
        The source is damaged. Nothing damaged is written to the target.
    AccessDenied, StorageFailure
        A request to either failed.
    """
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    document, manifest = read_manifest(source, entry)
    objects = manifest.objects
    there = {stat.key: stat.size_bytes for stat in target.list_objects(layout.segment_prefix(entry.seg))}
    sizes = workers.run(
        partial(_copy_object, source, target, entry.seg, item, throttle, there) for item in objects
    )  # fmt: skip
    # All objects of the manifest are durable before it is written, so a segment with a manifest is complete.
    target.sync_folders(layout.segment_key(entry.seg, item.path) for item in objects)
    target.put(key, document)
    target.sync_folders([key])
    put = [size for size in sizes if size is not None]
    return CopiedObjects(len(put) + 1, sum(put) + len(document), len(sizes) - len(put))


def has_segment(target: Storage, entry: ChainEntry) -> bool:
    """Return whether the segment was copied completely, and make that durable. One GET.

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
    # The writer may have been killed before the manifest's name was durable. The names of its objects are durable.
    target.sync_folders([key])
    return True


def _copy_object(
    source: Storage, target: Storage, segment: str, item: ObjectEntry, throttle: Throttle, there: dict[str, int]
) -> int | None:
    """Copy one object and return its bytes; None if the target already has it with the right digest."""
    key = layout.segment_key(segment, item.path)
    if there.get(key) == item.size:
        try:
            read_verified(target, key, size_bytes=item.size, digest=item.xxh3_128)
        except (CorruptObject, MissingObject):
            pass  # Written again below.
        else:
            return None
    throttle.take(item.size)
    target.put(key, read_verified(source, key, size_bytes=item.size, digest=item.xxh3_128))
    return item.size
