"""The published vectors are what the library computes; those of the encodings are recomputed from the formulas too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from format_spec import generate_vectors
from tests.support.encoders import lattice_codes, lattice_floats

VECTORS: dict[str, Any] = json.loads(generate_vectors.PATH.read_text())


def floats(hexes: list[str]) -> np.ndarray[Any, Any]:
    return np.asarray([int(text, 16) for text in hexes], np.uint32).view(np.float32)


def test_published_vectors_hold() -> None:
    assert generate_vectors.vectors() == VECTORS


def test_the_state_digest_is_the_one_that_the_specification_prints() -> None:
    assert VECTORS["state_digest"]["digest"] == "25f5ec7490f64fc6"


def test_lattice_vectors_follow_the_formula_and_the_kernels() -> None:
    vector = VECTORS["lattice"]
    values = floats(vector["values"])

    assert lattice_codes(values, vector["scale"]).tolist() == vector["codes"]
    assert generate_vectors.hexes(lattice_floats(np.asarray(vector["codes"], np.int32), 0.25)) == vector["decoded"]


def test_float_bits_vectors_follow_the_formula() -> None:
    for vector in VECTORS["float_bits"]:
        drop = 23 - vector["mantissa_bits"]
        for bits, code, decoded in zip(vector["values"], vector["codes"], vector["decoded"], strict=True):
            pattern = int(bits, 16)
            size = pattern & 0x7FFFFFFF
            low = size & ((1 << drop) - 1)
            k = size >> drop
            k += 2 * low > 1 << drop or (2 * low == 1 << drop and drop > 0 and k & 1)
            k = min(k, 0x7F7FFFFF >> drop)
            assert code == (-1 - k if pattern >> 31 else k)
            assert int(decoded, 16) == (k << drop) | (pattern & 0x80000000)


def test_packed_vectors_are_numpys_bits() -> None:
    for vector in VECTORS["packed"]:
        bits = np.unpackbits(np.asarray(vector["codes"], np.uint8)[:, None], axis=1, bitorder="little")
        packed = np.packbits(bits[:, : vector["bits"]].reshape(-1), bitorder="little")
        assert packed.tobytes().hex() == vector["bytes"]


def test_affine_vectors_are_one_product_and_one_sum() -> None:
    for vector, packed in zip(VECTORS["affine"], VECTORS["packed"], strict=True):
        scale, zero = (
            np.asarray([int(vector[name][0], 16)], np.uint16).view(np.float16).astype(np.float32)
            for name in ("scale", "zero_point")
        )
        decoded = zero + scale * np.asarray(packed["codes"], np.float32)
        assert generate_vectors.hexes(decoded) == vector["decoded"]


def test_the_digest_vector_follows_the_formula() -> None:
    vector = VECTORS["state_digest"]
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x + golden) & mask
        z = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    total = 0
    for row, codes in zip(vector["rows"], vector["codes"], strict=True):
        total += mix(row ^ (3 * golden & mask))
        total += (mix(row) | 1) * sum((mix((1 << 63) ^ j) | 1) * code for j, code in enumerate(codes))

    assert f"{total & mask:016x}" == vector["digest"]
