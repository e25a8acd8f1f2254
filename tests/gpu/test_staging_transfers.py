"""Copies behind the training: the ring, several saves at a time, waits, errors. All real, with threads for streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BackgroundSaveFailed, BadInput, BadRowIds
from cnr_store_gpu import RowRequest, StagingBuffers
from cnr_store_gpu.delivery import StagedIds, deliver
from cnr_store_gpu.pinned import SMALLEST_RING, TransitRing, block_sizes, plan_chunks
from cnr_store_gpu.staging import KeptMemory
from cnr_store_gpu.streams import streams_of
from cnr_store_gpu.transfer import HostTransfer, Mark, transfer_for

T = TypeVar("T")
TIMEOUT_S = 20


class GatedTransfer(HostTransfer):
    """A host transfer whose copies wait for a gate, so that a test knows what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.copies = 0
        self.fails_at: int | None = None

    def run(self, after: None, work: Callable[[], T]) -> Future[T]:
        def gated() -> T:
            self.begun.set()
            assert self.gate.wait(TIMEOUT_S)
            return work()

        return super().run(after, gated)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        self.copies += 1
        if self.copies == self.fails_at:
            return super().copy(source, target[:-1])  # torch refuses it, on the copying thread
        return super().copy(source, target)


@pytest.fixture
def transfer() -> Iterator[GatedTransfer]:
    transfer = GatedTransfer()
    yield transfer
    transfer.gate.set()
    transfer.close()


def request(value: float, num_rows: int = 3) -> dict[str, RowRequest]:
    return {"t": RowRequest(np.arange(num_rows), {"weight": torch.full((num_rows, 2), float(value))})}


# ---- the ring


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 5000), max_size=6),
    block_bytes=st.sampled_from([64, 256, 2048]),
    num_blocks=st.integers(2, 5),
)
def test_chunks_cover_every_array_once_in_order_and_take_blocks_in_turn(
    sizes: list[int], block_bytes: int, num_blocks: int
) -> None:
    chunks = plan_chunks(sizes, block_bytes, num_blocks)

    for array, size in enumerate(sizes):
        covered = [byte for chunk in chunks if chunk.array == array for byte in range(chunk.start, chunk.stop)]
        assert covered == list(range(size))
    assert [chunk.array for chunk in chunks] == sorted(chunk.array for chunk in chunks)
    assert all(0 < chunk.stop - chunk.start <= block_bytes for chunk in chunks)
    assert [chunk.block for chunk in chunks] == [i % num_blocks for i in range(len(chunks))]


@given(ring_bytes=st.integers(SMALLEST_RING, 2**33))
def test_blocks_are_powers_of_two_that_fit_the_ring(ring_bytes: int) -> None:
    block_bytes, num_blocks = block_sizes(ring_bytes)

    assert block_bytes & (block_bytes - 1) == 0
    assert block_bytes <= 64 * 2**20
    assert num_blocks >= 4
    assert ring_bytes - block_bytes < block_bytes * num_blocks <= ring_bytes


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xla", "privateuseone"])
def test_a_device_that_torch_has_no_streams_of_is_copied_by_threads(kind: str) -> None:
    """Regression: a device whose module is in a package beside torch, as XLA's, raised RuntimeError."""
    transfer = transfer_for(torch.device(kind))

    assert streams_of(torch.device(kind)) is None
    assert isinstance(transfer, HostTransfer)
    transfer.close()


def test_the_streams_of_a_gpu_are_in_its_module() -> None:
    assert streams_of(torch.device("cuda:1")) is torch.cuda
    assert streams_of(torch.device("xpu")) is torch.xpu


def test_a_ring_too_small_to_copy_through_is_refused_before_any_save() -> None:
    with pytest.raises(BadInput, match="too small"):
        StagingBuffers(pinned_bytes=SMALLEST_RING - 1)


