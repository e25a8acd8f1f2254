from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cnr_store.encodings import affine, affine_kernels, packing
from cnr_store.errors import BadInput
from cnr_store.types import Affine
from tests.support import affine_reference
from tests.support.ties import affine_ties

BITS = packing.WIDTHS
SEARCHES: list[dict[str, Any]] = [
    {"search": "grid"},
    {"search": "minmax"},
    {"search": "greedy", "num_bins": 25, "ratio": 0.5},
]


class Encoded:
    def __init__(self, values: np.ndarray, bits: int, param_dtype: str = "float16", **search: Any) -> None:
        num_rows, dim = values.shape
        self.codes = np.full((num_rows, packing.packed_width(dim, bits)), 0xA5, np.uint8)
        self.scale = np.full(num_rows, 7, param_dtype)
        self.zero_point = np.full(num_rows, 7, param_dtype)
        self.bad_row = affine.encode(
            values,
            Affine(bits, param_dtype=param_dtype, **search),  # type: ignore[arg-type]
            out_codes=self.codes,
            out_scale=self.scale,
            out_zero_point=self.zero_point,
        )
        self.decoded = np.full_like(values, np.nan)
        affine.decode(self.codes, self.scale, self.zero_point, bits=bits, dim=dim, out=self.decoded)
        self.row_errors = np.square(self.decoded.astype(np.float64) - values).sum(axis=1)

    def parts(self) -> list[bytes]:
        return [self.codes.tobytes(), self.scale.tobytes(), self.zero_point.tobytes()]


def rows_of(kind: str, num_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "laplace":
        return (0.1 * rng.laplace(size=(num_rows, dim))).astype(np.float32)
    rows = 0.1 * rng.standard_normal((num_rows, dim))
    if kind == "outlier":
        rows = np.where(rng.random(rows.shape) < 0.02, rows * rng.uniform(4, 10, rows.shape), rows)
    return rows.astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 3, 17, 64, 130])
