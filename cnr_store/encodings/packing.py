"""Packs n-bit codes into bytes, least significant bit first, row by row.

Eight codes give n bytes: ``w = sum(q_j << (n * j))``, stored little-endian. A row is padded with zero codes
to a multiple of eight, so each row starts at a byte and one formula serves 2, 3, 4 and 8 bits. The layout
equals ``np.packbits(bitorder="little")`` over the codes' bits; 4 bits put the low nibble first, as torch and
FBGEMM do. No I/O; nothing here looks at what the codes mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
    return padded_dim(dim) // 8 * bits


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

    Notes
    -----
    Blocks for the computation alone, without the GIL. Format: quantization reference, section 4.4.
    """
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
    """
    _UNPACK[bits](packed, out)


def _packer(bits: int) -> Any:
    """Return the loop of `pack` for one width: its bits are a constant, so that it is unrolled."""

    @njit(nogil=True)
    def kernel(codes: Codes8, out: Codes8) -> None:
        for row in range(codes.shape[0]):
            for k in range(codes.shape[1] // 8):
                word = np.uint64(0)
                for j in range(8):
                    word |= np.uint64(codes[row, 8 * k + j]) << np.uint64(bits * j)
                for j in range(bits):
                    out[row, bits * k + j] = np.uint8(word >> np.uint64(8 * j))

    return kernel


def _unpacker(bits: int) -> Any:
    """Return the loop of `unpack` for one width."""

    @njit(nogil=True)
    def kernel(packed: Codes8, out: Codes8) -> None:
        for row in range(out.shape[0]):
            for k in range(out.shape[1] // 8):
                word = np.uint64(0)
                for j in range(bits):
                    word |= np.uint64(packed[row, bits * k + j]) << np.uint64(8 * j)
                for j in range(8):
                    out[row, 8 * k + j] = np.uint8((word >> np.uint64(bits * j)) & np.uint64(2**bits - 1))

    return kernel


_PACK = {bits: _packer(bits) for bits in WIDTHS}
_UNPACK = {bits: _unpacker(bits) for bits in WIDTHS}
