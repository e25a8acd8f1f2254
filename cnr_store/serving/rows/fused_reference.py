"""What `fused_kernels` computes, in numpy; and the values of fused rows.

Reads like the layout: tests compare the kernels with these functions, and these with the operators that take the rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.serving.rows.fused_kernels import fused_row_bytes

_LANES = 8


def fuse_rows(values: npt.NDArray[np.float32], bits: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Return `values` (n, dim) as fused rows of 8 or 4 `bits`, and the first row that cannot be one (else -1).

    From that row on the bytes are zero.
    """
    out = np.zeros((len(values), fused_row_bytes(values.shape[1], bits)), np.uint8)
    for row, vector in enumerate(values):
        fused = _fuse_8(vector) if bits == 8 else _fuse_4(vector)
        if fused is None:
            return out, row
        out[row] = fused
    return out, -1


def values_of_rows(rows: npt.NDArray[np.uint8], dim: int, bits: int) -> npt.NDArray[np.float32]:
    """Return the float32 values (n, dim) of fused rows: ``bias + scale * code``, rounded twice."""
    if bits == 8:
        codes = rows[:, :dim]
        parameters = np.ascontiguousarray(rows[:, dim:]).view("<f4")
    else:
        packed = rows[:, : (dim + 1) // 2]
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(rows), -1)[:, :dim]
        parameters = np.ascontiguousarray(rows[:, (dim + 1) // 2 :]).view("<f2").astype(np.float32)
    scaled = codes.astype(np.float32) * parameters[:, :1]
    return np.asarray(scaled + parameters[:, 1:], np.float32)


def _fuse_8(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8] | None:
    low, high = _ends(vector)
    with np.errstate(all="ignore"):
        span = np.float32(high - low)
        scale = np.float32(span / np.float32(255))
        if not np.isfinite(vector).all() or not np.isfinite(np.float32(scale * np.float32(255)) + low):
            return None
        codes = np.rint((vector - low) * (np.float32(255) / (span + np.float32(1e-8))))
    return np.concatenate([codes.astype(np.uint8), np.array([scale, low], "<f4").view(np.uint8)])


def _fuse_4(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8] | None:
    low, high = _ends(vector)
    with np.errstate(all="ignore"):
        low = np.float16(low).astype(np.float32)
        span = np.float32(high - low)
        scale = np.float16(np.float32(1) if span == 0 else span / np.float32(15))
        if not np.isfinite(vector).all() or not np.isfinite(low) or not np.isfinite(scale):
            return None
        scale = scale or np.float16(1)
        codes = np.clip(np.rint((vector - low) * (np.float32(1) / scale.astype(np.float32))), 0, 15).astype(np.uint8)
    codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    packed = codes[0::2] | codes[1::2] << np.uint8(4)
    return np.concatenate([packed, np.array([scale, low], "<f2").view(np.uint8)])


def _ends(vector: npt.NDArray[np.float32]) -> tuple[np.float32, np.float32]:
    """Return minimum and maximum; of zeros that tie, the one that a fold over AVX2 lanes keeps."""
    whole = len(vector) // _LANES * _LANES
    lanes = list(vector[:whole].reshape(-1, _LANES)[0]) if whole else []
    for register in vector[:whole].reshape(-1, _LANES)[1:]:
        lanes = [a if a < b else b for a, b in zip(lanes, register, strict=True)]
    low = (lanes + list(vector[whole:]))[0]
    for value in (lanes + list(vector[whole:]))[1:]:
        low = value if value < low else low
    high = vector.max()
    return low, low if high == low else high
