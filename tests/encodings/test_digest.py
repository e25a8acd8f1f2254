from __future__ import annotations

import hashlib

import numpy as np
import pytest

from cnr_store.encodings import digest, kernels
from tests.support import encoding_reference as reference
from tests.support.encoders import digest_of_block


def coded(n: int = 30, d: int = 8, seed: int = 0, dtype: type = np.int16) -> np.ndarray:
    return np.random.default_rng(seed).integers(-300, 300, (n, d)).astype(dtype)


def whole(codes: np.ndarray, row_start: int = 0) -> int:
    return digest_of_block(codes, row_start, digest.column_multipliers(0, codes.shape[1]), digest.PRESENCE_CODED)


def test_splitmix64_has_the_published_first_outputs() -> None:
    # The generator seeded with 0 yields the images of 0, G, 2G.
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % 2**64], np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert digest.splitmix64(states).tolist() == expected
    assert [reference.splitmix64(int(x)) for x in states] == expected


def test_constants_of_the_format() -> None:
    mask = 2**64 - 1
    assert digest.column_multipliers(3, 5).tolist() == [reference.splitmix64((1 << 63) ^ j) | 1 for j in (3, 4)]
    head = int.from_bytes(hashlib.sha256(b"slot:momentum1").digest()[:8], "little")
    expected = [reference.splitmix64((head + j) & mask) | 1 for j in (0, 1)]
    assert digest.slot_multipliers("momentum1", 0, 2).tolist() == expected
    assert int(digest.PRESENCE_CODED) == 3 * 0x9E3779B97F4A7C15 & mask
    assert int(digest.PRESENCE_ESCAPE) == 5 * 0x9E3779B97F4A7C15 & mask


def test_a_known_digest_never_changes() -> None:
    # Pinned: the format. A change here is a new format version.
    codes = np.array([[1, -2, 3], [0, 32767, -32768]], np.int16)
    assert whole(codes, row_start=5) == reference.digest(
        codes, np.array([5, 6]), digest.column_multipliers(0, 3), int(digest.PRESENCE_CODED)
    )
    assert f"{whole(codes, row_start=5):016x}" == "25f5ec7490f64fc6"


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 3), (33, 65)])
@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("presence", [digest.NO_PRESENCE, digest.PRESENCE_CODED, digest.PRESENCE_ESCAPE])
def test_kernels_equal_reference(shape: tuple[int, int], dtype: type, presence: np.uint64) -> None:
    codes = coded(*shape, dtype=dtype)
    multipliers = digest.column_multipliers(2, 2 + shape[1])
    rows = np.arange(100, 100 + shape[0], dtype=np.int64)
    expected = reference.digest(codes, rows, multipliers, int(presence))

    assert digest_of_block(codes, 100, multipliers, presence) == expected
    assert digest.digest_of_rows(codes, rows, multipliers, presence) == expected
    assert int(kernels.digest_gathered(codes, rows, 100, multipliers, presence)) == expected


def test_negative_row_keys_are_twos_complement() -> None:
    rows = np.array([-(2**63), -1, 2**63 - 1], np.int64)
    codes = coded(3, 2)
    multipliers = digest.column_multipliers(0, 2)
    expected = reference.digest(codes, rows, multipliers, int(digest.PRESENCE_CODED))
    assert digest.digest_of_rows(codes, rows, multipliers, digest.PRESENCE_CODED) == expected


def test_one_dimensional_slots_are_one_column() -> None:
    codes = coded(9, 1)
    multipliers = digest.slot_multipliers("momentum1", 0, 1)
    assert digest_of_block(codes[:, 0], 4, multipliers, digest.NO_PRESENCE) == digest_of_block(
        codes, 4, multipliers, digest.NO_PRESENCE
    )


def test_presence_counts_once_per_row_however_columns_are_cut() -> None:
    codes = coded(10, 8)
    left = digest_of_block(codes[:, :3].copy(), 0, digest.column_multipliers(0, 3), digest.presence(0))
    right = digest_of_block(codes[:, 3:].copy(), 0, digest.column_multipliers(3, 8), digest.presence(3))
    assert digest.add_digests(left, right) == whole(codes)


def test_an_absent_row_differs_from_a_zero_row_and_from_an_escape_row() -> None:
    zero = np.zeros((1, 4), np.int32)
    multipliers = digest.column_multipliers(0, 4)
    as_coded = digest_of_block(zero, 0, multipliers, digest.PRESENCE_CODED)
    as_escape = digest_of_block(zero, 0, multipliers, digest.PRESENCE_ESCAPE)
    assert len({0, as_coded, as_escape}) == 3


def test_every_single_bit_flip_changes_it() -> None:
    codes = coded(6, 5)
    original = whole(codes)
    for i in range(6):
        for j in range(5):
            for bit in range(16):
                flipped = codes.copy()
                flipped.view(np.uint16)[i, j] ^= np.uint16(1 << bit)
                assert whole(flipped) != original, (i, j, bit)


def test_swaps_of_rows_columns_and_elements_change_it() -> None:
    codes = coded(12, 6, seed=1)
    original = whole(codes)
    seen = {original}
    for a in range(12):
        for b in range(a):
            order = np.arange(12)
            order[[a, b]] = order[[b, a]]
            seen.add(whole(codes[order]))
    for a in range(6):
        for b in range(a):
            order = np.arange(6)
            order[[a, b]] = order[[b, a]]
            seen.add(whole(codes[:, order].copy()))
    assert len(seen) == 1 + 12 * 11 // 2 + 6 * 5 // 2


def test_random_multi_element_damage_changes_it() -> None:
    rng = np.random.default_rng(2)
    codes = coded(20, 8, seed=3)
    original = whole(codes)
    for _ in range(500):
        damaged = codes.copy()
        count = int(rng.integers(2, 10))
        at = (rng.integers(0, 20, count), rng.integers(0, 8, count))
        damaged[at] += rng.integers(1, 50, count).astype(np.int16) * rng.choice([-1, 1], count).astype(np.int16)
        if (damaged != codes).any():
            assert whole(damaged) != original


def test_shifted_rows_missing_rows_and_moved_slots_change_it() -> None:
    codes = coded(10, 4)
    digests = {whole(codes), whole(codes, row_start=1), whole(codes[:-1]), whole(codes[1:], row_start=1)}
    assert len(digests) == 4
    slot = codes[:, :1].copy()
    of_slots = {
        digest_of_block(slot, 0, digest.slot_multipliers(name, 0, 1), digest.NO_PRESENCE)
        for name in ("exp_avg", "exp_avg_sq")
    }
    as_column = digest_of_block(slot, 0, digest.column_multipliers(0, 1), digest.NO_PRESENCE)
    assert len(of_slots | {as_column}) == 3
