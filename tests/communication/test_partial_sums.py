"""Tables split among ranks: equal to unsharded models over steps, few bytes, and saved by row on their rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's custom)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.communication import Meter, PartialFirstLayer, PartialSums
from cnr_store.errors import BadInput, BadRowIds, BadShape
from cnr_store.training import CheckpointManager
from tests.communication.conftest import RunRanks

FIELDS, DIM, HIDDEN, BATCH = (7, 1, 30, 12), 5, 9, 8
NUM_ROWS = sum(FIELDS)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch_of(step: int) -> Batch:
    """Ids in their field, offsets of a bag per sample and field (some are empty), values, targets."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (BATCH * len(FIELDS),), generator=generator)
    rows = torch.tensor(FIELDS).repeat(BATCH).repeat_interleave(lengths)
    ids = (torch.rand(len(rows), generator=generator) * rows).long()
    offsets = lengths.cumsum(0) - lengths
    return ids, offsets, torch.rand(len(rows), generator=generator) + 0.5, torch.randn(BATCH, generator=generator)


class Split(nn.Module):
    """A model of all four operators over split tables."""

    def __init__(self, group: Any = None, *, sparse: bool = False) -> None:
        super().__init__()
        self.linear = PartialSums(NUM_ROWS, 1, group=group, sparse=sparse)
        self.pairs = PartialSums(NUM_ROWS, DIM, group=group, sparse=sparse)
        self.pooled = PartialSums(NUM_ROWS, DIM, group=group, sparse=sparse)
        self.first = PartialFirstLayer(FIELDS, DIM, HIDDEN, group=group, sparse=sparse)
        self.top = nn.Linear(HIDDEN + DIM, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([0, *FIELDS[:-1]]).cumsum(0)
        places = torch.arange(len(ids))
        whole = ids + starts[(torch.searchsorted(offsets, places, right=True) - 1) % len(FIELDS)]
        of_sample = offsets[:: len(FIELDS)]
        wide = self.linear.pooled(whole, of_sample, values).squeeze(1)
        pairs = self.pairs.factorized(whole, of_sample, values)
        deep = torch.cat([self.first(ids, offsets, values).relu(), self.pooled.pooled(whole, of_sample, values)], dim=1)
        found: torch.Tensor = wide + 0.1 * pairs + self.top(deep).squeeze(1)
        return found


class Whole(nn.Module):
    """The same model on one rank, written with what torch has."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows, dim in [("linear", NUM_ROWS, 1), ("pairs", NUM_ROWS, DIM), ("pooled", NUM_ROWS, DIM),
                                ("table", NUM_ROWS, DIM), ("columns", len(FIELDS) * DIM, HIDDEN)]:  # fmt: skip
            weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows * dim)) * 0.3
            self.register_parameter(name, nn.Parameter(weight))
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        torch.manual_seed(0)
        self.top = nn.Linear(HIDDEN + DIM, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([0, *FIELDS[:-1]]).cumsum(0)
        places = torch.arange(len(ids))
        whole = ids + starts[(torch.searchsorted(offsets, places, right=True) - 1) % len(FIELDS)]
        of_sample = offsets[:: len(FIELDS)]

        def bags(weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return F.embedding_bag(whole, weight, starts, mode="sum", per_sample_weights=values)

        ends = [*of_sample.tolist()[1:], len(ids)]
        terms = [self.pairs[whole[a:b]] * values[a:b, None] for a, b in zip(of_sample.tolist(), ends, strict=True)]
        pairs = torch.stack([(one @ one.T).triu(1).sum() for one in terms])
        hidden = (bags(self.table, offsets).view(BATCH, -1) @ self.columns + self.bias).relu()
        deep = torch.cat([hidden, bags(self.pooled, of_sample)], dim=1)
        found: torch.Tensor = bags(self.linear, of_sample).squeeze(1) + 0.1 * pairs + self.top(deep).squeeze(1)
        return found


def tables_of(model: Split) -> dict[str, PartialSums]:
    return {
        "linear": model.linear, "pairs": model.pairs, "pooled": model.pooled, "table": model.first.table,
        "columns": model.first.columns,
    }  # fmt: skip


def copied_from(whole: Whole, split: Split) -> Split:
    """Give a split model the weights of a whole one."""
    for name, table in tables_of(split).items():
        table.weight.data.copy_(getattr(whole, name)[slice(*table.rows)])
    split.top.load_state_dict(whole.top.state_dict())
    return split


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        ids, offsets, values, targets = batch_of(step)
        optimizer.zero_grad()
        loss = (model(ids, offsets, values) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


STORED = {"linear.weight": "linear", "first.table.weight": "table", "first.columns.weight": "columns"}
"""Names of tables in a store, and in `Whole`."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def train_split(optimizer: str) -> dict[str, Any]:
    model = copied_from(Whole(), Split())
    losses = train(model, OPTIMIZERS[optimizer](model.parameters()), 0, 10)
    tables = {name: [table.rows[0], table.weight.tolist()] for name, table in tables_of(model).items()}
    return {"losses": losses, "tables": tables, "top": model.top.weight.tolist()}


@pytest.mark.parametrize(("world", "optimizer"), [(4, "sgd"), (2, "adagrad"), (4, "adam")])
def test_split_training_equals_the_unsharded_one(run_ranks: RunRanks, world: int, optimizer: str) -> None:
    whole = Whole()
    losses = train(whole, OPTIMIZERS[optimizer](whole.parameters()), 0, 10)

    found = run_ranks(world, train_split, optimizer)

    for of_rank in found:
        torch.testing.assert_close(torch.tensor(of_rank["losses"]), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        assert of_rank["top"] == found[0]["top"]
        for name, (start, weight) in of_rank["tables"].items():
            expected = getattr(whole, name)[start : start + len(weight)].detach()
            torch.testing.assert_close(torch.tensor(weight).view_as(expected), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=4), st.integers(0, 1000), st.booleans())
def test_the_parts_of_any_ranges_add_up(cuts: list[int], step: int, with_values: bool) -> None:
    ids, offsets, given_values, _ = batch_of(step)
    ids, values = ids % 30, given_values if with_values else None
    weight = torch.randn(30, DIM)
    bounds = [0, *sorted(cuts), 30]

    parts = []
    for start, stop in pairwise(bounds):
        table = PartialSums(30, DIM)
        table.rows, table.weight = (start, stop), nn.Parameter(weight[start:stop])
        parts.append(table.partial(ids, offsets, values))

    expected = F.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=values)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected)


