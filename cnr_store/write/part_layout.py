"""Lay out one writer's side of a segment: table groups, row lists, dense packs, and the lines about them.

The transaction decides what is saved; this puts it where the format says (spec, sections 4.1 to 4.6). Blocking.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from cnr_store.format.chain_checks import find_dense
from cnr_store.format.records import DenseEntry, PartEntry, RowListEntry, TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import Array, array_specs
from cnr_store.segment.row_order import order_of
from cnr_store.segment.shards import Shard
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage import object_digest
from cnr_store.types import JsonValue, Rectangle
from cnr_store.write.baseline_rows import StagedTable
from cnr_store.write.delta_rows import StagedRows


@dataclass(slots=True)
class DenseTensors:
    """What a transaction says of dense tensors: new values, logical dtypes where numpy has none, names that end."""

    given: dict[str, Array] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def is_unchanged(self, name: str, old: DenseEntry) -> bool:
        """Whether the tensor given has the bytes, dtype and shape of ``old``."""
        tensor = self.given[name]
        if (old.shape, old.dtype) != (tensor.shape, self.dtypes.get(name, tensor.dtype.name)):
            return False
        return old.digest == object_digest(tensor.reshape(-1).view(np.uint8).data)


class PartWriter:
    """Puts staged tables and tensors into a segment and remembers the manifest's entries for them.

    Attributes
    ----------
    out
        The segment's writer.
    entries
        Shard to operation to the row list that was written.
    """

    def __init__(self, out: SegmentWriter) -> None:
        self.out = out
        self.entries: dict[Shard, dict[str, RowListEntry]] = {}
        self._folders: set[str] = set()

    def write_table(self, shard: Shard, staged: StagedTable) -> None:
        """Write all rows of a shard: coded rows as ``set``, exact ones as ``escape``."""
        entries = self.entries.setdefault(shard, {})
        lists = {"set": staged.rows, "escape": None if staged.escape is None else staged.escape.row_list()}
        folder = self._group(shard, staged.schema)
        for operation, row_list in lists.items():
            if row_list is not None:
                attributes = list_attributes(shard.table, staged.schema, operation)
                entries[operation] = self.out.write_row_list(f"{folder}/{operation}", row_list, attributes)

    def write_lists(self, shard: Shard, schema: TableSchema, staged: StagedRows) -> None:
        """Write the row lists of a delta; a shard without any gets no object."""
        entries = self.entries.setdefault(shard, {})
        specs = array_specs(schema, shard.rectangle_in(schema).columns)
        for operation, item in staged.lists.items():
            path = f"{self._group(shard, schema)}/{operation}"
            attributes = list_attributes(shard.table, schema, operation)
            dtypes = {name: array.dtype for name, array in item.arrays.items()}
            order = order_of(operation, specs, dtypes, len(item.rows))
            row_list = replace(item.row_list(), order=order)
            entries[operation] = self.out.write_row_list(path, row_list, attributes)

    def write_dense(self, tensors: DenseTensors, before: Snapshot | None, kept: set[str]) -> None:
        """Write dense tensors that changed or whose bytes would leave the chain; reference the others.

        Parameters
        ----------
        before
            The state the segment builds on; its tensors that are not given keep their values.
        kept
            Segments of ``before`` that stay in the chain.
        """
        known: dict[str, DenseEntry] = {}
        if before is not None and not before.is_empty:
            names = [reader.name for reader in before.readers]
            for name, entry in before.dense.items():
                # Not where it was put, if compaction has merged that: its bytes are read there no more.
                held = find_dense(names, before.manifests, name)
                known[name] = entry if held is None else msgspec.structs.replace(held[1], segment=names[held[0]])
        changed: dict[str, Array] = {}
        dtypes = dict(tensors.dtypes)
        for name in [*tensors.given, *(name for name in known if name not in tensors.given)]:
            old = known.get(name)
            if name in tensors.dropped:
                continue
            is_kept = old is not None and old.segment in kept
            if old is not None and is_kept and (name not in tensors.given or tensors.is_unchanged(name, old)):
                self.out.reference_dense(name, old)
            elif name in tensors.given:
                changed[name] = tensors.given[name]
            elif before is not None and old is not None:
                changed[name] = before.read_dense(name)
                dtypes.setdefault(name, old.dtype)
        self.out.write_dense(changed, dtypes)

    def part(self, shard: Shard, schema: TableSchema, base_digest: int | None, state_digest: int | None) -> PartEntry:
        """Return the manifest's line for this writer's rectangle of a table."""
        rectangle = shard.rectangle_in(schema)
        return PartEntry(
            table=shard.table, folder=self._folder(shard, schema), rows=rectangle.rows, columns=rectangle.columns,
            base_digest=_hex(base_digest), state_digest=_hex(state_digest), **self.entries.get(shard, {}),
        )  # fmt: skip

    def _folder(self, shard: Shard, schema: TableSchema) -> str:
        return self.out.part_folder(shard.table, shard.rectangle_in(schema), schema.num_rows, schema.dim)

    def _group(self, shard: Shard, schema: TableSchema) -> str:
        """Put the part's group document once and return its folder."""
        folder = self._folder(shard, schema)
        if folder not in self._folders:
            self._folders.add(folder)
            write_part_group(self.out, folder, shard.table, schema, shard.rectangle_in(schema))
        return folder


def write_part_group(out: SegmentWriter, folder: str, table: str, schema: TableSchema, rectangle: Rectangle) -> None:
    """Put the group document of a part that has row lists."""
    place = {"rows": list(rectangle.rows), "columns": list(rectangle.columns)}
    out.write_group(folder, {"table": table, **place, "schema": msgspec.to_builtins(schema)})


def list_attributes(table: str, schema: TableSchema, operation: str) -> dict[str, Any]:
    """Return the attributes of a row list's group."""
    encoding: JsonValue = msgspec.to_builtins(schema.encoding)
    return {"table": table, "operation": operation, "encoding": encoding}


def _hex(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"
