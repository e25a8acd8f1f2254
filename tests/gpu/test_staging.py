"""Staged rows are copies of one instant, in reused memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadRowIds, BadShape
from cnr_store_gpu import RowBitmap, RowRequest, StagingBuffers
from cnr_store_gpu.transfer import HostTransfer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def table(num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "weight": torch.nn.Parameter(torch.randn(num_rows, dim, generator=generator).to(dtype)),
        "sum": torch.rand(num_rows, generator=generator),
        "row_var": torch.rand(num_rows, 1, generator=generator),
        "wide": torch.randn(dim, num_rows, generator=generator).T,
    }


@settings(max_examples=40)
@given(num_rows=st.sampled_from([1, 7, 64]), dim=st.integers(1, 5), counts=st.lists(st.integers(0, 90)), data=st.data())
def test_staged_rows_equal_numpy_indexing_in_every_round(
    num_rows: int, dim: int, counts: list[int], data: st.DataObject
) -> None:
    buffers = StagingBuffers()
    tensors = table(num_rows, dim, data.draw(st.sampled_from(DTYPES)))

    for count in counts[:5]:
        rows = np.random.default_rng(count).integers(0, num_rows, count)
        staged = buffers.gather({"t": RowRequest(rows, tensors)})
        for name, tensor in tensors.items():
            copy = staged.tensors["t"][name]
            expected = tensor.detach().float().numpy()[rows]
            np.testing.assert_array_equal(copy.float().numpy(), expected)
            assert (copy.dtype, copy.is_contiguous(), copy.requires_grad) == (tensor.dtype, True, False)
        assert staged.size_bytes == sum(t.numel() * t.element_size() for t in staged.tensors["t"].values())
        staged.release()


@pytest.fixture(scope="module")
def host_transfer() -> Iterator[HostTransfer]:
    transfer = HostTransfer()
    yield transfer
    transfer.close()


@st.composite
def sources(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Weights and slots of one table, each of any dtype, contiguous or a view of columns of something wider."""
    num_rows, dim = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensors = {}
    for name, shape in (("weight", (dim,)), ("row", ()), ("column", (1,)), ("element", (dim,))):
        if name != "weight" and not draw(st.booleans()):
            continue
        wide = torch.randn((num_rows, *shape[:-1], 3 * shape[-1]) if shape else (num_rows, 3), generator=generator)
        wide = wide.to(draw(st.sampled_from(DTYPES)))
        chosen = wide[:, 1] if not shape else wide[:, shape[0] : 2 * shape[0]]
        tensors[name] = chosen if draw(st.booleans()) else chosen.contiguous()
    return tensors


@pytest.mark.parametrize("through", ["the gather alone", "the ring"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables=st.lists(sources(), min_size=1, max_size=3), data=st.data())
def test_staged_rows_are_those_of_the_instant_of_the_gather(
    host_transfer: HostTransfer, through: str, tables: list[dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    requests, expected = {}, {}
    for number, tensors in enumerate(tables):
        num_rows = tensors["weight"].shape[0]
        rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=60)), np.int64)
        requests[str(number)] = RowRequest(rows, tensors)
        expected[str(number)] = {n: t.index_select(0, torch.from_numpy(rows)).clone() for n, t in tensors.items()}
    # The smallest ring: blocks of 2048 bytes, so that arrays pass through it in pieces.
    buffers = StagingBuffers(pinned_bytes=8192, transfer=host_transfer if through == "the ring" else None)

    staged = buffers.gather(requests)
    for tensors in tables:
        for tensor in tensors.values():
            tensor.fill_(-7)

    for name, request in requests.items():
        assert staged.row_ids[name].tolist() == np.asarray(request.row_ids).tolist()
        assert list(staged.tensors[name]) == list(expected[name])
        for key, copy in staged.tensors[name].items():
            assert torch.equal(copy.view(torch.uint8), expected[name][key].view(torch.uint8))
            assert copy.is_contiguous()
    assert staged.host_bytes == staged.size_bytes


@pytest.mark.parametrize("count", [0, 1, 300])
def test_rows_that_a_bitmap_left_on_its_device_are_gathered_by(count: int) -> None:
    bitmap, tensors = RowBitmap({"t": 1000}, on_host=False), table(1000, 5)
    bitmap.mark("t", np.random.default_rng(count).choice(1000, count, replace=False))
    taken, buffers = bitmap.take_all()["t"], StagingBuffers()
    assert taken.device_rows is not None

    staged = buffers.gather({"t": RowRequest(taken.row_ids, tensors, taken.device_rows)})

    assert staged.row_ids["t"] is taken.row_ids
    for name, tensor in tensors.items():
        assert torch.equal(staged.tensors["t"][name], tensor.detach()[torch.from_numpy(taken.row_ids)])
    staged.release()


