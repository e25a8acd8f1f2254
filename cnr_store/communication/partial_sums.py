"""Tables whose rows are split among ranks, read by partial sums alone: neither rows nor their gradients travel.

Each rank keeps a range of the rows, with their optimizer state. All ranks get the same batch. Each computes its part
of a sum from its own rows, and the parts are added over all ranks; that is exact, since the first operations of click
models are sums. Every rank then computes the same loss, so it has the gradient of the sum without any message, and
from it those of its own rows (distributed equivalent substitution, Rong et al., SIGIR 2020).

The rest of the model is the same on every rank and sees the same batch: it needs no all-reduce. Do not wrap it in
DistributedDataParallel, which would average what is different here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's custom)
from torch import nn

from cnr_store.communication.one_bit import rank_and_world
from cnr_store.errors import BadInput, BadRowIds, BadShape


class SplitTable(nn.Module):
    """This rank's rows of a matrix that is split among the ranks of a group by rows.

    Parameters
    ----------
    num_rows, dim
        Shape of the whole matrix.
    bounds
        ``world + 1`` ascending numbers from 0 to ``num_rows``, others raise `BadInput`: rank r has the rows from
        ``bounds[r]`` to below ``bounds[r + 1]``. None: as even as possible.
    group
        The process group; None means the default one, or one rank alone if there is none.

    Attributes
    ----------
    rows, weight
        First (inclusive) and last (exclusive) row of this rank. Parameter ``(rows, dim)``, float32 unless ``dtype`` is
        given, drawn from a normal distribution: other values on each rank, and one number of torch's generator, so
        ranks with the same seed draw the same for what follows. `CheckpointManager` saves and restores it as a part
        of the whole table, on any number of ranks.
    """

    def __init__(
        self, num_rows: int, dim: int, *, bounds: Sequence[int] | None = None, group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_rows, self.dim, self.group = num_rows, dim, group
        rank, world = rank_and_world(group)
        bounds = [number * num_rows // world for number in range(world + 1)] if bounds is None else list(bounds)
        if len(bounds) != world + 1 or bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
            raise BadInput(
                f"bounds: expected {world + 1} ascending numbers from 0 to {num_rows}, found {bounds}", found=bounds
            )
        self.rows = (bounds[rank], bounds[rank + 1])
        self.weight = nn.Parameter(torch.empty(self.rows[1] - self.rows[0], dim, device=device, dtype=dtype))
        draws = torch.Generator("cpu" if self.weight.is_meta else self.weight.device)
        draws.manual_seed(int(torch.randint(1 << 62, (), device="cpu")) + rank)
        nn.init.normal_(self.weight, generator=draws)


class PartialSums(SplitTable):
    """A table split among ranks by rows: pooled lookups, linear terms (``dim=1``) and factorization machines.

    Parameters
    ----------
    num_rows, dim, bounds, group, device, dtype, sparse
        As of `SplitTable`; whether the gradient of the weight is a sparse tensor, as of ``nn.Embedding``.

    Notes
    -----
    The methods take what ``nn.EmbeddingBag`` takes: ``ids`` ``(n,)`` int64 in the whole table, ``offsets``
    ``(num_bags,)`` int64, where each bag begins, and ``values`` ``(n,)`` to multiply rows by, None for ones. All are
    the same on every rank. Each call is one all-reduce of its result and blocks; backward has no message. It waits for
    the device, because ids are checked: one outside the table raises `BadRowIds`.

    Examples
    --------
    >>> table = PartialSums(100, 8)
    >>> table.pooled(torch.tensor([3, 99, 7]), torch.tensor([0, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(self, num_rows: int, dim: int, *, sparse: bool = False, **options: Any) -> None:
        super().__init__(num_rows, dim, **options)
        self.sparse = sparse

    def pooled(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of ``values * rows`` of each bag, ``(num_bags, dim)``, the same on every rank."""
        return sum_over_ranks(self.partial(ids, offsets, values), self.group)

    def factorized(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over all pairs in each bag of ``values * rows`` times one another, ``(num_bags,)``.

        It sends ``dim + 1`` numbers per bag: the sum, whose square has all pairs, and the sum of squares.
        """
        rows, bags = self._own_rows(ids, offsets, values)
        sums = _sum_of_bags(rows, bags, len(offsets))
        squares = _sum_of_bags(rows.square().sum(dim=1, keepdim=True), bags, len(offsets))
        both = sum_over_ranks(torch.cat([sums, squares], dim=1), self.group)
        return (both[:, :-1].square().sum(dim=1) - both[:, -1]) / 2

    def partial(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of `pooled`; nothing communicates."""
        return _sum_of_bags(*self._own_rows(ids, offsets, values), len(offsets))

    def _own_rows(
        self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of each id in this rank's range its row times its value, and its bag."""
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_rows):
            raise BadRowIds(
                f"expected row ids from 0 to below {self.num_rows}, found {int(ids.min())} to {int(ids.max())}",
                expected=self.num_rows,
            )
        start, stop = self.rows
        own = ((ids >= start) & (ids < stop)).nonzero().squeeze(1)
        rows = F.embedding(ids[own] - start, self.weight, sparse=self.sparse)
        if values is not None:
            rows = rows * values[own].unsqueeze(1)
        return rows, torch.searchsorted(offsets.contiguous(), own, right=True) - 1


class PartialFirstLayer(nn.Module):
    """The first fully connected layer over the pooled rows of several fields, whole fields split among ranks.

    A rank has the rows of its fields and the columns of the layer's weight that they meet. It sends ``hidden`` numbers
    per sample, however many fields and rows there are.

    ``fields``: number of rows of each. ``dim``: numbers per row. ``hidden``: outputs of the layer. The others are as of
    `PartialSums`.

    Attributes
    ----------
    own_fields
        First (inclusive) and last (exclusive) field of this rank; ranks get about equally many rows.
    table, columns, bias
        `PartialSums` of all fields, one after the other; `SplitTable` ``(fields * dim, hidden)``: the transpose of the
        layer's weight, zero on average with the variance of ``nn.Linear``; parameter ``(hidden,)``, the same on all.
    """

    def __init__(self, fields: Sequence[int], dim: int, hidden: int, *, sparse: bool = False, **options: Any) -> None:
        super().__init__()
        group = options.get("group")
        rank, world = rank_and_world(group)
        edges = [0, *accumulate(fields)]
        targets = [edges[-1] * number / world for number in range(1, world)]
        cuts = [0, *(min(range(len(edges)), key=lambda cut: abs(edges[cut] - at)) for at in targets), len(fields)]
        self._starts: torch.Tensor
        self.num_fields, self.own_fields = len(fields), (cuts[rank], cuts[rank + 1])
        self.table = PartialSums(edges[-1], dim, sparse=sparse, bounds=[edges[cut] for cut in cuts], **options)
        self.columns = SplitTable(len(fields) * dim, hidden, bounds=[cut * dim for cut in cuts], **options)
        with torch.no_grad():
            self.columns.weight.mul_((3 * len(fields) * dim) ** -0.5)
        factory = {name: options[name] for name in ("device", "dtype") if name in options}
        self.bias = nn.Parameter(torch.zeros(hidden, **factory))
        self.register_buffer("_starts", torch.tensor(edges[:-1], device=options.get("device")), persistent=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer's outputs ``(batch, hidden)``, the same on every rank. Blocks.

        The arguments are those of `PartialSums`, but ids count from 0 in their field. ``offsets`` are ``(batch *
        fields,)``: bags of one sample after the other, in the order of the fields; another number raises `BadShape`.
        """
        if len(offsets) % self.num_fields:
            raise BadShape(
                f"expected a multiple of {self.num_fields} bags, one per sample and field, found {len(offsets)}",
                expected=self.num_fields, found=len(offsets),
            )  # fmt: skip
        places = torch.arange(len(ids), device=ids.device)
        field = (torch.searchsorted(offsets.contiguous(), places, right=True) - 1) % self.num_fields
        pooled = self.table.partial(ids + self._starts[field], offsets, values)
        own = pooled.view(-1, self.num_fields, self.table.dim)[:, slice(*self.own_fields)].flatten(1)
        return sum_over_ranks(own @ self.columns.weight, self.table.group) + self.bias


def sum_over_ranks(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of the parts of all ranks. Blocks. Backward passes the gradient on, which every rank has."""
    summed: torch.Tensor = _SumOverRanks.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        summed = part.clone()
        if rank_and_world(group)[1] > 1:
            dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _sum_of_bags(rows: torch.Tensor, bags: torch.Tensor, num_bags: int) -> torch.Tensor:
    return rows.new_zeros(num_bags, rows.shape[1]).index_add(0, bags, rows)
