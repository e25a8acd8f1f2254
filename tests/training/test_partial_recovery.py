"""Ranks that are killed and replaced read their rows from the store; those that survive keep theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.errors import BadInput, Conflict, VersionNotFound
from cnr_store.segment.codes import array_specs
from cnr_store.training import CheckpointManager, RestoredState, SavePolicy, StoreOptions
from cnr_store.training.survivor import plan_recovery
from cnr_store.types import Lattice
from tests.support.ranks import ThreadRank, thread_ranks
from tests.training.four_ranks import Calm, FourRanks, outputs
from tests.training.ranks_program import CUTS, logged_state, noted
from tests.training.test_ranks_killed import check_what_is_stored, same

STEPS = 6
SHARDED = {"user.weight", "user.momentum1"}
"""What each rank has its own rows of; of all else every rank has a copy, but for the generators."""


def check_recovered(folder: Path, lost: set[int]) -> tuple[int, int]:
    """What each rank has after the recovery is its own, or of the last save; returns the live and the saved step."""
    found = {tuple(map(str, noted(folder, "partial", rank, "recovered")[0])) for rank in range(4)}
    assert len(found) == 1
    step, version, told, stale = noted(folder, "partial", 0, "recovered")[0]
    assert set(told) == lost
    saved = step - stale
    with Store.open(str(folder / "store")) as store:
        assert store.snapshot(version).step == saved
    after = [logged_state(folder, "partial", rank, -2) for rank in range(4)]
    source = min(set(range(4)) - lost)
    for rank in range(4):
        own = logged_state(folder, "partial", rank, saved if rank in lost else -1)
        for name in (*SHARDED, "rng"):
            same(after[rank][name], own[name], f"rank {rank}, {name}")
        for name in after[0].keys() - SHARDED - {"rng"}:
            same(after[rank][name], logged_state(folder, "partial", source, step)[name], f"rank {rank}, {name}")
    return step, saved


def check_codes(folder: Path) -> None:
    """The last version has every rank's rows, as exactly as its scale says."""
    with Store.open(str(folder / "store")) as store:
        table = store.snapshot().table("user.weight")
        spec, found = array_specs(table.schema)["codes"], table.read()
    assert isinstance(spec.encoding, Lattice)
    for rank in range(4):
        live = logged_state(folder, "partial", rank, STEPS)["user.weight"]
        assert np.abs(found[slice(*CUTS[4][rank : rank + 2])] - live).max() <= 0.51 * spec.scale


def reads_of_tables(folder: Path, rank: int) -> list[str]:
    (calls,) = noted(folder, "partial", rank, "calls")
    return [call for call in calls if call.startswith("read") and "/c." in call and "dense" not in call]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{2}, {0, 1, 3}], ids=str)
def test_lost_ranks_get_their_rows_from_the_store_and_others_keep_theirs(
    four_ranks: FourRanks, tmp_path: Path, lost: set[int]
) -> None:
    codes = four_ranks.run(tmp_path, "partial", STEPS, recovers=True, dies=sorted(lost), dies_before=4, every_steps=3)

    assert codes == [0] * 4, outputs(tmp_path)
    assert check_recovered(tmp_path, lost) == (4, 3)
    for rank in range(4):
        # The first save after it writes what changed since the last one, of the live rows, too.
        assert noted(tmp_path, "partial", rank, "kinds") == [["delta"]]
        assert bool(reads_of_tables(tmp_path, rank)) == (rank in lost)
    assert check_what_is_stored(tmp_path, "partial") == STEPS


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rank_killed_at_any_of_fifty_calls_is_replaced_alone(
    four_ranks: FourRanks, calm: Calm, tmp_path: Path
) -> None:
    firsts = {0: calm.index(0, "create commits/", 2) + 1, 2: calm.index(2, ".receipt.json.zst", 2)}
    places = [
        (rank, int(index), when)
        for rank, count in ((0, 15), (2, 10))
        for index in np.linspace(firsts[rank], calm.of_saves(rank) - 1, count)
        for when in ("before", "after")
    ]
    assert len(set(places)) == 50
    for number, (rank, index, when) in enumerate(places):
        folder = tmp_path / str(number)
        folder.mkdir()
        what = f"rank {rank} {when} call {index} ({calm.calls[rank][index]})"
        codes = four_ranks.run(folder, "partial", STEPS, recovers=True, kill=[rank, index, when])
        assert codes == [0] * 4, what + outputs(folder)
        _, saved = check_recovered(folder, {rank})
        for other in {0, 1, 2, 3} - {rank}:
            for version, step in noted(folder, "partial", other, "known")[0]:
                assert step <= saved, what
                with Store.open(str(folder / "store")) as store:
                    assert store.snapshot(version).step == step, what
        assert check_what_is_stored(folder, "partial") == STEPS, what


