"""Copies a state dict for `dcp.async_save`: of tracked tables the changed rows only, of all else everything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cnr_store.integrations.dcp.row_marks import RowMarks, Signature, TakenMarks, local_of, table_of
from cnr_store.integrations.dcp.tracked_copy import TrackedCopy
from cnr_store_gpu import RowRequest, RowTracker, Staged, StagingBuffers

Path = tuple[Any, ...]


class CnrStager:
    """An ``AsyncStager`` that is kept between saves, and its memory with it. `CnrStorageWriter` is one by itself.

    The copies are complete when `stage` returns. Their memory is used again once nothing refers to them: if an earlier
    save still does, more is taken.

    Parameters
    ----------
    tracker
        Knows which rows changed. None: everything is copied in every save, and compared by the writer.
    stored
        Returns the names of the tables and slots of the newest save, so far as the writer can build on them: of those
        changed rows are enough.
    """

    _synchronize_after_execute = False

    def __init__(self, tracker: RowTracker | None = None, *, stored: Callable[[], Collection[str]] = tuple) -> None:
        self.marks = RowMarks(tracker)
        self._stored = stored
        self._copies = _new_copies()
        self._buffers = StagingBuffers()
        self._lease: weakref.ref[_CopiesInUse] | None = None
        self._has_whole = False  # the kept copies have tracked tables, which later saves do not need

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: nothing is left to wait for."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: copies are complete when `stage` returns."""

    def close(self) -> None:
        """Free the memory of the copies."""
        self._copies.close()
        self._buffers = StagingBuffers()

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return a state dict that later training steps do not change. Blocks; call it between optimizer steps.

        Raises
        ------
        BadInput
            With a tracker: lookups wait for their optimizer step.
        """
        tracked: dict[Path, torch.Tensor] = {}
        taken: TakenMarks | None = None
        if self.marks.tracker is not None:
            tensors = dict(_tensors(state_dict, ()))
            live = self.marks.live()
            tracked = {path: one for path, one in tensors.items() if _has_one_shard(one) and table_of(one, live)}
            taken = self.marks.take(live, _signature(tensors))
        stored = self._stored() if taken is not None and taken.signature == self.marks.saved else ()
        by_rows = {path: one for path, one in tracked.items() if _joined(path) in stored}
        held = {path: None if path in by_rows else local_of(tensor) for path, tensor in tracked.items()}
        is_in_use = self._lease is not None and self._lease() is not None
        if is_in_use or (by_rows and self._has_whole):
            self._copies = _new_copies()
        self._has_whole = bool(tracked) and not by_rows
        lease = _CopiesInUse()
        self._lease = weakref.ref(lease)
        copied: Any = self._copies.stage(_with(state_dict, held))  # no future: it does not stage asynchronously
        for _path, tensor in _tensors(copied, ()):
            tensor._cnr_lease = lease  # type: ignore[attr-defined]
        if taken is None:
            return copied  # type: ignore[no-any-return]
        whole = dict(_tensors(copied, ()))
        staged = self._staged_rows(by_rows, taken, lease)
        staged |= {
            path: TrackedCopy(tensor, taken, None, partial(whole.__getitem__, path), lease)
            for path, tensor in tracked.items()
            if path not in by_rows
        }
        return _with(copied, staged)  # type: ignore[no-any-return]

    def _staged_rows(
        self, tracked: Mapping[Path, torch.Tensor], taken: TakenMarks, lease: _CopiesInUse
    ) -> dict[Path, TrackedCopy]:
        """Copy the changed rows of tracked tensors."""
        by_table: dict[str, dict[Path, torch.Tensor]] = {}
        for path, tensor in tracked.items():
            by_table.setdefault(str(table_of(tensor, taken.live)), {})[path] = tensor
        requests = {
            table: RowRequest(
                taken.rows[table].row_ids,
                {_joined(path): local_of(tensor) for path, tensor in tensors.items()},
                taken.rows[table].device_rows,
            )
            for table, tensors in by_table.items()
        }
        staged = self._buffers.gather(requests)
        weakref.finalize(lease, staged.release)
        return {
            path: TrackedCopy(
                tensor, taken, taken.rows[table].row_ids, partial(_arrived, staged, table, _joined(path)), lease
            )
            for table, tensors in by_table.items()
            for path, tensor in tensors.items()
        }  # fmt: skip


def _arrived(staged: Staged, table: str, name: str) -> torch.Tensor:
    return staged.tensors[table][name]


class _CopiesInUse:
    """Lives as long as something refers to the copies of one save."""


def _new_copies() -> DefaultStager:
    has_device = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(), use_shared_memory=False, use_async_staging=False,
            use_non_blocking_copy=has_device,
        )
    )  # fmt: skip


def _has_one_shard(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor is one strided tensor."""
    local = local_of(tensor)
    return type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided and local.ndim > 0


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif hasattr(value, "local_shards"):  # a ShardedTensor
        yield from _tensors([shard.tensor for shard in value.local_shards()], path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, index))


def _with(value: Any, others: Mapping[Path, Any]) -> Any:
    """Return nested containers with other leaves at some paths; what has none of them is the same object."""
    return _replaced(value, others, {path[:depth] for path in others for depth in range(len(path))}, ())


def _replaced(value: Any, others: Mapping[Path, Any], on_the_way: Set[Path], path: Path) -> Any:
    if path in others:
        return others[path]
    if path not in on_the_way:
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, others, on_the_way, (*path, key)) for key, item in value.items()}
    items = [_replaced(item, others, on_the_way, (*path, index)) for index, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _signature(tensors: Mapping[Path, torch.Tensor]) -> Signature:
    return {_joined(path): (tuple(one.shape), str(one.dtype)) for path, one in tensors.items()}


def _joined(path: Path) -> str:
    return ".".join(map(str, path))
