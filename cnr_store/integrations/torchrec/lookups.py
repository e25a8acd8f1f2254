"""Hooks that report to a tracker which rows a sharded model looks up, and when the fused optimizer has written them.

Why this module exists: ids are local to a shard only inside the lookup. A fused optimizer has no step to hook: it
writes while the lookup's node of the backward graph runs. So the forward hook of each lookup marks rows, and a hook at
the end of that node reports that they are written. TorchRec's tracker callbacks are single slots and are not used.
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
"""A forward may wait for this many backwards of other forwards before garbage is collected, which takes time."""


class Tracker(Protocol):
    """Receives the reports; `cnr_store_gpu.RowTracker` is one."""

    def lookup_slices(self, names: Sequence[str], ids: torch.Tensor, ends: Sequence[int]) -> None:
        """Report rows that an update will change: slice i of ``ids``, local to shard i, ends at ``ends[i]``."""

    def updated(self, name: str) -> None:
        """Report that a fused optimizer has updated a shard; lookups without an update yet are reported again."""


def follow(sharded: Sharded, tracker: Tracker) -> list[Handle]:
    """Attach hooks that report lookups to a tracker, and return their handles.

    Only lookups with gradients enabled are reported, because only they may change rows. A lookup in eval mode is
    reported after its backward has written, if that happens.
    """
    handles: list[Handle] = []
    for lookup in sharded.lookups:
        if not lookup.slices:  # this rank has no shard of its tables
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
    """One forward of a kernel. Only its node of the backward graph references it, so dropping the loss drops it."""

    ids: torch.Tensor
    ends: list[int]
    is_told: bool
    outlived: int = 0  # backwards of other forwards


class _LookupFollower:
    """The hooks of one lookup: the ids of its forward, and its forwards that have no backward yet."""

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
        # By position, because a feature that several tables share occurs once per table, with the same key.
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
        elif self._learns:  # there will be no backward
            self._settle(number)

    def _written(self, number: int, forward: _Forward) -> None:
        if not forward.is_told:
            self._tell(number, forward)
        # Another backward over the same graph, if it is retained, writes the rows again.
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
        """Count this backward for all pending forwards; return whether one has reached the limit.

        TorchRec's graphs over several ranks are reference cycles: a dropped one is freed by garbage collection only.
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
