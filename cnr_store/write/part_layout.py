"""Lay out one writer's side of a segment: row lists, dense packs, and the lines about them.

The transaction decides what is saved; this puts it where the format says (spec, sections 4.1 to 4.6). Blocking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cnr_store.format.manifest_state import is_same_tensor
from cnr_store.format.records import DenseEntry, Manifest, PartPlace, TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import Array
from cnr_store.segment.groups import RowList, WrittenList, WrittenPart
from cnr_store.segment.row_order import order_of
from cnr_store.segment.shards import Shard
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage import object_digest
from cnr_store.write.baseline_rows import StagedTable
from cnr_store.write.delta_rows import StagedRows
from cnr_store.write.encode import StagedList


@dataclass(slots=True)
class DenseTensors:
    """The dense tensors of a transaction: new values, logical dtypes that numpy lacks, names that end."""

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
        Shard to operation to the row list that was written; in this order the segment has the parts.
    """

    def __init__(self, out: SegmentWriter) -> None:
        self.out = out
        self.entries: dict[Shard, dict[str, WrittenList]] = {}

    def write_table(self, shard: Shard, staged: StagedTable) -> None:
        """Write all rows of a shard: coded rows as ``set``, exact ones as ``escape``."""
        entries = self.entries.setdefault(shard, {})
        lists = {"set": staged.rows, "escape": None if staged.escape is None else staged.escape.row_list()}
        for operation, row_list in lists.items():
            if row_list is not None:
                entries[operation] = self.out.write_row_list(operation, row_list)

    def write_lists(self, changed: Mapping[Shard, Sequence[StagedRows]]) -> None:
        """Write the row lists of a delta; a shard without any gets no object."""
        runs: dict[int, list[tuple[Shard, StagedRows]]] = {}
        for shard, changes in changed.items():
            entries = self.entries.setdefault(shard, {})
            # Parts stand in the order of their rows in each group, so lists of one shard are written one by one.
            if len(changes) == 1 and changes[0].run is not None and changes[0].lists:
                runs.setdefault(id(changes[0].run), []).append((shard, changes[0]))
                continue
            for staged in changes:
                for operation, item in staged.lists.items():
                    entries[operation] = self.out.write_row_list(operation, _row_list(operation, staged, item))
        for own in runs.values():
            self._write_run(sorted(own, key=lambda one: one[1].start))

    def _write_run(self, own: Sequence[tuple[Shard, StagedRows]]) -> None:
        """Write the lists of shards that have no others, of one run in its order."""
        counts = [len(staged.lists["add"].rows) for _, staged in own]
        first, run = own[0][1], own[0][1].run
        assert run is not None  # asked before
        joined = _row_list("add", first, run)
        if sum(counts) == joined.count and max(counts) < joined.full_chunk_rows:
            written = self.out.write_small_lists("add", joined, counts)
        else:
            written = [
                self.out.write_row_list("add", _row_list("add", staged, staged.lists["add"])) for _, staged in own
            ]
        for (shard, _), one in zip(own, written, strict=True):
            del self.entries[shard]
            self.entries[shard] = {"add": one}

    def write_dense(self, tensors: DenseTensors, before: Snapshot | None, base: Manifest | None) -> set[str]:
        """Write dense tensors that are not those of the manifest before; return the names of all in the new state.

        Parameters
        ----------
        before
            The state the segment builds on; its tensors that are not given keep their values.
        base
            The manifest that the segment is a delta to; None of a baseline.
        """
        held = {} if before is None or before.is_empty else before.dense
        kept = {} if base is None else base.dense
        changed: dict[str, Array] = {}
        dtypes = dict(tensors.dtypes)
        names = (tensors.given.keys() | held.keys()) - tensors.dropped
        for name in sorted(names):
            old = kept.get(name)
            if name in tensors.given:
                if old is None or not tensors.is_unchanged(name, old):
                    changed[name] = tensors.given[name]
            elif before is not None and (old is None or not is_same_tensor(old, held[name])):
                changed[name] = before.read_dense(name)
                dtypes.setdefault(name, held[name].dtype)
        self.out.write_dense(changed, dtypes)
        return names

    def part(self, shard: Shard, schema: TableSchema, base_digest: int | None, state_digest: int | None) -> WrittenPart:
        """Return this writer's rectangle of a table."""
        rectangle = shard.rectangle_in(schema)
        place = PartPlace(
            table=shard.table, rows=rectangle.rows, columns=rectangle.columns,
            base_digest=_hex(base_digest), state_digest=_hex(state_digest),
        )  # fmt: skip
        return WrittenPart(place, self.entries.get(shard, {}))


def _row_list(operation: str, staged: StagedRows, item: StagedList) -> RowList:
    dtypes = {name: array.dtype for name, array in item.arrays.items()}
    return item.row_list(order_of(operation, staged.specs, dtypes))


def _hex(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"
