"""The `lattice` encoding: one step (scale) for a table and generation, so a code depends on the value alone.

Definition (normative)
    * encode: ``q = rint(x / scale)``; one fp32 division by the float32 scale, rounded half to even; ``|q| <=
      MAX_CODE`` (2^21);
    * decode: ``float32(scale) * float32(q)``; one fp32 multiplication;
    * float16 and bfloat16 tables: widened exactly to fp32 first; after decoding rounded to the nearest, half
      to even, saturating at the largest finite number (`widths.from_float32`).

Laws: the error is at most scale / 2 plus fp32 rounding, whatever the history; encoding a decoded row gives
the same codes; differences of codes add. The sign of zero is lost (-0.0 decodes to +0.0); NaN, Inf and codes
beyond MAX_CODE are refused.

The kernels (`kernels.lattice_*`) do both on preallocated blocks.
"""

from __future__ import annotations

import numpy as np

from cnr_store.errors import BadInput
from cnr_store.types import MAX_CODE

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Below this a scale is subnormal, and devices that flush subnormals would decode something else."""

LARGEST_SCALE = float(np.finfo(np.float32).max) / (2 * MAX_CODE)
"""Up to this every code decodes to a finite float32."""


def check_scale(scale: float) -> np.float32:
    """Return the scale as float32.

    Raises
    ------
    BadInput
        If it is not finite, not positive, or so small or large that codes do not decode exactly.
    """
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise BadInput(
            f"a lattice scale must be between {SMALLEST_SCALE:.3g} and {LARGEST_SCALE:.3g}, found {scale!r}",
            expected=[SMALLEST_SCALE, LARGEST_SCALE],
            found=scale,
        )
    return np.float32(scale)
