"""Copies of the touched rows, weights and slots, as of one instant: the only part of a save that stalls the training.

Why this module exists: everything after the gather (coding, copying to the host, compressing, putting) works on these
copies while the training continues, so weights and slots must be of the same rows at the same step.

On the CPU the gather itself makes the host copies. On an accelerator it is queued on the training's own stream, and
the rest runs after it: the rows are coded if that is asked for, and copied to the host through a ring of pinned blocks.
The training waits for the gather only; the thread that reads the copies waits until they have arrived.

It must never return memory that is still read or filled: memory is used again only when its copies have arrived *and*
were released.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from cnr_store.errors import BackgroundSaveFailed, BadInput, CnrStoreError
from cnr_store.runtime.threads import Workers
from cnr_store.types import RowIds
from cnr_store_gpu.delivery import Delivery, Key, StagedArray, StagedIds, deliver
from cnr_store_gpu.gather import RowRequest, check_range, common_rows, index_of, select_rows
from cnr_store_gpu.host_copies import HostCopies, HostLayout, JoinedCopies, host_copies
from cnr_store_gpu.pinned import PINNED_BYTES, TransitRing, block_sizes
from cnr_store_gpu.quantize import LatticeCodes, check_codable
from cnr_store_gpu.streams import streams_of
from cnr_store_gpu.transfer import Transfer, transfer_for


class Staged:
    """Copies of rows as of one instant; valid until ``release``. Any thread may read and release them.

    Attributes
    ----------
    size_bytes
        Bytes of the gathered rows, as floats.
    make_room
        Prepares memory for a gather of more rows after the release, so that this does not pay for its pages while the
        training waits. Blocks; from any thread, before the release.
    """

    def __init__(self, tables: Collection[str], give_back: Callable[[], None]) -> None:
        self.size_bytes = 0
        self.make_room: Callable[[], None] = lambda: None
        self._tables = tables
        self._names: dict[str, tuple[str, ...]] = {}
        self._give_back: Callable[[], None] | None = give_back
        self._here = Delivery()
        self._under_way: list[Future[Delivery]] = []
        self._plain: HostCopies | None = None
        self._merging, self._releasing = threading.Lock(), threading.Lock()

    def name(self, table: str, names: Iterable[str]) -> None:
        """Say which tensors a table has that is not among the plain ones."""
        self._names[table] = tuple(names)

    def expect(self, delivery: Delivery | Future[Delivery]) -> None:
        """Add arrays that are here, or will be."""
        if isinstance(delivery, Future):
            self._under_way.append(delivery)
        else:
            self._add(delivery)

    def add_plain(self, copies: HostCopies) -> None:
        """Add copies of plain tables, once; their tensors are made when they are asked for."""
        self._plain = copies
        self.size_bytes += copies.size_bytes

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(future.done() for future in self._under_way)

    def wait(self) -> Staged:
        """Block until everything is in host memory, without the GIL; returns itself.

        Raises
        ------
        BackgroundSaveFailed
            Coding or copying failed, with its cause. Nothing was returned.
        BadRowIds
            Ids that were on a device lie outside their table.
        """
        with self._merging:
            while self._under_way:
                try:
                    arrived = self._under_way[0].result()
                except CnrStoreError:
                    raise
                except Exception as error:
                    raise BackgroundSaveFailed(
                        f"the staged rows of tables {sorted(self._tables)} did not reach the host ({error}); release "
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
        if self._here.row_ids.keys() != self._names.keys():
            self.wait()
        plain = {} if self._plain is None else self._plain.row_ids
        return {table: self._here.row_ids[table] if table in self._names else plain[table] for table in self._tables}

    @property
    def tensors(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """Host tensors by table and name: ``(n, ...)``, contiguous, row i is row ``row_ids[i]``. Blocks as `wait`.

        Without what is in `codes` instead. Views of memory that a gather after the release overwrites, made when a
        table is looked up.
        """
        return _TensorsByTable(self._tables, self._names, self.wait()._here.tensors, self._plain)

    def arrays(self, table: str, as_array: Callable[[torch.Tensor], npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return `tensors` of one table as arrays, each as ``as_array`` converts it. Blocks as `wait`.

        ``as_array`` returns an array that shares the memory of a contiguous host tensor, with as many elements.
        """
        self.wait()
        if self._plain is not None and table in self._plain:
            return self._plain.arrays_of(table, as_array)
        return {name: as_array(tensor) for name, tensor in self.tensors[table].items()}

    def joined(self, as_array: Callable[[torch.Tensor], npt.NDArray[Any]]) -> list[JoinedCopies]:
        """Return the copies of small tables, those of tables that are alike end to end. Blocks as `wait`.

        ``as_array`` as in `arrays`. What other tables have is in `arrays` and `codes` alone.
        """
        self.wait()
        return [] if self._plain is None else self._plain.joined(as_array)

    @property
    def codes(self) -> dict[str, torch.Tensor]:
        """Lattice codes by table: int16 ``(n, ...)`` on the host; without tables that fell back. Blocks as `wait`."""
        return dict(self.wait()._here.codes)

    @property
    def host_bytes(self) -> int:
        """Bytes of what is handed out: those that crossed from the device. Blocks as `wait`."""
        return self.wait()._here.size_bytes + (0 if self._plain is None else self._plain.size_bytes)

    def release(self) -> None:
        """Let a later gather use the memory, once the copies have arrived.

        Does not block; a second call does nothing.
        """
        with self._releasing:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(frozen=True, slots=True, eq=False)
