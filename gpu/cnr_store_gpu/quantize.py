"""Codes made on the device of the rows, so that fewer bytes are copied to the host: 2 per element instead of 4.

The codes are those of the store's lattice encoding, bit for bit: ``rint(x / scale)``, one fp32 division, half to even;
only codes that int16 holds. What cannot be coded (NaN, Inf, too large) sets a flag on the device, which is read after
the copy. The codes of such an array are not valid, and its floats are copied instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cnr_store.errors import BadDtype, BadInput
from cnr_store.types import MAX_CODE
from cnr_store_gpu import kernels

_WINDOW_ELEMENTS = 1 << 22
"""Elements that the torch reference codes at a time: its temporaries stay near 100 MB, however large the save."""

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


def check_codable(table: str, quantizer: LatticeCodes, tensor: torch.Tensor) -> None:
    """Raise BadDtype unless the rows of a tensor can be coded at all."""
    if tensor.dtype not in _FLOATS:
        raise BadDtype(
            f"codes of table {table!r} are made from float32, float16 or bfloat16, but {quantizer.tensor!r} is "
            f"{tensor.dtype}",
            table=table,
            found=str(tensor.dtype),
        )


@torch.no_grad()
def encode(quantizer: LatticeCodes, rows: torch.Tensor, codes: torch.Tensor, flag: torch.Tensor) -> None:
    """Write the codes of rows, on their device; queues work there and waits for nothing.

    Parameters
    ----------
    rows
        Contiguous ``(n, ...)``, float32, float16 or bfloat16 (widened exactly). Read only.
    codes
        int16, contiguous, of the shape of ``rows``; overwritten.
    flag
        int32 ``(1,)``: is no longer 0 if an element cannot be coded, else stays.
    """
    n = rows.shape[0]
    if rows.numel() == 0:
        return
    matrix, out = rows.reshape(n, -1), codes.view(n, -1)
    span = n if kernels.uses_triton(rows) else max(1, _WINDOW_ELEMENTS // matrix.shape[1])
    for start in range(0, n, span):
        kernels.lattice_quantize(matrix[start : start + span], quantizer.scale, out[start : start + span], flag)
