"""What the live rows of a training ask of scales: measured on each rank's shards, put together over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cnr_store.encodings.choose import sample_rows
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import ScaleChoice, minmax_scale, pooled, scale_choice
from cnr_store.encodings.widths import to_float32
from cnr_store.errors import BadInput
from cnr_store.format.limits import MAX_SHIFT, MAX_SHIFT_IN_CHAIN, MIN_SCALE
from cnr_store.format.records import TableSchema
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.shards import Holdings, RankShard
from cnr_store.training.tensors import TensorRows, table_dtype_name
from cnr_store.types import MAX_CODE, AffineBits, Lattice
from cnr_store.write.schema_choice import choose_table_scale, encoding_name, table_dtype
from cnr_store.write.table_options import TableOptions
from cnr_store.write.writer import Writer

_FEW_ROWS = 2048
"""Rows of the sample that decides whether a scale is measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the live rows of a table ask for.

    Attributes
    ----------
    scale
        That of its options; None where it is no lattice, or was measured nowhere.
    halvings
        How often the scale that it has can be halved in the next delta, on all ranks.
    refused
        Why some rank could not measure it; None if all could.
    """

    scale: float | None
    halvings: int
    refused: str | None


class ScaleMeter:
    """Measures scales on the shards that a rank holds. Call it from the thread that trains."""

    def __init__(self, holdings: Holdings) -> None:
        self._held, self._owned = _by_table(holdings.by_name), _by_table(holdings.owned)

    def is_lattice(self, table: str, options: TableOptions) -> bool:
        """Whether options ask for a lattice, as far as this rank has rows; what is stored may be something else."""
        mine = self._held.get(table, ())
        return all(encoding_name(options, table_dtype_name(one.shard.weight, table)) == "lattice" for one in mine)

    def room(self, writer: Writer, table: str) -> int:
        """Return how often the scale of this rank's shards could be halved in the next delta. Reads their codes."""
        schema = writer.snapshot.tables[table]
        return min((_room(writer, one, schema) for one in self._mine(table)), default=MAX_SHIFT)

    def measure(self, ranks: Ranks, writer: Writer, options: Mapping[str, TableOptions]) -> dict[str, Measured]:
        """Return what the live rows of tables, of all ranks, ask for under such options. All ranks call it.

        Blocks for up to 0.3 s for each table.
        """
        answers = together(ranks, lambda: {table: self._measure(writer, table, one) for table, one in options.items()})
        return {table: _of_all([answer[table] for answer in answers]) for table in options}

    def scales(self, ranks: Ranks, writer: Writer, options: Mapping[str, TableOptions]) -> dict[str, float]:
        """Return the scale that each table's options ask for now, of all its rows. Blocks; all ranks call it.

        Tables are left out that some rank cannot measure, and that are no lattice.
        """
        found = self.measure(ranks, writer, options)
        return {table: one.scale for table, one in found.items() if one.scale is not None and one.refused is None}

    def roughly(self, table: str, bits: AffineBits) -> float:
        """Return the scale of a width on a few rows of this rank, or more; 0 where it has none. About a millisecond."""
        found = [0.0]
        for holding in self._mine(table):
            rows = TensorRows(holding.shard.weight)
            dtype = table_dtype(rows, table)
            sample = np.asarray(rows[sample_rows(len(rows), _FEW_ROWS, 0)])
            found.append(minmax_scale(to_float32(sample, dtype), bits))
        return max(found)

    def _measure(self, writer: Writer, table: str, options: TableOptions) -> dict[str, Any]:
        """Return what this rank knows of a table, as plain JSON: scales that its shards ask for, room for halvings."""
        schema = writer.snapshot.tables[table]
        if not isinstance(schema.encoding, Lattice) or not self.is_lattice(table, options):
            return {"choices": [], "halvings": 0, "refused": None}
        try:
            found = [(_choice(one, step_of(schema), options), one.shard.weight.numel()) for one in self._mine(table)]
        except BadInput as error:
            return {"choices": [], "halvings": 0, "refused": str(error)}
        made = [(msgspec.to_builtins(one), elements) for one, elements in found]
        return {"choices": made, "halvings": self.room(writer, table), "refused": None}

    def _mine(self, table: str) -> Sequence[RankShard]:
        return self._owned.get(table, ())


def _by_table(shards: Mapping[str, RankShard]) -> dict[str, list[RankShard]]:
    found: dict[str, list[RankShard]] = {}
    for holding in shards.values():
        found.setdefault(holding.key.table, []).append(holding)
    return found


def _of_all(measured: Sequence[Mapping[str, Any]]) -> Measured:
    """Put together what the ranks measured of one table. Pure."""
    choices = [(scale_choice(one), n) for of_rank in measured for one, n in of_rank["choices"]]
    scale = pooled([one for one, _ in choices], [n for _, n in choices]).scale if choices else None
    refused = next((of_rank["refused"] for of_rank in measured if of_rank["refused"]), None)
    return Measured(scale, min(of_rank["halvings"] for of_rank in measured), refused)


def step_of(schema: TableSchema) -> float | None:
    """Return the lattice step of a table as it is, None if it is no lattice."""
    return schema.encoding.scale * 0.5**schema.shift if isinstance(schema.encoding, Lattice) else None


def _choice(holding: RankShard, held: float | None, options: TableOptions) -> ScaleChoice:
    """The scale that a shard asks for now, of its live rows."""
    rows = TensorRows(holding.shard.weight)
    dtype = table_dtype(rows, holding.key.table)
    choice = choose_table_scale(options, dtype, RowSample(rows, dtype), held=held)
    assert choice is not None  # a lattice
    return choice


def _room(writer: Writer, holding: RankShard, schema: TableSchema) -> int:
    """How often the scale of a shard could be halved in the next delta; `Transaction.refine_scale` checks it again."""
    mirror, scale = writer.mirrors.get(holding.key), step_of(schema)
    if mirror is None or scale is None:
        return 0
    snapshot = writer.snapshot
    first = snapshot.plan(holding.key.table).batches[0].segment
    of_chain = MAX_SHIFT_IN_CHAIN - (schema.shift - snapshot.manifests[first].tables[holding.key.table].shift)
    codes = mirror.arrays["codes"]
    largest = max(1, abs(int(np.min(codes, initial=0))), abs(int(np.max(codes, initial=0))))
    of_codes = (MAX_CODE // largest).bit_length() - 1
    of_scale = int(np.log2(scale / MIN_SCALE))
    return max(0, min(MAX_SHIFT - schema.shift, of_chain, of_codes, of_scale))
