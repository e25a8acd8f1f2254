"""Lattice codes of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from cnr_store_gpu.kernels.device.rounding import round_half_even

LAST_STORABLE = tl.constexpr(2097152.5)
"""The largest quotient that rounds to a code of at most 2^21 (a tie goes to the even neighbour)."""


@triton.jit(do_not_specialize=["num_coded", "scale"], do_not_specialize_on_alignment=["flag"])
def lattice_codes(
    source: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    num_coded: tl.int64,
    scale: tl.float32,
    dim: tl.constexpr,
    source_stride: tl.constexpr,
    narrow: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """Write ``rint(source / scale)`` and OR what went wrong into ``flag``."""
    at = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_dim + tl.arange(0, block_dim)
    inside = at < num_coded
    is_coded = inside[:, None] & (column < dim)[None, :]
    x = tl.load(source + at[:, None] * source_stride + column[None, :], mask=is_coded, other=0.0).to(tl.float32)
    t = tl.div_rn(x, tl.full((block_rows, block_dim), scale, tl.float32))
    is_storable = tl.abs(t) <= LAST_STORABLE
    code = round_half_even(tl.where(is_storable, t, 0.0)).to(tl.int32)
    wrong = 1 - tl.min(tl.min(is_storable.to(tl.int32), axis=1), axis=0)
    if narrow:
        is_wide = tl.abs(code) > 32767
        code = tl.where(is_wide, 0, code)
        wrong += 2 * tl.max(tl.max(is_wide.to(tl.int32), axis=1), axis=0)
    tl.store(out + at[:, None] * dim + column[None, :], code.to(out.dtype.element_ty), mask=is_coded)
    tl.atomic_or(flag, wrong, mask=wrong != 0, sem="relaxed")
