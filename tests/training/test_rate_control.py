"""Trainings whose tables become more exact as they are restored: what is counted, refined, kept, and on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BadInput, CorruptStore, Snapshot, Store, TableOptions
from cnr_store.runtime.ranks import OneRank, Ranks
from cnr_store.training import CheckpointManager, SaveReport
from cnr_store.training.document import PROGRESS, TRAINER, RateDocument, trainer_of
from cnr_store.training.tensors import tensor_of
from cnr_store.types import Affine, FloatBits, Lattice
from cnr_store.write.transaction import Transaction
from tests.support.ranks import on_ranks
from tests.tools.cli_runner import cnr
from tests.training.runs import grouped

ROWS, DIM = 400, 8
AUTO = TableOptions(bits="auto", expected_restores=1)


class Life:
    """One process of a training: a table, SGD, and a manager that saves when it is told to."""

    def __init__(self, url: str, ranks: Ranks | None = None, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Embedding(ROWS, DIM, sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        chosen: dict[str, Any] = {"options": AUTO, "ranks": ranks or OneRank(), "threads": 1, **options}
        self.manager = CheckpointManager(url, model=self.model, optimizer=self.optimizer, **grouped(**chosen))
        self.restored = self.manager.restore()

    def train(self, number: int) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(number)
        rows = torch.randint(0, ROWS, (40,), generator=generator)
        target = torch.randn(40, DIM, generator=generator)
        self.optimizer.zero_grad()
        (self.model(rows) - target).square().sum().div(40).backward()
        self.optimizer.step()
        self.manager.step()

    def save(self) -> SaveReport:
        report = self.manager.save()
        assert report is not None
        return report

    def next(self, number: int) -> SaveReport:
        """Train a step, save, and end."""
        self.train(number)
        report = self.save()
        self.manager.close()
        return report


def step_of(snapshot: Snapshot, table: str = "weight") -> float:
    schema = snapshot.tables[table]
    assert isinstance(schema.encoding, Lattice)
    return schema.encoding.scale * 0.5**schema.shift


def rate_in(url: str, version: int | None = None) -> RateDocument:
    """What a checkpoint says of rates."""
    snapshot = Store.open(url).snapshot(version)
    return trainer_of(*(snapshot.read_document(name, tensor_of) for name in (TRAINER, PROGRESS))).rate


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_a_width_grows_with_the_restores_and_halves_the_scale(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cnr_store")
    first = Life(url).next(0)
    store = Store.open(url)
    steps, kinds, generations, widths = [step_of(store.snapshot())], [first.kind], set(), []
    for number in range(1, 5):
        life = Life(url)
        report = life.next(number)
        steps.append(step_of(store.snapshot()))
        kinds.append(report.kind)
        generations.add(store.snapshot().tables["weight"].generation)
        widths.append((life.manager.rate.restores, life.manager.rate.tables["weight"].bits))
        change = report.scales.get("weight")
        assert (change is not None) == (steps[-1] != steps[-2])
        if change is not None:
            assert (change.before, change.after) == (steps[-2], steps[-1])
            assert "expected" in change.reason

    # L <= 1 is 2 bits, the second restore is one more than that: 3 bits up to three restores, then 4.
    assert widths == [(1, 2), (2, 3), (3, 3), (4, 4)]
    assert kinds == ["baseline", "delta", "delta", "delta", "delta"]
    assert generations == {1}
    halvings = [math.log2(before / after) for before, after in itertools.pairwise(steps)]
    assert halvings[0] == halvings[2] == 0
    assert all(1 <= halvings[at] <= 3 and halvings[at].is_integer() for at in (1, 3))
    assert "3 bits instead of 2 (restored 2 times, 1 were expected)" in caplog.text
    assert first.scales["weight"].choice is not None
    assert first.scales["weight"].choice.sample_rows == ROWS


def test_the_command_tells_restores_and_the_scale_after_its_halvings(url: str) -> None:
    for number in range(3):
        Life(url).next(number)

    shown, text = cnr("show", url, "--json").document, cnr("show", url).out

    assert shown["rate"] == {"restores": 2, "calibrated": []}
    assert shown["tables"]["weight"]["shift"] > 0
    assert shown["tables"]["weight"]["scale"] == step_of(Store.open(url).snapshot())
    assert f"scale {shown['tables']['weight']['scale']:.4g}" in text
    assert "restored 2 times" in text


def test_a_refined_table_is_as_exact_as_its_new_scale_where_it_was_trained(url: str) -> None:
    for number in range(2):
        Life(url).next(number)
    life = Life(url)
    coarse = step_of(Store.open(url).snapshot())
    before = life.model.weight.detach().clone()
    life.next(2)

    snapshot = Store.open(url).snapshot()
    stored = snapshot.table("weight").read()

    moved = (life.model.weight != before).any(dim=1).cpu().numpy()
    live = life.model.weight.detach().cpu().numpy()
    fine = step_of(snapshot)
    assert fine < coarse
    assert moved.any()
    assert np.abs(stored[moved] - live[moved]).max() <= fine / 2 * (1 + 1e-6)
    np.testing.assert_array_equal(stored[~moved], live[~moved])


def test_a_restore_that_nothing_was_saved_behind_does_not_count(url: str) -> None:
    Life(url).next(0)
    for _ in range(3):
        lost = Life(url)
        lost.train(7)
        lost.manager.close()

    life = Life(url)

    assert life.manager.rate.restores == 1
    assert life.next(1).scales == {}


def test_going_back_forgets_the_restores_that_were_given_up(url: str) -> None:
    for number in range(4):
        Life(url).next(number)
    store = Store.open(url)
    life = Life(url)
    assert life.manager.rate.restores == 4
    life.manager.restore(step=1)
    assert (life.manager.rate.restores, life.manager.rate.tables["weight"].bits) == (1, 2)
    life.next(9)
    assert step_of(store.snapshot()) == step_of(store.snapshot(step=1))


def test_a_fixed_width_stays_whatever_happens(url: str) -> None:
    fixed = TableOptions(bits=2)
    Life(url, options=fixed).next(0)
    for number in range(1, 5):
        assert Life(url, options=fixed).next(number).scales == {}


@pytest.mark.parametrize(
    ("first", "then", "factor"),
    [
        ({"bits": 4}, {"bits": 8}, 1 / 16),
        ({"bits": 4}, {}, 1 / 16),
        ({}, {"bits": 4}, 16),
        ({"scale": 0.1}, {"scale": 0.07}, 0.7),
        ({"max_error": 0.1}, {"max_error": 0.01}, 0.1),
        ({"max_error": 0.1}, {"max_error": 0.5}, 5),
        ({"scale": 0.3}, {}, 1 / 30),
        ({"bits": 2}, {"scale": 0.3}, 1 / 2),
    ],
)
def test_options_that_changed_since_the_checkpoint_take_effect(
    first: dict[str, Any], then: dict[str, Any], factor: float, url: str
) -> None:
    """A regression: a resumed run kept the scale for good, so that rows could err by more than max_error= asked for."""
    Life(url, options=TableOptions(**first)).next(0)
    store = Store.open(url)
    before = step_of(store.snapshot())

    changed = Life(url, options=TableOptions(**then)).next(1)

    assert (changed.kind, list(changed.scales)) == ("baseline", ["weight"])
    assert "asked for now" in changed.scales["weight"].reason
    assert step_of(store.snapshot()) / before == pytest.approx(factor, rel=0.5)
    again = Life(url, options=TableOptions(**then)).next(2)
    assert (again.kind, again.scales) == ("delta", {})


def test_a_scale_that_rounds_most_rows_to_zero_is_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(url, options=TableOptions(bits=8))
    with torch.no_grad():
        life.model.weight[3] = torch.linspace(-1e9, 1e9, DIM)
    life.manager.tracker.mark("weight", torch.tensor([3]))
    life.save()
    life.manager.close()
    assert "round to zero 100 % of the rows of weight, because" in caplog.text


def test_many_such_scales_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A regression: a model of 300 tables got a warning for each."""
    model = torch.nn.ModuleList(torch.nn.EmbeddingBag(64, DIM, mode="sum", sparse=True) for _ in range(7))
    with torch.no_grad():
        for bag in model:
            bag.weight[3] = torch.linspace(-1e9, 1e9, DIM)
    with CheckpointManager(str(tmp_path / "s"), model=model, optimizer=[]) as manager:
        manager.save()

    [warning] = [record for record in caplog.records if "round to zero" in record.message]
    assert "of the rows of 6.weight" in warning.message
    assert "and most of 2 other tables" in warning.message


