"""The large table of the timing benchmarks, and the bare loops that a store is compared with.

A bare loop is the same kernels, the same codecs and the same chunks without anything that makes a store: no staging,
no dropping of unchanged rows, no inventory, no commit, no checks.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cnr_store import TableOptions, Writer
from cnr_store.encodings import digest, kernels, row_kernels
from cnr_store.format import arrays
from cnr_store.format.layout import segment_key
from cnr_store.format.records import ArrayEntry, RowListEntry
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import BLOCK_ROWS, TASK_ROWS
from cnr_store.segment.reader import Scratch, SegmentReader
from cnr_store.types import Codes, Float32s, RowIds
from cnr_store.write.encode import ENCODE_ROWS

DIM = 64
TABLE = "table"
WIDTH = 0.1
DRIFT = 0.3
"""Drift of a touched row over the width of the values: about 2.3 bits per element at 4-bit quality, 6 at 8-bit."""
SHARE = 0.2


class _Memory(threading.local, Scratch):
    """What a thread decodes through."""


_MEMORY = _Memory()


class DriftingTable:
    """float32 (num_rows, 64), of which each `step` moves a random share of the rows."""

    def __init__(self, num_rows: int, seed: int = 0, share: float = SHARE) -> None:
        self._random = np.random.default_rng(seed)
        self.values: Float32s = self._normal(num_rows, WIDTH)
        self._drift = self._normal(round(num_rows * share), WIDTH * DRIFT)

    def step(self) -> RowIds:
        """Move some rows, in slices so that no large copy is made; returns their ids."""
        rows = np.sort(self._random.choice(len(self.values), len(self._drift), replace=False)).astype(np.int64)
        for start, stop in blocks(len(rows), ENCODE_ROWS):
            self.values[rows[start:stop]] += self._drift[start:stop]
        return rows

    def _normal(self, num_rows: int, width: float) -> Float32s:
        made = np.empty((num_rows, DIM), np.float32)
        for start, stop in blocks(num_rows, 1 << 16):
            self._random.standard_normal(dtype=np.float32, out=made[start:stop])
            made[start:stop] *= np.float32(width)
        return made


def saves(writer: Writer, table: DriftingTable, options: TableOptions, deltas: int) -> Iterator[int]:
    """Write a baseline and so many deltas, each when it is asked for; yields the version of each."""
    with writer.begin(0, "baseline") as txn:
        txn.write_table(TABLE, table.values, options=options)
    yield writer.head.record.v
    for step in range(1, deltas + 1):
        changed = table.step()
        with writer.begin(step) as txn:
            txn.write_rows(TABLE, changed, table.values[changed])
        yield writer.head.record.v


class BareWriter:
    """Encode, subtract the codes kept, compress and write, chunk by chunk on threads."""

    def __init__(self, folder: Path, scale: float, workers: Workers) -> None:
        self.folder = folder
        self.mirror = np.zeros((0, DIM), np.int16)
        self._scale = np.float32(scale)
        self._workers = workers
        self._multipliers = digest.column_multipliers(0, DIM)

    def write_baseline(self, values: Float32s) -> None:
        """Encode and write every row."""
        self.mirror = np.zeros(values.shape, np.int16)
        chunk_rows = self._start(len(values))

        def write(start: int, stop: int) -> None:
            flags = np.zeros(stop - start, np.uint8)
            kernels.lattice_encode(values[start:stop], self._scale, self.mirror[start:stop], flags)
            for low, high in blocks(stop - start, BLOCK_ROWS):
                held = self.mirror[start + low : start + high]
                kernels.digest_block(held, start + low, self._multipliers, digest.PRESENCE_CODED)
            self._put(start, np.arange(start, stop, dtype=np.int64), self.mirror[start:stop])

        self._run(write, len(values), chunk_rows)

    def write_delta(self, rows: RowIds, values: Float32s) -> None:
        """Encode and write the differences of ``rows``, and move the mirror."""
        chunk_rows = self._start(len(rows))

        def write(start: int, stop: int) -> None:
            out = self.differences(rows, values, start, stop)
            self._put(start, rows[start:stop], out)
            row_kernels.add_codes(self.mirror, rows[start:stop], 0, out, 0)

        self._run(write, len(rows), chunk_rows)

    def differences(self, rows: RowIds, values: Float32s, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Encode positions [start, stop) of ``rows`` as differences to the mirror."""
        out, flags = np.empty((stop - start, DIM), np.int16), np.zeros(stop - start, np.uint8)
        for low, high in blocks(stop - start, ENCODE_ROWS):
            kernels.lattice_delta(
                values[start + low : start + high], rows[start + low : start + high], self.mirror, 0, self._scale,
                self._multipliers, out[low:high], flags[low:high],
            )  # fmt: skip
        return out

    def encode_only(self, rows: RowIds, values: Float32s) -> list[np.ndarray[Any, Any]]:
        """The kernels of `write_delta` alone; returns the chunks of codes."""
        return self._workers.run(partial(self.differences, rows, values, a, b) for a, b in chunks_of(len(rows)))

    def compress_only(self, rows: RowIds, codes: list[np.ndarray[Any, Any]]) -> int:
        """The entropy coder of `write_delta` alone, over chunks of codes and of row ids; returns the bytes."""
        tasks = [partial(_encode, block) for block in codes]
        tasks += [partial(_encode, rows[start:stop]) for start, stop in chunks_of(len(rows))]
        return sum(len(data) for data in self._workers.run(tasks))

    def _run(self, write: Any, count: int, chunk_rows: int) -> None:
        self._workers.run(partial(write, a, b) for a, b in blocks(count, chunk_rows))

    def _start(self, count: int) -> int:
        """Forget what was written; returns the rows of a chunk."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return arrays.chunk_rows_for(count, 2 * DIM)

    def _put(self, start: int, rows: RowIds, codes: Codes) -> None:
        for name, block in (("rows", rows), ("codes", codes)):
            (self.folder / f"{name}-{start}").write_bytes(_encode(block))


def chunks_of(count: int) -> list[tuple[int, int]]:
    """Return the row ranges of the chunks that a store makes of ``count`` rows of codes."""
    return blocks(count, arrays.chunk_rows_for(count, 2 * DIM))


def decode_ranges(count: int) -> list[tuple[int, int]]:
    """Return the row ranges in which a store decodes codes into floats."""
    return blocks(count, TASK_ROWS)


def _encode(block: np.ndarray[Any, Any]) -> bytes:
    return arrays.encode_chunk(arrays.describe("bare", block.shape, block.dtype, len(block)), block)


def replay_bare(
    folder: Path, readers: Sequence[SegmentReader], codes: Codes, workers: Workers, *, decodes_only: bool = False
) -> None:
    """Put and add the codes of a chain of a store in ``folder``, unchecked; with ``decodes_only`` they go nowhere."""
    for reader in readers:
        root = folder / segment_key(reader.name, "x")
        for row_list, adds in ((reader.manifest.parts[0].set, False), (reader.manifest.parts[0].add, True)):
            if row_list is not None:
                count = arrays.chunk_count(row_list.arrays["codes"])
                workers.run(
                    partial(_apply, root.parent, row_list, k, codes, adds=adds, decodes_only=decodes_only)
                    for k in range(count)
                )


def _apply(root: Path, row_list: RowListEntry, index: int, codes: Codes, *, adds: bool, decodes_only: bool) -> None:
    count = min(row_list.arrays["codes"].chunk_rows, row_list.count - index * row_list.arrays["codes"].chunk_rows)
    block = _decode(root, row_list.arrays["codes"], index)[:count]
    first, last = row_list.first[index], row_list.last[index]
    is_contiguous = last - first + 1 == count
    rows = None if is_contiguous else _decode(root, row_list.arrays["rows"], index)[:count]
    if decodes_only:
        return
    if rows is None:
        row_kernels.put_block(codes[first : last + 1], block, 0)
    elif adds:
        row_kernels.add_codes(codes, rows, 0, block, 0)
    else:
        row_kernels.put_codes(codes, rows, 0, block, 0)


def _decode(root: Path, entry: ArrayEntry, index: int) -> Any:
    out = np.empty(arrays.chunk_shape(entry), entry.dtype)
    decompress(entry, stored_bytes(root, entry, index), out)
    return out


def stored_bytes(segment: Path, entry: ArrayEntry, index: int) -> bytes:
    """Return the stored bytes of a chunk of a segment in a local folder, unchecked."""
    if entry.shards is msgspec.UNSET:
        return (segment / arrays.chunk_path(entry, index)).read_bytes()
    place = arrays.place_in_shard(entry, entry.shards, index)
    with (segment / place.path).open("rb") as file:
        file.seek(place.start)
        return file.read(place.size)


def decompress(entry: ArrayEntry, data: bytes, out: Codes | RowIds) -> None:
    """Decode a chunk's bytes, its crc32c left aside, into ``out``, an array of the chunk's shape."""
    arrays.decode_chunk(entry, data, out, "bare", _MEMORY.take((arrays.chunk_bytes(entry),), np.dtype(np.uint8)))
