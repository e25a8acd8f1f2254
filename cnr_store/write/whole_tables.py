"""Whole tables that are encoded together: small ones with the same arrays, by one call for about `ENCODE_ROWS` rows.

A first save of a thousand tables would otherwise take longer to begin calls of numpy and kernels than for their rows.
`baseline_rows.encode_table` defines what is done for each table, and does it where that cannot be done together.
Computation on threads, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import table_kernels
from cnr_store.encodings.widths import as_columns, carrier
from cnr_store.format.arrays import full_chunk_rows
from cnr_store.format.records import TableSchema
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Allocate, Array, ArraySpecs, Differences, TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.types import Rectangle
from cnr_store.write.baseline_rows import EncodedTable, encode_table
from cnr_store.write.encode import ENCODE_ROWS, EncodedList, OnBadRows
from cnr_store.write.table_options import TableOptions

_FLOAT32 = carrier("float32")
_INT16 = np.dtype(np.int16)
_INT16_MAX = 2**15 - 1


class TableValues(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All rows of a table: what `Transaction.write_tables` takes of each.

    Attributes
    ----------
    table
        Name of the table.
    values, slots, options, rectangle
        As for `Transaction.write_table`.
    """

    table: str
    values: Any
    slots: Mapping[str, Any] = {}
    options: TableOptions | None = None
    rectangle: Rectangle | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WholeTable:
    """A checked shard that is written whole; ``arrays`` by name and ``on_bad_rows`` as for `encode_table`."""

    shard: Shard
    schema: TableSchema
    rectangle: Rectangle
    specs: ArraySpecs
    arrays: Mapping[str, Any]
    on_bad_rows: OnBadRows = "refuse"

    @property
    def alike(self) -> tuple[Differences, ...] | None:
        """What it has as one object with those that it can be encoded with; None if it goes alone."""
        found, rows = self.specs.differences, self.rectangle.num_rows
        if found is None or not 0 < rows <= ENCODE_ROWS or rows >= full_chunk_rows(_INT16.itemsize * found[0].width):
            return None
        return found if all(array.dtype == _FLOAT32 for array in self.arrays.values()) else None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTables:
    """Tables ready to be written; ``joined``: their rows end to end, of those that were encoded together."""

    tables: Sequence[WholeTable]
    encoded: Sequence[EncodedTable]
    joined: EncodedList | None = None


def encode_tables(
    tables: Sequence[WholeTable], *, allocate: Allocate | None, workers: Workers
) -> Iterator[EncodedTables]:  # fmt: skip
    """Encode tables, each as `encode_table` does. Blocks. Memory: codes of a run of small ones for each thread.

    Raises
    ------
    NonFiniteValues
    """
    runs = [[number] for number in range(len(tables))] if allocate is None else plan_tables(tables)
    alone = [tables[run[0]] for run in runs if len(run) == 1]
    together = [[tables[number] for number in run] for run in runs if len(run) > 1]
    while allocate is not None and together:
        window, together = together[: workers.threads], together[workers.threads :]
        for encoded, rest in workers.run(partial(encode_run, run, allocate) for run in window):
            alone += rest
            yield encoded
    for one in alone:
        encoded_alone = encode_table(
            one.shard.table, one.schema, one.arrays, allocate=allocate, on_bad_rows=one.on_bad_rows, workers=workers,
            rectangle=one.rectangle,
        )  # fmt: skip
        yield EncodedTables([one], [encoded_alone])


def plan_tables(tables: Sequence[WholeTable]) -> list[list[int]]:
    """Return which tables are encoded together, by position; those that go alone in runs of one. Pure."""
    runs: list[list[int]] = []
    last: dict[int, tuple[list[int], int]] = {}
    for number, one in enumerate(tables):
        alike = one.alike
        if alike is None:
            runs.append([number])
            continue
        run, rows = last.get(id(alike), ([], ENCODE_ROWS))
        if rows >= ENCODE_ROWS:
            run, rows = [], 0
            runs.append(run)
        run.append(number)
        last[id(alike)] = run, rows + one.rectangle.num_rows
    return runs


def encode_run(run: Sequence[WholeTable], allocate: Allocate) -> tuple[EncodedTables, list[WholeTable]]:
    """Encode tables that are alike as `encode_table` does each, and return those that have to go alone. Blocks.

    These have bad rows, or codes beyond int16: nothing is kept of what was encoded.
    """
    alike = run[0].specs.differences
    assert alike is not None  # they were planned
    counts = np.array([one.rectangle.num_rows for one in run], np.int64)
    first_rows = np.array([one.rectangle.rows[0] for one in run], np.int64)
    starts = np.cumsum(counts) - counts
    mirrors = [
        TableCodes.allocate(
            one.schema, *one.rectangle.rows, names=tuple(one.specs), mirror=True, allocate=allocate,
            columns=one.rectangle.columns,
        )
        for one in run
    ]  # fmt: skip
    flags = np.zeros(int(counts.sum()), np.uint8)
    digests, is_alone = np.zeros(len(run), np.uint64), np.zeros(len(run), np.bool_)
    coded: dict[str, Array] = {}
    for array in alike:
        found, coded[array.name] = _encode_array(array, run, mirrors, starts, counts, flags)
        digests += found[:, 1].view(np.uint64)  # modulo 2^64, as `add_digests`
        if array.shift is None:
            is_alone |= found[:, 0] > _INT16_MAX
    is_alone |= np.maximum.reduceat(flags, starts) > 0
    ids = np.arange(len(flags), dtype=np.int64) + np.repeat(first_rows - starts, counts)
    kept = np.flatnonzero(~is_alone).tolist()
    if len(kept) < len(run):
        rows = np.flatnonzero(np.repeat(~is_alone, counts))
        ids, coded = ids[rows], {name: block[rows] for name, block in coded.items()}
    after = digests.tolist()
    encoded = [EncodedTable(run[k].schema, mirrors[k], None, None, after[k]) for k in kept]
    together = EncodedTables([run[k] for k in kept], encoded, EncodedList(ids, coded))
    return together, [run[k] for k in np.flatnonzero(is_alone).tolist()]


def _encode_array(
    array: Differences, run: Sequence[WholeTable], mirrors: Sequence[TableCodes], starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64], flags: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], Array]:  # fmt: skip
    """Encode one array of all tables; returns what the kernel found, and the codes as they are stored."""
    name, spec = array.name, run[0].specs[array.name]
    blocks = [np.ascontiguousarray(one.arrays[name][0 : one.rectangle.num_rows]) for one in run]
    addresses = np.array([*map(address_of, map(as_columns, blocks))], np.int64)
    places = np.array([one.place_of(name) for one in mirrors], np.int64)
    parts = table_kernels.parts_of(starts, counts, addresses, places)
    out, found = np.empty((len(flags), array.width), spec.mirror_dtype), np.empty((len(run), 2), np.int64)
    if array.shift is None:
        scales = np.array([one.specs[name].scale for one in run], np.float32)
        table_kernels.lattice_codes(parts, scales, spec.multipliers, spec.presence(), out, flags, found)
    else:
        table_kernels.float_bits_codes(parts, array.shift, spec.multipliers, spec.presence(), out, flags, found)
    return found, out.reshape(-1) if array.is_vector else out