def test_many_scales_without_room_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A regression: a model of 300 tables got a warning for each, at each restore."""
    for loss in (1e4, 1e-4, 1e-4):  # the scale of all but its first value should be halved 13 times
        torch.manual_seed(5)
        model = torch.nn.ModuleList(torch.nn.EmbeddingBag(64, DIM, mode="sum", sparse=True) for _ in range(7))
        with CheckpointManager(
            str(tmp_path / "s"), model=model, optimizer=[], options=TableOptions(bits=8), **grouped(schedule="loss")
        ) as manager:
            manager.restore()
            for _ in range(5000):
                manager.report_loss(loss)
            manager.step()
            manager.save()

    [warning] = [record for record in caplog.records if "have room for" in record.message]
    assert "'0.weight', '1.weight', '2.weight', '3.weight', '4.weight'] and 2 more" in warning.message


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"max_error": 0.1}, {"max_error": 0.12}),
        ({"scale": 0.125}, {"max_error": 0.0625}),
        ({"bits": 8}, {}),
        ({}, {"bits": 8}),
    ],
)
def test_options_that_the_checkpoint_meets_change_nothing(
    first: dict[str, Any], then: dict[str, Any], url: str
) -> None:
    Life(url, options=TableOptions(**first)).next(0)
    report = Life(url, options=TableOptions(**then)).next(1)
    assert (report.kind, report.scales) == ("delta", {})


@pytest.mark.parametrize("policy", ["baseline", "one_shot", "intermittent"])
def test_policies_that_cannot_refine_choose_a_new_scale_in_a_full(policy: Any, url: str) -> None:
    for number in range(2):
        life = Life(url, policy=policy)
        life.train(10 + number)
        life.save()
        life.next(number)
    store = Store.open(url)
    coarse, before = step_of(store.snapshot()), store.snapshot().tables["weight"].generation

    report = Life(url, policy=policy).next(2)

    schema = store.snapshot().tables["weight"]
    assert report.kind == "baseline"
    assert report.scales["weight"].choice is not None
    assert (schema.generation, schema.shift) == (before + 1, 0)
    assert step_of(store.snapshot()) < coarse


def test_a_one_shot_delta_on_a_baseline_alone_refines(url: str) -> None:
    Life(url, policy="baseline").next(0)
    Life(url, policy="baseline").next(1)
    life = Life(url, policy="one_shot")
    assert life.next(2).kind == "delta"
    again = Life(url, policy="one_shot")
    live = again.model.weight.detach().clone()
    again.train(3)
    moved = (again.model.weight != live).any(dim=1).cpu().numpy()
    again.save()
    snapshot = Store.open(url).snapshot()
    error = np.abs(snapshot.table("weight").read() - again.model.weight.detach().cpu().numpy())
    assert error[moved].max() <= step_of(snapshot) / 2 * (1 + 1e-6)
    assert not error[~moved].any()
    again.manager.close()


def test_affine_rows_get_more_bits_in_a_full(url: str) -> None:
    affine = dataclasses.replace(AUTO, encoding="affine", search="minmax")
    reports = [Life(url, options=affine).next(number) for number in range(3)]
    encoding = Store.open(url).snapshot().tables["weight"].encoding
    assert [report.kind for report in reports] == ["baseline", "delta", "baseline"]
    assert isinstance(encoding, Affine)
    assert encoding.bits == 3


def test_tables_without_codes_to_halve_are_written_anew(url: str) -> None:
    for number in range(2):
        Life(url, mirror="none").next(number)

    life = Life(url, mirror="none")
    pending = life.manager.rate.tables["weight"].pending

    assert pending is not None
    assert pending.how == "baseline"
    report = life.next(2)
    assert (report.kind, report.scales["weight"].reason) == ("baseline", pending.reason)


def test_a_scale_that_is_fine_enough_for_more_bits_stays(url: str) -> None:
    """One large row makes Check-N-Run's error that of the large row: the scale from before it is finer than asked."""
    life = Life(url)
    life.save()
    with torch.no_grad():
        life.model.weight[3] *= 2**19 * step_of(Store.open(url).snapshot()) / life.model.weight[3].abs().max()
    life.manager.tracker.mark("weight", torch.tensor([3]))
    life.save()
    life.manager.close()
    Life(url).next(1)

    life = Life(url)

    pending = life.manager.rate.tables["weight"].pending
    assert pending is not None
    assert pending.how == "keep"
    report = life.next(2)
    assert (report.kind, report.scales) == ("delta", {})
    assert life.manager.rate.tables["weight"].bits == 3


