"""What the kernels of serving compute, in numpy: tests compare them with these functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import widths
from cnr_store.segment.codes import ArraySpec
from cnr_store.serving.rows.fused_kernels import fused_row_bytes
from cnr_store.serving.rows.gather import ABSENT_PLACE, Places
from cnr_store.serving.update.adding import LARGEST_CODE
from cnr_store.types import Lattice
from tests.support.encoding_reference import float_codes, float_patterns

Array = npt.NDArray[Any]

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


def add_reference(spec: ArraySpec, values: Array, differences: Array) -> Array | None:
    """`add_to_values` in numpy, into a new array; None where a code leaves its range."""
    moved = differences.astype(np.int64)
    if isinstance(spec.encoding, Lattice):
        codes = np.rint(values / spec.scale).astype(np.int64) + moved
        if codes.size and (np.abs(codes).max() > LARGEST_CODE or np.abs(moved).max() > LARGEST_CODE):
            return None
        return np.float32(spec.scale) * codes.astype(np.float32)
    width = 32 if values.itemsize == 4 else 16
    bits = widths.as_bits(np.ascontiguousarray(values), spec.dtype)
    known, _ = float_codes(bits, spec.bit_shift)
    codes = known.astype(np.int64) + moved
    if spec.memory_dtype == np.int32:
        codes = codes.astype(np.int32)
    elif codes.size and not -32768 <= codes.min() <= codes.max() <= 32767:
        return None
    return np.ascontiguousarray(float_patterns(codes.astype(np.int32), spec.bit_shift, width)).view(values.dtype)


def gather_reference(held: Array, overlay: Array, fill: Array, places: Places, out: Array) -> int:
    """`gather` in numpy, on rows rather than words."""
    of_held, nowhere, of_overlay = places >= 0, places == ABSENT_PLACE, places < ABSENT_PLACE
    out[of_held] = held[places[of_held]]
    out[nowhere] = fill
    out[of_overlay] = overlay[-2 - places[of_overlay]]
    return int(nowhere.sum())