def count_bytes() -> dict[str, list[int]]:
    meter = Meter()
    model = Split(meter.group())
    ids, offsets, values, _ = batch_of(0)
    bags, found = offsets[:: len(FIELDS)], {}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: model.linear.pooled(ids, bags, values),
        "pairs": lambda: model.pairs.factorized(ids, bags, values),
        "pooled": lambda: model.pooled.pooled(ids, bags, values),
        "first": lambda: model.first(ids, offsets, values),
    }
    for name, call in calls.items():
        meter.reset()
        call().sum().backward()
        found[name] = [meter.total.calls, meter.total.pushed_bytes]
    return found


def test_partial_sums_alone_are_on_the_wire(run_ranks: RunRanks) -> None:
    for of_rank in run_ranks(2, count_bytes):
        floats = {"linear": 1, "pairs": DIM + 1, "pooled": DIM, "first": HIDDEN}
        assert of_rank == {name: [1, BATCH * 4 * count] for name, count in floats.items()}


# ---- in a store


def managed(url: str) -> tuple[Split, torch.optim.Optimizer, CheckpointManager]:
    model = copied_from(Whole(), Split(sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    options = TableOptions.exact()
    return model, optimizer, CheckpointManager(url, model=model, optimizer=optimizer, options=options)


def resumed(url: str) -> list[float]:
    model, optimizer, manager = managed(url)
    assert manager.restore() is not None
    losses = train(model, optimizer, 6, 10)
    manager.close()
    return losses


def save_and_resume(url: str) -> list[list[float]]:
    model, optimizer, manager = managed(url)
    train(model, optimizer, 0, 3)
    manager.save()
    train(model, optimizer, 3, 6)
    manager.save()
    manager.close()
    return [train(model, optimizer, 6, 10), resumed(url)]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_split_tables_are_saved_by_row_and_resumed(run_ranks: RunRanks, tmp_path: Path) -> None:
    url, whole = str(tmp_path / "store"), Whole()
    train(whole, OPTIMIZERS["adagrad"](whole.parameters()), 0, 6)

    on_two = run_ranks(2, save_and_resume, url)

    with Store.open(url) as store:
        snapshot = store.snapshot()
        for table, name in STORED.items():
            stored = torch.from_numpy(snapshot.table(table).read())
            torch.testing.assert_close(stored, getattr(whole, name).detach(), rtol=1e-5, atol=1e-6)
    assert on_two[0][1] == on_two[0][0]
    torch.testing.assert_close(torch.tensor(resumed(url)), torch.tensor(on_two[0][0]), rtol=1e-6, atol=1e-6)


# ---- refusals


def first_weights(num_rows: int) -> dict[str, Any]:
    torch.manual_seed(0)
    table = PartialSums(num_rows, 16)
    return {"rows": table.weight[:5].tolist(), "layer": nn.Linear(4, 2).weight.tolist()}


@pytest.mark.parametrize("num_rows", [100, 101])
def test_ranks_of_one_seed_draw_other_rows_and_the_same_layers(run_ranks: RunRanks, num_rows: int) -> None:
    found = run_ranks(4, first_weights, num_rows)

    assert all(one["layer"] == found[0]["layer"] for one in found)
    rows = torch.tensor([one["rows"] for one in found])
    assert len(rows.flatten().unique()) == rows.numel()


@pytest.mark.parametrize("ids", [[-1], [3, NUM_ROWS]])
def test_ids_outside_the_table_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadRowIds, match=f"from 0 to below {NUM_ROWS}"):
        PartialSums(NUM_ROWS, DIM).pooled(torch.tensor(ids), torch.tensor([0]))


def test_a_sample_without_all_fields_is_refused() -> None:
    with pytest.raises(BadShape, match="multiple of 4 bags"):
        PartialFirstLayer(FIELDS, DIM, HIDDEN)(torch.tensor([0]), torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("bounds", [[0, 5], [1, NUM_ROWS], [0, 3, NUM_ROWS]])
def test_bounds_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    with pytest.raises(BadInput, match="bounds"):
        PartialSums(NUM_ROWS, DIM, bounds=bounds)