def test_a_refinement_waits_for_the_next_save_when_one_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        Life(url).next(number)
    life = Life(url)
    coarse = step_of(Store.open(url).snapshot())
    life.train(2)
    commit = "cnr_store.write.transaction.Transaction.commit"
    with monkeypatch.context() as patched:
        patched.setattr(commit, lambda *_, **__: (_ for _ in ()).throw(OSError("the store is gone")))
        with pytest.raises(Exception, match="gone"):
            life.manager.save()

    report = life.save()

    assert report.scales["weight"].before == coarse
    assert life.manager.rate.tables["weight"].bits == 3
    life.manager.close()


def test_how_many_restores_are_expected_must_be_said(url: str) -> None:
    with pytest.raises(BadInput, match="expected_restores"):
        Life(url, options=TableOptions(bits="auto"))


def live_with_loss(url: str, number: int, loss: float, **options: Any) -> tuple[SaveReport, CheckpointManager]:
    """A life in which the loss comes down to ``loss`` and stays there."""
    life = Life(url, options=TableOptions(bits=4), schedule="loss", **options)
    for _ in range(2000):
        life.manager.report_loss(loss)
    life.manager.report_loss(math.nan)
    return life.next(number), life.manager


@pytest.mark.parametrize("policy", ["consecutive", "baseline"])
def test_scales_follow_the_loss_at_restores_and_nowhere_else(policy: Any, url: str) -> None:
    """Levels are the root of first / loss: 1 to 0.2 is 2.2, so two halvings; 1 to 0.01 is 10, so four."""
    store = Store.create(url)
    steps, reports = [], []
    for number, loss in enumerate((1.0, 0.2, 0.2, 0.01, 0.5, 0.5)):
        report, manager = live_with_loss(url, number, loss, policy=policy)
        reports.append(report)
        steps.append(step_of(store.snapshot()))

    halvings = [round(math.log2(before / after)) for before, after in itertools.pairwise(steps)]
    assert halvings == [0, 2, 0, 2, 0]
    assert steps == [steps[0] * 2.0**-total for total in (0, 0, 2, 2, 4, 4)]
    assert [bool(report.scales) for report in reports] == [True, False, True, False, True, False]
    assert "the loss fell from 1 to 0.2" in reports[2].scales["weight"].reason
    assert manager.rate.first_loss == pytest.approx(1.0)
    assert manager.rate.loss == pytest.approx(0.5)
    assert manager.rate.tables["weight"].bits == 4
    if policy == "consecutive":
        assert {report.kind for report in reports[1:]} == {"delta"}
    else:
        assert store.snapshot().tables["weight"].generation == 3


