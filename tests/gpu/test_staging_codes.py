"""Rows staged as codes: those of the store's own encodings, and floats where codes cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.encodings import affine, lattice
from cnr_store.errors import BadDtype, BadInput
from cnr_store_gpu import RowRequest, StagingBuffers
from cnr_store_gpu.quantize import AffineCodes, LatticeCodes
from cnr_store_gpu.transfer import HostTransfer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows_of(seed: int, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, dim, generator=generator) * 0.1).to(dtype)


def encoded_on_the_cpu(rows: torch.Tensor, codes: AffineCodes) -> dict[str, np.ndarray[Any, Any]]:
    values = np.ascontiguousarray(rows.float().numpy())
    width = (values.shape[1] + 7) // 8 * codes.bits
    found = {
        "codes": np.empty((len(values), width), np.uint8),
        "scale": np.empty(len(values), codes.param_dtype),
        "zero_point": np.empty(len(values), codes.param_dtype),
    }
    bad = affine.encode(
        values, bits=codes.bits, search=codes.search, param_dtype=codes.param_dtype,
        out_codes=found["codes"], out_scale=found["scale"], out_zero_point=found["zero_point"],
    )  # fmt: skip
    assert bad == -1
    return found


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000), num_rows=st.integers(1, 60), dim=st.integers(1, 40), dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 2.5e-4, 0.013]), through_ring=st.booleans(), data=st.data(),
)  # fmt: skip
def test_lattice_codes_are_those_of_the_store(
    seed: int, num_rows: int, dim: int, dtype: torch.dtype, scale: float, through_ring: bool, data: st.DataObject
) -> None:
    weight = rows_of(seed, num_rows, dim, dtype)
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=80)), np.int64)
    expected = lattice.encode(weight[rows].float().numpy(), scale)
    momentum = rows_of(seed + 1, num_rows, dim)
    momentum_before = momentum[rows].clone()
    transfer = HostTransfer() if through_ring else None
    buffers = StagingBuffers(quantize={"t": LatticeCodes(scale)}, pinned_bytes=8192, transfer=transfer)

    staged = buffers.gather({"t": RowRequest(rows, {"weight": weight, "momentum": momentum})})
    weight.fill_(3)
    momentum.fill_(3)

    assert staged.codes["t"].dtype == torch.int16
    np.testing.assert_array_equal(staged.codes["t"].numpy(), expected)
    assert list(staged.tensors["t"]) == ["momentum"]
    assert torch.equal(staged.tensors["t"]["momentum"], momentum_before)
    assert staged.host_bytes == len(rows) * dim * (2 + 4) + 4
    buffers.free()
    if transfer is not None:
        transfer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_affine_codes_by_minmax_are_those_of_the_store(bits: Any, param_dtype: Any, dtype: torch.dtype) -> None:
    weight = rows_of(bits, 50, 13, dtype)
    weight[3] = 0.5  # a constant row
    weight[4] = torch.where(torch.arange(13) % 2 == 0, 0.0, -0.0).to(dtype)
    codes = AffineCodes(bits, search="minmax", param_dtype=param_dtype)
    expected = encoded_on_the_cpu(weight, codes)

    staged = StagingBuffers(quantize={"t": codes}).gather({"t": RowRequest(np.arange(50), {"weight": weight})})

    packed = staged.packed["t"]
    for name, array in expected.items():
        np.testing.assert_array_equal(getattr(packed, name).numpy().view(np.uint8), array.view(np.uint8))
    assert (packed.bits, packed.dim, staged.tensors["t"], staged.codes) == (bits, 13, {}, {})
    # 13 elements of `bits` bits in groups of eight, two parameters per row, the flag.
    assert staged.host_bytes == 50 * (2 * bits + 2 * (2 if param_dtype == "float16" else 4)) + 4


def test_affine_codes_by_grid_are_as_exact_as_those_of_the_store() -> None:
    weight = rows_of(1, 200, 64)
    codes = AffineCodes(4)
    expected = encoded_on_the_cpu(weight, codes)

    staged = StagingBuffers(quantize={"t": codes}).gather({"t": RowRequest(np.arange(200), {"weight": weight})})

    packed = staged.packed["t"]

    def error_of(codes: Any, scale: Any, zero_point: Any) -> float:
        decoded = np.empty((200, 64), np.float32)
        affine.decode(codes, scale, zero_point, bits=4, dim=64, out=decoded)
        return float(np.square(decoded - weight.numpy()).sum())

    ours = error_of(packed.codes.numpy(), packed.scale.numpy(), packed.zero_point.numpy())
    assert ours == pytest.approx(error_of(expected["codes"], expected["scale"], expected["zero_point"]), rel=0.01)


@pytest.mark.parametrize("through_ring", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 32768 * 1e-4])
def test_rows_that_have_no_codes_come_as_the_floats_of_the_instant(bad: float, through_ring: bool) -> None:
    good, wide = rows_of(0, 20, 4), rows_of(1, 20, 4)
    wide[7, 2] = bad
    before = wide.clone()
    transfer = HostTransfer() if through_ring else None
    quantize = {"good": LatticeCodes(1e-4), "wide": LatticeCodes(1e-4)}
    buffers = StagingBuffers(quantize=quantize, transfer=transfer)

    staged = buffers.gather({t: RowRequest(np.arange(20), {"weight": w}) for t, w in (("wide", wide), ("good", good))})
    wide.fill_(0)

    assert list(staged.codes) == ["good"]
    assert staged.tensors["good"] == {}
    assert torch.equal(staged.tensors["wide"]["weight"].view(torch.int32), before.view(torch.int32))
    assert staged.host_bytes == 20 * 4 * (2 + 2 + 4) + 8
    buffers.free()
    if transfer is not None:
        transfer.close()


def test_rows_beyond_affine_parameters_come_as_floats() -> None:
    weight = rows_of(0, 5, 3)
    weight[2, 1] = 70000

    half = StagingBuffers(quantize={"t": AffineCodes(8)}).gather({"t": RowRequest(np.arange(5), {"weight": weight})})
    single = StagingBuffers(quantize={"t": AffineCodes(8, param_dtype="float32")}).gather(
        {"t": RowRequest(np.arange(5), {"weight": weight})}
    )

    assert (half.packed, list(half.tensors["t"])) == ({}, ["weight"])
    assert torch.equal(half.tensors["t"]["weight"], weight)
    assert (list(single.packed), single.tensors["t"]) == (["t"], {})


def test_codes_windows_are_one_array() -> None:
    # More elements than the torch reference codes at a time.
    weight = rows_of(3, 70_000, 64)

    staged = StagingBuffers(quantize={"t": LatticeCodes(1e-3)}).gather(
        {"t": RowRequest(np.arange(70_000), {"weight": weight})}
    )

    np.testing.assert_array_equal(staged.codes["t"].numpy(), lattice.encode(weight.numpy(), 1e-3))


def test_a_slot_can_be_coded_and_the_scale_changed_between_gathers() -> None:
    slots = {"weight": rows_of(0, 9, 2), "sum": rows_of(1, 9, 1)[:, 0]}
    buffers = StagingBuffers(count=1, quantize={"t": LatticeCodes(0.01, tensor="sum")})
    for scale in (0.01, 0.002):
        buffers.quantize["t"] = LatticeCodes(scale, tensor="sum")
        staged = buffers.gather({"t": RowRequest(np.array([8, 0]), slots)})

        np.testing.assert_array_equal(staged.codes["t"].numpy(), lattice.encode(slots["sum"].numpy()[[8, 0]], scale))
        assert torch.equal(staged.tensors["t"]["weight"], slots["weight"][[8, 0]])
        staged.release()


def test_what_cannot_be_coded_at_all_is_refused_by_the_gather() -> None:
    buffers = StagingBuffers(count=1, quantize={"t": LatticeCodes(0.1), "u": AffineCodes(4)})

    with pytest.raises(BadDtype, match="float16 or bfloat16"):
        buffers.gather({"t": RowRequest(np.array([0]), {"weight": torch.ones(2, 2, dtype=torch.int64)})})
    with pytest.raises(BadInput, match="'weight', but the request has"):
        buffers.gather({"t": RowRequest(np.array([0]), {"rows": torch.ones(2, 2)})})
    with pytest.raises(BadInput, match="at least one element"):
        buffers.gather({"u": RowRequest(np.array([0]), {"weight": torch.ones(2)})})

    assert not buffers.in_use


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39])
def test_steps_that_no_lattice_has_are_refused(scale: float) -> None:
    with pytest.raises(BadInput, match="lattice scale"):
        LatticeCodes(scale)


@pytest.mark.parametrize("settings", [{"bits": 5}, {"bits": 4, "search": "greedy"}, {"bits": 4, "param_dtype": "int8"}])
def test_affine_settings_that_do_not_exist_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="affine codes are made with"):
        AffineCodes(**settings)
