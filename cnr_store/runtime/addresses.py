"""Memory by its address, for compiled kernels that work on the arrays of many tables in one call.

A call per table takes longer than the rows of a small one: Python collects addresses into one int64 array, and a
kernel makes arrays of them, ``carray(float32s_at(address), shape)``. An address is not checked: whoever passes one
knows dtype, contiguity and size of what is there, and keeps it alive until the kernel has returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from cnr_store.runtime.jit import njit


@njit(nogil=True)
def _address(array: Any) -> int:
    return array.ctypes.data  # type: ignore[no-any-return]


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element, of a dtype that kernels take.

    Compiled: numpy takes 2 us to tell it, which is more than most else that a save does for a small table.
    """
    address: int = _address(array)
    return address


def _pointers_to(element: Any) -> Any:
    @intrinsic
    def at(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), generate  # type: ignore[no-untyped-call]

    return at


uint8s_at = _pointers_to(types.uint8)
int16s_at = _pointers_to(types.int16)
int32s_at = _pointers_to(types.int32)
int64s_at = _pointers_to(types.int64)
float32s_at = _pointers_to(types.float32)


@njit(nogil=True)
def _are_equal(addresses: Any, size: int) -> bool:
    first = carray(uint8s_at(addresses[0]), (size,))
    for k in range(1, addresses.size):
        other = carray(uint8s_at(addresses[k]), (size,))
        for i in range(size):
            if other[i] != first[i]:
                return False
    return True


def are_equal(addresses: npt.NDArray[np.int64], size: int) -> bool:
    """Return whether the ``size`` bytes at each of these addresses, at least one, are the same."""
    return bool(_are_equal(addresses, size))
