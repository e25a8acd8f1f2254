"""Per-row n-bit codes: parameters by min-max or by a grid with least squares, codes from the stored parameters.

A program holds whole rows, so each element is read once however many candidates are tried. Sums run in another order
than on the CPU, so searched parameters may differ in their last digits; minima, maxima and the codes that given
parameters define may not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cnr_store_gpu.kernels.device.rounding import round_half_even

LARGEST_HALF = tl.constexpr(65504.0)
SMALLEST_HALF = tl.constexpr(2.0**-24)
LARGEST_SINGLE = tl.constexpr(2.0**126)
NOT_INVERTIBLE = tl.constexpr(2.0**-128)
"""From here down 1 / x overflows: such a width or scale counts as zero."""


@triton.jit
def _inverse(x: tl.tensor) -> tl.tensor:
    is_usable = x > NOT_INVERTIBLE
    divisor = tl.where(is_usable, x, 1.0)
    return tl.where(is_usable, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), divisor), 0.0)


@triton.jit
def _quotients(x: tl.tensor, zero_point: tl.tensor, inverse: tl.tensor, max_code: tl.constexpr) -> tl.tensor:
    # Clamped before rounding, which is right below 2^22 only.
    t = (x - zero_point) * inverse
    return t, tl.clamp(round_half_even(tl.clamp(t, -1.0, max_code + 1.0)), 0.0, max_code)


@triton.jit
def _search(
    u: tl.tensor,
    is_column: tl.tensor,
    candidates: tl.tensor,
    num_candidates: tl.tensor,
    relax: tl.tensor,
    dim: tl.constexpr,
    max_code: tl.constexpr,
    fit_steps: tl.constexpr,
    block_rows: tl.constexpr,
) -> tl.tensor:
    """Return scale and zero_point of normalised rows ``u``, in units of their width."""
    best_error = tl.full((block_rows,), float("inf"), tl.float32)
    best_scale = tl.zeros((block_rows,), tl.float32)
    best_zero = tl.zeros((block_rows,), tl.float32)
    for c in range(num_candidates):
        low = tl.load(candidates + 3 * c)
        scale = tl.load(candidates + 3 * c + 1)
        inverse = tl.load(candidates + 3 * c + 2)
        t, q = _quotients(u, low, inverse, max_code)
        error = tl.where(is_column, t - q, 0.0)
        error = tl.sum(error * error, axis=1) * (scale * scale)
        is_better = error < best_error
        best_error = tl.where(is_better, error, best_error)
        best_scale = tl.where(is_better, scale, best_scale)
        best_zero = tl.where(is_better, low, best_zero)
    size = tl.full((block_rows,), dim, tl.float32)
    mean_u = tl.div_rn(tl.sum(u, axis=1), size)
    for _ in range(fit_steps):
        _, q = _quotients(u, best_zero[:, None], _inverse(best_scale)[:, None], max_code)
        q = tl.where(is_column, q, 0.0)
        sum_q = tl.sum(q, axis=1)
        sum_qq = tl.sum(q * q, axis=1)
        sum_qu = tl.sum(q * (u - mean_u[:, None]), axis=1)
        mean_q = tl.div_rn(sum_q, size)
        variance = sum_qq - sum_q * mean_q
        # All codes equal: no line through them. The bound covers what rounding leaves of a zero variance.
        has_line = variance > 1e-6 * sum_qq
        fitted = tl.where(has_line, tl.div_rn(sum_qu, tl.where(has_line, variance, 1.0)), 0.0)
        moved = best_scale + relax * (fitted - best_scale)
        is_moved = has_line & (moved > 1e-6)
        offset = mean_u - fitted * mean_q
        best_scale = tl.where(is_moved, moved, best_scale)
        best_zero = tl.where(is_moved, best_zero + relax * (offset - best_zero), best_zero)
    return best_scale, best_zero


@triton.jit(
    do_not_specialize=["num_coded", "table_rows", "num_candidates", "relax"],
    do_not_specialize_on_alignment=["rows", "candidates", "out_scale", "out_zero_point", "flag"],
)
def affine_codes(
    source: tl.tensor,
    rows: tl.tensor,
    candidates: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    out_zero_point: tl.tensor,
    flag: tl.tensor,
    num_coded: tl.int64,
    table_rows: tl.int64,
    num_candidates: tl.int32,
    relax: tl.float32,
    dim: tl.constexpr,
    source_stride: tl.constexpr,
    bits: tl.constexpr,
    fit_steps: tl.constexpr,
    search: tl.constexpr,
    half: tl.constexpr,
    gather: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """Write packed codes, scale and zero_point of ``source[rows[i]]`` (or of row i).

    ``out`` is uint8 for 3 and 8 bits, int16 for 2, int32 for 4: eight codes at once where they make one integer.
    """
    max_code: tl.constexpr = 2.0**bits - 1.0
    at = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_dim)
    inside = at < num_coded
    row = at
    if gather:
        row = tl.load(rows + at, mask=inside, other=-1)
    is_read = ((row >= 0) & (row < table_rows) & inside)[:, None] & (column < dim)[None, :]
    x = tl.load(source + row[:, None] * source_stride + column[None, :], mask=is_read, other=0.0).to(tl.float32)
    is_codable = tl.abs(x) <= (LARGEST_HALF if half else LARGEST_SINGLE)
    wrong = 1 - tl.min(tl.min(is_codable.to(tl.int32), axis=1), axis=0)
    tl.atomic_or(flag, wrong, mask=wrong != 0, sem="relaxed")
    x = tl.where(is_codable, x, 0.0)

    is_column = tl.broadcast_to((column < dim)[None, :], (block_rows, block_dim))
    low = tl.min(tl.where(is_column, x, float("inf")), axis=1)
    width = tl.max(tl.where(is_column, x, float("-inf")), axis=1) - low
    if search:
        u = tl.where(is_column, (x - low[:, None]) * _inverse(width)[:, None], 0.0)
        scale, zero_point = _search(
            u, is_column, candidates, num_candidates, relax, dim, max_code, fit_steps, block_rows
        )
        scale = width * scale
        zero_point = low + width * zero_point
    else:
        scale = tl.div_rn(width, tl.full((block_rows,), max_code, tl.float32))
        zero_point = low

    if half:
        scale = tl.where(scale > 0.0, tl.clamp(scale, SMALLEST_HALF, LARGEST_HALF), 0.0).to(tl.float16).to(tl.float32)
        zero_point = tl.clamp(zero_point, -LARGEST_HALF, LARGEST_HALF).to(tl.float16).to(tl.float32)
    else:
        scale = tl.where(scale > NOT_INVERTIBLE, scale, 0.0)
    # The sign of a zero minimum depends on the order in which zeros are met.
    zero_point = tl.where(zero_point == 0.0, 0.0, zero_point)
    tl.store(out_scale + at, scale.to(out_scale.dtype.element_ty), mask=inside)
    tl.store(out_zero_point + at, zero_point.to(out_zero_point.dtype.element_ty), mask=inside)

    _, q = _quotients(x, zero_point[:, None], _inverse(scale)[:, None], max_code)
    code = tl.where(is_column, q, 0.0).to(tl.int32)
    groups: tl.constexpr = (dim + 7) // 8
    if bits == 8:
        is_byte = inside[:, None] & (column < 8 * groups)[None, :]
        tl.store(out + at[:, None] * (8 * groups) + column[None, :], code.to(tl.uint8), mask=is_byte)
    else:
        shift = (tl.arange(0, 8) * bits)[None, None, :]
        word = tl.sum(tl.reshape(code, (block_rows, block_dim // 8, 8)) << shift, axis=2)
        group = tl.arange(0, block_dim // 8)
        is_group = inside[:, None] & (group < groups)[None, :]
        place = at[:, None] * groups + group[None, :]
        if bits == 3:
            for byte in tl.static_range(3):
                tl.store(out + 3 * place + byte, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=is_group)
        else:
            tl.store(out + place, word.to(out.dtype.element_ty), mask=is_group)