def test_a_full_chooses_the_scale_anew_when_rows_have_grown(url: str) -> None:
    """The scale of the first baseline was kept for ever, though trained rows are wider than fresh: bits for nothing.

    The second baseline after it measures nothing: rows that did not grow are looked at, no more.
    """
    life = Life(url, options=TableOptions(bits=4), policy="baseline")
    with torch.no_grad():
        life.model.weight *= 0.05
    life.manager.tracker.mark_all("weight")
    life.save()
    life.train(0)
    kept = life.save()
    with torch.no_grad():
        life.model.weight *= 20.0
    life.manager.tracker.mark_all("weight")

    grown = life.save()

    assert kept.scales == {}
    change = grown.scales["weight"]
    assert change.before is not None
    assert 8 < change.after / change.before < 40
    assert "grown" in change.reason
    assert Store.open(url).snapshot().tables["weight"].generation == 2
    assert life.save().scales == {}
    error = np.abs(Store.open(url).snapshot().table("weight").read() - life.model.weight.detach().cpu().numpy())
    assert error.max() <= change.after / 2 * (1 + 1e-6)
    life.manager.close()


def test_a_delta_keeps_the_scale_however_much_rows_have_grown(url: str) -> None:
    life = Life(url, options=TableOptions(bits=4))
    life.save()
    with torch.no_grad():
        life.model.weight *= 20.0
    life.manager.tracker.mark_all("weight")
    report = life.save()
    assert (report.kind, report.scales) == ("delta", {})
    life.manager.close()


