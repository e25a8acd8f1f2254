"""Memory fences and prefetches as numba intrinsics; the order of accesses by threads and processes depends on them.

x86 keeps stores in order without them, ARM does not. On both they keep the compiler from changing the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic

cgutils: Any = numba_cgutils

_READ, _KEEP_IN_ALL_CACHES, _DATA = 0, 3, 1

AHEAD = 16
"""Rows ahead whose memory kernels ask for. 8 took up to half as long again for rows of 64 bytes, 32 twice as long."""


def _intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


def _ordering(builder: Any, context: Any, ordering: str) -> Any:
    builder.fence(ordering)
    return context.get_dummy_value()


@_intrinsic
def fence(typingctx: Any) -> Any:  # noqa: ARG001 - numba passes it
    """Order every load and store before it before every one after it, for all threads and processes (seq_cst)."""
    return types.void(), lambda context, builder, _signature, _arguments: _ordering(builder, context, "seq_cst")


@_intrinsic
def load_fence(typingctx: Any) -> Any:  # noqa: ARG001
    """Order loads before it before loads and stores after it (acquire); x86 needs no instruction for it."""
    return types.void(), lambda context, builder, _signature, _arguments: _ordering(builder, context, "acquire")


@_intrinsic
def store_fence(typingctx: Any) -> Any:  # noqa: ARG001
    """Order loads and stores before it before stores after it (release); x86 needs no instruction for it."""
    return types.void(), lambda context, builder, _signature, _arguments: _ordering(builder, context, "release")


@_intrinsic
def prefetch(typingctx: Any, array: Any, row: Any) -> Any:  # noqa: ARG001
    """Ask for the first cache line of ``array[row]`` (two-dimensional); a row outside the array does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        found = context.make_array(array_type)(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, found.strides, array_type.ndim)[0]
        byte, flag = ir.IntType(8), ir.IntType(32)
        start = builder.bitcast(found.data, byte.as_pointer())
        address = builder.gep(start, [builder.mul(arguments[1], stride)])
        function_type = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [address, *(ir.Constant(flag, value) for value in (_READ, _KEEP_IN_ALL_CACHES, _DATA))])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
