"""Hooks that tell a tracker which rows the lookups of a sharded model read, and when the fused optimizer has written.

Why this module exists: ids are local to a shard only inside the lookup, and a fused optimizer has no step to hook: it
writes while the lookup's own node of the backward graph runs. So the forward of each lookup marks rows, and the end of
that node says that they are written. TorchRec's tracker callbacks are single slots and are left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from cnr_store.errors import Unsupported
from cnr_store.integrations.torchrec.names import private
from cnr_store.integrations.torchrec.shards import Kernel, Lookup, Sharded
from cnr_store.training.shards import Handle

_PATIENCE = 3
"""Backwards of other forwards that one in a pipeline may wait for without a look for garbage, which takes time."""


class Tracker(Protocol):
    """What is told; `cnr_store_gpu.RowTracker` is one."""

    def lookup_slices(self, names: Sequence[str], ids: torch.Tensor, ends: Sequence[int]) -> None:
        """Rows are read that an update will change: slice i of ``ids`` ends at ``ends[i]``, local to shard i."""

    def updated(self, name: str) -> None:
        """A fused optimizer has written a shard's updates; lookups that still wait for theirs are told of again."""


def follow(sharded: Sharded, tracker: Tracker) -> list[Handle]:
    """Make the lookups tell a tracker, until the handles are removed.

    Only lookups that may change rows count: gradients are enabled. A lookup in eval mode is told once its backward
    has written, if it ever does.
    """
    handles: list[Handle] = []
    for lookup in sharded.lookups:
        if not lookup.slices:  # this rank has no shard of it
            continue
        follower = _LookupFollower(lookup, tracker)
        handles.append(
            lookup.module.register_forward_pre_hook(torch.compiler.disable(follower.before), with_kwargs=True)
        )
        handles += [
            kernel.module.register_forward_hook(torch.compiler.disable(partial(follower.after_kernel, number)))
            for number, kernel in enumerate(lookup.kernels)
            if kernel.is_fused
        ]
    return handles


@dataclass(eq=False)
class _Forward:
    """One forward of a kernel, kept alive by its node of the backward graph alone: a dropped loss drops it too."""

    ids: torch.Tensor
    ends: list[int]
    is_told: bool
    outlived: int = 0  # backwards of other forwards


class _LookupFollower:
    """The hooks of one lookup: what its forward shows, and which of its forwards still wait for their backward."""

    def __init__(self, lookup: Lookup, tracker: Tracker) -> None:
        self._lookup, self._tracker = lookup, tracker
        self._read: tuple[torch.Tensor, list[int]] | None = None  # the running forward's ids and ends of slices
        self._learns = False
        self._waiting: list[WeakSet[_Forward]] = [WeakSet() for _ in lookup.kernels]

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read = None
        if not torch.is_grad_enabled():
            return
        features = args[0] if args else kwargs["sparse_features"]
        # By position: a feature that several tables share comes once per table, under the same key.
        ends = list(private(features, "offset_per_key")()[1:])
        if len(ends) != len(self._lookup.slices):
            raise Unsupported(
                f"a lookup of {sorted(set(self._lookup.slices))} got {len(ends)} features, expected "
                f"{len(self._lookup.slices)}: its tables were changed after the tracker was attached, or this version "
                "of TorchRec orders them in another way",
                expected=len(self._lookup.slices),
                found=len(ends),
            )
        self._read = (features.values(), ends)
        self._learns = bool(self._lookup.collection.training)
        if self._learns:
            self._tracker.lookup_slices(self._lookup.slices, *self._read)

    def after_kernel(self, number: int, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if self._read is None:
            return
        forward = _Forward(*_of_kernel(self._lookup.kernels[number], *self._read), is_told=self._learns)
        if output.grad_fn is not None:
            self._waiting[number].add(forward)
            output.grad_fn.register_hook(lambda _inputs, _outputs: self._written(number, forward))
        elif self._learns:  # no backward will come
            self._settle(number)

    def _written(self, number: int, forward: _Forward) -> None:
        if not forward.is_told:
            self._tell(number, forward)
        # Another backward over the same graph, if it is kept, writes the rows once more.
        forward.is_told = False
        self._waiting[number].discard(forward)
        self._settle(number)

    def _settle(self, number: int) -> None:
        for name in dict.fromkeys(self._names(number)):
            self._tracker.updated(name)
        if self._outlive(number):
            gc.collect()
        for forward in list(self._waiting[number]):
            if forward.is_told:
                self._tell(number, forward)

    def _outlive(self, number: int) -> bool:
        """Count for the forwards that still wait, and return whether one of them waits for suspiciously long.

        TorchRec's graphs over several ranks are reference cycles: a dropped one waits until they are collected.
        """
        found = False
        for forward in self._waiting[number]:
            forward.outlived += 1
            found |= forward.outlived == _PATIENCE
        return found

    def _tell(self, number: int, forward: _Forward) -> None:
        self._tracker.lookup_slices(self._names(number), forward.ids, forward.ends)

    def _names(self, number: int) -> tuple[str, ...]:
        return self._lookup.slices[slice(*self._lookup.kernels[number].slices)]


def _of_kernel(kernel: Kernel, ids: torch.Tensor, ends: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    first, last = kernel.slices
    start = ends[first - 1] if first else 0
    return ids[start : ends[last - 1]], [end - start for end in ends[first:last]]
