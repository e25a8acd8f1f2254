"""Rounds float32 rows to 16 bits in one pass, during lookups.

`widths.from_float32` is the definition and the reference: numpy, several passes, fast enough for loading.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import widths
from cnr_store.runtime.jit import njit
from cnr_store.types import Float32s

_EXPONENT = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN_16 = np.uint32(0x8000)
_ONE = np.uint32(1)


@njit(nogil=True)
def _to_bfloat16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> int:
    """Write the bits of the nearest finite bfloat16; return whether a value was not finite (1) or all were (0)."""
    strange = np.uint32(0)
    for i in range(len(bits)):
        magnitude = bits[i] & _MAGNITUDE
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & _ONE)) >> np.uint32(16)
        rounded = min(rounded, np.uint32(0x7F7F))
        strange |= _ONE if magnitude >= _EXPONENT else np.uint32(0)
        out[i] = np.uint16(rounded | ((bits[i] >> np.uint32(16)) & _SIGN_16))
    return int(strange)


@njit(nogil=True)
def _to_float16(bits: npt.NDArray[np.uint32], values: Float32s, out: npt.NDArray[np.uint16]) -> int:
    """The same for float16; ``values`` is the memory of ``bits``."""
    strange = np.uint32(0)
    for i in range(len(bits)):
        magnitude = bits[i] & _MAGNITUDE
        odd = (magnitude >> np.uint32(13)) & _ONE
        normal = (magnitude - np.uint32(0x38000000) + np.uint32(0x0FFF) + odd) >> np.uint32(13)
        # Below 2**-14 halves are multiples of 2**-24: the product is exact, and rint rounds ties to even.
        small = min(abs(values[i]), np.float32(2.0**-14)) * np.float32(2.0**24)
        rounded = normal if magnitude >= np.uint32(0x38800000) else np.uint32(np.int32(np.rint(small)))
        rounded = np.uint32(0x7BFF) if magnitude >= np.uint32(0x477FF000) else rounded
        strange |= _ONE if magnitude >= _EXPONENT else np.uint32(0)
        out[i] = np.uint16(rounded | ((bits[i] >> np.uint32(16)) & _SIGN_16))
    return int(strange)


def round_float32(values: Float32s, dtype: Literal["float16", "bfloat16"], out: npt.NDArray[Any]) -> None:
    """Write float32 ``values`` as `widths.from_float32` rounds them; both C-contiguous and of one shape."""
    flat, into = values.reshape(-1), out.reshape(-1).view(np.uint16)
    bits = flat.view(np.uint32)
    strange = _to_bfloat16(bits, into) if dtype == "bfloat16" else _to_float16(bits, flat, into)
    if strange:  # NaN payloads are what numpy makes of them
        widths.from_float32(values, dtype, out)
