"""What stands between a training and its next save: the states, and when a save is due."""

from __future__ import annotations

import pytest

from cnr_store.training.saver import SaveEvent, SaveState, next_state
from cnr_store.training.schedule import SaveSchedule


def ways_out(state: SaveState) -> dict[SaveEvent, SaveState]:
    """Every event that can happen in a state and leads out of it, with where it leads."""
    found = {}
    for event in SaveEvent:
        try:
            found[event] = next_state(state, event)
        except AssertionError:
            continue
    return {event: to for event, to in found.items() if to is not state}


def test_only_a_restore_ends_what_a_fence_began() -> None:
    assert ways_out(SaveState.FENCED) == {SaveEvent.IN_PLACE: SaveState.UNTRAINED}


def test_a_save_of_unknown_outcome_is_left_only_when_the_outcome_is_known() -> None:
    assert ways_out(SaveState.UNKNOWN) == {SaveEvent.WON: SaveState.IDLE, SaveEvent.LOST: SaveState.IDLE}


def test_a_running_save_is_left_only_by_its_outcome() -> None:
    outcomes = {SaveEvent.WON, SaveEvent.LOST, SaveEvent.FENCED, SaveEvent.NO_REPLY}
    assert ways_out(SaveState.RUNNING).keys() == outcomes


def test_a_save_starts_only_where_none_runs_and_nothing_is_open() -> None:
    starts = {state for state in SaveState if SaveEvent.STARTED in ways_out(state)}
    assert starts == {SaveState.IDLE, SaveState.UNTRAINED, SaveState.READING}


def test_what_was_read_live_becomes_a_save_or_is_given_up() -> None:
    assert ways_out(SaveState.READING) == {SaveEvent.STARTED: SaveState.RUNNING, SaveEvent.LOST: SaveState.IDLE}


@pytest.mark.parametrize("event", [SaveEvent.WON, SaveEvent.NO_REPLY])
def test_an_outcome_without_a_save_is_refused(event: SaveEvent) -> None:
    with pytest.raises(AssertionError, match="cannot happen"):
        next_state(SaveState.IDLE, event)


def test_a_save_is_due_by_steps_or_seconds_and_stays_due_until_it_begins() -> None:
    schedule = SaveSchedule(every_steps=3, every_seconds=10.0, last_s=100.0)

    assert [schedule.is_due(step, 101.0) for step in (1, 2, 3)] == [False, False, True]
    assert schedule.is_due(1, 101.0)  # a loop that counts anew does not lose it
    schedule.mark(3, 101.0)
    assert not schedule.is_due(5, 110.9)
    assert schedule.is_due(5, 111.0)


def test_without_steps_and_seconds_no_save_is_due() -> None:
    assert not SaveSchedule(every_steps=None, every_seconds=None, last_s=0.0).is_due(10**6, 1e9)
