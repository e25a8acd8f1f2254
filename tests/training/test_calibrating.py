"""Precision from a validation: the coarsest that keeps within the loss, and a model that is as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store import BadInput, Store, TableOptions
from cnr_store.runtime.ranks import OneRank, Ranks
from cnr_store.training import Calibration, CheckpointManager, StoreOptions, calibrate
from tests.support.ranks import ThreadRank, on_ranks
from tests.training.runs import grouped


class Clicks:
    """A trained model of two tables and a validation set: logistic regression on sums of rows."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.user, self.item = nn.Embedding(120, 8), nn.Embedding(60, 8)
        self.model = nn.ModuleDict({"user": self.user, "item": self.item})
        generator = torch.Generator(torch.get_default_device()).manual_seed(4)
        self.users = torch.randint(0, 120, (800,), generator=generator)
        self.items = torch.randint(0, 60, (800,), generator=generator)
        score = (torch.randn(120, 8, generator=generator)[self.users]
                 * torch.randn(60, 8, generator=generator)[self.items]).sum(1)  # fmt: skip
        self.labels = (score + torch.randn(800, generator=generator) > 0).float()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        for _ in range(60):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()
        self.calls = 0

    def loss(self) -> torch.Tensor:
        score = (self.user(self.users) * self.item(self.items)).sum(1)
        return nn.functional.binary_cross_entropy_with_logits(score, self.labels)

    def validate(self) -> float:
        self.calls += 1
        with torch.no_grad():
            return float(self.loss())

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    return Clicks()


@pytest.mark.parametrize("allowed", [1.0, 1e-2, 1e-3])
def test_the_coarsest_scale_within_the_loss_is_taken(allowed: float, clicks: Clicks) -> None:
    before, calls = clicks.state(), clicks.calls

    found = calibrate(clicks.model, clicks.validate, max_quality_loss=allowed, ranks=OneRank())

    assert_same(clicks.state(), before)
    assert clicks.calls - calls == len(found.trials) + 1
    assert found.is_met
    assert found.trials[-1].loss <= allowed
    assert all(trial.loss > allowed for trial in found.trials[:-1])
    assert [trial.halvings for trial in found.trials] == list(range(len(found.trials)))
    assert found.metric == pytest.approx(clicks.validate())


def test_what_was_promised_is_what_a_restore_gives(clicks: Clicks, tmp_path: Path) -> None:
    found = calibrate(clicks.model, clicks.validate, max_quality_loss=1e-2, ranks=OneRank())
    with CheckpointManager(
        str(tmp_path / "store"), model=clicks.model, options=found.options, store_options=StoreOptions(ranks=OneRank())
    ) as manager:
        manager.save()
    other = Clicks()
    with CheckpointManager(
        str(tmp_path / "store"), model=other.model, options=found.options, store_options=StoreOptions(ranks=OneRank())
    ) as again:
        again.restore()

    assert other.validate() == pytest.approx(found.trials[-1].metric, rel=1e-6)


def test_more_restores_ask_for_no_coarser_scale(clicks: Clicks) -> None:
    scales = []
    for restores in (1, 10, 1000):
        found = calibrate(
            clicks.model, clicks.validate, max_quality_loss=1e-2, expected_restores=restores, ranks=OneRank()
        )
        assert not found.is_met or found.trials[-1].loss <= 1e-2 / restores
        scales.append(found.options["user.weight"].scale)
    assert all(scale is not None for scale in scales)
    assert scales == sorted(scales, reverse=True)  # type: ignore[type-var]
    assert scales[0] != scales[-1]


def test_a_loss_that_cannot_be_kept_is_said(clicks: Clicks, caplog: pytest.LogCaptureFixture) -> None:
    """The validation itself gets worse with every call, whatever the tables are."""
    worse = iter(range(1, 1000))
    found = calibrate(clicks.model, lambda: float(next(worse)), max_quality_loss=0.1, ranks=OneRank())
    assert not found.is_met
    assert "no scale up to 8-bit quality" in caplog.text
    assert len(found.trials) == found.trials[-1].halvings + 1 >= 4


