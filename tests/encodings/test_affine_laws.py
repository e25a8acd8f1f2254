from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cnr_store.encodings import affine, packing
from cnr_store.types import Affine, ParamDtype
from tests.support import affine_reference

LAWS = settings(max_examples=50)

widths = st.sampled_from(packing.WIDTHS)
param_dtypes = st.sampled_from(["float16", "float32"])
shapes = st.tuples(st.integers(1, 5), st.one_of(st.integers(1, 20), st.sampled_from([63, 65, 127, 130])))
searches = st.sampled_from(
    [{"search": "grid"}, {"search": "minmax"}, {"search": "greedy", "num_bins": 20, "ratio": 0.6}]
)


def rows(largest: float) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, shapes, elements=st.floats(-largest, largest, width=32), fill=st.nothing())


ordinary = rows(4.0)
any_size = rows(2.0**126)


def encoded(values: np.ndarray, bits: int, param_dtype: str, **search: Any) -> tuple[Any, ...]:
    codes = np.empty((len(values), packing.packed_width(values.shape[1], bits)), np.uint8)
    scale, zero_point = np.empty(len(values), param_dtype), np.empty(len(values), param_dtype)
    bad_row = affine.encode(
        values,
        Affine(bits, param_dtype=param_dtype, **search),  # type: ignore[arg-type]
        out_codes=codes,
        out_scale=scale,
        out_zero_point=zero_point,
    )
    decoded = np.empty_like(values)
    affine.decode(codes, scale, zero_point, bits=bits, dim=values.shape[1], out=decoded)
    return bad_row, codes, scale, zero_point, decoded


def row_errors(values: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(decoded.astype(np.float64) - values).sum(axis=1))


@LAWS
@given(any_size, widths, st.data())
def test_codes_of_any_parameters_equal_the_reference(values: np.ndarray, bits: int, data: st.DataObject) -> None:
    params = st.floats(0, 2.0**126, width=32)
    scale = data.draw(hnp.arrays(np.float32, len(values), elements=params))
    zero_point = data.draw(hnp.arrays(np.float32, len(values), elements=params))
    codes = np.empty(values.shape, np.uint8)

    affine.quantize(values, scale, zero_point, bits=bits, out=codes)

    with np.errstate(over="ignore"):
        expected = affine_reference.codes_from_params(values, scale, zero_point, bits)
    np.testing.assert_array_equal(codes, expected)


@LAWS
@given(any_size, widths)
def test_searches_equal_the_reference(values: np.ndarray, bits: int) -> None:
    scale, zero_point = np.empty(len(values), np.float32), np.empty(len(values), np.float32)
    points, step, fit_steps, relax = affine.GRIDS[bits]
    references = [
        (
            {"search": "grid"},
            affine_reference.grid_params(values, bits, points=points, step=step, fit_steps=fit_steps, relax=relax),
        ),
        (
            {"search": "greedy", "num_bins": 20, "ratio": 0.6},
            affine_reference.greedy_params(values, bits, num_bins=20, ratio=0.6),
        ),
        (
            {"search": "greedy", "num_bins": 50, "ratio": 1.0},
            affine_reference.greedy_params(values, bits, num_bins=50, ratio=1.0),
        ),
    ]
    for search, expected in references:
        affine.search_params(values, Affine(bits, **search), out_scale=scale, out_zero_point=zero_point)  # type: ignore[arg-type]
        np.testing.assert_array_equal(scale, expected[0])
        np.testing.assert_array_equal(zero_point, expected[1])


@LAWS
@given(any_size, widths, searches)
def test_whatever_is_accepted_decodes_to_finite_values(values: np.ndarray, bits: int, search: dict[str, Any]) -> None:
    bad_row, _, scale, zero_point, decoded = encoded(values, bits, "float32", **search)
    assert bad_row == -1
    assert np.isfinite(scale).all()
    assert np.isfinite(zero_point).all()
    assert np.isfinite(decoded).all()


