"""Scenarios of models that every rank has a copy of (DistributedDataParallel), or whose ranks differ; no TorchRec."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager
from tests.training.ranks.scenarios import Place, State, changed_rows, copied, scenario
from tests.training.runs import assert_same, grouped

SMALL, ROWS, DIM, BATCH = 24, 200, 4, 6
"""How many small tables; rows of the two others: each rank looks up its own share of them."""
EXACT = TableOptions.exact()
TABLES = (nn.Embedding, nn.EmbeddingBag)


class Copies(nn.Module):
    """A bag with sparse gradients, one whose rows never stop to move, a table of plain SGD, small ones, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum")
        self.full = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.plain = nn.Embedding(ROWS, DIM)
        self.small = nn.ModuleList(nn.EmbeddingBag(5 + n, DIM, sparse=True, mode="sum") for n in range(SMALL))
        self.out = nn.Linear(DIM, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.sparse(ids) + self.full(ids) + self.plain(ids).sum(dim=1)
        for table in self.small:
            rows = rows + table(ids % table.num_embeddings)
        result: torch.Tensor = self.out(rows)
        return result


def averaged(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Average gradients over the ranks, sparse ones as dense rows beside a column that tells which were touched.

    DistributedDataParallel would sum them by gloo's sparse all-reduce. In torch 2.13.0 that breaks the heap once in
    some thousand steps of this model on a busy machine ("malloc(): unaligned tcache chunk detected"), also where
    nothing of this library is imported.
    """
    grad, ranks = bucket.buffer(), dist.get_world_size()
    if not grad.is_sparse:
        return dist.all_reduce(grad, async_op=True).get_future().then(lambda done: done.value()[0] / ranks)
    grad = grad.coalesce()
    touched = torch.zeros(grad.shape[0], 1).index_fill_(0, grad.indices()[0], 1.0)
    both = torch.cat([touched, grad.to_dense()], dim=1)

    def sparse(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        summed = done.value()[0]
        rows = summed[:, 0].nonzero()
        return torch.sparse_coo_tensor(rows.T, summed[rows[:, 0], 1:] / ranks, grad.shape, is_coalesced=True)

    return dist.all_reduce(both, async_op=True).get_future().then(sparse)


class Run:
    """A model that the ranks train together, or one process alone."""

    def __init__(self, place: Place, model: nn.Module | None = None) -> None:
        torch.manual_seed(7)
        self.place = place
        self.model = Copies() if model is None else model
        self.wrapped = self.model
        if place.world > 1:
            self.wrapped = DistributedDataParallel(self.model)
            self.wrapped.register_comm_hook(None, averaged)
        tables = [one for one in self.model.modules() if isinstance(one, TABLES)]
        kinds: list[tuple[Callable[..., torch.optim.Optimizer], list[nn.Parameter]]] = [
            (torch.optim.Adagrad, [table.weight for table in tables if table.sparse]),
            (torch.optim.SGD, [table.weight for table in tables if isinstance(table, nn.Embedding)]),
        ]
        taken = {id(parameter) for _, parameters in kinds for parameter in parameters}
        kinds.append((torch.optim.Adam, [one for one in self.model.parameters() if id(one) not in taken]))
        self.optimizers = [kind(parameters, lr=0.05) for kind, parameters in kinds if parameters]

    def train(self, number: int, manager: CheckpointManager | None = None) -> bool:
        """Train on a batch of this rank's share of the rows."""
        generator = torch.Generator().manual_seed(10 * number + self.place.rank)
        share = ROWS // 2
        ids = torch.randint(0, share, (BATCH, 2), generator=generator) + share * (self.place.rank % 2)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.wrapped(ids).sin().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return manager is not None and manager.step()

    def manager(self, store: str | Store, **options: object) -> CheckpointManager:
        given: dict[str, object] = {"options": EXACT} | options
        return CheckpointManager(store, model=self.wrapped, optimizer=self.optimizers, **grouped(**given))  # type: ignore[arg-type]

    def state(self) -> State:
        """Everything that training depends on but the generators."""
        found = copied(dict(self.model.state_dict()))
        for name, parameter in self.model.named_parameters():
            for optimizer in self.optimizers:
                state = optimizer.state.get(parameter, {})
                found |= copied({f"{name}/{key}": value for key, value in state.items()})
        return found


def spoiled(run: Run) -> Run:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(9.0)
    return run


def names_of(state: State, table: str) -> list[str]:
    """The table and its row state."""
    return [n for n in state if n == table or (n.startswith(f"{table}/") and not n.endswith("/step"))]


@scenario(1, 2)
def copies_are_saved_once(place: Place) -> None:
    run = Run(place)
    manager = run.manager(place.url("copies"))
    for number in range(3):
        run.train(number, manager)
    full = manager.save()
    before = run.state()
    run.train(3, manager)
    rewrite(run, manager)
    delta = manager.save()
    after = run.state()
    assert [full.kind, delta.kind] == ["baseline", "delta"]
    assert_same(*place.gather(after))
    head = manager.store.snapshot()
    tables = [name for name, module in run.model.named_modules() if isinstance(module, TABLES)]
    assert sorted(head.tables) == sorted(f"{name}.weight" for name in tables)
    for table in head.tables:
        changed = changed_rows(before, after, names_of(after, table))
        assert set(head.table(table).changed_rows().tolist()) == changed, table
    mine = changed_rows(before, after, ["sparse.weight"])
    assert any(row < ROWS // 2 for row in mine), "rank 0 has moved some"
    assert any(row >= ROWS // 2 for row in mine), "and so has rank 1"
    assert_each_table_has_one_owner(manager.store)
    rows = [report.rows for report in manager.history]
    assert all(sum(given) > max(given) > 0 for given in zip(*place.gather(rows), strict=True)), "both have written"
    run.train(4, manager)
    manager.save()
    place.keep("copies", run.state())


@torch.no_grad()
def rewrite(run: Run, manager: CheckpointManager | None = None) -> None:
    """Every rank writes two rows of each table, and says so of one of them."""
    for name, module in run.model.named_modules():
        if isinstance(module, TABLES):
            module.weight[:2] += 1
            if manager is not None:
                manager.tracker.mark(f"{name}.weight", torch.tensor([run.place.rank]))


def assert_each_table_has_one_owner(store: Store) -> None:
    owners: dict[str, set[str]] = {}
    elements: dict[str, int] = {}
    snapshot = store.snapshot()
    for reader in snapshot.readers:
        for part in reader.manifest.parts:
            lists = [one for one in (part.add, part.set, part.delete, part.escape) if one is not None]
            assert lists, "its writer is known by what it wrote"
            rank = lists[0].arrays["rows"].path.split("-")[0]
            shape = (part.rows[1] - part.rows[0], part.columns[1] - part.columns[0])
            schema = snapshot.tables[part.table]
            assert shape == (schema.num_rows, schema.dim), "one has all of it"
            if part.table not in owners:
                elements[rank] = elements.get(rank, 0) + shape[0] * shape[1]
            owners.setdefault(part.table, set()).add(rank)
    assert owners.keys() == snapshot.tables.keys()
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert len(elements) == 2
    assert max(elements.values()) < 1.1 * min(elements.values())
    assert len(set(snapshot.dense)) == len(snapshot.dense) > 0


@scenario(2, 2)
def copies_resume_on_the_same_ranks(place: Place) -> None:
    expected = Run(place)
    for number in range(7):
        expected.train(number)
        if number == 3:
            rewrite(expected)
    run = spoiled(Run(place))
    manager = run.manager(place.url("copies"))
    assert manager.restore() is not None
    place.assert_kept("copies", run.state())
    for number in range(5, 7):
        run.train(number, manager)
    assert_same(run.state(), expected.state())
    before = run.state()
    manager.save()
    run.train(7, manager)
    assert manager.save().kind == "delta"
    after = run.state()
    again = spoiled(Run(place))
    manager.close()
    manager = again.manager(place.url("copies"))
    manager.restore()
    assert_same(again.state(), after)
    manager.restore(step=7)
    assert_same(again.state(), before)
    manager.close()


@scenario(2, 1)
def one_process_takes_what_copies_have_saved(place: Place) -> None:
    run = spoiled(Run(place))
    manager = run.manager(place.url("copies"))
    restored = manager.restore(step=5)
    assert restored is not None
    assert_same(run.state(), place.kept("copies", 1))
    run.train(5, manager)
    manager.save()
    manager.close()


# ---- ranks that differ


class Uneven(nn.Module):
    """Every rank has one table and a layer; the last rank has one more table."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.common = nn.EmbeddingBag(20, DIM, mode="sum")
        self.out = nn.Linear(DIM, 1)
        if place.rank == place.world - 1:
            self.extra = nn.EmbeddingBag(11, DIM, mode="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.common(ids) + (self.extra(ids % 11) if hasattr(self, "extra") else 0)
        result: torch.Tensor = self.out(rows)
        return result


class UnevenRun(Run):
    """Gradients are averaged by hand: DistributedDataParallel wants the same parameters on every rank."""

    def __init__(self, place: Place) -> None:
        super().__init__(Place(place.rank, 1, place.folder), Uneven(place))
        self.place = place

    def train(self, number: int, manager: CheckpointManager | None = None) -> bool:
        generator = torch.Generator().manual_seed(10 * number + self.place.rank)
        ids = torch.randint(0, 10, (BATCH, 2), generator=generator) + 10 * (self.place.rank % 2)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(ids).sin().sum().backward()
        for name, parameter in self.model.named_parameters():
            if not name.startswith("extra") and self.place.world > 1:
                torch.distributed.all_reduce(parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
        return manager is not None and manager.step()


@scenario(1, 2)
def a_table_of_one_rank_alone(place: Place) -> None:
    run = UnevenRun(place)
    manager = run.manager(place.url("uneven"), every_steps=2)
    for number in range(4):
        run.train(number, manager)
    manager.wait_until_finished()
    place.keep("uneven", run.state())
    run.train(4, manager)


@scenario(2, 2)
def a_table_of_one_rank_alone_resumes(place: Place) -> None:
    expected = UnevenRun(place)
    for number in range(6):
        expected.train(number)
    run = UnevenRun(place)
    spoiled(run)
    manager = run.manager(place.url("uneven"), every_steps=2)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 4
    place.assert_kept("uneven", run.state())
    for number in range(4, 6):
        run.train(number, manager)
    assert_same(run.state(), expected.state())
    manager.close()


@scenario(1, 4)
def ranks_without_anything_to_save_take_part(place: Place) -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, DIM, sparse=True, mode="sum"), nn.Linear(DIM, 2))
    run = Run(place, model)

    def train(number: int) -> None:
        for one in run.optimizers:
            one.zero_grad()
        run.wrapped(torch.tensor([[number, 2 * place.rank]])).sum().backward()
        for one in run.optimizers:
            one.step()

    manager = run.manager(place.url("few"), every_steps=1)
    for number in range(3):
        train(number)
        manager.step()
    assert manager.wait_until_finished() is not None
    manager.step()  # nothing was trained
    quiet = manager.wait_until_finished()
    assert quiet is not None
    assert (quiet.kind, quiet.rows) == ("delta", 0)
    assert manager.store.head().record.v == quiet.version
    reached = run.state()
    rows = place.gather(sum(report.rows for report in manager.history))
    assert sorted(rows)[:3] == [0, 0, 0], "one has the only table"
    spoiled(run)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 4
    assert_same(run.state(), reached)
    manager.close()
