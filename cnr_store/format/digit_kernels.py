"""The kernels of `digits`. One-dimensional arrays; otherwise their contract is that of `cnr_store.encodings.kernels`.

A block of a plane stays in the L1 cache while its digits are added. Arrays are sliced before each loop, because an
index that may be negative prevents vectorization.
"""

from __future__ import annotations

import numpy as np

from cnr_store.runtime.jit import njit

_compiled = njit(nogil=True, error_model="numpy")

BLOCK = 8192


@_compiled
def _first_digits(values, offset, weight, weight_shift, over, over_shift, base, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        number = ((np.uint64(values[i]) + offset) * weight) >> weight_shift
        out[i] = np.uint8(number - base * ((number * over) >> over_shift))


@_compiled
def _more_digits(values, offset, weight, weight_shift, over, over_shift, base, power, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        number = ((np.uint64(values[i]) + offset) * weight) >> weight_shift
        out[i] = np.uint8(out[i] + power * np.uint8(number - base * ((number * over) >> over_shift)))


@_compiled
def pack_plane(values, offset, weight, weight_shift, over, over_shift, base, per, out):  # type: ignore[no-untyped-def]
    """Write ``((values + offset) // w) % base`` to ``out`` (m,) uint8, ``per`` digits a byte, planar; values (n,).

    ``weight`` and its shift are the reciprocal of w, ``over`` and its shift that of ``base``; uint64, as ``offset`` is.
    Digits beyond the last value are 0.
    """
    n, m = values.shape[0], out.shape[0]
    for start in range(0, m, BLOCK):
        stop = min(start + BLOCK, m)
        block = out[start:stop]
        block[:] = 0
        power = np.uint8(1)
        for k in range(per):
            piece = values[min(k * m + start, n) : min(k * m + stop, n)]
            if k == 0:
                _first_digits(piece, offset, weight, weight_shift, over, over_shift, base, block)
            else:
                _more_digits(piece, offset, weight, weight_shift, over, over_shift, base, power, block)
            power = np.uint8(power * np.uint8(base))


@_compiled
def _put_digits(plane, low, high, base, half, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        byte = np.uint32(plane[i])
        digit = np.int32((byte * low) >> np.uint32(16)) - base * np.int32((byte * high) >> np.uint32(16))
        out[i] = digit - half


@_compiled
def _add_digits(plane, low, high, base, half, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        byte = np.uint32(plane[i])
        digit = np.int32((byte * low) >> np.uint32(16)) - base * np.int32((byte * high) >> np.uint32(16))
        out[i] = out[i] * base + (digit - half)


@_compiled
def _put_bits(plane, shift, mask, half, out):  # type: ignore[no-untyped-def]
    within = shift & np.uint8(7)  # no effect on the value; with it the compiler uses 8-bit instead of 64-bit shifts
    for i in range(out.shape[0]):
        out[i] = np.int16((plane[i] >> within) & mask) - half


@_compiled
def _add_bits(plane, shift, mask, base, half, out):  # type: ignore[no-untyped-def]
    within = shift & np.uint8(7)
    for i in range(out.shape[0]):
        out[i] = out[i] * base + (np.int16((plane[i] >> within) & mask) - half)


@_compiled
def unpack_planes(planes, bases, per, count, start, out):  # type: ignore[no-untyped-def]
    """Write the values [start, start + n) of ``count`` to ``out`` (n,), modulo its width.

    ``bases``, ``per`` (k,) int64. ``planes`` (m,) uint8, which the caller has checked against ``count``. A byte
    b holds the digit ``b // base^k % base``: shifted out where the base is a power of two, four times as fast, else
    divided by reciprocals of 16 bits, which are exact for bytes.
    """
    n = out.shape[0]
    if bases.shape[0] == 0:
        out[:] = 0
    for low in range(0, n, BLOCK):
        block = out[low : min(low + BLOCK, n)]
        begin = 0
        for j in range(bases.shape[0]):
            size = (count + per[j] - 1) // per[j]
            plane = planes[begin : begin + size]
            begin += size
            base, done = np.int32(bases[j]), 0
            while done < block.shape[0]:
                digit = (start + low + done) // size
                first = start + low + done - digit * size
                length = min(size - first, block.shape[0] - done)
                power, bits = 1, 0
                for _ in range(digit):
                    power *= bases[j]
                while 1 << bits < power:
                    bits += 1
                divide = np.uint32((65536 + power - 1) // power)
                over = np.uint32((65536 + power * bases[j] - 1) // (power * bases[j]))
                piece = plane[first : first + length]
                shift, mask, half = np.uint8(bits), np.uint8(base - 1), np.int16(base // 2)
                if base & (base - 1) == 0 and j == 0:
                    _put_bits(piece, shift, mask, half, block[done : done + length])
                elif base & (base - 1) == 0:
                    _add_bits(piece, shift, mask, out.dtype.type(base), half, block[done : done + length])
                elif j == 0:
                    _put_digits(piece, divide, over, base, base // np.int32(2), block[done : done + length])
                else:
                    _add_digits(piece, divide, over, base, base // np.int32(2), block[done : done + length])
                done += length
