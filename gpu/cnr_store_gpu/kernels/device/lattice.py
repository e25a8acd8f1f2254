"""Lattice codes of rows."""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it leaves no bit after the point, rounded half to even; for magnitudes below 2^22."""

FIRST_UNSTORABLE = tl.constexpr(32767.5)
"""The smallest quotient that rounds to more than 32767 (a tie goes to the even neighbour)."""


@triton.jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """Return ``rint(x)`` for ``abs(x) < 2^22``; libdevice's own does not run under the interpreter."""
    return (x + MAGIC) - MAGIC


@triton.jit(do_not_specialize=["num_coded", "scale"], do_not_specialize_on_alignment=["flag"])
def lattice_codes(
    source: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    num_coded: tl.int64,
    scale: tl.float32,
    dim: tl.constexpr,
    source_stride: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """Write ``rint(source / scale)``, and OR 1 into ``flag`` if an element has no code."""
    at = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_dim + tl.arange(0, block_dim)
    inside = at < num_coded
    is_coded = inside[:, None] & (column < dim)[None, :]
    x = tl.load(source + at[:, None] * source_stride + column[None, :], mask=is_coded, other=0.0).to(tl.float32)
    t = tl.div_rn(x, tl.full((block_rows, block_dim), scale, tl.float32))
    is_storable = tl.abs(t) < FIRST_UNSTORABLE
    code = round_half_even(tl.where(is_storable, t, 0.0)).to(tl.int16)
    wrong = 1 - tl.min(tl.min(is_storable.to(tl.int32), axis=1), axis=0)
    tl.store(out + at[:, None] * dim + column[None, :], code, mask=is_coded)
    tl.atomic_or(flag, wrong, mask=wrong != 0, sem="relaxed")