def test_codes_from_given_parameters_equal_the_reference(bits: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    values = rows_of("outlier", 300, dim)
    scale = rng.lognormal(-3, 2, 300).astype(np.float32)
    scale[:6] = [0.0, 2.0**-128, 2.0**-127, 1e-45, 2.0**-140, 3e38]
    zero_point = rng.normal(0, 0.2, 300).astype(np.float32)
    codes = np.empty(values.shape, np.uint8)

    affine.quantize(values, scale, zero_point, bits=bits, out=codes)

    np.testing.assert_array_equal(codes, affine_reference.codes_from_params(values, scale, zero_point, bits))


def test_ties_round_to_the_even_code() -> None:
    codes = np.empty((1, 6), np.uint8)
    values = np.array([[0.5, 1.5, 2.5, 13.5, 14.5, 15.5]], np.float32)
    affine.quantize(values, np.ones(1, np.float32), np.zeros(1, np.float32), bits=4, out=codes)
    assert codes.tolist() == [[0, 2, 2, 14, 14, 15]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_every_tie_between_codes_goes_to_the_even_one(bits: int, param_dtype: str) -> None:
    values, expected = affine_ties(bits)
    encoded = Encoded(values, bits, param_dtype, search="minmax")
    unpacked = np.empty((len(values), packing.padded_dim(values.shape[1])), np.uint8)
    packing.unpack(encoded.codes, bits=bits, out=unpacked)
    scale, zero_point = encoded.scale.astype(np.float32), encoded.zero_point.astype(np.float32)
    quantized = np.empty(values.shape, np.uint8)

    affine.quantize(values, scale, zero_point, bits=bits, out=quantized)

    np.testing.assert_array_equal(unpacked[:, : values.shape[1]], expected)
    np.testing.assert_array_equal(quantized, expected)
    np.testing.assert_array_equal(affine_reference.codes_from_params(values, scale, zero_point, bits), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_decoding_is_one_product_and_one_sum_in_float32(bits: int, param_dtype: str) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (2100, 40), dtype=np.uint8)
    codes[:, 37:] = 0
    packed = np.empty((2100, packing.packed_width(37, bits)), np.uint8)
    packing.pack(codes, bits=bits, out=packed)
    scale = rng.lognormal(-3, 1, 2100).astype(param_dtype)
    zero_point = rng.normal(0, 1, 2100).astype(param_dtype)
    decoded = np.empty((2100, 37), np.float32)

    affine.decode(packed, scale, zero_point, bits=bits, dim=37, out=decoded)

    expected = affine_reference.values_from_codes(
        codes[:, :37], scale.astype(np.float32), zero_point.astype(np.float32)
    )
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (63, 2), (64, 7), (65, 64), (130, 130)])
def test_searches_equal_the_numpy_reference_bit_for_bit(bits: int, num_rows: int, dim: int) -> None:
    values = rows_of("outlier", num_rows, dim)
    values[0] = 0.25
    scale, zero_point = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
    points, step, fit_steps, relax = affine.GRIDS[bits]

    def search(**settings: Any) -> tuple[bytes, bytes]:
        affine.search_params(values, Affine(bits, **settings), out_scale=scale, out_zero_point=zero_point)  # type: ignore[arg-type]
        return scale.tobytes(), zero_point.tobytes()

    def reference(params: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
        return params[0].tobytes(), params[1].tobytes()

    grid = affine_reference.grid_params(values, bits, points=points, step=step, fit_steps=fit_steps, relax=relax)
    assert search(search="grid") == reference(grid)
    assert search(search="minmax") == reference(affine_reference.minmax_params(values, bits))
    for num_bins, ratio in ((10, 1.0), (25, 0.5), (200, 0.16), (200, 1.0), (7, 0.0)):
        greedy = affine_reference.greedy_params(values, bits, num_bins=num_bins, ratio=ratio)
        assert search(search="greedy", num_bins=num_bins, ratio=ratio) == reference(greedy)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_encoded_alike_in_any_block_and_thread(search: dict[str, Any], bits: int) -> None:
    values = rows_of("gauss", 5000, 33)
    whole = Encoded(values, bits, **search)
    starts = [0, 1, 700, 3333, 5000]

    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(lambda i: Encoded(values[starts[i] : starts[i + 1]], bits, **search).parts(), range(4)))

    assert [b"".join(parts) for parts in zip(*pieces, strict=True)] == whole.parts()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_constant_rows_decode_to_their_value(search: dict[str, Any], bits: int, param_dtype: str) -> None:
    values = np.repeat(np.array([[0.0], [1.5], [-0.25], [-0.0]], np.float32), 9, axis=1)
    encoded = Encoded(values, bits, param_dtype, **search)
    np.testing.assert_array_equal(encoded.decoded, values)
    assert not encoded.scale.any()
    assert not encoded.codes.any()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_the_sign_of_zero_is_dropped(search: dict[str, Any], param_dtype: str) -> None:
    values = np.array([[-0.0, 0.0, 1.0], [0.0, -0.0, 1.0], [-0.0, -0.0, -0.0], [-1e-30, 0.0, 1.0]], np.float32)
    encoded = Encoded(values, 4, param_dtype, **search)
    assert not np.signbit(encoded.zero_point[:3]).any()
    assert not np.signbit(encoded.decoded[:3]).any()
    assert encoded.codes[0].tobytes() == bytes([0x00, 0x0F, 0, 0])


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [1e-45, 1e-41, 3e-39, 1e-37, 1e-20, 1e-9, 1e-6, 1.0, 3e4])
def test_rows_of_any_size_decode_near_their_values(
    search: dict[str, Any], bits: int, param_dtype: str, size: float
) -> None:
    values = (rows_of("gauss", 20, 21) * 2.0).clip(-1, 1) * np.float32(size)
    encoded = Encoded(values, bits, param_dtype, **search)
    assert encoded.bad_row == -1
    # Half the largest step of float32 rows below the normal range, and of float16 near zero; else the row's own.
    absolute = 2.0**-24 if param_dtype == "float16" else 2.0**-120
    assert np.abs(encoded.decoded - values).max() <= 0.6 * size + absolute


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_the_largest_values_decode_to_finite_ones(search: dict[str, Any], bits: int, param_dtype: str) -> None:
    largest = np.float32(affine.LARGEST_VALUE[param_dtype])
    values = np.array([[-largest, largest, 0.0], [largest, largest, largest], [0.0, largest, largest]], np.float32)
    encoded = Encoded(values, bits, param_dtype, **search)
    assert encoded.bad_row == -1
    assert np.isfinite(encoded.decoded).all()
    assert np.isfinite(encoded.scale).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 1e38, -65520.0])
@pytest.mark.parametrize("row", [0, 63, 199])
def test_a_row_that_cannot_be_encoded_is_named_and_nothing_is_written(bad: float, row: int) -> None:
    values = rows_of("gauss", 200, 19)
    values[row, 18] = bad
    values[199, 0] = np.nan
    codes, scale, zero_point = np.full((200, 12), 1, np.uint8), np.ones(200, "f2"), np.ones(200, "f2")

    found = affine.encode(values, Affine(4), out_codes=codes, out_scale=scale, out_zero_point=zero_point)

    assert found == row
    assert (codes == 1).all()
    assert (scale == 1).all()
    codable = affine.codable_rows(values, param_dtype="float16")
    np.testing.assert_array_equal(np.flatnonzero(~codable), sorted({row, 199}))


