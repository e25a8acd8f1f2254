"""Chunks of integers: as small as their entropy allows, and refused where they are not what they should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from cnr_store.errors import CorruptObject
from cnr_store.format import arrays, digits

COUNT = 1 << 16


def laplace(spread: float, dtype: str = "int16", count: int = COUNT) -> npt.NDArray[Any]:
    """Codes as differences of rows are distributed."""
    return np.rint(np.random.default_rng(3).laplace(0, spread, count)).astype(dtype)


def entropy_bytes(values: npt.NDArray[Any]) -> float:
    _, counts = np.unique(values, return_counts=True)
    shares = counts / values.size
    return float(-(shares * np.log2(shares)).sum() * values.size / 8)


def encoded(values: Any) -> bytes:
    return b"".join(arrays.encode_digits(values))


def decoded(frame: bytes, count: int, dtype: str) -> npt.NDArray[Any]:
    out = np.empty(count, dtype)
    arrays.decode_digits(memoryview(frame), count, out.itemsize, "chunk").unpack(0, out)
    return out


@pytest.mark.parametrize(
    ("spread", "growth"),
    [(0.25, 1.13), (0.4, 1.07), (1.0, 1.04), (2.0, 1.05), (8.0, 1.03), (50.0, 1.03), (800.0, 1.03)],
)
def test_codes_take_little_more_than_their_entropy(spread: float, growth: float) -> None:
    values = laplace(spread)

    frame = encoded(values)

    assert np.array_equal(decoded(frame, COUNT, "int16"), values)
    assert len(frame) <= growth * entropy_bytes(values) + 100


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_one_large_value_among_small_ones_costs_next_to_nothing(dtype: str) -> None:
    values = laplace(1.0, dtype)
    alone = len(encoded(values))
    values[1000] = np.iinfo(dtype).max

    frame = encoded(values)

    assert np.array_equal(decoded(frame, COUNT, dtype), values)
    assert len(frame) <= 1.01 * alone + 700


@pytest.mark.parametrize("values", [[], [0] * 9, [5], [-1, 300]], ids=str)
def test_few_values_come_back(values: list[int]) -> None:
    given = np.array(values, np.int16)

    assert decoded(encoded(given), given.size, "int16").tolist() == values


def test_a_plain_compressor_would_do_for_every_reader() -> None:
    values = laplace(3.0)
    content = zstandard.ZstdDecompressor().decompress(encoded(values))

    again = zstandard.ZstdCompressor(level=19).compress(content)

    assert np.array_equal(decoded(again, COUNT, "int16"), values)


def frame(content: bytes) -> memoryview:
    return memoryview(zstandard.ZstdCompressor(level=3).compress(content))


@pytest.mark.parametrize("size", [0, 35, 37, 10**6])
def test_a_frame_of_another_size_is_refused_before_it_is_decoded(size: int) -> None:
    with pytest.raises(CorruptObject, match="elements"):
        arrays.decode_digits(frame(bytes(size)), 10, 2, "chunk")


def test_a_frame_that_does_not_tell_its_size_is_refused() -> None:
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(36))

    with pytest.raises(CorruptObject, match="unknown number"):
        arrays.decode_digits(memoryview(silent), 10, 2, "chunk")


@pytest.mark.parametrize("data", [b"", b"no frame at all", bytes(frame(bytes(range(36))))[:-9]])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="zstd"):
        arrays.decode_digits(memoryview(data), 10, 2, "chunk")


@pytest.mark.parametrize("bases", [(256,) * 3, (2, *(256,) * 2, 16, 3), (255,) * 8], ids=str)
def test_digits_without_room_are_refused(bases: digits.Bases) -> None:
    end = bytes(base % 256 for base in bases).rjust(8, b"\1")

    with pytest.raises(CorruptObject, match="need more bytes"):
        arrays.decode_digits(frame(bytes(28) + end), 10, 2, "chunk")


@pytest.mark.parametrize("widest", [2, 6, 14, 40, 100])
def test_bases_fit_chunks_whose_codes_widen_along_them(widest: int) -> None:
    """Rows in the order of a slot are so: a sample under one Huffman table chose bases that took 4 % more."""
    random = np.random.default_rng(widest)
    widths = np.repeat(np.geomspace(widest / 15, widest, 16_384), 32)
    values = np.rint(random.laplace(size=widths.size) * widths).astype(np.int16)

    found = digits.choices(int(values.min()), int(values.max()), values.dtype)
    sizes = {packing: frame_bytes(values, packing) for packing in found}

    assert len(found) > 1
    assert frame_bytes(values, arrays.choose_packing(values)) <= 1.006 * min(sizes.values())


def frame_bytes(values: npt.NDArray[Any], packing: digits.Packing) -> int:
    chunk = np.zeros(arrays.digit_chunk_bytes(values.size, values.itemsize), np.uint8)
    digits.pack(values, packing, chunk)
    return sum(map(len, arrays._COMPRESSOR.compress(chunk, digits.plane_bytes(packing.bases, values.size))))


@pytest.mark.parametrize("spread", [0.3, 0.5, 5.0, 12.0])
def test_bases_fit_chunks_whose_last_rows_moved_most(spread: float) -> None:
    """Samples had the ends of a chunk: up to 7 % more bytes, because rows that moved most counted a quarter."""
    random = np.random.default_rng(5)
    place = np.linspace(0, 1, 1 << 20)
    values = np.rint(random.laplace(0, spread * (0.7 + place**2 + 3 * place**30))).astype(np.int16)
    sizes = {
        packing: frame_bytes(values, packing)
        for packing in digits.choices(int(values.min()), int(values.max()), values.dtype)
    }

    assert frame_bytes(values, arrays.choose_packing(values)) <= 1.006 * min(sizes.values())


def test_values_above_zero_take_a_tenth_less_than_with_digits_around_zero() -> None:
    """As sums of squares grow; a symmetric low digit has no use for its lower half, and its upper one is too short."""
    random = np.random.default_rng(5)
    values = np.floor(random.exponential(random.choice([0.3, 6.0], COUNT, p=[0.8, 0.2]))).astype(np.int16) - np.int16(1)

    around_zero = digits.choices(int(values.min()), int(values.max()), values.dtype)

    assert arrays.choose_packing(values).middle > 0
    assert len(encoded(values)) < 0.9 * min(frame_bytes(values, packing) for packing in around_zero)
    assert np.array_equal(decoded(encoded(values), COUNT, "int16"), values)


@pytest.mark.parametrize("value", [-129, -128, 1, 127, 128])
def test_a_chunk_of_one_value_comes_back(value: int) -> None:
    values = np.full(1000, value, np.int16)

    assert np.array_equal(decoded(encoded(values), 1000, "int16"), values)
