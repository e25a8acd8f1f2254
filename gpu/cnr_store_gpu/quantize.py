"""Codes made where the rows are, so that fewer bytes leave the device: 2 per element for lattice codes instead of 4.

Definitions are those of the store's encodings, bit for bit:
    * lattice: ``rint(x / scale)``, one fp32 division, half to even; only codes that int16 holds. 2 bytes per element.
    * affine: a scale and a zero_point per row, codes from the *stored* parameters, ``rint((x - zero_point) * (1 /
      scale))``, packed least significant bit first. ``bits / 8`` bytes per element (0.5 at 4 bits), rows padded to
      eight codes, and 4 bytes per row (8 with float32 parameters).

What cannot be coded so (NaN, Inf, too large) raises a flag on the device that is looked at behind the copy; the codes
of such an array are worth nothing, and its floats go instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from cnr_store.errors import BadDtype, BadInput
from cnr_store.types import MAX_CODE, AffineBits, ParamDtype
from cnr_store_gpu import kernels

_WINDOW_ELEMENTS = 1 << 22
"""Elements that the torch reference codes at a time: its temporaries stay near 100 MB, however large the save."""

_PARAMS = {"float16": torch.float16, "float32": torch.float32}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LatticeCodes:
    """Stage a table's rows as int16 lattice codes.

    Attributes
    ----------
    scale
        The table's step, as its schema has it.
    tensor
        Which of the requested tensors is coded; the others stay floats.
    """

    scale: float
    tensor: str = "weight"

    def __post_init__(self) -> None:
        smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / (2 * MAX_CODE)
        if not smallest <= self.scale <= largest:
            raise BadInput(
                f"a lattice scale must be between {smallest:.3g} and {largest:.3g}, found {self.scale!r}; "
                "take it from the table's schema",
                expected=[smallest, largest],
                found=self.scale,
            )


@dataclass(frozen=True, slots=True)
class AffineCodes:
    """Stage a table's rows as packed codes of ``bits`` with a scale and a zero_point per row.

    Attributes
    ----------
    bits
        2, 3, 4 or 8.
    search
        How parameters are found: ``grid`` (ranges and least squares; its error is within 1 % of the CPU's) or
        ``minmax`` (the row's own range; the CPU's codes bit for bit).
    param_dtype
        dtype of scale and zero_point.
    tensor
        Which of the requested tensors is coded.
    """

    bits: AffineBits
    search: Literal["grid", "minmax"] = "grid"
    param_dtype: ParamDtype = "float16"
    tensor: str = "weight"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, (2, 3, 4, 8)),
            ("search", self.search, ("grid", "minmax")),
            ("param_dtype", self.param_dtype, tuple(_PARAMS)),
        ):
            if value not in allowed:
                raise BadInput(
                    f"affine codes are made with {name} one of {allowed}, found {value!r}",
                    expected=allowed,
                    found=value,
                )


Quantizer = LatticeCodes | AffineCodes


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Affine rows: codes uint8 ``(n, packed_width)``, scale and zero_point ``(n,)``; x = zero_point + scale * code."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bits: int
    dim: int


@dataclass(frozen=True, slots=True)
class Part:
    """One array that coding writes: its name, row shape and dtype."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype


def parts_of(quantizer: Quantizer, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the arrays that code rows of ``row_shape``, per row; pure."""
    if isinstance(quantizer, LatticeCodes):
        return (Part("codes", row_shape, torch.int16),)
    params = _PARAMS[quantizer.param_dtype]
    width = kernels.packed_width(math.prod(row_shape), quantizer.bits)
    return (Part("codes", (width,), torch.uint8), Part("scale", (), params), Part("zero_point", (), params))


def check_codable(table: str, quantizer: Quantizer, tensor: torch.Tensor) -> None:
    """Raise BadDtype or BadInput unless the rows of a tensor can be coded at all."""
    if tensor.dtype not in _FLOATS:
        raise BadDtype(
            f"codes of table {table!r} are made from float32, float16 or bfloat16, but {quantizer.tensor!r} is "
            f"{tensor.dtype}",
            table=table,
            found=str(tensor.dtype),
        )
    if isinstance(quantizer, AffineCodes) and (tensor.ndim != 2 or tensor.shape[1] == 0):
        raise BadInput(
            f"affine codes of table {table!r} need rows of at least one element, found shape {tuple(tensor.shape)}",
            table=table,
            found=tuple(tensor.shape),
        )


@torch.no_grad()
def encode(quantizer: Quantizer, rows: torch.Tensor, parts: dict[str, torch.Tensor], flag: torch.Tensor) -> None:
    """Write the codes of rows, on their device; queues work there and waits for nothing.

    Parameters
    ----------
    rows
        Contiguous ``(n, ...)``, float32, float16 or bfloat16 (widened exactly). Read only.
    parts
        By name, contiguous ``(n, *row_shape)`` of `parts_of`; overwritten.
    flag
        int32 ``(1,)``: is no longer 0 if an element cannot be coded, else stays.
    """
    n = rows.shape[0]
    if rows.numel() == 0:
        return
    matrix = rows.reshape(n, -1)
    span = n if kernels.uses_triton(rows) else max(1, _WINDOW_ELEMENTS // matrix.shape[1])
    for start in range(0, n, span):
        window = matrix[start : start + span]
        out = {name: part[start : start + span] for name, part in parts.items()}
        if isinstance(quantizer, LatticeCodes):
            kernels.lattice_quantize(window, quantizer.scale, out["codes"].view(window.shape), flag)
        else:
            kernels.affine_quantize(
                window,
                bits=quantizer.bits,
                search=quantizer.search,
                out=out["codes"],
                out_scale=out["scale"],
                out_zero_point=out["zero_point"],
                flag=flag,
            )