def test_a_validation_that_fails_leaves_the_model_as_it_was(clicks: Clicks) -> None:
    before = clicks.state()
    answers = iter([1.0, 5.0])
    with pytest.raises(StopIteration):
        calibrate(clicks.model, lambda: next(answers), max_quality_loss=0.1, ranks=OneRank())
    assert_same(clicks.state(), before)


def test_tables_of_a_named_precision_are_left_alone(clicks: Clicks) -> None:
    given = {"user.weight": TableOptions(bits=3)}
    touched: set[bool] = set()
    user = clicks.user.weight.detach().clone()

    def validate() -> float:
        touched.add(torch.equal(clicks.user.weight, user))
        return clicks.validate()

    found = calibrate(clicks.model, validate, max_quality_loss=1e-2, options=given, ranks=OneRank())

    assert touched == {True}
    assert found.options["user.weight"] == given["user.weight"]
    assert found.options["item.weight"].scale is not None
    with pytest.raises(BadInput, match="nothing to calibrate"):
        calibrate(clicks.model, validate, max_quality_loss=1e-2, options=TableOptions.exact(), ranks=OneRank())


@pytest.mark.parametrize(
    "wrong", [{"max_quality_loss": 0.0}, {"max_quality_loss": math.nan}, {"expected_restores": -1.0}]
)
def test_bounds_that_are_none_are_refused(wrong: dict[str, float], clicks: Clicks) -> None:
    with pytest.raises(BadInput, match="positive"):
        calibrate(clicks.model, clicks.validate, **{"max_quality_loss": 0.1, **wrong}, ranks=OneRank())


@pytest.mark.parametrize("metric", [0.0, -1.0, math.nan])
def test_metrics_that_have_no_share_are_refused(metric: float, clicks: Clicks) -> None:
    with pytest.raises(BadInput, match="better when smaller"):
        calibrate(clicks.model, lambda: metric, max_quality_loss=0.1, ranks=OneRank())


def test_the_worst_rank_counts_and_all_take_the_same() -> None:
    """Rank 1 validates on something harder, so both take what it needs."""
    models = [Clicks(), Clicks()]

    def run(rank: ThreadRank) -> Calibration:
        model, factor = models[rank.rank], 1.0 + rank.rank
        return calibrate(model.model, lambda: model.validate() ** factor, max_quality_loss=1e-2, ranks=rank)

    found = on_ranks(2, run)

    assert found[0] == found[1]
    assert_same(models[1].state(), models[0].state())


def manager_of(url: str, clicks: Clicks, **options: Any) -> CheckpointManager:
    optimizer = torch.optim.SGD(clicks.model.parameters(), lr=0.01)
    chosen: dict[str, Any] = {"max_quality_loss": 0.01, "validate": clicks.validate, "on_bypass": "raise", **options}
    return CheckpointManager(url, model=clicks.model, optimizer=optimizer, **grouped(threads=1, **chosen))


def step(manager: CheckpointManager, clicks: Clicks) -> None:
    clicks.loss().backward()
    for optimizer in manager._training.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    manager.step()


def scales_of(url: str) -> dict[str, Any]:
    snapshot = Store.open(url).snapshot()
    return {table: (schema.encoding, schema.generation) for table, schema in snapshot.tables.items()}


