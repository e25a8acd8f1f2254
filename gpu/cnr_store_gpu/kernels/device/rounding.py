"""Rounding that the compiled kernels and the interpreter share."""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it leaves no bit after the point, rounded half to even; for magnitudes below 2^22."""


@triton.jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """Return ``rint(x)`` for ``abs(x) < 2^22``; libdevice's own does not run under the interpreter."""
    return (x + MAGIC) - MAGIC