def test_room_for_a_larger_gather_is_on_the_host_whatever_the_default() -> None:
    """It was on torch's default device, where the next gather could not copy to."""
    weight = torch.arange(4000.0, device="cpu").view(1000, 4)
    buffers = StagingBuffers()
    staged = buffers.gather({"t": RowRequest(np.arange(10), {"weight": weight})})
    with torch.device("meta"):
        staged.make_room()
    staged.release()

    later = buffers.gather({"t": RowRequest(np.arange(1000), {"weight": weight})})

    assert torch.equal(later.tensors["t"]["weight"], weight)


def test_memory_is_reused_and_grows_only_when_needed() -> None:
    buffers = StagingBuffers()
    tensors = {"weight": torch.randn(1000, 8)}
    staged = buffers.gather({"t": RowRequest(np.arange(500), tensors)})
    address, capacity = staged.tensors["t"]["weight"].data_ptr(), buffers.capacity_bytes
    staged.release()

    again = buffers.gather({"t": RowRequest(np.arange(510), tensors)})

    assert again.tensors["t"]["weight"].data_ptr() == address
    assert buffers.capacity_bytes == capacity
    again.release()
    buffers.gather({"t": RowRequest(np.arange(1000), tensors)})
    assert capacity < buffers.capacity_bytes == 1000 * 8 * 4


def test_a_gather_before_the_release_takes_other_memory() -> None:
    buffers = StagingBuffers()
    tensors = {"weight": torch.arange(12.0).view(6, 2)}
    staged = buffers.gather({"t": RowRequest(np.array([5]), tensors)})

    buffers.gather({"t": RowRequest(np.array([0]), tensors)})

    assert staged.tensors["t"]["weight"].tolist() == [[10, 11]]


def test_second_release_does_not_free_a_later_gather() -> None:
    buffers = StagingBuffers()
    request = {"t": RowRequest(np.array([0]), {"weight": torch.ones(2, 2)})}
    first = buffers.gather(request)
    first.release()
    buffers.gather(request)

    first.release()

    assert buffers.in_use


def test_failed_gather_leaves_the_buffers_usable() -> None:
    buffers = StagingBuffers()
    tensors = {"weight": torch.ones(4, 2)}

    with pytest.raises(BadRowIds, match="rows 0 to 3"):
        buffers.gather({"t": RowRequest(np.array([4]), tensors)})

    assert buffers.gather({"t": RowRequest(np.array([3]), tensors)}).tensors["t"]["weight"].shape == (1, 2)


def test_copy_of_a_sparse_slot_is_dense() -> None:
    indices, values = torch.tensor([[1, 3, 1]]), torch.tensor([[1.0, 2], [3, 4], [10, 20]])
    slot = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)

    staged = StagingBuffers().gather({"t": RowRequest(np.array([3, 0, 1]), {"momentum_buffer": slot})})

    assert staged.tensors["t"]["momentum_buffer"].tolist() == [[3, 4], [0, 0], [11, 22]]


def gather(row_ids: np.ndarray, tensors: dict[str, torch.Tensor]) -> None:
    StagingBuffers().gather({"t": RowRequest(row_ids, tensors)})


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(BadShape, match="same number of rows"):
        gather(np.array([0]), {"weight": torch.ones(4, 2), "sum": torch.ones(5)})
    with pytest.raises(BadShape):
        gather(np.array([0]), {"weight": torch.ones(4, 2), "step": torch.tensor(1.0)})


@pytest.mark.parametrize("rows", [np.array([-1]), np.array([0.5]), np.array([[1]])])
def test_rows_that_are_no_row_ids_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(BadRowIds):
        gather(rows, {"weight": torch.ones(4, 2)})


def test_rows_may_be_none_and_buffers_given_back() -> None:
    buffers = StagingBuffers()

    staged = buffers.gather({"t": RowRequest(np.empty(0, np.int64), {"weight": torch.ones(4, 2)})})
    buffers.free()

    assert staged.tensors["t"]["weight"].shape == (0, 2)
    assert (buffers.in_use, buffers.capacity_bytes) == (False, 0)