def test_a_value_too_large_for_float16_parameters_fits_float32_ones() -> None:
    values = np.array([[1e6, -1e6, 5.0]], np.float32)
    assert affine.first_uncodable_row(values, param_dtype="float16") == 0
    assert affine.first_uncodable_row(values, param_dtype="float32") == -1


@pytest.mark.parametrize("bits", BITS)
def test_ordinary_rows_fit_float16_parameters(bits: int) -> None:
    for kind in ("gauss", "laplace", "outlier"):
        assert affine.params_fit(rows_of(kind, 500, 64), "float16", bits=bits)


@pytest.mark.parametrize("change", ["tiny", "huge", "offset"])
def test_extreme_tables_need_float32_parameters(change: str) -> None:
    values = rows_of("gauss", 500, 64)
    values = {"tiny": values * np.float32(1e-6), "huge": values * np.float32(1e7), "offset": values + 1000}[change]
    assert not affine.params_fit(values, "float16")
    assert affine.params_fit(values, "float32")


def test_greedy_keeps_its_best_if_the_public_search_falls_back_to_minmax() -> None:
    # The error falls all along the path, so a search that keeps only strict local optima finds none.
    values = rows_of("gauss", 400, 128)
    minmax = Encoded(values, 2, search="minmax")
    greedy = Encoded(values, 2, search="greedy", num_bins=200, ratio=0.16)
    assert (greedy.row_errors < minmax.row_errors).all()
    assert greedy.row_errors.sum() < 0.7 * minmax.row_errors.sum()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier"])
def test_no_row_is_worse_than_minmax(bits: int, kind: str) -> None:
    values = rows_of(kind, 500, 48)
    minmax = Encoded(values, bits, "float32", search="minmax").row_errors
    for search in (SEARCHES[0], SEARCHES[2]):
        assert (Encoded(values, bits, "float32", **search).row_errors <= minmax * 1.0001).all()


@pytest.mark.parametrize(("bits", "ratio"), [(2, 0.5), (3, 0.3), (4, 0.16)])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier"])
def test_the_default_search_is_as_good_as_two_hundred_greedy_bins(bits: int, ratio: float, dim: int, kind: str) -> None:
    values = rows_of(kind, 1500, dim)
    grid = Encoded(values, bits).row_errors.sum()
    greedy = Encoded(values, bits, search="greedy", num_bins=200, ratio=ratio).row_errors.sum()
    assert grid <= 1.01 * greedy


@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier"])
def test_four_bit_greedy_has_the_error_of_torchs(kind: str) -> None:
    torch = pytest.importorskip("torch")
    values = rows_of(kind, 500, 64)
    packed = torch.ops.quantized.embedding_bag_4bit_prepack(torch.from_numpy(values), True, 200, 0.16)
    theirs = torch.ops.quantized.embedding_bag_4bit_unpack(packed).numpy()
    ours = Encoded(values, 4, search="greedy", num_bins=200, ratio=0.16).row_errors.sum()
    assert ours == pytest.approx(np.square(theirs.astype(np.float64) - values).sum(), rel=0.005)


def test_eight_bit_default_beats_minmax_with_stored_float16_parameters() -> None:
    values = rows_of("gauss", 1000, 64)
    assert Encoded(values, 8).row_errors.sum() < 0.93 * Encoded(values, 8, search="minmax").row_errors.sum()


def test_no_rows_is_no_work() -> None:
    assert Encoded(np.empty((0, 5), np.float32), 3).bad_row == -1


def test_a_greedy_search_without_its_settings_is_refused() -> None:
    values = rows_of("gauss", 4, 8)
    good = {"out_codes": np.empty((4, 4), "u1"), "out_scale": np.empty(4, "f2"), "out_zero_point": np.empty(4, "f2")}

    with pytest.raises(BadInput, match="num_bins"):
        affine.encode(values, Affine(4, "greedy"), **good)
    with pytest.raises(BadInput, match="ratio"):
        affine.encode(values, Affine(4, "greedy", num_bins=25, ratio=1.5), **good)


def test_kernels_release_the_gil() -> None:
    kernels = (affine_kernels.grid_params, affine_kernels.greedy_params, affine_kernels.codes_from_params)
    assert all(kernel.targetoptions["nogil"] for kernel in kernels)
