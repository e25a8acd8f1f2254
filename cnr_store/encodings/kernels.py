"""The row kernels: one pass over memory each, compiled by numba, serial and without the GIL.

These turn values into codes and back, and take state digests; `row_kernels` moves rows of codes. Each kernel has a
numpy twin in ``reference.py`` and an equality test.

Contract of every kernel
    * arrays are C-contiguous and two-dimensional, (rows, columns); a one-dimensional slot is passed as
      ``slot.reshape(-1, 1)``;
    * outputs are preallocated by the caller, nothing is allocated here, and the library's own pool calls
      kernels on row blocks;
    * ``rows`` are global row ids (int64), ``row_base`` is the global id of row 0 of ``mirror`` or ``codes``;
      a row outside the array is reported, never touched;
    * codes are int16 or int32, whichever array is passed; a value that does not fit is reported, never
      wrapped in silence;
    * ``flags`` (uint8) has per row 0 unchanged, 1 changed, 255 (`BAD_ROW`) not encodable. Kernels only OR
      into it, so a table and its slots share one array.

No ``fastmath``: reassociation removes the quantizer (t + MAGIC - MAGIC folds), and ``nnan`` removes the
finite checks. ``error_model="numpy"`` drops the division-by-zero branch, without which the division does not
vectorize.
"""

from __future__ import annotations

import numpy as np

from cnr_store.runtime.fences import AHEAD, prefetch
from cnr_store.runtime.jit import njit
from cnr_store.types import MAX_CODE

BAD_ROW = 255
"""Flag of a row that holds a value the encoding cannot store."""

_compiled = njit(nogil=True, error_model="numpy")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30 = np.uint64(30)
_SHIFT_27 = np.uint64(27)
_SHIFT_31 = np.uint64(31)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_LIMIT = np.float32(MAX_CODE)
_EXPONENT_32 = 0x7F800000
_LINE_BYTES = 64