@LAWS
@given(rows(65504.0), widths, searches)
def test_whatever_float16_parameters_accept_decodes_to_finite_values(
    values: np.ndarray, bits: int, search: dict[str, Any]
) -> None:
    bad_row, _, scale, zero_point, decoded = encoded(values, bits, "float16", **search)
    assert bad_row == -1
    assert np.isfinite(scale).all()
    assert np.isfinite(zero_point).all()
    assert np.isfinite(decoded).all()


@LAWS
@given(rows(65504.0), widths, param_dtypes, searches)
def test_row_errors_are_those_of_what_is_decoded(
    values: np.ndarray, bits: int, param_dtype: ParamDtype, search: dict[str, Any]
) -> None:
    decoded = encoded(values, bits, param_dtype, **search)[-1]
    errors = affine.row_errors(values, Affine(bits, param_dtype=param_dtype, **search))  # type: ignore[arg-type]
    np.testing.assert_allclose(np.sqrt(errors), row_errors(values, decoded), rtol=1e-12)


@LAWS
@given(ordinary, widths)
@example(np.array([[0.0, 9.48924e-40]], np.float32), 2)
def test_minmax_codes_err_by_at_most_half_a_step(values: np.ndarray, bits: int) -> None:
    """A scale whose float32 reciprocal would overflow becomes 0: such a row errs by its whole range."""
    *_, scale, _, decoded = encoded(values, bits, "float32", search="minmax")
    slack = 4 * np.spacing(np.abs(values).max(axis=1) + scale * 2**bits)
    slack = slack + np.where(scale == 0.0, (2**bits - 1) / np.finfo(np.float32).max.astype(np.float64), 0.0)
    assert (np.abs(decoded.astype(np.float64) - values) <= (scale / 2 + slack)[:, None]).all()


@LAWS
@given(ordinary, widths, searches)
def test_no_search_is_worse_than_minmax(values: np.ndarray, bits: int, search: dict[str, Any]) -> None:
    minmax = row_errors(values, encoded(values, bits, "float32", search="minmax")[-1])
    found = row_errors(values, encoded(values, bits, "float32", **search)[-1])
    slack = 8 * np.spacing(np.abs(values).max(axis=1)) * np.sqrt(values.shape[1]) + 2.0**-120
    assert (found <= minmax * 1.0001 + slack).all()


@LAWS
@given(ordinary, widths, param_dtypes, searches)
def test_a_row_does_not_depend_on_its_neighbours(
    values: np.ndarray, bits: int, param_dtype: str, search: dict[str, Any]
) -> None:
    together = encoded(values, bits, param_dtype, **search)
    alone = [encoded(values[i : i + 1], bits, param_dtype, **search) for i in range(len(values))]
    for part in range(1, 5):
        np.testing.assert_array_equal(together[part], np.concatenate([row[part] for row in alone]))


@LAWS
@given(ordinary, widths, param_dtypes, searches)
def test_stored_codes_are_those_of_the_stored_parameters(
    values: np.ndarray, bits: int, param_dtype: str, search: dict[str, Any]
) -> None:
    _, packed, scale, zero_point, _ = encoded(values, bits, param_dtype, **search)
    codes = np.empty((len(values), packing.padded_dim(values.shape[1])), np.uint8)
    packing.unpack(packed, bits=bits, out=codes)
    expected = affine_reference.codes_from_params(values, scale.astype(np.float32), zero_point.astype(np.float32), bits)
    np.testing.assert_array_equal(codes[:, : values.shape[1]], expected)
    assert not codes[:, values.shape[1] :].any()


@LAWS
@given(rows(2.0**127), st.data())
def test_the_first_bad_row_is_the_first_that_is_not_codable(values: np.ndarray, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 2))):
        row, column = data.draw(st.tuples(*(st.integers(0, side - 1) for side in values.shape)))
        values[row, column] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    for param_dtype in ("float16", "float32"):
        codable = affine.codable_rows(values, param_dtype=param_dtype)  # type: ignore[arg-type]
        expected = -1 if codable.all() else int(np.argmin(codable))
        assert affine.first_uncodable_row(values, param_dtype=param_dtype) == expected  # type: ignore[arg-type]