@pytest.mark.parametrize(("ring_bytes", "threads"), [(SMALLEST_RING, 1), (256 * 1024, 1), (256 * 1024, 3)])
def test_the_ring_has_the_same_blocks_for_every_save_whatever_its_size(ring_bytes: int, threads: int) -> None:
    transfer = HostTransfer()
    ring = TransitRing(transfer, ring_bytes, threads=threads)
    addresses = []
    for size in (1_000_003, 500_000, 5 * ring_bytes, ring_bytes):
        source, target = torch.randint(0, 255, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        transfer.run(None, lambda source=source, target=target: ring.copy([(source, target)])).result()
        addresses.append([block.data_ptr() for block in ring.blocks])
        assert torch.equal(source, target)

    transfer.close()
    ring.close()
    assert addresses[1:] == addresses[:-1]
    assert ring.size_bytes == ring_bytes


def test_the_ring_of_a_transfer_is_taken_with_the_first_copy_only(transfer: GatedTransfer) -> None:
    transfer.gate.set()
    on_host, through_ring = StagingBuffers(), StagingBuffers(pinned_bytes=SMALLEST_RING, transfer=transfer)
    before = through_ring.pinned_bytes

    on_host.gather(request(1)).wait()
    through_ring.gather(request(1, num_rows=5000)).wait()

    assert (before, on_host.pinned_bytes, through_ring.pinned_bytes) == (0, 0, SMALLEST_RING)


# ---- behind the training


def test_gather_returns_while_nothing_has_been_copied_yet(transfer: GatedTransfer) -> None:
    staged = StagingBuffers(transfer=transfer).gather(request(1))

    assert not staged.is_ready
    transfer.gate.set()
    assert staged.tensors["t"]["weight"].tolist() == [[1, 1]] * 3
    assert staged.is_ready


def test_row_ids_of_the_host_are_known_before_the_copies(transfer: GatedTransfer) -> None:
    staged = StagingBuffers(transfer=transfer).gather(request(1))

    assert staged.row_ids["t"].tolist() == [0, 1, 2]
    assert not staged.is_ready


def test_an_empty_array_crosses_whatever_its_stride() -> None:
    """numpy gives empty ids a stride of 0, and a save of a table on a GPU with no marked row failed."""
    ring = TransitRing(HostTransfer(), SMALLEST_RING, threads=1)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 5, 0))
    target = torch.empty(0, dtype=torch.int64)
    rows, copy = torch.arange(4), torch.zeros(4, dtype=torch.int64)

    ring.copy([(ids.as_strided((0,), (0,)), target), (rows, copy)])
    ring.close()

    assert copy.tolist() == [0, 1, 2, 3]


def test_two_saves_are_under_way_at_a_time_and_keep_their_own_rows(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(transfer=transfer)
    source = request(1)
    first = buffers.gather(source)
    source["t"].tensors["weight"].fill_(2)
    second = buffers.gather(source)
    source["t"].tensors["weight"].fill_(3)

    transfer.gate.set()

    # In the other order than they were gathered.
    assert second.tensors["t"]["weight"].unique().tolist() == [2]
    assert first.tensors["t"]["weight"].unique().tolist() == [1]


def test_a_later_save_released_first_leaves_the_earlier_one_alone() -> None:
    buffers = StagingBuffers()
    first, second = buffers.gather(request(1)), buffers.gather(request(2))

    second.release()
    third = buffers.gather(request(3))

    assert first.tensors["t"]["weight"].unique().tolist() == [1]
    assert third.tensors["t"]["weight"].data_ptr() == second.tensors["t"]["weight"].data_ptr()


def test_memory_released_before_its_copies_arrived_is_not_used_yet(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(transfer=transfer)
    first = buffers.gather(request(1))
    first.release()
    assert buffers.in_use

    second = buffers.gather(request(2))
    transfer.gate.set()

    assert first.tensors["t"]["weight"].data_ptr() != second.tensors["t"]["weight"].data_ptr()
    assert second.tensors["t"]["weight"].unique().tolist() == [2]


def test_released_from_many_threads_at_once_frees_one_place() -> None:
    buffers = StagingBuffers()
    for _ in range(20):
        staged = buffers.gather(request(1))
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _, staged=staged: staged.release(), range(4)))
    held = [buffers.gather(request(1)), buffers.gather(request(2))]

    buffers.gather(request(3))
    assert [one.tensors["t"]["weight"].unique().tolist() for one in held] == [[1], [2]]


