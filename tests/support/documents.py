"""The documents of a store as they are stored, and manifests turned back into them."""

from __future__ import annotations

from typing import Any

import msgspec

from cnr_store import Store
from cnr_store.format import arrays
from cnr_store.format.documents import unpack
from cnr_store.format.layout import MANIFEST, segment_key, segment_name
from cnr_store.format.records import (
    OPERATIONS,
    ArrayEntry,
    ArrayGroup,
    ListLine,
    Manifest,
    ObjectDigest,
    ObjectEntry,
    PartLine,
    RowListEntry,
    SegmentDocument,
    StoredArray,
    TensorLine,
)


def segment_document(store: Store, segment: int = -1) -> dict[str, Any]:
    """Return the manifest of a segment of the head's chain, as plain JSON."""
    key = segment_key(store.head().record.chain[segment].seg, MANIFEST)
    found: dict[str, Any] = msgspec.json.decode(unpack(store.storage.read(key) or b"", key))
    return found


def document_of(manifest: Manifest) -> SegmentDocument:
    """Return the document that states what the manifest states, also of one with the state of its chain."""
    objects = {item.path: item for item in manifest.objects}
    whole = {array.path: array for array in manifest.arrays}
    groups: dict[str, dict[str, ArrayEntry]] = {}
    lines = []
    for part in (part for part in manifest.parts if part.table in manifest.recorded):
        lists = {}
        for operation in OPERATIONS:
            row_list: RowListEntry | None = getattr(part, operation)
            if row_list is not None:
                path = row_list.arrays["rows"].path.removesuffix(".rows")
                groups[path] = {name: whole[one.path] for name, one in row_list.arrays.items()}
                lists[operation] = ListLine(
                    group=path, count=row_list.count, first=row_list.first, last=row_list.last
                )  # fmt: skip
        lines.append(PartLine(**(msgspec.structs.asdict(part) | dict.fromkeys(OPERATIONS) | lists)))
    packs = [_group("", {array.dtype: array}, objects) for array in manifest.dense_arrays]
    fields = {name: getattr(manifest, name) for name in SegmentDocument.__struct_fields__ if hasattr(manifest, name)}
    own = segment_name(manifest.base, manifest.txn)
    return SegmentDocument(**fields | {
        "tables": {name: manifest.tables[name] for name in manifest.recorded},
        "dense": {
            name: msgspec.convert(msgspec.structs.asdict(entry), TensorLine)
            for name, entry in manifest.dense.items() if entry.segment == own
        },
        "documents": {
            name: one.object.path for name, one in manifest.documents.items() if one.segment == own and one.object
        },
        "small": {
            name: msgspec.Raw(one.text)
            for name, one in manifest.documents.items() if one.segment == own and not one.object
        },
        "parts": tuple(lines), "groups": tuple(_group(path, groups[path], objects) for path in sorted(groups)),
        "dense_arrays": tuple(packs), "objects": tuple(objects.values()),
    })  # fmt: skip


def _group(path: str, entries: dict[str, ArrayEntry], objects: dict[str, ObjectEntry]) -> ArrayGroup:
    """A group, whose objects are taken out of ``objects``."""
    name, first = next(iter(entries.items()))
    path = path or first.path.removesuffix(f".{name}")
    names = {one.path: name for name, one in entries.items()}
    stored = {}
    for name, one in entries.items():
        own = [objects.pop(key) for key in arrays.object_paths(one)]
        stored[name] = StoredArray(
            dtype=one.dtype, width=None if len(one.shape) == 1 else one.shape[1], codec=one.codec,
            order=one.order if one.order is msgspec.UNSET else names[one.order], shards=one.shards,
            objects=tuple(ObjectDigest(size=item.size, xxh3_128=item.xxh3_128) for item in own),
        )  # fmt: skip
    return ArrayGroup(path=path, rows=first.shape[0], chunk_rows=first.chunk_rows, arrays=stored)
