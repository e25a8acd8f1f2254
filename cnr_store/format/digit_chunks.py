"""Chunks of integers as bytes under zstd: planes of digits, and their bases at the end (spec, section 4.2). Pure.

zstd is used for its Huffman coder. Codes repeat by chance only, and a match costs more bytes than it saves, so the
writer sets the match search to its minimum. Each block of a frame has its own Huffman table: a block has at most
64 KiB, of one plane. Any zstd decoder reads the result.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from numcodecs.zstd import Zstd

from cnr_store.errors import CorruptObject
from cnr_store.format import digits
from cnr_store.format.documents import content_size

Bytes = npt.NDArray[np.uint8]

LEVEL = 1
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=LEVEL, window_log=16, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)  # fmt: skip
_SLACK_BYTES = 8
"""Each plane ends with a whole byte, so the planes of a few values can be a few bytes larger than the values."""

_FIRST_RUNS, _FIRST_RUN = 8, 1024
_SECOND_RUNS, _SECOND_RUN = 4, 16_384
"""Runs of a sample, and values of each: in the first round all bases are compared, in the second those left."""

_CLOSE = 1.02
"""Bases that cost more times the least in the first round are out (`format_spec/decisions/0049`)."""

_UNPACKED_TO_STORED = 100
"""Unpacking this many bytes costs as much as storing one more byte."""

_DIVIDED = 1.005
"""Bases that are no power of two unpack at a quarter of the speed, so they must save half a percent of the bytes."""


def chunk_bytes(count: int, itemsize: int) -> int:
    """Return the bytes of a chunk of ``count`` integers before zstd; independent of the bases."""
    return count * itemsize + _SLACK_BYTES + digits.MOST_DIGITS


@dataclass(frozen=True, slots=True)
class DigitChunk:
    """A decompressed chunk: ``count`` values, any range of which can be unpacked."""

    planes: Bytes
    bases: digits.Bases
    count: int

    def unpack(self, start: int, out: npt.NDArray[Any]) -> None:
        """Write values [start, start + n) to ``out`` (n,)."""
        digits.unpack(self.planes, self.bases, self.count, start, out)


class _Compressor(threading.local):
    """A zstd compressor and its input memory, one per thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    def compress(self, chunk: Bytes, planes: Sequence[int]) -> bytes:
        """Return the zstd frame of a chunk that begins with planes of the given sizes in bytes."""
        stream = self._zstd.compressobj(size=chunk.size)
        pieces, start = [], 0
        for size in planes:
            pieces.append(stream.compress(chunk[start : start + size].data))
            pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            start += size
        pieces += [stream.compress(chunk[start:].data), stream.flush()]
        return b"".join(pieces)


_COMPRESSOR = _Compressor()


def encode(values: npt.NDArray[Any]) -> bytes:
    """Return the zstd frame of a chunk of int16, int32 or int64 values (n,), contiguous.

    Memory: `chunk_bytes` per thread, kept. Releases the GIL.
    """
    bases = choose(values)
    chunk = _COMPRESSOR.take(chunk_bytes(values.size, values.itemsize))
    used = digits.pack(values, bases, chunk)
    chunk[used:] = 0
    chunk[chunk.size - digits.MOST_DIGITS :] = 1
    if bases:
        chunk[chunk.size - len(bases) :] = np.array(bases, np.int64).astype(np.uint8)
    return _COMPRESSOR.compress(chunk, digits.plane_bytes(bases, values.size))


def choose(values: npt.NDArray[Any]) -> digits.Bases:
    """Return the bases for which a sample of the values has the lowest cost (`_cost`), in two rounds. Pure."""
    if values.size == 0:
        return ()
    found = digits.choices(int(values.min()), int(values.max()), values.dtype)
    if len(found) > 1 and values.size > 2 * _FIRST_RUNS * _FIRST_RUN:
        # Together: with a Huffman table for each short run the tables would count for more than they do in a chunk.
        sample = np.concatenate(_runs(values, _FIRST_RUNS, _FIRST_RUN))
        costs = [_cost(sample, bases) for bases in found]
        found = [bases for bases, cost in zip(found, costs, strict=True) if cost <= _CLOSE * min(costs)]
    if len(found) == 1:
        return found[0]
    # By themselves, as each block of a chunk is compressed: rows are in the order of a slot, so the range of their
    # codes changes along the chunk. One Huffman table for all of them would overestimate the cost of low digits.
    runs = _runs(values, _SECOND_RUNS, _SECOND_RUN)
    return min(found, key=lambda bases: sum(_cost(run, bases) for run in runs))


def _runs(values: npt.NDArray[Any], count: int, length: int) -> list[npt.NDArray[Any]]:
    """Return the values, or ``count`` runs of them evenly over the chunk."""
    if values.size <= count * length:
        return [values]
    starts = np.linspace(0, values.size - length, count).astype(np.int64)
    return [values[start : start + length] for start in starts]


def _cost(run: npt.NDArray[Any], bases: digits.Bases) -> float:
    planes = _COMPRESSOR.take(chunk_bytes(run.size, run.itemsize))
    used = digits.pack(run, bases, planes)
    stored = len(_COMPRESSOR.compress(planes[:used], digits.plane_bytes(bases, run.size)))
    is_divided = any(base & (base - 1) for base in bases)
    return _UNPACKED_TO_STORED * stored * (_DIVIDED if is_divided else 1.0) + used


def decode(frame: memoryview, count: int, itemsize: int, where: str, memory: Bytes | None = None) -> DigitChunk:
    """Return a chunk of ``count`` values in ``memory`` (`chunk_bytes`), which is allocated if it is None.

    Raises
    ------
    CorruptObject
        It is no zstd frame, has another size, or its bases need more bytes than the chunk has; names ``where``.
    """
    size = chunk_bytes(count, itemsize)
    chunk = np.empty(size, np.uint8) if memory is None else memory[:size]
    found = content_size(frame)
    if found != size:
        raise CorruptObject(
            f"{where} has {'an unknown number of' if found is None else found} bytes under zstd, a chunk of {count} "
            f"elements has {size}; run `cnr verify`",
            path=where, expected=size, found=found,
        )  # fmt: skip
    try:
        Zstd().decode(frame, out=chunk)
    except (RuntimeError, ValueError) as error:
        raise CorruptObject(f"{where} is no zstd frame: {error}", path=where) from error
    bases = tuple(int(base) or digits.LARGEST_BASE for base in chunk[size - digits.MOST_DIGITS :] if base != 1)
    if sum(digits.plane_bytes(bases, count)) > size - digits.MOST_DIGITS:
        raise CorruptObject(
            f"{where} has digits of bases {bases}, which need more bytes than its {count} elements have; run "
            "`cnr verify`",
            path=where, found=bases,
        )  # fmt: skip
    return DigitChunk(chunk, bases, count)
