"""What a save holds of one instant, and how its reader waits for it.

Why this module exists: the training goes on while the copies are still on their way, so only who reads them waits, on
whatever thread that is. Nothing is handed out that has not arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from cnr_store.errors import BackgroundSaveFailed, CnrStoreError
from cnr_store.types import RowIds
from cnr_store_gpu.delivery import Delivery


class Staged:
    """Copies of rows at one instant; valid until ``release``. May be read and released from any thread.

    Attributes
    ----------
    stall_s
        Seconds for which the gather held its caller up. On an accelerator that is the queueing; the device is held up
        for the gather itself.
    wait_s
        Seconds for which the gather waited for memory before, because earlier copies were still held.
    size_bytes
        Bytes of the gathered rows, as floats.
    """

    def __init__(self, order: Mapping[str, tuple[str, ...]], give_back: Callable[[], None]) -> None:
        self.stall_s = 0.0
        self.wait_s = 0.0
        self.size_bytes = 0
        self._order = order
        self._give_back: Callable[[], None] | None = give_back
        self._here = Delivery()
        self._under_way: list[Future[Delivery]] = []
        self._described: list[Callable[[], Delivery]] = []
        self._merging, self._releasing = threading.Lock(), threading.Lock()

    def expect(self, delivery: Delivery | Future[Delivery] | Callable[[], Delivery]) -> None:
        """Add arrays that are here, or will be; or are here, and are described by a call when they are asked for."""
        if isinstance(delivery, Future):
            self._under_way.append(delivery)
        elif callable(delivery):
            self._described.append(delivery)
        else:
            self._add(delivery)

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(future.done() for future in self._under_way)

    def wait(self) -> Staged:
        """Block until everything is in host memory, without the GIL; returns itself.

        Raises
        ------
        BackgroundSaveFailed
            Coding or copying failed; the cause says why. Nothing was handed out.
        BadRowIds
            Ids that were on a device lie outside their table.
        """
        with self._merging:
            while self._described:
                self._add(self._described[0]())
                self._described.pop(0)
            while self._under_way:
                try:
                    arrived = self._under_way[0].result()
                except CnrStoreError:
                    raise
                except Exception as error:
                    raise BackgroundSaveFailed(
                        f"the staged rows of tables {sorted(self._order)} did not reach the host ({error}); release "
                        "them, and save their rows again"
                    ) from error
                self._add(arrived)
                self._under_way.pop(0)
        return self

    def _add(self, arrived: Delivery) -> None:
        self._here.tensors.update(arrived.tensors)
        self._here.codes.update(arrived.codes)
        self._here.row_ids.update(arrived.row_ids)
        self._here.size_bytes += arrived.size_bytes

    @property
    def row_ids(self) -> dict[str, RowIds]:
        """By table: int64, as they were asked for. Blocks as `wait` if they were on a device."""
        if self._here.row_ids.keys() != self._order.keys():
            self.wait()
        return {table: self._here.row_ids[table] for table in self._order}

    @property
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Host tensors by table and name: ``(n, ...)``, contiguous, row i is row ``row_ids[i]``. Blocks as `wait`.

        Without what is in `codes` instead. Views of memory that a gather after the release overwrites.
        """
        tensors = self.wait()._here.tensors
        return {
            table: {name: tensors[table, name] for name in names if (table, name) in tensors}
            for table, names in self._order.items()
        }

    @property
    def codes(self) -> dict[str, torch.Tensor]:
        """Lattice codes by table: int16 ``(n, ...)`` on the host; without tables that fell back. Blocks as `wait`."""
        return dict(self.wait()._here.codes)

    @property
    def host_bytes(self) -> int:
        """Bytes of what is handed out: those that crossed from the device. Blocks as `wait`."""
        return self.wait()._here.size_bytes

    def release(self) -> None:
        """Let a later gather use the memory, once the copies have arrived.

        Does not block; a second call does nothing.
        """
        with self._releasing:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
