from __future__ import annotations

import numpy as np
import pytest

from cnr_store.encodings import packing


def codes_of(num_rows: int, width: int, bits: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, (num_rows, width), dtype=np.uint8)


def packed_by_numpy(codes: np.ndarray, bits: int) -> np.ndarray:
    planes = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(len(codes), codes.shape[1] * bits), axis=1, bitorder="little")


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("width", [8, 16, 64, 136])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_packing_is_numpys_little_endian_bit_stream(bits: int, width: int, num_rows: int) -> None:
    codes = codes_of(num_rows, width, bits)
    packed = np.full((num_rows, packing.packed_width(width, bits)), 255, np.uint8)

    packing.pack(codes, bits=bits, out=packed)

    np.testing.assert_array_equal(packed, packed_by_numpy(codes, bits))


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_unpacking_inverts_packing(bits: int) -> None:
    codes = codes_of(37, 72, bits)
    packed = np.empty((37, packing.packed_width(72, bits)), np.uint8)
    unpacked = np.empty_like(codes)

    packing.pack(codes, bits=bits, out=packed)
    packing.unpack(packed, bits=bits, out=unpacked)

    np.testing.assert_array_equal(unpacked, codes)


def test_the_low_nibble_comes_first() -> None:
    packed = np.empty((1, 4), np.uint8)
    packing.pack(np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.uint8), bits=4, out=packed)
    assert packed.tobytes() == bytes([0x21, 0x43, 0x65, 0x87])


@pytest.mark.parametrize(("dim", "width"), [(1, 3), (8, 3), (9, 6), (130, 51)])
def test_a_row_is_padded_to_eight_codes(dim: int, width: int) -> None:
    assert packing.packed_width(dim, 3) == width
