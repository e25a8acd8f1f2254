"""Packs n-bit codes into bytes, least significant bit first, row by row.

Eight codes give n bytes: ``w = sum(q_j << (n * j))``, stored little-endian. A row is padded with zero codes
to a multiple of eight, so each row starts at a byte and one formula serves 2, 3, 4 and 8 bits. The layout
equals ``np.packbits(bitorder="little")`` over the codes' bits; 4 bits put the low nibble first, as torch and
FBGEMM do. No I/O; nothing here looks at what the codes mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype, BadInput, BadShape
from cnr_store.runtime.jit import njit

Codes8 = npt.NDArray[np.uint8]

WIDTHS = (2, 3, 4, 8)
"""Code widths in bits that can be packed."""


def padded_dim(dim: int) -> int:
    """Return `dim` rounded up to a multiple of eight codes."""
    return (dim + 7) // 8 * 8


def packed_width(dim: int, bits: int) -> int:
    """Return the bytes of one packed row of `dim` codes.

    Examples
    --------
    >>> packed_width(16, 4), packed_width(17, 3), packed_width(5, 8)
    (8, 9, 8)
    """
    check_bits(bits)
    return padded_dim(dim) // 8 * bits


def check_bits(bits: int) -> None:
    """Raise BadInput unless `bits` is a width that can be packed."""
    if bits not in WIDTHS:
        raise BadInput(f"codes have 2, 3, 4 or 8 bits, found bits={bits}", expected=list(WIDTHS), found=bits)


def pack(codes: Codes8, *, bits: int, out: Codes8) -> None:
    """Pack codes into preallocated bytes.

    Parameters
    ----------
    codes
        uint8, (n, padded_dim), each below ``2**bits``; codes beyond the row's dim must be zero. Read only.
    bits
        2, 3, 4 or 8.
    out
        uint8, C-contiguous, (n, padded_dim // 8 * bits), overwritten. Owned by the caller.

    Raises
    ------
    BadInput, BadShape, BadDtype

    Notes
    -----
    Blocks for the computation alone, without the GIL. Format: quantization reference, section 4.4.
    """
    check_bits(bits)
    _check_pair(codes, out, bits)
    _PACK[bits](codes, out)


def unpack(packed: Codes8, *, bits: int, out: Codes8) -> None:
    """Unpack bytes into preallocated codes; the inverse of `pack`.

    Parameters
    ----------
    packed
        uint8, (n, padded_dim // 8 * bits). Read only.
    bits
        2, 3, 4 or 8.
    out
        uint8, C-contiguous, (n, padded_dim), overwritten, padding codes included. Owned by the caller.

    Raises
    ------
    BadInput, BadShape, BadDtype
    """
    check_bits(bits)
    _check_pair(out, packed, bits)
    _UNPACK[bits](packed, out)


def _check_pair(codes: Codes8, packed: Codes8, bits: int) -> None:
    for name, array in (("codes", codes), ("packed bytes", packed)):
        if array.dtype != np.uint8:
            raise BadDtype(f"{name} must be uint8, found {array.dtype}", expected="uint8", found=str(array.dtype))
        if array.ndim != 2 or not array.flags.c_contiguous:
            raise BadShape(f"{name} must be a C-contiguous matrix, found shape {array.shape}", found=list(array.shape))
    num_rows, width = codes.shape
    expected = (num_rows, width // 8 * bits)
    if width % 8 != 0 or packed.shape != expected:
        raise BadShape(
            f"packing {codes.shape} codes of {bits} bits needs a multiple of 8 codes per row and bytes of shape "
            f"{expected}, found {packed.shape}",
            expected=list(expected),
            found=list(packed.shape),
        )


@njit(nogil=True)
def _pack2(codes: Codes8, out: Codes8) -> None:
    for row in range(out.shape[0]):
        for k in range(out.shape[1]):
            c = 4 * k
            low = codes[row, c] | (codes[row, c + 1] << np.uint8(2))
            high = (codes[row, c + 2] << np.uint8(4)) | (codes[row, c + 3] << np.uint8(6))
            out[row, k] = np.uint8(low | high)


@njit(nogil=True)
def _pack3(codes: Codes8, out: Codes8) -> None:
    for row in range(out.shape[0]):
        for k in range(out.shape[1] // 3):
            word = np.uint32(0)
            for j in range(8):
                word |= np.uint32(codes[row, 8 * k + j]) << np.uint32(3 * j)
            out[row, 3 * k] = np.uint8(word & np.uint32(255))
            out[row, 3 * k + 1] = np.uint8((word >> np.uint32(8)) & np.uint32(255))
            out[row, 3 * k + 2] = np.uint8((word >> np.uint32(16)) & np.uint32(255))


@njit(nogil=True)
def _pack4(codes: Codes8, out: Codes8) -> None:
    for row in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[row, k] = np.uint8(codes[row, 2 * k] | (codes[row, 2 * k + 1] << np.uint8(4)))


@njit(nogil=True)
def _copy8(source: Codes8, out: Codes8) -> None:
    for row in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[row, k] = source[row, k]


@njit(nogil=True)
def _unpack2(packed: Codes8, out: Codes8) -> None:
    for row in range(packed.shape[0]):
        for k in range(packed.shape[1]):
            byte = packed[row, k]
            for j in range(4):
                out[row, 4 * k + j] = np.uint8((byte >> np.uint8(2 * j)) & np.uint8(3))


@njit(nogil=True)
def _unpack3(packed: Codes8, out: Codes8) -> None:
    for row in range(packed.shape[0]):
        for k in range(packed.shape[1] // 3):
            word = (
                np.uint32(packed[row, 3 * k])
                | (np.uint32(packed[row, 3 * k + 1]) << np.uint32(8))
                | (np.uint32(packed[row, 3 * k + 2]) << np.uint32(16))
            )
            for j in range(8):
                out[row, 8 * k + j] = np.uint8((word >> np.uint32(3 * j)) & np.uint32(7))


@njit(nogil=True)
def _unpack4(packed: Codes8, out: Codes8) -> None:
    for row in range(packed.shape[0]):
        for k in range(packed.shape[1]):
            byte = packed[row, k]
            out[row, 2 * k] = np.uint8(byte & np.uint8(15))
            out[row, 2 * k + 1] = np.uint8(byte >> np.uint8(4))


_PACK = {2: _pack2, 3: _pack3, 4: _pack4, 8: _copy8}
_UNPACK = {2: _unpack2, 3: _unpack3, 4: _unpack4, 8: _copy8}
