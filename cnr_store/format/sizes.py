"""How many bytes of a segment hold what: rows, codes, scales, slots, dense tensors, documents, metadata.

Pure: everything is read off the manifest, so the answer costs no request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from cnr_store.format.records import ArrayEntry, Manifest


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """Stored bytes by kind, after compression.

    Attributes
    ----------
    rows
        Row ids of all row lists.
    codes
        Weights: integer codes, packed codes, floats of ``raw`` tables, values of escape rows; and classes of rows.
    scales
        ``scale`` and ``zero_point`` of affine rows.
    slots
        Optimizer state that travels with rows.
    dense
        Dense tensors whose bytes this segment holds.
    documents
        Reader state, RNG state and the like, where they are objects.
    metadata
        ``zarr.json`` documents and the manifest, with small documents in it. Receipts, which no reader needs, do not
        count.
    """

    rows: int = 0
    codes: int = 0
    scales: int = 0
    slots: int = 0
    dense: int = 0
    documents: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Return kind to bytes, ``total`` last."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


def segment_sizes(manifest: Manifest, *, segment_bytes: int | None = None) -> SegmentSizes:
    """Return the bytes of one segment by kind. Pure, no I/O.

    Parameters
    ----------
    manifest
        The segment's manifest.
    segment_bytes
        The chain entry's ``bytes``: what it holds beyond the inventory is the manifest itself.
    """
    kinds = _kinds_of_arrays(manifest)
    documents = {entry.object.path for entry in manifest.documents.values() if entry.object is not None}
    found = dict.fromkeys((field.name for field in fields(SegmentSizes)), 0)
    for entry in manifest.objects:
        array, mark, _ = entry.path.rpartition("/c.")
        if entry.path in documents:
            kind = "documents"
        else:
            kind = kinds.get(array, "metadata") if mark else "metadata"
        found[kind] += entry.size
    if segment_bytes is not None:
        found["metadata"] += max(0, segment_bytes - sum(entry.size for entry in manifest.objects))
    return SegmentSizes(**found)


def array_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the stored bytes of the chunks of each array of row lists, by its path. Pure, no I/O."""
    found = {array.path: 0 for array in manifest.arrays}
    for entry in manifest.objects:
        array, mark, _ = entry.path.rpartition("/c.")
        if mark and array in found:
            found[array] += entry.size
    return found


def total_sizes(sizes: Iterable[SegmentSizes]) -> SegmentSizes:
    """Return the sum by kind. Pure."""
    total = dict.fromkeys((field.name for field in fields(SegmentSizes)), 0)
    for one in sizes:
        for name in total:
            total[name] += getattr(one, name)
    return SegmentSizes(**total)


def fp32_bytes(manifest: Manifest) -> int:
    """Return what a baseline of the same state takes with every table and slot in fp32. Pure, no I/O.

    Dense tensors count in their own dtype. Of a hashed table only the rows in this segment are known.
    """
    total = 0
    for name, schema in manifest.tables.items():
        rows = schema.num_rows
        if schema.keys == "hashed":
            rows = sum(part.set.count for part in manifest.parts if part.table == name and part.set is not None)
        elements = rows * schema.dim
        elements += sum(rows if slot.kind == "row" else rows * schema.dim for slot in schema.slots.values())
        total += 4 * elements
    for entry in manifest.dense.values():
        itemsize = {"bfloat16": 2, "bool": 1}.get(entry.dtype) or np.dtype(entry.dtype).itemsize
        total += itemsize * math.prod(entry.shape)
    return total


def _kinds_of_arrays(manifest: Manifest) -> dict[str, str]:
    """Array path to kind of byte."""
    kinds = {array.path: "dense" for array in manifest.dense_arrays}
    for part in manifest.parts:
        for row_list in (part.add, part.set, part.delete, part.escape):
            group: dict[str, ArrayEntry] = {} if row_list is None else row_list.group
            kinds |= {array.path: _kind_of(name) for name, array in group.items()}
    return kinds


def _kind_of(name: str) -> str:
    if name == "rows":
        return "rows"
    if name in ("scale", "zero_point"):
        return "scales"
    return "slots" if name.startswith("slots/") else "codes"
