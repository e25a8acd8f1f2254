"""What every hook of DistributedDataParallel needs: names of parameters, and means of buckets over ranks.

A hook must key its state by parameter: DDP builds its buckets anew after the first step, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Result = torch.futures.Future[torch.Tensor]


def register(model: DistributedDataParallel, hook: Callable[[GradBucket], Result]) -> dict[torch.Tensor, str]:
    """Make a hook reduce the gradients of a model; return the names of its parameters. Once for each model."""

    def call(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        return hook(bucket)

    model.register_comm_hook(None, call)
    return {parameter: name for name, parameter in model.module.named_parameters()}


def mean_of_dense(values: torch.Tensor, group: dist.ProcessGroup) -> Result:
    """Return the mean of a tensor over the ranks, which replaces it. Does not block."""
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    world = group.size()
    result: Result = work.get_future().then(lambda done: done.value()[0].div_(world))
    return result


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

    def sparse(messages: list[list[torch.Tensor]]) -> torch.Tensor:
        rows, found = zip(*messages, strict=True)
        at = torch.cat([one[:size] for one, size in zip(rows, sizes, strict=True)]).T
        every = torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])
        return torch.sparse_coo_tensor(at, every / world, values.shape, check_invariants=False)

    return gathered(padded, group, sparse)


def gathered(
    share: Sequence[torch.Tensor], group: dist.ProcessGroup, then: Callable[[list[list[torch.Tensor]]], torch.Tensor]
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

    def merge(_: torch.futures.Future[object]) -> torch.Tensor:
        messages = []
        for row in received:
            parts = zip(row.split(lengths), share, strict=True)
            messages.append([part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in parts])
        return then(messages)

    result: Result = work.get_future().then(merge)
    return result


def message_bytes(share: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the message in which `gathered` sends tensors."""
    return sum(one.nbytes + -one.nbytes % _WORD for one in share)


_WORD = 8
"""Each tensor of a message begins at a multiple of so many bytes, as views of its dtype need."""


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    flat = values.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _WORD))
