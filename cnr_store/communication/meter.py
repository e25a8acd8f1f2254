"""Counts the bytes that a training sends: a process group that passes every collective on to another one.

Nothing is computed from formulas of a compression: the sizes are those of the tensors that reach the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cnr_store.communication.state import RankState

_BACKEND = "cnr_metered"
"""The name under which torch knows groups of `Meter.group`."""


@dataclass(slots=True)
class Traffic:
    """What one kind of collective moved, seen from one rank, in ``calls`` of it.

    ``pushed_bytes``: of the tensors that this rank gave to it for others: a gradient before it is reduced, the own
    share of a gather, all but the own chunk of an all-to-all. ``received_bytes``: of the shares of the others; of an
    all-reduce of n bytes and a reduce-scatter, what the ring algorithm moves: 2 n (W - 1) / W and n (W - 1) / W.
    """

    calls: int = 0
    pushed_bytes: int = 0
    received_bytes: int = 0


class Meter:
    """Counts what the groups that it makes send and receive, by kind of collective.

    ``by_collective``: the traffic since the start or the last `reset`, by name of the collective. ``name``: of these
    counts in checkpoints; as an item of ``CheckpointManager(communication=)`` the meter goes on counting.

    Examples
    --------
    On every rank: ``meter = Meter()``, ``model = DistributedDataParallel(module, process_group=meter.group())``.
    Functions of ``torch.distributed`` are counted with ``group=`` of that group.
    """

    def __init__(self, *, name: str = "meter") -> None:
        self.name = name
        self.by_collective: dict[str, Traffic] = {}

    def group(self, over: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
        """Return a group of the ranks of ``over`` (None: all) that counts. All of these ranks call it together. Blocks.

        Collectives run in ``over``: with its backend, on its threads and streams, and in one order with its own ones.
        """
        if _BACKEND not in dist.Backend.backend_list:
            devices = [*dist.Backend.default_device_backend_map]
            dist.Backend.register_backend(_BACKEND, lambda _, metered: metered, extended_api=True, devices=devices)
        inner = dist.group.WORLD if over is None else over
        assert inner is not None
        made = dist.new_group(
            dist.get_process_group_ranks(inner), backend=_BACKEND, pg_options=_MeteredGroup(inner, self),
            use_local_synchronization=dist.get_world_size(inner) < dist.get_world_size(),
        )  # fmt: skip
        assert isinstance(made, dist.ProcessGroup)
        return made

    @property
    def total(self) -> Traffic:
        """The sum over all collectives."""
        return Traffic(*map(sum, zip(*map(astuple, self.by_collective.values()), strict=True)))

    def reset(self) -> None:
        """Count from zero."""
        self.by_collective.clear()

    def metrics(self) -> dict[str, float]:
        """Return what a manager records with each save: bytes pushed and received since the start."""
        return {"pushed_bytes": self.total.pushed_bytes, "received_bytes": self.total.received_bytes}

    def rank_state(self) -> RankState:
        """See `CommunicationState`."""
        return RankState({}, {"counts": {name: list(astuple(one)) for name, one in self.by_collective.items()}})

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`."""
        self.by_collective = {name: Traffic(*counts) for name, counts in state.scalars["counts"].items()}

    def _count(self, name: str, pushed: int, received: int) -> None:
        traffic = self.by_collective.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.pushed_bytes += pushed
        traffic.received_bytes += received


def _bytes(tensors: torch.Tensor | Iterable[Any]) -> int:
    """Bytes of the elements of a tensor, or of all tensors in nested lists; of a sparse one its indices and values."""
    if not isinstance(tensors, torch.Tensor):
        return sum(map(_bytes, tensors))
    return _bytes([tensors._indices(), tensors._values()]) if tensors.layout is torch.sparse_coo else tensors.nbytes


_COUNTED: dict[str, tuple[str, int, Callable[[int, int, bool], tuple[int, int]]]] = {
    name: (collective, argument, sizes)
    for collective, argument, sizes, names in [
        ("all_reduce", 0, lambda own, world, _: (own, 2 * own * (world - 1) // world), "allreduce allreduce_coalesced"),
        ("all_gather", 1, lambda own, world, _: (own, own * (world - 1)),
         ("allgather allgather_coalesced all_gather_single all_gather_single_coalesced _allgather_base "
          "allgather_into_tensor_coalesced")),
        ("reduce_scatter", 1, lambda own, world, _: (own, own * (world - 1) // world),
         ("reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced _reduce_scatter_base "
          "reduce_scatter_tensor_coalesced")),
        ("broadcast", 0, lambda own, _, is_root: (own, 0) if is_root else (0, own), "broadcast"),
        ("reduce", 0, lambda own, _, is_root: (0, own) if is_root else (own, 0), "reduce"),
        ("gather", 1, lambda own, world, is_root: (0, own * (world - 1)) if is_root else (own, 0), "gather"),
        ("scatter", 0, lambda own, world, is_root: (own * (world - 1), 0) if is_root else (0, own), "scatter"),
        ("send", 0, lambda own, *_: (own, 0), "send"),
        ("recv", 0, lambda own, *_: (0, own), "recv recv_anysource"),
    ]
    for name in names.split()
}  # fmt: skip
"""By method of a process group: the collective, the argument whose bytes count, and what is pushed and received.

Sizes follow from a rank's own bytes, the number of ranks, and whether it is the root.
"""
_EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")


def _counts(method: str, rank: int, world: int, given: tuple[Any, ...]) -> tuple[str, int, int]:
    """Return of a call the collective, and the bytes that this rank pushed and received."""
    if method == "barrier":
        return "barrier", 0, 0
    if method in _EXCHANGES:
        received, pushed = given[:2]
        to, source = (given[3], given[2]) if len(given) >= 4 else ([], [])
        return "all_to_all", _foreign_bytes(pushed, to, rank, world), _foreign_bytes(received, source, rank, world)
    collective, argument, sizes = _COUNTED[method]
    options = given[-1]
    root = options if isinstance(options, int) else getattr(options, "rootRank", None)
    return collective, *sizes(_bytes(given[argument]), world, root == rank)


def _foreign_bytes(tensors: Any, splits: Any, rank: int, world: int) -> int:
    """Bytes of the tensors of an all-to-all but for a rank's own chunk."""
    if not isinstance(tensors, torch.Tensor):
        own = tensors[rank]
    elif splits:
        own = tensors[sum(splits[:rank]) :][: splits[rank]]
    else:
        own = tensors.chunk(world)[rank] if len(tensors) else tensors
    return _bytes(tensors) - _bytes(own)


class _MeteredGroup(dist.ProcessGroup):
    """Passes collectives on to another group, and counts them. Python and DDP's reducer call its methods alike."""

    def __init__(self, inner: dist.ProcessGroup, meter: Meter) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this overload
        self.inner, self.meter = inner, meter

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return _BACKEND

    @property
    def group_name(self) -> c10d.GroupName:  # torch's own asks a backend, which this group does not have
        return c10d._world.pg_names[self]


def _counted(method: str) -> Callable[..., Any]:
    def call(self: _MeteredGroup, *given: Any, **named: Any) -> Any:
        self.meter._count(*_counts(method, self.rank(), self.size(), (*given, *named.values())))
        return getattr(self.inner, method)(*given, **named)

    return call


for _method in (*_COUNTED, *_EXCHANGES, "barrier"):
    setattr(_MeteredGroup, _method, _counted(_method))
