"""Maintenance under a budget: what is planned, what is reported, and that it harms nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.maintenance import Stage, plan_stages, share_s

names = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=6)


@given(names)
def test_every_log_is_compacted_and_garbage_is_collected_once_and_last(branches: list[str]) -> None:
    stages = plan_stages(branches)

    assert stages[0] == Stage("compact")
    assert sorted(stage.branch or "" for stage in stages[1:-1]) == sorted(branches)
    assert [stage.kind for stage in stages].count("collect") == 1
    assert stages[-1] == Stage("collect")


@given(names, st.floats(0, 1e6), st.data())
def test_shares_never_exceed_the_budget_and_deletions_are_never_starved(
    branches: list[str], budget_s: float, data: st.DataObject
) -> None:
    stages = plan_stages(branches)
    left = budget_s
    for index in range(len(stages)):
        share = share_s(stages[index:], left)
        assert share is not None
        assert 0 <= share <= left
        assert share > 0 or left == 0 or left < 1e-300
        left -= share * data.draw(st.floats(0, 1))
    assert left >= 0


def test_what_a_stage_leaves_goes_to_those_after_it() -> None:
    stages = plan_stages([])

    assert share_s(stages, 100.0) == pytest.approx(80.0)
    assert share_s(stages[1:], 99.0) == pytest.approx(99.0)
    assert share_s(stages, -5.0) == 0.0
    assert share_s(stages, None) is None
