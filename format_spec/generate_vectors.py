"""Write ``golden/encodings.json``: published values, codes and bits of each encoding, names, canonical JSON, a digest.

    python -m format_spec.generate_vectors

Written once from the numpy references; `tests/format/test_vectors.py` holds the kernels to the committed file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cnr_store.encodings import affine, digest, packing
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import encode_name
from tests.support import encoding_reference as reference
from tests.support.encoders import digest_of_block, float_bits_codes, float_bits_floats

PATH = Path(__file__).parent / "golden" / "encodings.json"
VALUES = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 0.1, -0.3, 1e-45, 3.4028234663852886e38, 65519.0, -1.0000001]
NAMES = ["user", "model.ebc/user:0", "..", "__x", "zarr.json", "größe", "a b%"]
FLOATS = [0.0, -0.0, 1.0, 0.1, 1e-4, 1.5e-5, 9.5e-6, 1.5e-7, 1e15, 9999999999999998.0, 1e16, 1.25e17, 5e-324]

DIGITS: list[tuple[tuple[int, ...], str, list[int]]] = [
    ((), "int16", [0, 0, 0]),
    ((3,), "int16", [-1, 0, 1, 1, 0, -1, 1]),
    ((16, 5), "int16", [-42, -3, 0, 2, 37, 1, 1, -1]),
    ((256, 16), "int16", [-2056, -9, -8, 0, 7, 8, 2039]),
    ((16, 256, 16), "int16", [-32768, 32767, 0, -1, 2040]),
    ((256, 256, 256, 256), "int32", [-(2**31), 2**31 - 1, 0, -1]),
    ((7, 2), "int32", [-7, 6, 0, -1, 1]),
    ((256,) * 8, "int64", [-(2**63), 2**63 - 1, 0, 1]),
]
"""Bases, dtype and values of section 4.2."""


def hexes(array: Any) -> list[str]:
    """Return the bits of each element, most significant digit first."""
    array = np.ascontiguousarray(array).reshape(-1)
    return [f"{int(x):0{2 * array.itemsize}x}" for x in array.view(f"u{array.itemsize}")]


def vectors() -> dict[str, Any]:
    """Return the content of the file."""
    values = np.asarray(VALUES, np.float32)
    small = values[np.abs(values) < 1e4]
    codes = np.rint(small / np.float32(0.25)).astype(np.int32)
    found: dict[str, Any] = {
        "lattice": {"scale": 0.25, "values": hexes(small), "codes": codes.tolist(),
                    "decoded": hexes(np.float32(0.25) * codes.astype(np.float32))},
        "float_bits": [],
        "packed": [],
        "digits": [],
        "affine": [],
        "names": {name: encode_name(name) for name in NAMES},
        "canonical": {"value": {"b": FLOATS, "a": {"ü": "\u0001\n/\"", "Z": None}},
                      "text": canonical_json({"b": FLOATS, "a": {"ü": "\u0001\n/\"", "Z": None}}).decode()},
        "state_digest": {"codes": [[1, -2, 3], [0, 32767, -32768]], "rows": [5, 6], "columns": [0, 3]},
    }  # fmt: skip
    block = np.asarray(found["state_digest"]["codes"], np.int32)
    total = digest_of_block(block, 5, digest.column_multipliers(0, 3), digest.PRESENCE_CODED)
    found["state_digest"]["digest"] = f"{total:016x}"
    for bits in (0, 1, 7, 15, 23):
        encoded = float_bits_codes(values.reshape(1, -1), bits)
        found["float_bits"].append(
            {"dtype": "float32", "mantissa_bits": bits, "values": hexes(values), "codes": encoded.reshape(-1).tolist(),
             "decoded": hexes(float_bits_floats(encoded, bits))}
        )  # fmt: skip
    for bases, dtype, chosen in DIGITS:
        integers = np.asarray(chosen, dtype)
        planes = reference.digit_planes(integers, bases).tobytes().hex()
        found["digits"].append({"dtype": dtype, "bases": list(bases), "values": chosen, "bytes": planes})
    for width in (2, 3, 4, 8):
        unpacked = (np.arange(16, dtype=np.uint8).reshape(1, 16) * 37 % 251).astype(np.uint8) & np.uint8(2**width - 1)
        packed = np.empty((1, packing.packed_width(16, width)), np.uint8)
        packing.pack(unpacked, bits=width, out=packed)
        out = np.empty((1, 16), np.float32)
        scale, zero = np.asarray([0.1], np.float16), np.asarray([-0.7], np.float16)
        affine.decode(packed, scale, zero, bits=width, dim=16, out=out)
        found["packed"].append({"bits": width, "codes": unpacked[0].tolist(), "bytes": packed.tobytes().hex()})
        found["affine"].append(
            {"bits": width, "scale": hexes(scale), "zero_point": hexes(zero), "bytes": packed.tobytes().hex(),
             "decoded": hexes(out)}
        )  # fmt: skip
    return found


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n")