@pytest.mark.slow
def test_rows_that_survivors_save_later_are_coded_as_before(four_ranks: FourRanks, tmp_path: Path) -> None:
    codes = four_ranks.run(
        tmp_path, "partial", STEPS, recovers=True, dies=[1], dies_before=4, every_steps=3, is_coded=True, mirror="mmap"
    )

    assert codes == [0] * 4, outputs(tmp_path)
    check_codes(tmp_path)


def test_survivors_and_lost_ranks_are_told_by_their_steps() -> None:
    assert plan_recovery([None, None]) is None
    recovery = plan_recovery([None, 4, 5, 5])
    assert recovery is not None
    assert (recovery.step, recovery.source, recovery.lost) == (5, 2, (0,))


@given(st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=8))
def test_copies_come_from_a_survivor_that_did_the_last_step(steps: list[int | None]) -> None:
    recovery = plan_recovery(steps)

    alive = [step for step in steps if step is not None]
    assert (recovery is None) == (not alive)
    if recovery is not None:
        assert steps[recovery.source] == recovery.step == max(alive)
        assert recovery.lost == tuple(rank for rank, step in enumerate(steps) if step is None)


class Copied(nn.Module):
    """A model that every rank has a copy of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.EmbeddingBag(20, 4, mode="sum")
        self.out = nn.Linear(4, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.items(ids))
        return found


@pytest.mark.parametrize("anew", ["nothing", "optimizer", "model and optimizer"])
def test_survivors_that_missed_a_step_take_copies_of_one_that_did_it(anew: str, tmp_path: Path) -> None:
    """Also of tables, optimizer state and step counters; also into what is built anew."""
    first, second, models = thread_ranks(3), thread_ranks(3), [Copied() for _ in range(3)]

    def run(number: int) -> tuple[RestoredState | None, dict[str, torch.Tensor]]:
        model = models[number]
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

        def manager(ranks: list[ThreadRank]) -> CheckpointManager:
            return CheckpointManager(
                str(tmp_path / "store"), model=model, optimizer=optimizer, options=TableOptions.exact(),
                save_policy=SavePolicy(rng=False), store_options=StoreOptions(threads=1, ranks=ranks[number]),
            )  # fmt: skip

        def train(item: int) -> None:
            optimizer.zero_grad()
            model(torch.tensor([[item]])).sum().backward()
            optimizer.step()

        before = manager(first)
        train(1)
        before.step()
        before.save()
        survivor = None
        if number:
            for item in range(2, 2 + number):
                train(item)
                before.step()
            survivor = before.survivor()
            if anew == "model and optimizer":
                model = Copied()
                nn.init.zeros_(model.items.weight)
            if anew != "nothing":
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.7)
        else:
            before.close()
            for tensor in model.parameters():
                tensor.data.zero_()  # what a new process has
            optimizer.state.clear()
        after = manager(second)
        restored = after.restore(survivor=survivor)
        after.save()
        after.close()
        state = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            state |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
        assert optimizer.param_groups[0]["lr"] == 0.1
        return restored, state

    with ThreadPoolExecutor(3) as pool:
        (_, lost), (told, behind), (_, last) = pool.map(run, range(3))

    assert told is not None
    assert (told.step, told.lost_ranks, told.stale_steps) == (3, (0,), 2)
    assert last["out.weight/step"] == 3
    assert last.keys() == behind.keys() == lost.keys()
    for name, tensor in last.items():
        assert torch.equal(behind[name], tensor), name
        assert torch.equal(lost[name], tensor), name
    with Store.open(str(tmp_path / "store")) as store:
        assert np.array_equal(
            store.snapshot().table("items.weight").read(), last["items.weight"].detach().cpu().numpy()
        )


class Alone:
    """A training of one process: what a rank does by itself needs no others."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.url = str(folder / "store")
        self.model = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def manager(self) -> CheckpointManager:
        return CheckpointManager(
            self.url, model=self.model, optimizer=self.optimizer, options=TableOptions.exact(),
            save_policy=SavePolicy(rng=False), store_options=StoreOptions(threads=1),
        )  # fmt: skip

    def train(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([rows])).sum().backward()
        self.optimizer.step()


def test_a_lookup_without_its_step_does_not_keep_a_survivor_from_its_marks(tmp_path: Path) -> None:
    training = Alone(tmp_path)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    training.train(2, 3)
    manager.step()
    training.model(torch.tensor([[7]]))  # whose gradient never came: row 7 does not change
    live = training.model.weight.detach().clone()

    survivor = manager.survivor()
    after = training.manager()
    restored = after.restore(survivor=survivor)
    report = after.save()
    after.close()

    assert restored is not None
    assert (restored.step, restored.lost_ranks, restored.stale_steps) == (2, (), 1)
    assert torch.equal(training.model.weight, live)
    assert report is not None
    assert (report.kind, report.step, report.rows) == ("delta", 2, 2)
    with Store.open(training.url) as store:
        assert np.array_equal(store.snapshot().table("weight").read(), live.cpu().numpy())