def test_a_schedule_without_a_loss_changes_nothing(url: str) -> None:
    for number in range(3):
        report = Life(url, options=TableOptions(bits=4), schedule="loss").next(number)
        assert bool(report.scales) == (number == 0)


def test_rates_that_contradict_each_other_are_refused(url: str) -> None:
    with pytest.raises(BadInput, match="choose one"):
        Life(url, schedule="loss")
    with pytest.raises(BadInput, match="schedule"):
        Life(url, schedule="cosine")
    life = Life(url, options=TableOptions(bits=4), schedule="loss")
    with pytest.raises(BadInput, match="positive"):
        life.manager.report_loss(-0.1)
    life.manager.close()


def test_a_loss_of_zero_stops_no_training_and_without_a_schedule_none_does(url: str) -> None:
    """Found by review: both raised, whether or not anything followed the loss."""
    life = Life(url, options=TableOptions(bits=4), schedule="loss")
    life.manager.report_loss(0.0)
    life.manager.report_loss(2.0)
    assert life.manager.rate.loss == 2.0
    life.manager.close()
    life = Life(url)
    life.manager.report_loss(-1.0)
    assert life.manager.rate.loss is None
    life.manager.close()


def test_a_width_that_grew_because_more_is_expected_now_says_so(url: str) -> None:
    """Found by review: "restored 1 times, 25 were expected", after 1 was expected before."""
    Life(url).next(0)
    more = Life(url, options=TableOptions(bits="auto", expected_restores=25)).next(1)
    assert more.scales["weight"].reason == "25 restores are expected now"


def test_a_loss_may_be_a_tensor_of_a_graph_and_is_kept_as_a_number(url: str) -> None:
    """Found by review: the tensor was kept with its graph, written as an array, and the checkpoint refused."""
    life = Life(url, options=TableOptions(bits=2), schedule="loss")
    life.manager.report_loss((torch.ones(1, requires_grad=True) * 2).sum())
    life.next(1)

    life = Life(url, options=TableOptions(bits=2), schedule="loss")

    assert life.manager.rate.first_loss == life.manager.rate.loss == 2.0
    assert type(life.manager.rate.loss) is float
    life.manager.close()


