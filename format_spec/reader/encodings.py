"""The arithmetic of the independent reader: stored numbers to integers, codes to floats, and the factors of digests."""

import hashlib

import numpy as np

from format_spec.reader.documents import EXACT_BITS, need

U, GOLDEN = np.uint64, 0x9E3779B97F4A7C15
CARRIER = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def unpack(data, count, dtype):  # [4.2] CNR-SEG-6: planes of digits, the top one first; middle, bases
    chunk, values, start = np.frombuffer(data, np.uint8), np.zeros(count, dtype), 0
    for base in (int(byte) or 256 for byte in chunk[-8:] if byte != 1):
        per_byte = max(most for most in range(1, 9) if base**most <= 256)
        stop = start + -(-count // per_byte)
        need(stop <= len(chunk) - 9, "corrupt_object", "digits that have no room")
        digits = np.arange(256) // base ** np.arange(per_byte)[:, None] % base - base // 2  # of each byte
        values = values * dtype.type(base) + digits.astype(dtype)[:, chunk[start:stop]].reshape(-1)[:count]
        start = stop
    return values + chunk[-9:-8].view(np.int8).astype(dtype)


def is_integer(encoding):
    return encoding["encoding"] in ("lattice", "float_bits")


def decode(codes, encoding, shift, dtype):  # [5.3], [5.4]; the values of other encodings are decoded as they are read
    if encoding["encoding"] == "lattice":
        return narrow(np.float32(encoding["scale"] * 0.5**shift) * codes.astype(np.float32), dtype)
    if encoding["encoding"] == "float_bits":
        size = np.where(codes < 0, -1 - codes, codes) << EXACT_BITS[dtype] - encoding["mantissa_bits"]
        sign, unsigned = (31, np.uint32) if dtype == "float32" else (15, np.uint16)
        return (size | (codes < 0) << sign).astype(unsigned).view(CARRIER[dtype])
    return codes


def affine(packed, scale, zero, array):  # [5.2]: packed (n, bytes of a row), scale and zero (n,)
    bits, (scale, zero) = array["encoding"]["bits"], (x[:, None].astype(np.float32) for x in (scale, zero))
    digits = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    codes = (digits << np.arange(bits, dtype=np.uint8)).sum(axis=2).astype(np.float32)
    return narrow(zero + scale * codes, array["dtype"])


def narrow(values, dtype):  # [5.1]: nearest, ties to even; finite values stay finite
    if dtype == "float16":
        return np.where(np.isfinite(values), np.clip(values, -65504, 65504), values).astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
        size, sign = bits & 0x7FFFFFFF, bits >> 16 & 0x8000
        near = np.minimum((size + 0x7FFF + (size >> 16 & 1)) >> 16, 0x7F7F)
        return (np.where(size < 0x7F800000, near, size >> 16) | sign).astype(np.uint16)
    return values


def exact_codes(floats, dtype):  # [4.5] CNR-DIG-2: of exact rows, the bits of their floats
    wide = floats.astype(np.uint32) << 16 if dtype == "bfloat16" else floats.astype(np.float32)
    return wide.view(np.int32).astype(np.int64)


def mix(x):  # splitmix64
    x = x + U(GOLDEN)
    z = (x ^ x >> U(30)) * U(0xBF58476D1CE4E5B9)
    z = (z ^ z >> U(27)) * U(0x94D049BB133111EB)
    return z ^ z >> U(31)


def row_marks(ids, constant):  # [4.5]: P, for coded rows with 3, for exact rows with 5
    return mix(ids.view(U) ^ U(constant * GOLDEN % 2**64))


def row_factors(ids):  # R
    return mix(ids.view(U)) | U(1)


def column_factors(name, columns):  # M of the weights, S of a slot
    if name == "codes":
        return mix(columns.astype(U) ^ U(1 << 63)) | U(1)
    seed = hashlib.sha256(b"slot:" + name.removeprefix("slots/").encode()).digest()[:8]
    return mix(columns.astype(U) + U(int.from_bytes(seed, "little"))) | U(1)