def test_a_model_that_is_built_anew_gets_a_survivors_rows(tmp_path: Path) -> None:
    """Its own rows, that no other rank has; the next save has those that changed since the last one."""
    training = Alone(tmp_path)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    training.train(2, 3)
    manager.step()
    live = training.model.weight.detach().clone()
    survivor = manager.survivor()

    anew = Alone(tmp_path)
    nn.init.zeros_(anew.model.weight)
    after = anew.manager()
    after.restore(survivor=survivor)
    report = after.save()

    assert report is not None
    assert (report.kind, report.rows) == ("delta", 2)
    assert torch.equal(anew.model.weight, live)
    anew.train(4)
    after.step()
    after.save()
    after.close()
    with Store.open(anew.url) as store:
        assert np.array_equal(store.snapshot().table("weight").read(), anew.model.weight.detach().cpu().numpy())


def test_an_optimizer_that_is_made_anew_gets_a_survivors_state(tmp_path: Path) -> None:
    """Regression: only a new model got it; beside the same model a new optimizer began without state, unseen."""
    training = Alone(tmp_path)
    training.model.sparse = False
    training.optimizer = torch.optim.Adagrad(training.model.parameters(), lr=0.5)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    training.train(2, 3)
    manager.step()
    kept = training.optimizer.state[training.model.weight]["sum"].clone()
    survivor = manager.survivor()

    training.optimizer = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
    with training.manager() as after:
        after.restore(survivor=survivor)
        report = after.save()

    assert report is not None
    assert (report.kind, report.rows) == ("delta", 2)
    assert torch.equal(training.optimizer.state[training.model.weight]["sum"], kept)
    assert training.optimizer.param_groups[0]["lr"] == 0.5
    with Store.open(training.url) as store:
        assert np.array_equal(store.snapshot().table("weight").read(slot="sum"), kept.numpy())


def test_a_survivor_with_other_shards_is_refused(tmp_path: Path) -> None:
    training = Alone(tmp_path)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    survivor = manager.survivor()

    other = Alone(tmp_path)
    other.model = nn.ModuleDict({"renamed": other.model})  # type: ignore[assignment]
    after = other.manager()
    with pytest.raises(BadInput, match=r"survived with .* build the model with the plan that it had"):
        after.restore(survivor=survivor)
    after.close()


def test_a_survivor_does_not_go_on_after_a_save_that_it_does_not_know(tmp_path: Path) -> None:
    training, other = Alone(tmp_path), Alone(tmp_path)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    live = training.model.weight.detach().clone()
    survivor = manager.survivor()
    with other.manager() as theirs:
        theirs.restore()
        other.train(5)
        theirs.step()
        theirs.save()

    after = training.manager()
    with pytest.raises(Conflict, match="restore without survivor="):
        after.restore(survivor=survivor)

    assert torch.equal(training.model.weight, live)
    after.restore()
    assert torch.equal(training.model.weight, other.model.weight)
    after.close()


def test_a_survivor_goes_on_after_a_takeover_that_saved_nothing(tmp_path: Path) -> None:
    """Regression: ranks that were lost again before the first save refused the fence of their own recovery."""
    training = Alone(tmp_path)
    manager = training.manager()
    training.train(1)
    manager.step()
    manager.save()
    training.train(2, 3)
    manager.step()
    live = training.model.weight.detach().clone()
    survivor = manager.survivor()
    with Alone(tmp_path).manager() as recovered:
        recovered.restore()
        recovered.step()

    with training.manager() as after:
        restored = after.restore(survivor=survivor)
        report = after.save()

    assert restored is not None
    assert (restored.step, restored.stale_steps) == (2, 1)
    assert report is not None
    assert (report.kind, report.rows) == ("delta", 2)
    with Store.open(training.url) as store:
        assert np.array_equal(store.snapshot().table("weight").read(), live.numpy())


def test_a_survivor_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    training = Alone(tmp_path)
    survivor = training.manager().survivor()
    with Alone(tmp_path).manager() as other:
        other.save()

    with training.manager() as after, pytest.raises(BadInput, match="without a checkpoint"):
        after.restore(survivor=survivor)


def test_survivors_of_a_training_that_never_saved_are_told_to_restart(tmp_path: Path) -> None:
    training = Alone(tmp_path)
    survivor = training.manager().survivor()

    with training.manager() as after, pytest.raises(VersionNotFound, match="restart the training on all ranks"):
        after.restore(survivor=survivor)


def test_a_survivor_goes_on_from_the_head_alone(tmp_path: Path) -> None:
    training = Alone(tmp_path)
    manager = training.manager()
    manager.save()
    survivor = manager.survivor()

    with training.manager() as after:
        for options in ({"version": 1}, {"strict": False}, {"tables": {}}, {"fallback": True}):
            with pytest.raises(BadInput, match="leave out all other arguments"):
                after.restore(survivor=survivor, **options)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="closed"):
        manager.survivor()
