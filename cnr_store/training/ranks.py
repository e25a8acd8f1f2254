"""The ranks of a training that runs under ``torch.distributed``: messages over a gloo group of their own.

A group of their own, because the default one may be NCCL, whose messages would wait for the device, and because its
time limit is another: a save may take minutes. Only bytes travel, never pickled objects.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from cnr_store.errors import BadInput, RankLost
from cnr_store.runtime.ranks import OneRank, Parcels, Ranks

TIMEOUT_S = 1800.0
"""How long ranks wait for the slowest one's share of a save."""
_ADVICE = "find out why in the output of all ranks, then restart the training from the last checkpoint"
_HANG_UP = dt.timedelta(milliseconds=1)


@dataclass(slots=True)
class _Connections:
    """All lines of one rank: when one breaks, all do."""

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    is_broken: bool = False


class ProcessRanks:
    """One rank of a ``torch.distributed`` job. Made by all ranks of the group together; blocks until they are there.

    Parameters
    ----------
    group
        The processes that train together; None for all.
    timeout_s
        Seconds to wait for the slowest rank, for its whole share of a save.

    Raises
    ------
    BadInput
        ``torch.distributed`` is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        if not dist.is_initialized():
            raise BadInput("torch.distributed is not initialised: call init_process_group() first, or leave out ranks=")
        if dist.get_rank(group) < 0:
            raise BadInput("this process is not in the group that it was given")
        self._members = dist.get_process_group_ranks(group)
        self._timeout_s = timeout_s
        self._lines = _Connections()
        self._line = dist.new_group(
            self._members,
            timeout=dt.timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=len(self._members) < dist.get_world_size(),
        )
        self._lines.groups.append(self._line)
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = len(self._members)

    def exchange(self, message: bytes) -> list[bytes]:
        """See `cnr_store.runtime.ranks.Ranks.exchange`. Two gathers: lengths, then bytes."""
        with self._answered():
            lengths = self._gather(torch.tensor([len(message)], dtype=torch.int64, device="cpu"))
            sizes = [int(length) for length in lengths]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
            given = self._gather(padded)
        return [tensor[:size].numpy().tobytes() for tensor, size in zip(given, sizes, strict=True)]

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        """See `cnr_store.runtime.ranks.Ranks.broadcast`."""
        with self._answered():
            dist.broadcast(torch.from_numpy(data), group=self._line, group_src=source)

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        """See `cnr_store.runtime.ranks.Ranks.transfer`."""
        with self._answered():
            works = [
                act(torch.from_numpy(data), group=self._line, **{side: rank})
                for act, side, parcels in ((dist.irecv, "group_src", received), (dist.isend, "group_dst", sent))
                for rank, data in parcels
                if data.size
            ]
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()

    def another(self) -> ProcessRanks:
        """See `cnr_store.runtime.ranks.Ranks.another`. It breaks when this one does."""
        other = ProcessRanks(self._group, timeout_s=self._timeout_s)
        other._lines = self._lines
        self._lines.groups.append(other._line)
        return other

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Raise RankLost where gloo fails, and close all lines then."""
        if self._lines.is_broken:
            raise RankLost(f"a rank did not answer earlier; {_ADVICE}")
        try:
            yield
        except RuntimeError as error:  # torch's DistError too
            self._hang_up()
            reason = str(error).split(". This is typically")[0]  # gloo goes on with advice of its own
            raise RankLost(
                f"another rank ended, or did not answer within {self._timeout_s:g} s ({reason}); {_ADVICE}"
            ) from error

    def _hang_up(self) -> None:
        """Close this rank's connections on all lines: ranks far from the lost one would wait for their time limit."""
        self._lines.is_broken = True
        for line in self._lines.groups:
            for peer in range(self.world):
                if peer == self.rank:
                    continue
                try:
                    # A receive that times out closes all connections of a gloo group; there is no call for it.
                    work = dist.irecv(torch.zeros(1, device="cpu"), group=line, group_src=peer)
                    if work is not None:
                        work.wait(_HANG_UP)
                except RuntimeError:
                    continue  # it is closed: now, or already

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor, group=self._line)
        return found


def ranks_of_this_training() -> Ranks:
    """Return all ranks of ``torch.distributed`` where it is initialised with several, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessRanks()
    return OneRank()