def test_a_manager_chooses_scales_before_its_first_save_and_never_again(tmp_path: Path) -> None:
    """Also where the model trains on, in the mode and with the generators that it had."""
    url, clicks = str(tmp_path / "store"), Clicks()
    manager = manager_of(url, clicks)
    manager.restore()
    step(manager, clicks)
    expected = calibrate(clicks.model, clicks.validate, max_quality_loss=0.01).options
    clicks.calls, before, drawn = 0, clicks.state(), torch.get_rng_state()
    clicks.item.eval()

    def validate() -> float:
        assert not clicks.model.training
        torch.rand(1)
        return clicks.validate()

    chain = manager._saver.chain
    assert chain.quality is not None
    chain.quality = replace(chain.quality, validate=validate)
    manager.save()

    called = clicks.calls
    assert called > 1
    assert_same(clicks.state(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (clicks.user.training, clicks.item.training) == (True, False)
    assert {table: encoding.scale for table, (encoding, _) in scales_of(url).items()} == {
        table: pytest.approx(one.scale, rel=1e-6) for table, one in expected.items()
    }
    step(manager, clicks)
    report = manager.save()
    assert report is not None
    assert (report.kind, report.scales, clicks.calls) == ("delta", {}, called)
    manager.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_restored_training_keeps_the_scales_that_a_validation_chose(again: bool, tmp_path: Path) -> None:
    url, clicks = str(tmp_path / "store"), Clicks()
    first = manager_of(url, clicks)
    first.save()
    first.close()
    chosen, clicks.calls = scales_of(url), 0

    asked = {} if again else {"max_quality_loss": None, "validate": None}
    manager = manager_of(url, clicks, policy="baseline", **asked)
    manager.restore()
    for _ in range(2):
        step(manager, clicks)
        manager.save()
    manager.close()

    assert scales_of(url) == chosen
    assert clicks.calls == 0
    # Written anew, because another process does not restore but goes on over what is there: the same question again.
    fresh = manager_of(url, clicks)
    fresh.save()
    fresh.close()
    assert clicks.calls > 1


def test_a_validation_that_fails_is_asked_again_by_the_next_save(tmp_path: Path) -> None:
    url, clicks = str(tmp_path / "store"), Clicks()
    found = iter([1.0, math.nan])
    manager = manager_of(url, clicks, validate=lambda: next(found, None) or clicks.validate())
    before = clicks.state()
    with pytest.raises(BadInput, match="positive"):
        manager.save()
    assert_same(clicks.state(), before)
    assert Store.open(url).snapshot().is_empty

    assert manager.save() is not None

    assert clicks.calls > 1
    manager.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"validate": None}, "go together"),
        ({"max_quality_loss": None}, "go together"),
        ({"max_quality_loss": 0.0}, "positive"),
        ({"options": TableOptions(bits=4)}, "bits="),
        ({"options": TableOptions(bits="auto", expected_restores=2)}, "bits="),
        ({"options": {"user.weight": TableOptions(scale=0.1)}}, "scale="),
        ({"options": TableOptions(max_error=0.1)}, "max_error="),
        ({"options": TableOptions.exact()}, "nothing to choose"),
        ({"options": TableOptions(encoding="affine", search="minmax")}, "nothing to choose"),
        ({"schedule": "loss"}, "schedule="),
    ],
)
def test_what_contradicts_a_quality_is_refused(options: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=match):
        manager_of(str(tmp_path / "store"), Clicks(), **options)


def test_tables_of_16_bits_leave_a_quality_nothing_to_choose(tmp_path: Path) -> None:
    """Found by review: the manager was made, and then every save failed."""
    clicks = Clicks()
    clicks.model.bfloat16()
    with pytest.raises(BadInput, match="nothing to choose"):
        manager_of(str(tmp_path / "store"), clicks)


def test_the_managers_of_several_ranks_choose_one_scale(tmp_path: Path) -> None:
    """The worst of their validations counts."""
    url = str(tmp_path / "store")
    Store.create(url).close()
    alone = Clicks()
    expected = calibrate(alone.model, alone.validate, max_quality_loss=0.01, ranks=OneRank()).options
    made = [Clicks(), Clicks()]

    def live(ranks: Ranks) -> Any:
        clicks = made[ranks.rank]
        manager = manager_of(url, clicks, ranks=ranks)
        report = manager.save()
        manager.close()
        return report

    reports = on_ranks(2, live)

    assert reports[0].scales == reports[1].scales
    assert {table: encoding.scale for table, (encoding, _) in scales_of(url).items()} == {
        table: pytest.approx(one.scale, rel=1e-6) for table, one in expected.items()
    }
