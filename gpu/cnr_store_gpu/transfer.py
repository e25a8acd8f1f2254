"""Work of a device beside the training: run functions in order, and copy to the host without blocking the training.

Why this module exists: staging, its ring and its waits are the same for every device, and are tested without one.
`StreamTransfer` is a side stream with events; `HostTransfer` is threads, for tensors in host memory and on devices
without streams.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from cnr_store.errors import BadInput
from cnr_store_gpu.streams import streams_of

T = TypeVar("T")


class Mark(Protocol):
    """A point in a queue of device work."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the point is reached; raises what went wrong on the way."""


class Transfer(Protocol):
    """One queue beside the training: work that is started runs in order, one at a time."""

    def record(self) -> Any:
        """Return the point that the calling thread's own work on the device has reached; does not block."""

    def run(self, after: Any, work: Callable[[], T]) -> Future[T]:
        """Start ``work`` on the transfer's thread; what it queues on the device runs after ``after``.

        When the future is done, nothing that the work queued is under way, also after an error.
        """

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Begin to copy bytes to a block (see `new_block`) from inside ``work``; does not block."""

    def new_block(self, size_bytes: int) -> torch.Tensor:
        """Return host memory, uint8 ``(size_bytes,)``, that `copy` reaches without holding the host up."""

    def close(self) -> None:
        """Block until all work is over, and end the threads. A second call does nothing."""


class HostTransfer:
    """Threads in place of streams: one drives the work in order, one copies.

    For tensors that are in host memory already, and for devices whose copies block.
    """

    def __init__(self) -> None:
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="cnr-stage")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="cnr-copy")

    def record(self) -> None:
        """Do nothing: host tensors have no queue of operations."""

    def run(self, after: None, work: Callable[[], T]) -> Future[T]:  # noqa: ARG002 (the host has no queue)
        """Start ``work`` on the driving thread."""
        return self._driver.submit(work)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Copy on the copying thread."""
        return _HostCopy(self._copier.submit(target.copy_, source))

    def new_block(self, size_bytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Block until all work is over, and end the threads."""
        self._driver.shutdown(wait=True)
        self._copier.shutdown(wait=True)


class _HostCopy:
    """The mark of a future."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class StreamTransfer:
    """A side stream of the lowest priority, driven by one thread.

    Parameters
    ----------
    device
        A device with streams; one without a number is the current one.

    Raises
    ------
    BadInput
        A device without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        if self._streams is None:
            raise BadInput(f"a transfer by streams needs a device that has them, found {device}", found=str(device))
        self._device = device
        # 0 is the lowest that CUDA has; kernels of a training that asks for more go first.
        self._side = self._streams.Stream(device, priority=0)
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="cnr-stage")

    def record(self) -> torch.Event:
        """Return an event on the calling thread's current stream of the device."""
        return self._recorded(self._streams.current_stream(self._device))

    def run(self, after: torch.Event, work: Callable[[], T]) -> Future[T]:
        """Start ``work`` with the side stream current; the stream waits for the event, the training for nothing."""

        def on_the_side() -> T:
            with self._streams.device(self._device), self._streams.stream(self._side):
                self._side.wait_event(after)
                try:
                    return work()
                finally:
                    # Nothing of the side stream outlives the future, so no memory needs record_stream.
                    self._side.synchronize()

        return self._driver.submit(on_the_side)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Queue a copy to pinned memory and an event after it."""
        target.copy_(source, non_blocking=True)
        return _Reached(self._recorded(self._side))

    def _recorded(self, stream: torch.Stream) -> torch.Event:
        # Blocking: a thread that spins for a CUDA event would take a core from the data loader. Others have no choice.
        event: torch.Event = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else self._streams.Event()
        event.record(stream)
        return event

    def new_block(self, size_bytes: int) -> torch.Tensor:
        """Return page-locked memory.

        Raises
        ------
        BadInput
            This machine gave none: copies into it would hold the training up unseen.
        """
        block = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if not block.is_pinned():
            raise BadInput(
                f"{size_bytes} bytes of page-locked memory were asked for, ordinary memory came; "
                "raise the limit on locked memory (ulimit -l), or lower pinned_bytes",
                expected="pinned",
            )
        return block

    def close(self) -> None:
        """Block until all work is over, and end the thread."""
        self._driver.shutdown(wait=True)


class _Reached:
    """The mark of an event."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def transfer_for(device: torch.device) -> Transfer:
    """Return the `Transfer` for a device."""
    return HostTransfer() if streams_of(device) is None else StreamTransfer(device)