def test_the_first_loss_is_the_first_checkpoints_whatever_comes_after(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: the mean when the save was over was kept, and the second checkpoint told another first loss."""
    life = Life(url, options=TableOptions(bits=2), schedule="loss", every_steps=1, first_baseline="live")
    go_on, commit = threading.Event(), Transaction.commit

    def late(transaction: Transaction) -> Any:
        assert go_on.wait(30)
        return commit(transaction)

    life.manager.report_loss(4.0)
    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "commit", late)
        life.train(1)
        life.manager._saver.finish()  # the rows of this step are copied; what is reported from here on is behind it
        for _ in range(50):
            life.manager.report_loss(1.0)
        go_on.set()
        life.manager.wait_until_finished()
    life.next(2)

    assert {rate_in(url, report.version).run.first_loss for report in life.manager.history} == {4.0}
    assert life.manager.rate.first_loss == 4.0


@pytest.mark.parametrize("rate", [{"loss": math.inf}, {"first_loss": math.inf}, {"calibrated": {"weight": math.inf}}])
def test_a_checkpoint_whose_rates_are_infinite_is_corrupt(rate: dict[str, Any]) -> None:
    """Found by review: the schedule refused it later, as if the caller had given it."""
    trainer = {"format": 1, "optimizers": [], "slots": {}, "rates": {"calibrated": {"weight": 0.5}}}
    progress = {"options": [], "state": [], "extras": {}, "rate": {"loss": 1.0}}
    good = trainer_of(trainer, progress).rate
    assert (good.run.loss, good.tables.calibrated) == (1.0, {"weight": 0.5})
    is_of_tables = "calibrated" in rate
    with pytest.raises(CorruptStore, match=next(iter(rate))):
        trainer_of(
            {**trainer, "rates": rate} if is_of_tables else trainer,
            progress if is_of_tables else {**progress, "rate": rate},
        )


def test_a_table_that_is_no_lattice_any_more_leaves_the_schedule(url: str) -> None:
    """Found by review: the scale of its old lattice was asked of the new encoding, and every save failed."""
    life = Life(url, options=TableOptions(bits=2), schedule="loss")
    life.manager.report_loss(1.0)
    life.next(1)

    life = Life(url, options=TableOptions.exact(), schedule="loss")
    life.manager.report_loss(0.001)

    assert life.next(2).kind == "baseline"
    assert isinstance(Store.open(url).snapshot().tables["weight"].encoding, FloatBits)


def test_a_width_grows_while_the_encoding_changes(url: str) -> None:
    """Found by review: the restore measured a lattice that nobody asked for any more, and failed."""
    Life(url).next(1)
    Life(url).next(2)

    life = Life(url, options=TableOptions(encoding="affine", bits="auto", expected_restores=1))

    assert life.next(3).kind == "baseline"
    encoding = Store.open(url).snapshot().tables["weight"].encoding
    assert isinstance(encoding, Affine)
    assert encoding.bits == 3


def test_ranks_refine_together(url: str) -> None:
    """A table that both ranks have a copy of is saved by one of them; both count, and write one scale."""
    Store.create(url).close()
    lives: list[list[Any]] = []
    for number in range(3):

        def live(ranks: Ranks, number: int = number) -> tuple[SaveReport, Any]:
            life = Life(url, ranks)
            return life.next(number), life.manager.rate

        lives.append(on_ranks(2, live))

    for of_ranks in lives:
        assert len({report.kind for report, _ in of_ranks}) == 1
        assert of_ranks[0][0].scales == of_ranks[1][0].scales
        assert of_ranks[0][1] == of_ranks[1][1]
    assert [of_ranks[0][0].kind for of_ranks in lives] == ["baseline", "delta", "delta"]
    assert lives[2][0][1].tables["weight"].bits == 3
    assert (
        lives[2][0][0].scales["weight"].after
        < lives[1][0][0].scales.get("weight", lives[0][0][0].scales["weight"]).after
    )


def test_a_rank_that_lost_its_state_makes_all_write_anew_without_waiting(url: str) -> None:
    """Found by review: the others asked it for scales that are too fine, which it did not answer, for ever."""
    Store.create(url).close()

    def live(ranks: Ranks) -> str:
        life = Life(url, ranks, options=TableOptions(bits=4))
        life.train(1)
        life.save()
        if ranks.rank == 0:
            writer = life.manager._saver.writer.current
            assert writer is not None
            writer._state.forget()  # as where a commit won and its mirrors could not be moved
        return life.next(2).kind

    assert on_ranks(2, live) == ["baseline", "baseline"]
