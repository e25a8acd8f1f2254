"""Staging from an accelerator: the same rows, behind the training, through the same pinned blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cnr_store.errors import BadRowIds
from cnr_store_gpu import RowBitmap, RowRequest, StagingBuffers
from cnr_store_gpu.pinned import TransitRing
from cnr_store_gpu.quantize import LatticeCodes
from cnr_store_gpu.transfer import StreamTransfer
from tests.support.accelerator import DEVICE, STREAMS, keep_busy, needs_accelerator
from tests.support.encoders import lattice_codes

pytestmark = [
    pytest.mark.gpu,
    needs_accelerator,
]


def tensors_on_gpu(num_rows: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(num_rows, 48, generator=generator).to(dtype).to(DEVICE)
    return {
        "weight": torch.randn(num_rows, 16, generator=generator).to(dtype).to(DEVICE),
        "sum": torch.rand(num_rows, generator=generator).to(DEVICE),
        "row_var": torch.rand(num_rows, 1, generator=generator).to(DEVICE),
        "columns": wide[:, 8:24],
        "transposed": torch.randn(8, num_rows, generator=generator).to(DEVICE).T,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ids_on_gpu", [False, True])
@pytest.mark.parametrize("count", [0, 1, 777, 30_000])
def test_rows_of_a_gpu_are_those_of_the_instant_on_the_host(dtype: torch.dtype, ids_on_gpu: bool, count: int) -> None:
    tensors = tensors_on_gpu(5000, dtype)
    ids = np.random.default_rng(count).integers(0, 5000, count)
    expected = {name: tensor.cpu()[torch.from_numpy(ids)] for name, tensor in tensors.items()}
    buffers = StagingBuffers(pinned_bytes=64 * 1024)

    staged = buffers.gather({"t": RowRequest(torch.from_numpy(ids).to(DEVICE) if ids_on_gpu else ids, tensors)})
    for tensor in tensors.values():
        tensor.fill_(5)

    for name, copy in staged.tensors["t"].items():
        assert copy.device.type == "cpu"
        assert torch.equal(copy, expected[name])
    np.testing.assert_array_equal(staged.row_ids["t"], ids)
    buffers.free()


def test_ids_that_are_on_the_gpu_already_are_not_copied_there() -> None:
    bitmap = RowBitmap({"t": 5000}, DEVICE)
    bitmap.mark("t", torch.randint(0, 5000, (600,)))
    weight = torch.randn(5000, 16, device=DEVICE)
    taken = bitmap.take_all()["t"]
    buffers = StagingBuffers()

    staged = buffers.gather({"t": RowRequest(taken.row_ids, {"weight": weight}, taken.device_rows)})

    assert torch.equal(staged.tensors["t"]["weight"], weight.cpu()[torch.from_numpy(taken.row_ids)])
    assert staged.row_ids["t"] is taken.row_ids
    assert not [key for key, *_ in buffers._slots[0].memory._flat if key[0] == "pinned ids"]
    buffers.free()


def test_training_on_a_stream_of_its_own_is_what_is_staged() -> None:
    weight, ids = torch.zeros(300_000, 64, device=DEVICE), torch.arange(300_000, device=DEVICE)
    buffers = StagingBuffers()
    stream = STREAMS.Stream()
    stream.wait_stream(STREAMS.current_stream())

    for value in (1, 2):
        with STREAMS.stream(stream):
            keep_busy(20_000_000)  # 10 ms: whoever does not wait for the stream reads what was before
            weight.fill_(value)
            staged = buffers.gather({"t": RowRequest(ids, {"weight": weight})})
            weight.fill_(-1)
        assert staged.tensors["t"]["weight"].unique().tolist() == [value]
        staged.release()
    buffers.free()


def test_training_goes_on_while_rows_are_copied() -> None:
    weight = torch.randn(400_000, 64, device=DEVICE)
    buffers = StagingBuffers(pinned_bytes=2**20)
    buffers.gather(
        {"t": RowRequest(np.arange(10), {"weight": weight})}
    ).release()  # kernels, ring and threads are there
    before = weight.cpu()

    staged = buffers.gather({"t": RowRequest(np.arange(400_000), {"weight": weight})})
    weight.zero_()
    step_is_over = STREAMS.Event()
    step_is_over.record()
    step_is_over.synchronize()
    was_ready = staged.is_ready

    # 100 MB through a ring of 1 MiB takes far longer than to clear them: the step did not wait for the copies.
    assert not was_ready
    assert torch.equal(staged.tensors["t"]["weight"], before)
    buffers.free()


def test_pinned_blocks_are_pinned_and_the_same_for_every_save() -> None:
    transfer = StreamTransfer(DEVICE)
    ring = TransitRing(transfer, 4 * 2**16)
    addresses = set()
    for size in (2**20, 3 * 2**20):
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
        target = torch.zeros(size, dtype=torch.uint8)
        transfer.run(transfer.record(), lambda source=source, target=target: ring.copy([(source, target)])).result()
        addresses.add(tuple(block.data_ptr() for block in ring.blocks))
        assert torch.equal(source.cpu(), target)

    assert len(addresses) == 1
    assert all(block.is_pinned() for block in ring.blocks)
    assert ring.size_bytes == 4 * 2**16
    transfer.close()


def test_two_saves_of_a_gpu_are_held_at_a_time() -> None:
    weight = torch.zeros(1000, 8, device=DEVICE)
    buffers = StagingBuffers()
    held = []
    for value in (1, 2):
        weight.fill_(value)
        held.append(buffers.gather({"t": RowRequest(np.arange(1000), {"weight": weight})}))
    weight.fill_(3)

    assert [one.tensors["t"]["weight"].unique().tolist() for one in reversed(held)] == [[2], [1]]
    buffers.free()


def test_codes_of_a_gpu_are_the_stores_and_floats_where_there_are_none() -> None:
    weight = torch.randn(3000, 64, device=DEVICE)
    rows = weight.cpu().numpy()
    buffers = StagingBuffers(quantize={"t": LatticeCodes(1e-3)})
    requests = {"t": RowRequest(np.arange(3000), {"weight": weight})}

    coded = buffers.gather(requests)
    weight[17, 3] = float("nan")
    fallen_back = buffers.gather(requests)

    np.testing.assert_array_equal(coded.codes["t"].numpy(), lattice_codes(rows, 1e-3))
    assert coded.host_bytes == 3000 * 64 * 2 + 4
    assert fallen_back.codes == {}
    assert fallen_back.tensors["t"]["weight"].isnan().sum() == 1
    buffers.free()


def test_ids_on_the_gpu_outside_the_table_are_refused_behind_the_copy() -> None:
    weight = torch.randn(100, 4, device=DEVICE)
    buffers = StagingBuffers()

    staged = buffers.gather({"t": RowRequest(torch.tensor([5, 100], device=DEVICE), {"weight": weight})})

    with pytest.raises(BadRowIds, match="rows 0 to 99"):
        staged.wait()
    buffers.free()
