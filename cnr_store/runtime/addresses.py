"""Memory by its address, for compiled kernels that work on the arrays of many tables in one call.

A call per table takes longer than the rows of a small one: Python collects addresses into one int64 array, and a
kernel makes arrays of them, ``carray(float32s_at(address), shape)``. An address is not checked: whoever passes one
knows dtype, contiguity and size of what is there, and keeps it alive until the kernel has returned.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from numba import types
from numba.extending import intrinsic


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _pointers_to(element: Any) -> Any:
    @intrinsic
    def at(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), generate  # type: ignore[no-untyped-call]

    return at


int16s_at = _pointers_to(types.int16)
int32s_at = _pointers_to(types.int32)
int64s_at = _pointers_to(types.int64)
float32s_at = _pointers_to(types.float32)
