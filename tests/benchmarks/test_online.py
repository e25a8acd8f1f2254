"""Snapshots of a benchmark are as old as they say, and predictions are made before the training has seen the sample."""

from __future__ import annotations

import numpy as np
import torch
from bench_online import AgedCopies, Log, Online, generated

TABLES = (50, 20)


def small() -> Log:
    return generated(samples=640, batch_size=32, seed=0, tables=TABLES, dim=4, warm_up=0.5)


def test_what_is_served_is_the_newest_copy_of_at_least_the_age() -> None:
    model = Online(small()).model
    weight = next(weight for _, weight in model.table_parameters())
    copies = AgedCopies(model, age_s=8.0)
    served = {}

    for second in range(40):
        weight.detach().fill_(second)
        copies.keep(float(second))
        shown = next(weight for _, weight in copies.at(float(second)).table_parameters())
        served[second] = float(shown.detach()[0, 0])

    assert {second: second - at for second, at in served.items() if second >= 8} == dict.fromkeys(range(8, 40), 8.0)


def test_a_batch_is_yielded_before_it_is_trained() -> None:
    online = Online(small())
    steps = online.steps()
    before = [one.detach().clone() for one in online.model.parameters()]

    next(steps)
    assert all(torch.equal(a, b) for a, b in zip(before, online.model.parameters(), strict=True))
    next(steps)

    assert not any(torch.equal(a, b) for a, b in zip(before, online.model.parameters(), strict=True))


def test_generated_clicks_come_at_an_even_rate() -> None:
    assert np.ptp(np.diff(small().times_s)) < 1e-9
