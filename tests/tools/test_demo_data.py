"""Generated traffic, the split in time and the resumable loader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadInput
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.metrics import auc
from cnr_store_tools.demo.traffic import (
    TrafficConfig,
    drift_popularity,
    generate_clicks,
    plant_teacher,
    zipf_cumulative,
)

SMALL = TrafficConfig(table_rows=(2_000, 500), num_samples=40_000, drift_every=2_000, drift_share=0.05)


def _log(num_samples: int, num_dense: int = 1) -> ClickLog:
    count = np.arange(num_samples)
    return ClickLog(
        ids=count[:, None].astype(np.int64),
        dense=np.repeat(count[:, None], num_dense, axis=1).astype(np.float32),
        labels=(count % 2).astype(np.float32),
        table_rows=[num_samples],
        names=["t"],
    )


def test_traffic_is_decided_by_its_seed() -> None:
    first, again = generate_clicks(SMALL), generate_clicks(SMALL)
    other = generate_clicks(replace(SMALL, seed=1))

    for name in ("ids", "dense", "labels"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_traffic_popularity_follows_the_zipf_law_between_two_drifts() -> None:
    config = replace(SMALL, num_samples=200_000, drift_every=200_000)

    counts = np.sort(np.bincount(generate_clicks(config).ids[:, 0], minlength=2_000))[::-1]

    expected = np.diff(zipf_cumulative(2_000, config.zipf_exponent), prepend=0.0) * config.num_samples
    np.testing.assert_allclose(counts[:20], expected[:20], rtol=0.1)


def test_traffic_popularity_drifts_and_stands_still_without_drift() -> None:
    def kept_stars(config: TrafficConfig) -> int:
        ids = generate_clicks(config).ids[:, 0]
        early, late = (
            set(np.argsort(np.bincount(part, minlength=2_000))[-20:]) for part in (ids[:8_000], ids[-8_000:])
        )
        return len(early & late)

    assert kept_stars(replace(SMALL, drift_share=0.0)) >= 15
    assert kept_stars(replace(SMALL, drift_share=0.2)) <= 8


def test_drift_keeps_a_permutation_and_moves_the_given_share() -> None:
    order = np.arange(10_000)

    drift_popularity(order, 0.1, np.random.default_rng(0))

    np.testing.assert_array_equal(np.sort(order), np.arange(10_000))
    assert 900 < (order != np.arange(10_000)).sum() <= 1_000


def test_teacher_knows_its_clicks() -> None:
    config = replace(SMALL, num_samples=20_000)
    log = generate_clicks(config)
    teacher = plant_teacher(config, np.random.default_rng(config.seed))

    assert auc(log.labels, teacher.logits(log.ids, log.dense)) > 0.75


def test_teacher_logits_equal_a_naive_sum_over_pairs() -> None:
    config = TrafficConfig(table_rows=(7, 5, 3), num_samples=11, num_dense=2)
    log = generate_clicks(config)
    teacher = plant_teacher(config, np.random.default_rng(9))

    logits = teacher.logits(log.ids, log.dense)

    for sample, row in enumerate(log.ids):
        vectors = [teacher.factors[column][row_id].astype(np.float64) for column, row_id in enumerate(row)]
        expected = config.click_bias + float(log.dense[sample] @ teacher.dense_weights)
        expected += sum(vector[-1] for vector in vectors)
        expected += sum(float(vectors[one][:-1] @ vectors[two][:-1]) for one in range(3) for two in range(one))
        assert logits[sample] == pytest.approx(expected, abs=1e-5)


def test_split_holds_out_the_last_samples() -> None:
    past, future = split_by_time(_log(100), 0.15)

    np.testing.assert_array_equal(past.ids[:, 0], np.arange(85))
    np.testing.assert_array_equal(future.ids[:, 0], np.arange(85, 100))


def test_split_scales_dense_features_by_the_past_alone() -> None:
    log = _log(100)
    log.dense[85:] = 1e6

    past, future = split_by_time(log, 0.15)

    assert past.dense.mean() == pytest.approx(0.0, abs=1e-6)
    assert past.dense.std() == pytest.approx(1.0, abs=1e-6)
    assert future.dense[0, 0] == pytest.approx((1e6 - 42.0) / np.arange(85).std(), rel=1e-5)


def test_split_leaves_a_constant_feature_at_zero() -> None:
    log = replace(_log(20), dense=np.full((20, 1), 3.0, dtype=np.float32))

    past, future = split_by_time(log)

    assert not past.dense.any()
    assert not future.dense.any()


def test_split_that_would_leave_a_part_empty_is_refused() -> None:
    with pytest.raises(BadInput, match="a part would be empty"):
        split_by_time(_log(2), 0.1)


def test_log_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(BadInput, match="as many dense rows and labels"):
        replace(_log(4), labels=np.zeros(3, dtype=np.float32))


@settings(max_examples=40)
@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 10), taken=st.integers(0, 40), data=st.data())
def test_loader_resumed_from_any_state_hands_out_the_same_batches(
    num_samples: int, batch_size: int, taken: int, data: st.DataObject
) -> None:
    if batch_size > num_samples:
        batch_size = num_samples
    log = _log(num_samples)
    whole = [batch.ids[:, 0].tolist() for batch in TimeOrderedBatches(log, batch_size)]
    first = TimeOrderedBatches(log, batch_size)
    taken = min(taken, len(first))
    state, seen = first.state_dict(), []
    for batch in first if taken else ():
        seen.append(batch.ids[:, 0].tolist())
        state = first.state_dict()
        if len(seen) == taken:
            break

    resumed = TimeOrderedBatches(log, batch_size)
    resumed.load_state_dict(state)

    assert seen + [batch.ids[:, 0].tolist() for batch in resumed] == whole
    assert whole == [list(range(k * batch_size, (k + 1) * batch_size)) for k in range(num_samples // batch_size)]


def test_loader_stops_at_max_batches_also_after_a_resume() -> None:
    loader = TimeOrderedBatches(_log(100), 10, max_batches=4)
    state = {**loader.state_dict(), "next_batch": 3}

    loader.load_state_dict(state)

    assert len(loader) == 4
    assert [batch.ids[0, 0].item() for batch in loader] == [30]


@pytest.mark.parametrize("changed", ["batch_size", "num_samples"])
def test_loader_refuses_the_state_of_other_data(changed: str) -> None:
    loader = TimeOrderedBatches(_log(100), 10)

    with pytest.raises(BadInput, match=changed):
        loader.load_state_dict({**loader.state_dict(), changed: 7})


@pytest.mark.parametrize("position", [-1, 11])
def test_loader_refuses_a_position_outside_the_log(position: int) -> None:
    loader = TimeOrderedBatches(_log(100), 10)

    with pytest.raises(BadInput, match="points at batch"):
        loader.load_state_dict({**loader.state_dict(), "next_batch": position})


@pytest.mark.parametrize("batch_size", [0, 101])
def test_loader_without_a_whole_batch_is_refused(batch_size: int) -> None:
    with pytest.raises(BadInput, match="no whole batch"):
        TimeOrderedBatches(_log(100), batch_size)