class _TensorsByTable(Mapping[str, dict[str, torch.Tensor]]):
    """`Staged.tensors`: tables in the order in which they were asked for."""

    tables: Collection[str]
    names: Mapping[str, tuple[str, ...]]
    arrived: Mapping[tuple[str, str], torch.Tensor]
    plain: HostCopies | None

    def __getitem__(self, table: str) -> dict[str, torch.Tensor]:
        if self.plain is not None and table in self.plain:
            return self.plain.tensors_of(table)
        return {name: self.arrived[table, name] for name in self.names[table] if (table, name) in self.arrived}

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


GROWTH = 1.125
"""Spare room of a buffer that had to grow: row counts drift, and each growth pays page faults again."""

SPARE_BYTES = 64 * 1024 * 1024
"""Room that `KeptMemory.reserve` makes beside what a save took: pages of 64 MiB take 30 ms at their first use."""

PAGE_BYTES = 4096


_Place = tuple[Key, torch.dtype, torch.device]
_PLAIN: Key = ("rows", "", "")


@dataclass(slots=True)
class KeptMemory:
    """Flat buffers by use, grown when they are too small.

    Kept between saves, because a fresh gigabyte costs more in page faults than in copying. One save at a time must use
    it: the next caller that takes a buffer gets the same bytes.
    """

    _flat: dict[_Place, torch.Tensor] = field(default_factory=dict)
    _next: dict[_Place, torch.Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.numel() * flat.element_size() for flat in [*self._flat.values(), *self._next.values()])

    def reserve(self, key: Key, size_bytes: int, at_most: int) -> None:
        """Have host memory ready for up to `SPARE_BYTES` more than this, and no more than ``at_most``, for `take`.

        What was taken before stays valid until then. Without enough memory nothing is reserved.
        """
        place = (key, torch.uint8, torch.device("cpu"))
        flat = self._flat.get(place)
        if flat is not None and flat.numel() >= min(size_bytes + SPARE_BYTES // 2, at_most):
            return
        with contextlib.suppress(RuntimeError, MemoryError):
            flat = torch.empty(min(size_bytes + SPARE_BYTES, at_most), dtype=torch.uint8, device="cpu")
            flat[::PAGE_BYTES] = 0
            self._next[place] = flat

    def take(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        at_most: int | None = None,
        pinned: bool = False,
    ) -> torch.Tensor:
        """Return contiguous memory of ``shape``: the buffer's, so what it held is overwritten.

        Parameters
        ----------
        key
            What it is for; the same key gets the same memory again.
        shape, dtype, device
            Of the tensor that is returned.
        at_most
            Elements that will never be exceeded: there is no spare room beyond.
        pinned
            Page-locked host memory.
        """
        needed = math.prod(shape)
        place = (key, dtype, torch.device(device))
        if place in self._next:
            self._flat[place] = self._next.pop(place)
        flat = self._flat.get(place)
        if flat is None or flat.numel() < needed:
            self._flat.pop(place, None)
            del flat  # before the larger one is allocated, so that the peak is one buffer, not two
            room = int(needed * GROWTH)
            if at_most is not None:
                room = min(room, max(at_most, needed))
            flat = torch.empty(room, dtype=dtype, device=device, pin_memory=pinned)
            self._flat[place] = flat
        return flat[:needed].view(shape)


@dataclass(slots=True, eq=False)
class _Slot:
    """The memory of one save, and what is on its way into it."""

    memory: KeptMemory = field(default_factory=KeptMemory)
    deliveries: list[Future[Delivery]] = field(default_factory=list)


class StagingBuffers:
    """Memory for the copies of saves, kept between gathers: of as many saves as were ever held at a time.

    Parameters
    ----------
    pinned_bytes
        Page-locked host memory for each accelerator, taken with its first copy and kept.
    quantize
        By table: what to stage as codes instead of floats, which copies 2 bytes per element to the host. An array that
        cannot be coded is copied as floats too; its codes are not used then.
    transfer
        How rows are copied from all devices; the default depends on the device, and host memory needs none. Its owner
        closes it.

    Attributes
    ----------
    quantize
        May be set between gathers: a scale belongs to a generation of its table.

    Examples
    --------
    >>> import numpy as np
    >>> buffers = StagingBuffers()
    >>> staged = buffers.gather({"t": RowRequest(np.array([2, 0]), {"weight": torch.arange(6.0).view(3, 2)})})
    >>> staged.tensors["t"]["weight"]
    tensor([[4., 5.],
            [0., 1.]])
    >>> staged.release()
    """

    def __init__(
        self,
        *,
        pinned_bytes: int = PINNED_BYTES,
        quantize: Mapping[str, LatticeCodes] | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        block_sizes(pinned_bytes)
        self.quantize: dict[str, LatticeCodes] = dict(quantize or {})
        self._pinned_bytes, self._given = pinned_bytes, transfer
        self._ways: dict[torch.device, tuple[Transfer, TransitRing]] = {}
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._layout: HostLayout | None = None
        self._workers = Workers(name="cnr-copy")
        self._like: object = None
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all buffers, on devices and on the host, without the pinned ring."""
        with self._lock:
            return sum(slot.memory.size_bytes for slot in self._slots)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the rings that have been taken."""
        return sum(ring.size_bytes for _, ring in self._ways.values())

    @property
    def in_use(self) -> bool:
        """Whether copies are held or still on their way."""
        with self._lock:
            return len(self._free) < len(self._slots)

    def gather(self, requests: Mapping[str, RowRequest], *, like: object = None) -> Staged:
        """Copy the asked rows of all tables as they are now.

        Call it at a step boundary, from the thread that trains: nothing may write the tables until it returns. On the
        CPU it blocks until the rows are copied; on an accelerator until the copying is queued on the current stream,
        and later work of that stream runs after it.

        Parameters
        ----------
        requests
            Rows and tensors by table, as a dict or as `RowRequests`. A table without rows yields tensors ``(0, ...)``.
        like
            With the same object as in the gather before, the caller says that tables and tensors have the names,
            dtypes, devices, layouts and numbers of elements that they had then: these are not compared. It is kept
            until the next gather.

        Raises
        ------
        BadShape
            Tensors of different lengths.
        BadRowIds
            Ids of a wrong shape or dtype, or outside the tensors. Those on a device are checked after the copy, by
            `Staged.wait`.
        BadDtype, BadInput
            A tensor that is to be coded cannot be; nothing was copied.
        """
        with self._lock:
            if not self._free:
                self._slots.append(_Slot())
                self._free.append(self._slots[-1])
            # The one released last: who holds one at a time needs the memory of one.
            slot = self._free.pop()
        slot.deliveries = []
        try:
            staged = Staged([*requests], lambda: self._free_when_done(slot))
            self._stage(staged, slot, requests, like)
        except BaseException:
            self._free_when_done(slot)
            raise
        return staged

    def free(self) -> None:
        """Give the memory back, and end the threads; blocks until copies under way are over.

        Copies that were not released stay valid; their memory is not used again.
        """
        with self._lock:
            self._slots.clear()
            self._free.clear()
        self._workers.close()
        self._workers = Workers(name="cnr-copy")
        ways, self._ways = self._ways, {}
        for transfer, ring in ways.values():
            if transfer is not self._given:
                transfer.close()
                ring.close()

    def _free_when_done(self, slot: _Slot) -> None:
        for delivery in slot.deliveries:
            if not delivery.done():
                delivery.add_done_callback(lambda _: self._free_when_done(slot))
                return
        with self._lock:
            if slot in self._slots and slot not in self._free:
                self._free.append(slot)

    # ---- copies

    def _stage(self, staged: Staged, slot: _Slot, requests: Mapping[str, RowRequest], like: object) -> None:
        for table in [table for table in self.quantize if table in requests]:
            self._check_quantizer(table, requests[table])
        here = Delivery()
        by_device: dict[torch.device, tuple[list[StagedArray], list[StagedIds]]] = {}
        rest: Mapping[str, RowRequest] = requests
        if self._given is None:
            is_like = like is not None and like is self._like
            plain = host_copies(requests, without=self.quantize, known=self._layout, is_like=is_like)
            self._layout, self._like = plain.layout, like
            if len(plain.rest) < len(requests):
                memory = slot.memory.take(_PLAIN, (plain.end,), torch.uint8, at_most=plain.most)
                plain.copy(requests, memory, self._workers)
                staged.add_plain(plain)
                staged.make_room = partial(slot.memory.reserve, _PLAIN, plain.end, plain.most)
                rest = {table: requests[table] for table in requests if table in plain.rest} if plain.rest else {}
        for table, request in rest.items():
            staged.name(table, request.tensors)
            index, num_rows = index_of(request.row_ids), common_rows(request.tensors)
            if index.device.type == "cpu":
                here.row_ids[table] = index.numpy() if isinstance(request.row_ids, torch.Tensor) else request.row_ids
            else:
                index = index.clone()  # the caller may overwrite his
                by_device.setdefault(index.device, ([], []))[1].append(StagedIds(table, index, num_rows))
            for one in self._copy_rows(slot.memory, table, request, index, num_rows):
                staged.size_bytes += one.rows.nbytes
                if self._given is None and one.rows.device.type == "cpu" and one.quantizer is None:
                    here.tensors[table, one.name] = one.rows
                    here.size_bytes += one.rows.nbytes
                else:
                    by_device.setdefault(one.rows.device, ([], []))[0].append(one)
        staged.expect(here)
        for device, (rows, ids) in by_device.items():
            slot.deliveries.append(self._send(device, rows, ids, slot.memory))
            staged.expect(slot.deliveries[-1])

    def _check_quantizer(self, table: str, request: RowRequest) -> None:
        quantizer = self.quantize.get(table)
        if quantizer is None:
            return
        if quantizer.tensor not in request.tensors:
            raise BadInput(
                f"table {table!r} is to be staged as codes of {quantizer.tensor!r}, but the request has "
                f"{sorted(request.tensors)}; name another tensor in its quantizer",
                table=table,
            )
        check_codable(table, quantizer, request.tensors[quantizer.tensor])

    def _copy_rows(
        self, memory: KeptMemory, table: str, request: RowRequest, index: torch.Tensor, num_rows: int
    ) -> list[StagedArray]:
        n = len(index)
        if index.device.type == "cpu":
            if request.tensors:
                check_range(index, num_rows)
        elif n and not num_rows:
            check_range(index.new_zeros(1, device="cpu"), num_rows)
        else:
            # Not read here, which would wait for the device: rows outside are another row's until the ids are checked.
            index = index.clamp(0, max(num_rows - 1, 0))
        uploaded: dict[torch.device, torch.Tensor] = {index.device: index}
        if request.device_rows is not None and index.device.type == "cpu":
            uploaded[request.device_rows.device] = index_of(request.device_rows)

        def rows_on(device: torch.device) -> torch.Tensor:
            if device not in uploaded:
                uploaded[device] = _upload(index, device, memory, table)
            return uploaded[device]

        out = {
            name: memory.take(("rows", table, name), (n, *tensor.shape[1:]), tensor.dtype, tensor.device,
                              at_most=tensor.numel())
            for name, tensor in request.tensors.items()
        }  # fmt: skip
        quantizer = self.quantize.get(table)
        return [
            StagedArray(table, name, rows, quantizer if quantizer is not None and quantizer.tensor == name else None)
            for name, rows in select_rows(request.tensors, rows_on, out).items()
        ]

    def _send(
        self, device: torch.device, rows: list[StagedArray], ids: list[StagedIds], memory: KeptMemory
    ) -> Future[Delivery]:
        if device not in self._ways:
            transfer = self._given or transfer_for(device)
            self._ways[device] = (transfer, TransitRing(transfer, self._pinned_bytes))
        transfer, ring = self._ways[device]
        copy_to_host = None if self._given is None and device.type == "cpu" else ring.copy
        return transfer.run(transfer.record(), lambda: deliver(rows, ids, memory.take, copy_to_host))


def _upload(index: torch.Tensor, device: torch.device, memory: KeptMemory, table: str) -> torch.Tensor:
    if streams_of(device) is None or index.device.type != "cpu":
        return index.to(device)
    # From ordinary memory the host would wait for all that the training has queued.
    pinned = memory.take(("pinned ids", table, str(device)), tuple(index.shape), index.dtype, pinned=True)
    return pinned.copy_(index).to(device, non_blocking=True)
