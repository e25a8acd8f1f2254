"""Merge one row list of the result, chunk by chunk, while it is written.

All rows of a list have the same outcome, so the replay of a chunk needs no statuses. It applies sets and differences
for a ``set`` list, only differences for an ``add`` list, and only exact floats for an ``escape`` list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cnr_store.encodings import digest, kernels
from cnr_store.format.records import ListLine, Operation
from cnr_store.maintenance.compaction.counted_chunks import CountedChunks
from cnr_store.maintenance.compaction.statuses import Statuses
from cnr_store.read.plan import Step, TablePlan, clip
from cnr_store.read.replay import NarrowCodes, Replay
from cnr_store.runtime.threads import Inline, blocks
from cnr_store.segment.codes import (
    ABSENT,
    ADDED,
    CODED,
    ESCAPED,
    UNTOUCHED,
    Array,
    ArraySpec,
    TableCodes,
    array_specs,
    escape_bits,
    stored_specs,
)
from cnr_store.segment.groups import Blocks, RowList, order_of
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.writer import SegmentWriter
from cnr_store.types import RowIds
from cnr_store.write.encode import stored_shape

_STATUS: dict[Operation, int] = {"add": ADDED, "set": CODED, "delete": ABSENT, "escape": ESCAPED}
_READS: dict[Operation, tuple[Operation, ...]] = {
    "add": ("add",), "set": ("add", "set"), "delete": (), "escape": ("escape",)
}  # fmt: skip
"""Which stored operations a replay applies, by the operation of the result's row list."""


@dataclass(frozen=True, slots=True)
class MergedRows:
    """The rows of a piece with one outcome, and the plan to read their content.

    ``is_delta``: the result is part of a delta. If it is part of a baseline, the state digest of its rows is computed.
    """

    readers: Sequence[SegmentReader]
    plan: TablePlan
    operation: Operation
    statuses: Statuses
    is_delta: bool

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.statuses.count(_STATUS[self.operation])

    def row_ids(self, start: int, stop: int) -> RowIds:
        """Return the ids of the rows [start, stop) of the list."""
        return self.statuses.rows(_STATUS[self.operation], start, stop)

    def reading(self) -> TablePlan:
        """Return the read plan, limited to the operations that these rows need."""
        chosen = _READS[self.operation]
        batches = tuple(
            replace(batch, steps=tuple(step for step in batch.steps if step.operation in chosen))
            for batch in self.plan.batches
        )
        return replace(self.plan, batches=batches, tracks_status=False)

    def specs(self) -> Mapping[str, ArraySpec]:
        """Return the arrays of the list."""
        return {} if self.operation == "delete" else stored_specs(self.plan.schema, self.plan.columns, self.operation)


def write_merged(out: SegmentWriter, rows: MergedRows, cache_bytes: int) -> tuple[ListLine, int]:
    """Write the row list; return it and the sum of its rows for the state digest. Blocks.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    plan, specs = rows.reading(), rows.specs()
    dtypes = {name: _narrowest(spec, plan) for name, spec in specs.items()}
    while True:
        attempt = _TypedRows(rows, plan, specs, dtypes, cache_bytes)
        row_list = replace(attempt.row_list, order=order_of(rows.operation, specs, dtypes))
        try:
            return out.write_row_list(rows.operation, row_list), attempt.digest
        except NarrowCodes as overflow:
            dtypes = dtypes | dict.fromkeys(overflow.names, np.dtype(np.int32))


class _TypedRows:
    """The row list with arrays of given dtypes, and the chunks that its own chunks share."""

    def __init__(
        self,
        rows: MergedRows,
        plan: TablePlan,
        specs: Mapping[str, ArraySpec],
        dtypes: Mapping[str, np.dtype[Any]],
        cache_bytes: int,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._specs = specs
        self._dtypes = dtypes
        self._digests: dict[int, int] = {}
        self._digested = {n: s for n, s in array_specs(plan.schema, plan.columns).items() if s.is_additive}
        self._multipliers = {name: spec.multipliers for name, spec in self._digested.items()}
        kinds = {self._stored(n): (dtypes[n], None if s.is_vector else s.width) for n, s in specs.items()}
        self.row_list = RowList(rows.count, {"rows": (np.dtype(np.int64), None), **kinds}, self._produce)
        self._cache = CountedChunks(rows.readers, self._uses(), cache_bytes)
        self._replay = Replay(self._cache.readers, Inline())

    @property
    def digest(self) -> int:
        """Sum of the produced rows for the state digest."""
        return digest.add_digests(*self._digests.values())

    def _stored(self, name: str) -> str:
        return "values" if name == "codes" and self._rows.operation == "escape" else name

    def _uses(self) -> list[tuple[Step, int]]:
        """Return for each step the number of chunks of the list whose row range it meets."""
        first, last = [], []
        for start, stop in blocks(self.row_list.count, self.row_list.chunk_rows):
            first.append(self._rows.row_ids(start, start + 1)[0])
            last.append(self._rows.row_ids(stop - 1, stop)[0])
        steps = [step for batch in self._plan.batches for step in batch.steps]
        begin = np.searchsorted(last, [step.first for step in steps], side="left")
        end = np.searchsorted(first, [step.last for step in steps], side="right")
        return [(step, int(count)) for step, count in zip(steps, end - begin, strict=True)]

    def _produce(self, start: int, stop: int) -> Blocks:
        rows = self._rows.row_ids(start, stop)
        low, high = int(rows[0]), int(rows[-1]) + 1
        held = {
            name: self._replay.scratch(f"held/{name}").take((len(rows), spec.width), self._dtypes[name])
            for name, spec in self._specs.items()
        }
        if self._rows.operation == "add":
            for array in held.values():
                array[...] = 0
        schema = self._plan.schema
        is_range = high - low == len(rows) and schema.keys == "dense"
        codes = TableCodes(
            schema, low if is_range else 0, high if is_range else len(rows), held,
            columns=self._plan.columns, specs=self._specs,
        )  # fmt: skip
        if self._rows.operation == "set" and self._rows.is_delta:
            # Ignore differences before a row's first set: the set replaces the codes that they apply to.
            codes.track_status(UNTOUCHED)
        plan = clip(self._plan, low, high)
        self._replay.run(plan, codes, None if is_range else rows)
        for batch in plan.batches:
            for step in batch.steps:
                self._cache.release(step)
        if not self._rows.is_delta:
            self._digests[start] = self._digest_of(rows, held, is_range=is_range)
        stored = {self._stored(name): stored_shape(self._specs[name], array) for name, array in held.items()}
        return {"rows": rows, **stored}

    def _digest_of(self, rows: RowIds, held: Mapping[str, Array], *, is_range: bool) -> int:
        total = 0
        exact = self._rows.operation == "escape"
        for name, spec in self._digested.items():
            codes = escape_bits(held[name], spec.dtype) if exact else held[name]
            presence = spec.presence(escape=exact)
            if is_range:
                total += int(kernels.digest_block(codes, int(rows[0]), self._multipliers[name], presence))
            else:
                total += int(kernels.digest_rows(codes, rows, self._multipliers[name], presence))
        return total


def _narrowest(spec: ArraySpec, plan: TablePlan) -> np.dtype[Any]:
    """Return the dtype of a merged array: codes are int16 unless a stored array is int32."""
    if spec.memory_dtype != np.int32:
        return spec.memory_dtype
    steps = [step for batch in plan.batches for step in batch.steps if spec.name in step.row_list.group]
    is_wide = any(step.row_list.group[spec.name].dtype == "int32" for step in steps)
    return np.dtype(np.int32 if is_wide else np.int16)
