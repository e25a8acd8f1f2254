"""Rows staged as codes: those of the store's own encodings, and floats where codes cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadDtype, BadInput
from cnr_store_gpu import RowRequest, StagingBuffers
from cnr_store_gpu.quantize import LatticeCodes
from cnr_store_gpu.transfer import HostTransfer
from tests.support.encoders import lattice_codes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows_of(seed: int, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, dim, generator=generator) * 0.1).to(dtype)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000), num_rows=st.integers(1, 60), dim=st.integers(1, 40), dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 2.5e-4, 0.013]), through_ring=st.booleans(), data=st.data(),
)  # fmt: skip
def test_lattice_codes_are_those_of_the_store(
    seed: int, num_rows: int, dim: int, dtype: torch.dtype, scale: float, through_ring: bool, data: st.DataObject
) -> None:
    weight = rows_of(seed, num_rows, dim, dtype)
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=80)), np.int64)
    expected = lattice_codes(weight[rows].float().numpy(), scale)
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


def test_codes_windows_are_one_array() -> None:
    # More elements than the torch reference codes at a time.
    weight = rows_of(3, 70_000, 64)

    staged = StagingBuffers(quantize={"t": LatticeCodes(1e-3)}).gather(
        {"t": RowRequest(np.arange(70_000), {"weight": weight})}
    )

    np.testing.assert_array_equal(staged.codes["t"].numpy(), lattice_codes(weight.numpy(), 1e-3))


def test_a_slot_can_be_coded_and_the_scale_changed_between_gathers() -> None:
    slots = {"weight": rows_of(0, 9, 2), "sum": rows_of(1, 9, 1)[:, 0]}
    buffers = StagingBuffers(quantize={"t": LatticeCodes(0.01, tensor="sum")})
    for scale in (0.01, 0.002):
        buffers.quantize["t"] = LatticeCodes(scale, tensor="sum")
        staged = buffers.gather({"t": RowRequest(np.array([8, 0]), slots)})

        np.testing.assert_array_equal(staged.codes["t"].numpy(), lattice_codes(slots["sum"].numpy()[[8, 0]], scale))
        assert torch.equal(staged.tensors["t"]["weight"], slots["weight"][[8, 0]])
        staged.release()


def test_what_cannot_be_coded_at_all_is_refused_by_the_gather() -> None:
    buffers = StagingBuffers(quantize={"t": LatticeCodes(0.1)})

    with pytest.raises(BadDtype, match="float16 or bfloat16"):
        buffers.gather({"t": RowRequest(np.array([0]), {"weight": torch.ones(2, 2, dtype=torch.int64)})})
    with pytest.raises(BadInput, match="'weight', but the request has"):
        buffers.gather({"t": RowRequest(np.array([0]), {"rows": torch.ones(2, 2)})})

    assert not buffers.in_use


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39])
def test_steps_that_no_lattice_has_are_refused(scale: float) -> None:
    with pytest.raises(BadInput, match="lattice scale"):
        LatticeCodes(scale)
