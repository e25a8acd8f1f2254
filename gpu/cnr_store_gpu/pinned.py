"""A ring of page-locked blocks, allocated once: every copy from a device to the host passes through it.

Why this module exists: page-locked memory is slow to allocate, and other programs cannot use it. Only copies into it
run beside the training. So there is a fixed amount, whatever the size of a save: while the device fills one block, the
block before is copied to ordinary memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cnr_store.errors import BadInput
from cnr_store_gpu.transfer import Mark, Transfer

LARGEST_BLOCK = 64 * 2**20
SMALLEST_RING = 2 * 4096
PINNED_BYTES = 128 * 2**20
"""Default of the whole ring: four blocks of 32 MiB."""
EMPTYING_THREADS = min(4, max(1, (os.cpu_count() or 1) // 4))
"""One thread moves some 5 GB/s between host buffers, a tenth of what a GPU fills; a quarter of the cores may help."""

_WORTH_A_THREAD = 4096


@dataclass(frozen=True, slots=True)
class PinnedCopy:
    """Bytes ``[start, stop)`` of one array, and the block they pass through."""

    array: int
    start: int
    stop: int
    block: int


def block_sizes(ring_bytes: int) -> tuple[int, int]:
    """Return (bytes of a block, number of blocks) of a ring of at most ``ring_bytes``; no memory is taken.

    A block is a power of two, because torch rounds pinned memory up to one; of at most 64 MiB, and small enough for
    four to fit.

    Raises
    ------
    BadInput
        Less than two pages.

    Examples
    --------
    >>> block_sizes(128 * 2**20)
    (33554432, 4)
    """
    if ring_bytes < SMALLEST_RING:
        raise BadInput(
            f"a ring of {ring_bytes} bytes is too small to copy through; give at least {SMALLEST_RING}, "
            f"or leave the default of {PINNED_BYTES}",
            expected=SMALLEST_RING,
            found=ring_bytes,
        )
    block_bytes = min(LARGEST_BLOCK, 1 << ((ring_bytes // 4).bit_length() - 1))
    return block_bytes, ring_bytes // block_bytes


def plan_chunks(sizes_bytes: Sequence[int], block_bytes: int, num_blocks: int) -> list[PinnedCopy]:
    """Return the copies that take arrays of these sizes through the ring, in order; pure.

    Each chunk uses the next block; empty arrays have none.
    """
    chunks: list[PinnedCopy] = []
    for array, size in enumerate(sizes_bytes):
        for start in range(0, size, block_bytes):
            chunks.append(PinnedCopy(array, start, min(start + block_bytes, size), len(chunks) % num_blocks))
    return chunks


class TransitRing:
    """The blocks of one transfer. Used by its work alone, so by one thread.

    Parameters
    ----------
    transfer
        What copies into the blocks.
    ring_bytes
        Bytes of all blocks together; taken with the first copy, kept until the ring is dropped.
    threads
        How many empty a block together.
    """

    def __init__(self, transfer: Transfer, ring_bytes: int, *, threads: int = EMPTYING_THREADS) -> None:
        self._transfer = transfer
        self._threads = threads
        # The copying thread is one of them.
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="cnr-empty") if threads > 1 else None
        self._block_bytes, self._num_blocks = block_sizes(ring_bytes)
        self._blocks: list[torch.Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks that have been taken."""
        return len(self._blocks) * self._block_bytes

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The blocks that have been taken."""
        return tuple(self._blocks)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy device tensors into host tensors; blocks until they are there. Call it inside a transfer's work.

        Parameters
        ----------
        pairs
            (source, target), contiguous, of the same number of bytes. Targets are ordinary memory.
        """
        sources, targets = [as_bytes(pair[0]) for pair in pairs], [as_bytes(pair[1]) for pair in pairs]
        under_way: deque[tuple[Mark, PinnedCopy]] = deque()
        try:
            for chunk in plan_chunks([len(source) for source in sources], self._block_bytes, self._num_blocks):
                if len(under_way) == self._num_blocks:
                    self._empty(*under_way[0], targets)
                    under_way.popleft()
                block = self._block(chunk.block)[: chunk.stop - chunk.start]
                source = sources[chunk.array][chunk.start : chunk.stop]
                under_way.append((self._transfer.copy(source, block), chunk))
            while under_way:
                self._empty(*under_way[0], targets)
                under_way.popleft()
        except BaseException:
            # The blocks and the sources are used again, so nothing may still be moving between them.
            for mark, _ in under_way:
                try:
                    mark.wait()
                except Exception:  # noqa: BLE001 (the first error is the one that is raised)
                    continue
            raise

    def close(self) -> None:
        """End the threads; the transfer must be idle."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _empty(self, mark: Mark, chunk: PinnedCopy, targets: Sequence[torch.Tensor]) -> None:
        mark.wait()
        target = targets[chunk.array][chunk.start : chunk.stop]
        block = self._blocks[chunk.block][: len(target)]
        if self._pool is None or len(target) < self._threads * _WORTH_A_THREAD:
            target.copy_(block)
            return
        share = -(-len(target) // self._threads)
        helped = [
            self._pool.submit(target[at : at + share].copy_, block[at : at + share])
            for at in range(share, len(target), share)
        ]
        target[:share].copy_(block[:share])
        for piece in helped:
            piece.result()

    def _block(self, number: int) -> torch.Tensor:
        while len(self._blocks) <= number:
            self._blocks.append(self._transfer.new_block(self._block_bytes))
        return self._blocks[number]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 ``(size,)``; a view."""
    if tensor.numel() == 0:  # its stride may be 0, which no view of bytes can have
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)
