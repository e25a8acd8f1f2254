"""Trainings whose checkpoints come to a target of bytes: by rows that wait, by coarser scales, or not, and said so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BadInput, Store, TableOptions, Threshold
from cnr_store.runtime.ranks import OneRank, Ranks
from cnr_store.training import CheckpointManager, SaveReport
from tests.tools.cli_runner import cnr
from tests.training.runs import grouped
from tests.training.test_rate_control import on_ranks, rate_in, step_of

ROWS, DIM = 3000, 16
THRESHOLD = Threshold(keep=0.8, max_error=4.0, max_wait=4)


class Life:
    """One process of a training whose lookups prefer low rows, saved at every step."""

    def __init__(
        self,
        url: str,
        target: int | None,
        ranks: Ranks | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.15)
        self.optimizer = optimizer
        self.manager = CheckpointManager(
            url,
            model=self.model,
            optimizer=optimizer,
            every_steps=1,
            **grouped(rng=False, threads=1, ranks=ranks or OneRank(), target_bytes_per_checkpoint=target, **options),
        )
        self.manager.restore()

    def train(self, steps: int) -> list[SaveReport]:
        """Train, saving at each step; return the reports."""
        done = len(self.manager.history)
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.manager.current_step)
            rows = (torch.rand(900, generator=generator) ** 3 * ROWS).long().unique()
            target = torch.randn(len(rows), DIM, generator=generator)
            self.optimizer.zero_grad()
            (self.model(rows) - target).square().sum().backward()
            self.optimizer.step()
            self.manager.step()
        self.manager.wait_until_finished()
        return self.manager.history[done:]

    def end(self, steps: int) -> list[SaveReport]:
        reports = self.train(steps)
        self.manager.close()
        return reports


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def usual(tmp_path: Path) -> float:
    """Bytes of a delta without a target."""
    return float(np.mean([report.size_bytes for report in Life(str(tmp_path / "usual"), None).end(4)[1:]]))


def state_of(report: SaveReport) -> str:
    assert report.target is not None
    return report.target.state


def test_rows_wait_until_saves_come_to_the_target(url: str, usual: float) -> None:
    target = round(0.8 * usual)
    life = Life(url, target, options=TableOptions(scale=2.0**-6, threshold=THRESHOLD))

    reports = life.end(16)

    assert {report.kind for report in reports[1:]} == {"delta"}
    assert reports[1].size_bytes > target
    assert max(report.size_bytes for report in reports[4:]) <= 1.1 * target
    last = reports[-1].target
    assert last is not None
    assert last.share < 1.0
    assert reports[-1].waiting
    waiting = Store.open(url).snapshot().waiting["weight"]
    assert waiting.max_error <= 4.0
    assert waiting.oldest <= 4
    assert step_of(Store.open(url).snapshot()) == 2.0**-6


@pytest.mark.parametrize("policy", ["consecutive", "full"])
def test_scales_become_coarser_where_nothing_may_wait(policy: Any, url: str, usual: float) -> None:
    fulls = Life(url + "-usual", None, policy="full").end(2) if policy == "full" else []
    target = round(0.7 * (fulls[-1].size_bytes if fulls else usual))
    life = Life(url, target, policy=policy)

    reports = life.end(8)

    changes = [report.scales["weight"] for report in reports if report.scales]
    assert len(changes) == 2  # the first full, and one for the target
    assert changes[1].before is not None
    assert math.log2(changes[1].after / changes[1].before).is_integer()
    assert "coarser" in changes[1].reason
    assert [report.kind for report in reports].count("full") == (8 if policy == "full" else 2)
    assert max(report.size_bytes for report in reports[-3:]) <= target
    assert state_of(reports[-1]) == "met"
    error = np.abs(Store.open(url).snapshot().table("weight").read() - life.model.weight.detach().numpy())
    assert error.max() <= changes[1].after / 2 * (1 + 1e-6)


@pytest.mark.parametrize("policy", ["consecutive", "full"])
def test_no_table_becomes_coarser_than_2_bits_and_that_is_said_once(
    policy: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    coarsest = Life(url + "-2", None, options=TableOptions(bits=2)).end(1)[0].scales["weight"].after

    reports = Life(url, 50, policy=policy).end(9)

    changes = [report.scales["weight"].after for report in reports if report.scales]
    assert len(changes) == 2
    assert coarsest / 3 <= changes[1] <= 1.2 * coarsest
    assert {state_of(report) for report in reports[-3:]} == {"unreachable"}
    assert caplog.text.count("cannot come to 50 bytes") == 1


@pytest.mark.parametrize("options", [TableOptions(max_error=0.01), TableOptions(scale=0.01), TableOptions.exact()])
def test_what_somebody_said_of_exactness_holds(options: TableOptions, url: str) -> None:
    reports = Life(url, 50, options=options).end(5)
    assert [report.kind for report in reports] == ["full", *["delta"] * 4]
    assert not any(report.scales for report in reports[1:])
    assert state_of(reports[-1]) == "unreachable"


@pytest.mark.parametrize("policy", ["consecutive", "full"])
def test_a_table_of_16_bits_has_no_scale_to_make_coarser(policy: Any, url: str) -> None:
    """Found by review: without ``encoding=`` it counted as a lattice, and the state said "adjusting" for ever."""
    reports = Life(url, 50, dtype=torch.bfloat16, policy=policy).end(5)
    assert [report.kind for report in reports[1:]] == ["full" if policy == "full" else "delta"] * 4
    assert [state_of(report) for report in reports[2:]] == ["unreachable"] * 3


def test_a_restored_training_goes_on_with_share_and_scale(url: str, usual: float) -> None:
    options = TableOptions(threshold=Threshold(keep=1.0, max_error=4.0, max_wait=1))
    before = Life(url, round(0.35 * usual), options=options).end(14)
    coarse = step_of(Store.open(url).snapshot())

    life = Life(url, round(0.35 * usual), options=options)
    target = life.manager.rate.target
    after = life.end(4)

    assert target is not None
    assert before[-1].target is not None
    assert (target.share, target.doublings) == (before[-1].target.share, before[-1].target.doublings)
    assert target.doublings["weight"] > 0
    assert target.state == "learning"
    assert {report.kind for report in after} == {"delta"}
    assert step_of(Store.open(url).snapshot()) == coarse


def test_without_the_target_a_restored_training_is_as_exact_as_its_options(url: str, usual: float) -> None:
    before = Life(url, round(0.6 * usual)).end(6)
    fine, coarse = (report.scales["weight"].after for report in before if report.scales)

    report = Life(url, None).end(1)[0]

    assert coarse > fine
    assert step_of(Store.open(url).snapshot()) == fine
    assert "no target" in report.scales["weight"].reason
    assert report.kind == "delta"


def test_without_the_target_and_without_room_the_scale_is_chosen_anew(url: str, usual: float) -> None:
    """Found by review: the table stayed coarse, and its checkpoint no longer said so."""
    before = Life(url, round(0.6 * usual)).end(6)
    fine, coarse = (report.scales["weight"].after for report in before if report.scales)

    report = Life(url, None, mirror="none").end(1)[0]

    assert report.kind == "full"
    assert 0.5 < report.scales["weight"].after / fine < 2
    assert report.scales["weight"].before == coarse
    assert rate_in(url).doublings == {}


@pytest.mark.parametrize("mirror", ["memory", "none"])
def test_a_schedule_undoes_a_target_and_counts_its_own_halvings_apart(mirror: Any, url: str, usual: float) -> None:
    """Found by review: what the target's end asks for replaced what the loss asks for, and counted as the loss's."""
    life = Life(url, round(0.6 * usual))
    life.manager.report_loss(4.0)
    before = life.train(6)
    for _ in range(2000):
        life.manager.report_loss(1.0)
    before += life.end(1)
    fine, coarse = (report.scales["weight"].after for report in before if report.scales)
    doubled = rate_in(url).doublings["weight"]
    assert coarse == math.ldexp(fine, doubled)

    Life(url, None, options=TableOptions(bits=8), schedule="loss", mirror=mirror).end(1)

    has_room = mirror == "memory"
    assert step_of(Store.open(url).snapshot()) == (fine / 2 if has_room else coarse)
    assert (rate_in(url).halved.get("weight", 0), rate_in(url).doublings) == (
        (1, {}) if has_room else (0, {"weight": doubled})
    )


def test_a_scale_change_that_failed_is_made_by_the_next_save(
    url: str, usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(url, round(0.6 * usual))
    first = life.train(3)[0]
    with monkeypatch.context() as patched:
        patched.setattr(
            "cnr_store.write.transaction.Transaction.commit", lambda *_, **__: (_ for _ in ()).throw(OSError("gone"))
        )
        with pytest.raises(Exception, match="gone"):
            life.train(1)

    report = life.end(1)[0]

    assert report.kind == "full"
    target = life.manager.rate.target
    assert target is not None
    assert target.doublings == {"weight": math.log2(report.scales["weight"].after / first.scales["weight"].after)}
    assert target.doublings["weight"] > 0


def test_a_save_by_name_is_whole_and_does_not_count(url: str) -> None:
    """It writes every row that waited, which no share could have made smaller."""
    life = Life(url, 10**9, options=TableOptions(scale=2.0**-6, threshold=THRESHOLD))
    counted = life.train(6)[-3:]
    flushed = life.manager.save()
    assert flushed is not None
    assert flushed.waiting == 0

    after = life.end(1)[0].target

    assert after is not None
    assert after.size_bytes == round(float(np.mean([report.size_bytes for report in counted])))


def test_targets_that_contradict_other_options_are_refused(url: str) -> None:
    with pytest.raises(BadInput, match="auto"):
        Life(url, 1000, options=TableOptions(bits="auto", expected_restores=3))
    with pytest.raises(BadInput, match="schedule"):
        Life(url, 1000, schedule="loss")
    for bad in (0, -1, 1.5, True):
        with pytest.raises(BadInput, match="target_bytes_per_checkpoint"):
            Life(url, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [TableOptions(scale=2.0**-6, threshold=THRESHOLD), TableOptions()])
def test_ranks_come_to_a_target_together(options: TableOptions, url: str, usual: float) -> None:
    """Both have a copy of the table, one saves it; rank 0 decides from the bytes of both."""
    Store.create(url).close()
    target = round(0.8 * usual)

    def live(ranks: Ranks) -> Any:
        life = Life(url, target, ranks, options=options)
        return life.end(10), life.manager.rate

    (first, rate), (second, other) = on_ranks(2, live)

    assert rate == other
    assert [(one.kind, one.size_bytes, one.scales, one.target) for one in first] == [
        (one.kind, one.size_bytes, one.scales, one.target) for one in second
    ]
    assert (rate.target.share < 1.0) == (options.threshold is not None)
    assert bool(rate.target.doublings) == (options.threshold is None)
    assert max(report.size_bytes for report in first[-2:]) <= 1.1 * target


def test_the_command_tells_scales_restores_and_the_target(url: str, usual: float) -> None:
    target = round(0.8 * usual)
    options = TableOptions(scale=2.0**-6, threshold=THRESHOLD)
    Life(url, target, options=options).end(6)
    Life(url, target, options=options).end(2)

    document, text = cnr("show", url, "--json").document, cnr("show", url).out

    assert document["rate"]["restores"] == 1
    said = document["rate"]["target"]
    assert (said["bytes"], said["doublings"]) == (target, {})
    assert 0 < said["share"] < 1
    assert document["tables"]["weight"]["scale"] == 2.0**-6
    assert "restored 1 times" in text
    assert f"checkpoint: {said['state']}; {100 * said['share']:.0f} % of the rows" in " ".join(text.split())


def test_the_command_shows_the_scale_after_its_halvings(url: str, usual: float) -> None:
    Life(url, round(0.6 * usual)).end(6)
    assert "weight doubled" in cnr("show", url).out
    Life(url, None).end(1)

    shown = cnr("show", url, "--json").document

    assert shown["rate"]["target"] is None
    assert shown["tables"]["weight"]["shift"] > 0
    assert shown["tables"]["weight"]["scale"] == step_of(Store.open(url).snapshot())
    assert f"scale {shown['tables']['weight']['scale']:.4g}" in cnr("show", url).out
