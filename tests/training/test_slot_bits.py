"""Optimizer state whose bits other options ask for after a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager, SaveReport
from cnr_store.types import FloatBits, Lattice
from tests.training.runs import grouped
from tests.training.test_rate_control import step_of

BITS_0, BITS_1, BITS_4, BITS_23 = (FloatBits(mantissa_bits=bits) for bits in (0, 1, 4, 23))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def saved(url: str, number: int, options: dict[str, Any], *, loss: float | None = None) -> SaveReport:
    """Resume a training of one table with SparseAdam, train a step, save; with a loss the scale follows it."""
    torch.manual_seed(5)
    model = nn.Embedding(400, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.5)
    chosen = grouped(options=TableOptions(**options), schedule="constant" if loss is None else "loss")
    with CheckpointManager(url, model=model, optimizer=optimizer, **chosen) as manager:
        manager.restore()
        for _ in range(0 if loss is None else 2000):  # it comes down to that and stays there
            manager.report_loss(loss)
        rows = torch.randint(0, 400, (40,), generator=torch.Generator().manual_seed(number), device="cpu")
        model(rows.to(model.weight.device)).square().sum().backward()
        optimizer.step()
        manager.step()
        report = manager.save()
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("first", "then", "stored"),
    [
        ({}, {"slot_bits": 2}, {"exp_avg_sq": BITS_0}),
        ({"slot_bits": 2}, {}, {"exp_avg_sq": BITS_4}),
        ({"slot_bits": {"exp_avg_sq": 2}}, {"slot_bits": {"exp_avg_sq": 3}}, {"exp_avg_sq": BITS_1}),
        ({"slot_bits": {"exp_avg": 2}}, {"slot_bits": {"exp_avg": 8}}, {"exp_avg_sq": BITS_4}),
        ({"slot_bits": 2}, {"slot_bits": "exact"}, {"exp_avg": BITS_23, "exp_avg_sq": BITS_23}),
        ({"bits": "auto", "expected_restores": 1}, {"slot_bits": 8}, {"exp_avg_sq": BITS_4}),
    ],
)  # fmt: skip
def test_slot_bits_that_changed_since_the_checkpoint_take_effect(
    first: dict[str, Any], then: dict[str, Any], stored: dict[str, FloatBits], url: str
) -> None:
    """A regression: a resumed run kept the bits of its optimizer state for good, unless they became exact."""
    then = {key: value for key, value in first.items() if key != "slot_bits"} | then
    saved(url, 0, first)
    before = Store.open(url).snapshot().tables["weight"].slots["exp_avg"].encoding

    changed = saved(url, 1, then)

    slots = Store.open(url).snapshot().tables["weight"].slots
    assert changed.kind == "baseline"
    assert {name: slots[name].encoding for name in stored} == stored
    if then.get("slot_bits") == {"exp_avg": 8}:
        assert isinstance(before, Lattice)
        assert isinstance(slots["exp_avg"].encoding, Lattice)
        assert slots["exp_avg"].encoding.scale == pytest.approx(before.scale / 16, rel=0.5)
    assert saved(url, 2, then).kind == "delta"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"slot_bits": 8}),
        ({"slot_bits": 4}, {"slot_bits": {"exp_avg": 4, "exp_avg_sq": 4, "other": 2}}),
        ({"bits": 4}, {"bits": 4, "slot_bits": 4}),
    ],
)
def test_slot_bits_that_the_checkpoint_meets_change_nothing(
    first: dict[str, Any], then: dict[str, Any], url: str
) -> None:
    saved(url, 0, first)
    assert saved(url, 1, then).kind == "delta"


def test_halvings_that_are_due_are_not_lost_to_other_slot_bits(url: str) -> None:
    for number, loss in enumerate((1.0, 0.2)):
        saved(url, number, {"bits": 4}, loss=loss)
    before = step_of(Store.open(url).snapshot())

    report = saved(url, 2, {"bits": 4, "slot_bits": 8}, loss=0.2)

    assert report.kind == "baseline"
    assert step_of(Store.open(url).snapshot()) == before / 4