@_compiled
def are_far_apart(array, rows):  # type: ignore[no-untyped-def]
    """Return whether a loop over ``rows`` (int64 (n,)) of ``array`` should ask for the memory of later ones.

    Touched rows lie far apart, and a core looks few rows ahead. Rows in order that share cache lines come by
    themselves: to ask for each took a third longer for rows of one element.
    """
    n = rows.size
    if n < AHEAD:
        return False
    is_ascending = rows[0] < rows[n // 4] < rows[n // 2] < rows[3 * n // 4] < rows[n - 1]
    is_dense = (rows[n - 1] - rows[0]) * array.strides[0] < _LINE_BYTES * n
    return not (is_ascending and is_dense)


@_compiled
def _splitmix64(x):  # type: ignore[no-untyped-def]
    x = x + _GOLDEN
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return x ^ (x >> _SHIFT_31)


@_compiled
def _row_multiplier(row):  # type: ignore[no-untyped-def]
    return _splitmix64(np.uint64(row)) | _ONE


# ---- lattice -----------------------------------------------------------------------------------------------------


@_compiled
def lattice_encode(values, scale, out, flags):  # type: ignore[no-untyped-def]
    """Write the codes ``rint(values / scale)``; return ``(max_abs_code, first_bad)``.

    Parameters
    ----------
    values : float32 (n, d)
    scale : float32 (cast if it is not)
    out : int16 or int32 (n, d); rows flagged bad are zero
    flags : uint8 (n,); bad rows become ``BAD_ROW``, others are left alone

    Returns
    -------
    max_abs_code : int. If it exceeds 32767, an int16 ``out`` is not valid: call again with int32.
    first_bad : int. Position of the first bad row, -1 if there is none.
    """
    step = np.float32(scale)
    max_code = np.int32(0)
    first_bad = -1
    n, d = values.shape
    for i in range(n):
        bad = np.int32(0)
        row_max = np.int32(0)
        for j in range(d):
            t = np.rint(values[i, j] / step)
            inside = abs(t) <= _LIMIT
            bad |= np.int32(0) if inside else np.int32(1)
            code = np.int32(t) if inside else np.int32(0)
            row_max = max(row_max, np.int32(abs(code)))
            out[i, j] = code
        if bad != 0:
            flags[i] = 255
            if first_bad < 0:
                first_bad = i
            for j in range(d):
                out[i, j] = 0
        else:
            max_code = max(max_code, row_max)
    return np.int64(max_code), np.int64(first_bad)


@njit(nogil=True, error_model="numpy", fastmath={"reassoc"})
def _add_in_any_order(total, summand):  # type: ignore[no-untyped-def]
    return total + summand


@_compiled
def _row_squared_error(values, i, step):  # type: ignore[no-untyped-def]
    error = 0.0
    for j in range(values.shape[1]):
        difference = np.float64(step * np.rint(values[i, j] / step)) - np.float64(values[i, j])
        error = _add_in_any_order(error, difference * difference)
    return error


@_compiled
def lattice_squared_errors(values, scale, out):  # type: ignore[no-untyped-def]
    """Write each row's squared error as of `lattice_encode` and `lattice_decode_in_place`, summed in float64.

    Parameters
    ----------
    values : float32 (n, d), finite and within the code range
    scale : float32 (cast if it is not)
    out : float64 (n,)
    """
    step = np.float32(scale)
    for i in range(values.shape[0]):
        out[i] = _row_squared_error(values, i, step)


@_compiled
def _row_magnitude(bits, i):  # type: ignore[no-untyped-def]
    largest = np.uint32(0)
    for j in range(bits.shape[1]):
        magnitude = np.uint32(bits[i, j] & np.uint32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return largest


@_compiled
def largest_magnitude(bits):  # type: ignore[no-untyped-def]
    """Return the largest bits without sign of float32 (n, d), given as uint32; 0 without any. Of NaN they are most."""
    largest = np.uint32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, _row_magnitude(bits, i))
    return largest


@_compiled
def zeroed_rows(bits, half):  # type: ignore[no-untyped-def]
    """Return how many rows of finite float32 (n, d), given as uint32, are not zero and everywhere below ``half``."""
    count = 0
    for i in range(bits.shape[0]):
        count += 1 if 0 < _row_magnitude(bits, i) < half else 0
    return count


@_compiled
def lattice_squared_error(values, scale):  # type: ignore[no-untyped-def]
    """Return the sum of `lattice_squared_errors`: float64. For searches, which ask for it many times for a table."""
    step = np.float32(scale)
    total = 0.0
    for i in range(values.shape[0]):
        total += _row_squared_error(values, i, step)
    return total


@_compiled
def lattice_delta(values, rows, mirror, row_base, scale, multipliers, out, flags):  # type: ignore[no-untyped-def]
    """Write the difference of each row's new codes to the mirror's; the mirror is only read.

    Parameters
    ----------
    values : float32 (n, d), the touched rows; or their codes, int16 or int32 (n, d), with scale 1
    rows : int64 (n,), their global row ids
    mirror : int16 or int32 (N, d), codes of rows ``row_base .. row_base + N``
    row_base : int
    scale : float32
    multipliers : uint64 (d,), `digest.column_multipliers` of the rectangle's columns
    out : int16 or int32 (n, d), receives new - old; rows flagged bad are zero
    flags : uint8 (n,); ``|= 1`` where any difference is not zero, ``BAD_ROW`` where a value is NaN, Inf or
        beyond MAX_CODE

    Returns
    -------
    max_abs_difference : int. Beyond 32767 an int16 ``out`` is not valid: call again with int32.
    max_abs_code : int. Beyond 32767 an int16 mirror must be widened before the new codes go into it.
    first_bad : int. Position of the first bad row or of a row outside the mirror, else -1.
    digest_change : uint64. What the good rows add to the state digest (modulo 2^64).
    """
    step = np.float32(scale)
    max_difference = np.int32(0)
    max_code = np.int32(0)
    first_bad = -1
    digest = _ZERO
    n, d = values.shape
    size = mirror.shape[0]
    far = are_far_apart(mirror, rows)
    for i in range(n):
        if far and i + AHEAD < n:
            prefetch(mirror, rows[i + AHEAD] - row_base)
        index = rows[i] - row_base
        bad = np.int32(0)
        row_code = np.int32(0)
        row_difference = np.int32(0)
        moved = np.int32(0)
        change = _ZERO
        if index < 0 or index >= size:
            bad = np.int32(1)
        else:
            for j in range(d):
                t = np.rint(values[i, j] / step)
                inside = abs(t) <= _LIMIT
                bad |= np.int32(0) if inside else np.int32(1)
                code = np.int32(t) if inside else np.int32(0)
                difference = np.int32(code - np.int32(mirror[index, j]))
                row_code = max(row_code, np.int32(abs(code)))
                row_difference = max(row_difference, np.int32(abs(difference)))
                moved |= difference
                change += multipliers[j] * np.uint64(np.int64(difference))
                out[i, j] = difference
        if bad != 0:
            flags[i] = 255
            if first_bad < 0:
                first_bad = i
            for j in range(d):
                out[i, j] = 0
        else:
            max_code = max(max_code, row_code)
            max_difference = max(max_difference, row_difference)
            if moved != 0:
                flags[i] |= 1
                digest += change * _row_multiplier(rows[i])
    return np.int64(max_difference), np.int64(max_code), np.int64(first_bad), digest


@_compiled
def lattice_decode(codes, scale, out):  # type: ignore[no-untyped-def]
    """Write ``float32(scale) * float32(code)``, one fp32 multiplication.

    ``out`` (float32, (n, d)) may be the very memory of an int32 ``codes`` (``codes = out.view(np.int32)``):
    element j is read before it is written. `lattice_decode_in_place` does the same at full speed.
    """
    step = np.float32(scale)
    n, d = codes.shape
    for i in range(n):
        for j in range(d):
            out[i, j] = step * np.float32(codes[i, j])


@_compiled
def lattice_decode_in_place(values, scale):  # type: ignore[no-untyped-def]
    """Turn a float32 (n, d) array whose memory holds int32 codes into the values, in place."""
    step = np.float32(scale)
    codes = values.view(np.int32)
    n, d = values.shape
    for i in range(n):
        for j in range(d):
            values[i, j] = step * np.float32(codes[i, j])


# ---- float_bits --------------------------------------------------------------------------------------------------


@_compiled
def _float_code(bits, magnitude_mask, shift, bias, odd, infinity):  # type: ignore[no-untyped-def]
    """Ordered code of one float's bits: k, or -1 - k for a set sign; k half to even, never from finite to Inf."""
    magnitude = bits & magnitude_mask
    k = np.int32((np.int64(magnitude) + bias + ((magnitude >> shift) & odd)) >> shift)
    top = np.int32(infinity >> shift)
    k = np.int32(top - 1) if (k >= top and magnitude < infinity and shift > 0) else k
    return np.int32(k ^ (bits >> np.int32(31)))


@_compiled
def _rounding(shift):  # type: ignore[no-untyped-def]
    """Constants of rounding half to even by ``shift`` bits: (added below the tie, 1 if the odd bit counts)."""
    if shift == 0:
        return np.int32(0), np.int32(0)
    return np.int32((1 << (shift - 1)) - 1), np.int32(1)


@_compiled
def float_bits_encode(bits, shift, out, flags):  # type: ignore[no-untyped-def]
    """Write the ordered integer image of floats given by their bits; return ``(max_fold, first_bad)``.

    Parameters
    ----------
    bits : int32 (n, d), the bits of float32, or int16 (n, d), the bits of float16 or bfloat16
    shift : int, 23 - mantissa_bits for float32; 0 for 16-bit floats, which are exact
    out : int16 or int32 (n, d)
    flags : uint8 (n,); ``BAD_ROW`` for a row with NaN when shift > 0 (shift 0 keeps NaN payloads)

    Returns
    -------
    max_fold : int. The largest of code and -1 - code; beyond 32767 an int16 ``out`` is not valid.
    first_bad : int. Position of the first bad row, -1 if there is none.
    """
    s = np.int32(shift)
    bias, odd = _rounding(shift)
    mask = np.int32(0x7FFFFFFF) if bits.itemsize == 4 else np.int32(0x7FFF)
    infinity = np.int32(_EXPONENT_32)
    max_fold = np.int32(0)
    first_bad = -1
    n, d = bits.shape
    for i in range(n):
        bad = np.int32(0)
        fold = np.int32(0)
        for j in range(d):
            b = np.int32(bits[i, j])
            bad |= np.int32(1) if (b & mask) > infinity else np.int32(0)
            code = _float_code(b, mask, s, bias, odd, infinity)
            fold |= np.int32(code ^ (code >> np.int32(31)))
            out[i, j] = code
        if bad != 0 and shift > 0:
            flags[i] = 255
            if first_bad < 0:
                first_bad = i
            for j in range(d):
                out[i, j] = 0
        else:
            max_fold = max(max_fold, fold)
    return np.int64(max_fold), np.int64(first_bad)


@_compiled
def float_bits_delta(bits, rows, mirror, row_base, shift, multipliers, out, flags):  # type: ignore[no-untyped-def]
    """Write the difference (modulo 2^32) of each row's new codes to the mirror's; the mirror is only read.

    Arguments as in `lattice_delta`, with ``bits`` and ``shift`` as in `float_bits_encode`.

    Returns
    -------
    max_fold_difference : int. The largest of k and -1 - k over the wrapped int32 differences k; beyond 32767
        an int16 ``out`` is not valid.
    max_fold_code : int. The same of the new codes.
    first_bad : int. Position of the first bad row or of a row outside the mirror, else -1.
    digest_change : uint64. What the good rows add to the state digest; of the true difference, not of the
        wrapped one.
    """
    s = np.int32(shift)
    bias, odd = _rounding(shift)
    mask = np.int32(0x7FFFFFFF) if bits.itemsize == 4 else np.int32(0x7FFF)
    infinity = np.int32(_EXPONENT_32)
    max_difference = np.int32(0)
    max_code = np.int32(0)
    first_bad = -1
    digest = _ZERO
    n, d = bits.shape
    size = mirror.shape[0]
    far = are_far_apart(mirror, rows)
    for i in range(n):
        if far and i + AHEAD < n:
            prefetch(mirror, rows[i + AHEAD] - row_base)
        index = rows[i] - row_base
        bad = np.int32(0)
        fold_code = np.int32(0)
        fold_difference = np.int32(0)
        moved = np.int32(0)
        change = _ZERO
        if index < 0 or index >= size:
            bad = np.int32(1)
        else:
            nan = np.int32(0)
            for j in range(d):
                b = np.int32(bits[i, j])
                nan |= np.int32(1) if (b & mask) > infinity else np.int32(0)
                code = _float_code(b, mask, s, bias, odd, infinity)
                exact = np.int64(code) - np.int64(mirror[index, j])
                difference = np.int32(exact)
                fold_code |= np.int32(code ^ (code >> np.int32(31)))
                fold_difference |= np.int32(difference ^ (difference >> np.int32(31)))
                moved |= difference
                change += multipliers[j] * np.uint64(exact)
                out[i, j] = difference
            if shift > 0:
                bad = nan
        if bad != 0:
            flags[i] = 255
            if first_bad < 0:
                first_bad = i
            for j in range(d):
                out[i, j] = 0
        else:
            max_code = max(max_code, fold_code)
            max_difference = max(max_difference, fold_difference)
            if moved != 0:
                flags[i] |= 1
                digest += change * _row_multiplier(rows[i])
    return np.int64(max_difference), np.int64(max_code), np.int64(first_bad), digest


@_compiled
def float_bits_decode(codes, shift, out):  # type: ignore[no-untyped-def]
    """Write the bits of the float of each code; ``out`` is int32 (float32) or int16 (16-bit floats), (n, d).

    ``out`` may be the very memory of ``codes`` when both have the same width.
    """
    s = np.int32(shift)
    sign = np.int32(-0x80000000) if out.itemsize == 4 else np.int32(-0x8000)
    n, d = codes.shape
    for i in range(n):
        for j in range(d):
            code = np.int32(codes[i, j])
            negative = np.int32(code >> np.int32(31))
            out[i, j] = np.int32(np.int32((code ^ negative) << s) | (negative & sign))


# ---- state digest ------------------------------------------------------------------------------------------------


@_compiled
def _row_sum(codes, i, multipliers):  # type: ignore[no-untyped-def]
    total = _ZERO
    for j in range(codes.shape[1]):
        total += multipliers[j] * np.uint64(np.int64(codes[i, j]))
    return total


@_compiled
def _row_digest(codes, i, row, multipliers, constant):  # type: ignore[no-untyped-def]
    """What row i of ``codes`` adds to the digest as the row ``row`` (uint64) of its table."""
    own = _row_sum(codes, i, multipliers) * _row_multiplier(row)
    return own + _splitmix64(row ^ constant) if constant != _ZERO else own


@_compiled
def digest_block(codes, row_start, multipliers, presence):  # type: ignore[no-untyped-def]
    """State digest of consecutive rows ``row_start ..``: sum of P + R * sum of multipliers * codes.

    ``presence`` (uint64) is the constant of P, `digest.PRESENCE_CODED` or `PRESENCE_ESCAPE`; 0 leaves P out
    (a rectangle that does not start at column 0, or a slot).
    """
    constant = np.uint64(presence)
    digest = _ZERO
    for i in range(codes.shape[0]):
        digest += _row_digest(codes, i, np.uint64(row_start + i), multipliers, constant)
    return digest


@_compiled
def lattice_decode_digest(codes, scale, out, row_start, multipliers, presence):  # type: ignore[no-untyped-def]
    """`lattice_decode` and `digest_block` in one pass: write the values to ``out``, return the state digest.

    The pass is bound by the memory that ``out`` is written to, so that the digest costs next to nothing.
    """
    step = np.float32(scale)
    n, d = codes.shape
    constant = np.uint64(presence)
    digest = _ZERO
    for i in range(n):
        digest += _row_digest(codes, i, np.uint64(row_start + i), multipliers, constant)
        for j in range(d):
            out[i, j] = step * np.float32(codes[i, j])
    return digest


@_compiled
def digest_rows(codes, rows, multipliers, presence):  # type: ignore[no-untyped-def]
    """State digest of the rows ``rows`` (int64 (n,), global ids) with codes (n, d); otherwise as `digest_block`."""
    constant = np.uint64(presence)
    digest = _ZERO
    for i in range(codes.shape[0]):
        digest += _row_digest(codes, i, np.uint64(rows[i]), multipliers, constant)
    return digest


@_compiled
def digest_gathered(acc, rows, row_base, multipliers, presence):  # type: ignore[no-untyped-def]
    """State digest of the rows ``rows`` as they stand in ``acc`` (N, d); the caller has checked their range."""
    constant = np.uint64(presence)
    digest = _ZERO
    for i in range(rows.shape[0]):
        digest += _row_digest(acc, rows[i] - row_base, np.uint64(rows[i]), multipliers, constant)
    return digest