def test_many_saves_in_turn_hold_the_memory_of_one() -> None:
    buffers = StagingBuffers()

    for value in range(5):
        buffers.gather(request(value)).release()

    assert buffers.capacity_bytes == 3 * 2 * 4


# ---- what goes wrong


def test_an_error_of_a_copy_reaches_whoever_reads_and_not_the_training(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(pinned_bytes=SMALLEST_RING, transfer=transfer)
    transfer.fails_at = 3
    transfer.gate.set()

    staged = buffers.gather(request(1, num_rows=2000))

    with pytest.raises(BackgroundSaveFailed, match=r"\['t'\] did not reach the host") as caught:
        staged.wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(BackgroundSaveFailed):  # and again: nothing was handed out
        _ = staged.tensors
    staged.release()
    assert buffers.gather(request(2, num_rows=2000)).tensors["t"]["weight"].unique().tolist() == [2]


def test_an_error_does_not_hide_behind_an_earlier_save(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(transfer=transfer)
    transfer.fails_at = 2
    first, second = buffers.gather(request(1)), buffers.gather(request(2))

    transfer.gate.set()

    with pytest.raises(BackgroundSaveFailed):
        second.wait()
    assert first.tensors["t"]["weight"].unique().tolist() == [1]


def test_bad_rows_are_refused_by_the_gather_and_its_memory_is_free_again(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(transfer=transfer)
    transfer.gate.set()

    with pytest.raises(BadRowIds):
        buffers.gather({**request(1), "u": RowRequest(np.array([9]), {"weight": torch.ones(4, 2)})})

    assert buffers.gather(request(2)).tensors["t"]["weight"].unique().tolist() == [2]


@pytest.mark.parametrize("copy_to_host", [None, "ring"])
def test_ids_of_a_device_are_checked_when_they_have_arrived(transfer: GatedTransfer, copy_to_host: str | None) -> None:
    ring = TransitRing(transfer, SMALLEST_RING)
    transfer.gate.set()

    def arrive(*row_ids: int, dtype: torch.dtype = torch.int64) -> list[int]:
        ids = [StagedIds("t", torch.tensor(row_ids, dtype=dtype), 5)]
        copy = ring.copy if copy_to_host else None
        arrived = transfer.run(None, lambda: deliver([], ids, KeptMemory().take, copy)).result().row_ids["t"]
        assert arrived.dtype == np.int64
        return arrived.tolist()  # type: ignore[no-any-return]

    assert arrive(4, 0) == [4, 0]
    assert arrive(3, 3, dtype=torch.int32) == [3, 3]
    assert arrive() == []
    with pytest.raises(BadRowIds, match="rows 0 to 4"):
        arrive(0, 5)
    with pytest.raises(BadRowIds):
        arrive(-1)


def test_free_keeps_copies_that_are_held_and_can_be_used_again(transfer: GatedTransfer) -> None:
    buffers = StagingBuffers(transfer=transfer)
    transfer.gate.set()
    staged = buffers.gather(request(1))

    buffers.free()
    other = buffers.gather(request(2))
    staged.release()

    assert staged.tensors["t"]["weight"].unique().tolist() == [1]
    assert other.tensors["t"]["weight"].unique().tolist() == [2]
    assert buffers.gather(request(3)).tensors["t"]["weight"].data_ptr() not in {
        one.tensors["t"]["weight"].data_ptr() for one in (staged, other)
    }
