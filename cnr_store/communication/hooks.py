"""What every hook of DistributedDataParallel shares: names of parameters, counts of bytes, means of buckets over ranks.

A hook must key its state by parameter: DDP builds its buckets anew after the first step, in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group: its defaults would keep that, and gloo's threads, for ever
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication.state import RankState
from cnr_store.errors import BadInput

Result = torch.futures.Future[torch.Tensor]
Messages = list[list[torch.Tensor]]
"""Tensors of each rank, by rank."""


class GradientHook(ABC):
    """A hook that reduces the gradients of one model, and counts the bytes that it gives to collectives.

    Gradients of ``sparse=True`` embeddings pass as the rows that they are, and are not counted.
    """

    held_back: ClassVar[str | None] = None
    """The last part of the names, in a rank's state, of what it holds back of each parameter: as many values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._names: dict[torch.Tensor, str] = {}
        self._group: dist.ProcessGroup | None = None
        self._steps = self._sent_bytes = self._dense_bytes = 0

    def register(self, model: DistributedDataParallel) -> None:
        """Reduce a model's gradients from now on, in its ``process_group``; once, before the first backward pass."""
        if self._group is not None:
            raise BadInput("this hook reduces the gradients of another model; make another one")
        self._names, self._group = register(model, self._reduce), model.process_group

    def _reduce(self, bucket: GradBucket) -> Result:
        buffer, step = bucket.buffer(), self._steps
        if bucket.is_last():
            self._steps += 1
        if buffer.is_sparse:
            return mean_of_sparse(buffer, self._ranks)
        self._dense_bytes += buffer.nbytes
        return self._reduce_dense(bucket, step)

    @abstractmethod
    def _reduce_dense(self, bucket: GradBucket, step: int, /) -> Result:
        """Replace a bucket's buffer, the gradients of its parameters end to end, by their mean over the ranks."""

    @property
    def _ranks(self) -> dist.ProcessGroup:
        if self._group is None:
            raise BadInput(f"{type(self).__name__} reduces no gradients yet; call register(model) first")
        return self._group

    def _share(self, tensors: Sequence[torch.Tensor], then: Callable[[Messages], torch.Tensor]) -> Result:
        """Send tensors to all ranks, and return what ``then`` makes of those of all. Does not block."""
        self._sent_bytes += sum(one.nbytes + -one.nbytes % 8 for one in tensors)  # as `_as_bytes` pads them
        return gathered(tensors, self._ranks, then)

    def metrics(self) -> dict[str, float]:
        """Return what a manager records with each save: bytes sent, and what they would be without the hook."""
        return {"sent_bytes": self._sent_bytes, "dense_bytes": self._dense_bytes}

    def rank_state(self) -> RankState:
        """See `CommunicationState`."""
        return RankState({}, {"steps": self._steps, "sent_bytes": self._sent_bytes, "dense_bytes": self._dense_bytes})

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`. The bytes are counted on."""
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        for key, held in state.tensors.items():
            name, _, what = key.rpartition("/")
            found, size = held.value.numel(), sizes.get(name)
            if sizes and what == self.held_back and size != found:
                raise BadInput(
                    f"the saved {what} of {name!r} has {found} values, the model's parameter {size}; build the model "
                    "as it was saved",
                    expected=size, found=found,
                )  # fmt: skip
        counts = (int(state.scalars[name]) for name in ("steps", "sent_bytes", "dense_bytes"))
        self._steps, self._sent_bytes, self._dense_bytes = counts


def parts_of(parameters: Sequence[torch.Tensor]) -> list[slice]:
    """Return where the gradient of each parameter stands in the buffer of its bucket."""
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    return [slice(end - parameter.numel(), end) for parameter, end in zip(parameters, ends, strict=True)]


def register(model: DistributedDataParallel, hook: Callable[[GradBucket], Result]) -> dict[torch.Tensor, str]:
    """Make a hook reduce the gradients of a model; return the names of its parameters. Once for each model."""
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))  # torch refuses annotations that are strings
    # With or without torch.compile, so that either resumes what the other has saved.
    return {parameter: name.replace("_orig_mod.", "") for name, parameter in model.module.named_parameters()}


def mean_of_sparse(values: torch.Tensor, group: dist.ProcessGroup) -> Result:
    """Return the mean of a ``torch.sparse_coo`` gradient over the ranks: their entries, gathered, not summed.

    Two gathers: the numbers of entries, then indices and values, padded to the most of a rank. Blocks for the first.
    DDP's own sum of sparse gradients on gloo breaks the heap (torch 2.13). A rank sends each row at most once.
    """
    values, world = values.coalesce(), group.size()
    indices, entries = values.indices().T, values.values()
    counts = torch.empty(world, 1, dtype=torch.int64, device=values.device)
    dist.all_gather(list(counts), torch.tensor([len(entries)], device=values.device), group=group)
    sizes = counts.view(-1).tolist()
    padding = max(sizes) - len(entries)
    padded = [torch.cat([one, one.new_zeros((padding, *one.shape[1:]))]) for one in (indices, entries)]

    def sparse(messages: Messages) -> torch.Tensor:
        rows, found = zip(*messages, strict=True)
        at = torch.cat([one[:size] for one, size in zip(rows, sizes, strict=True)]).T
        every = torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])
        return torch.sparse_coo_tensor(at, every / world, values.shape, check_invariants=False)

    return gathered(padded, group, sparse)


def gathered(
    share: Sequence[torch.Tensor], group: dist.ProcessGroup, then: Callable[[Messages], torch.Tensor]
) -> Result:
    """Send tensors to all ranks in one message, and call ``then`` with those of each rank, by rank. Does not block.

    The tensors have the same dtypes and shapes on all ranks.
    """
    pieces = [_as_bytes(one) for one in share]
    message, world = torch.cat(pieces), group.size()
    received = torch.empty(world, len(message), dtype=torch.uint8, device=message.device)
    work = dist.all_gather(list(received), message, group=group, async_op=True)
    assert work is not None
    lengths = [len(piece) for piece in pieces]

    def merge(done: torch.futures.Future[object]) -> torch.Tensor:
        done.value()  # raises where the gather failed, as where a rank is gone: nothing arrived then
        messages = []
        for row in received:
            parts = zip(row.split(lengths), share, strict=True)
            messages.append([part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in parts])
        return then(messages)

    result: Result = work.get_future().then(merge)
    return result


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, padded to a multiple of 8: the next one begins where a view of its dtype can."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8))
