"""The states of a training's saves, and every transition between them."""

from __future__ import annotations

from enum import Enum


class SaveState(Enum):
    """Whether and how the next save of a training may begin."""

    IDLE = "idle"
    """Nothing: a save may begin."""
    RESTORED = "restored"
    """A checkpoint was restored; the next step or save takes the store over."""
    READING = "reading"
    """Tables are read while the training continues; a later step adds the rows changed since and is saved."""
    RUNNING = "running"
    """A save is running, or over and not yet collected."""
    UNKNOWN = "unknown"
    """A commit's reply was lost. Its rows are kept separately, and the next save first looks up the commit."""
    FENCED = "fenced"
    """Another training has taken the store over: no save is possible before another restore."""


class SaveEvent(Enum):
    """What happens to a training's saves."""

    WRITER_OPENED = "writer opened"
    """A restore begins: a new writer replaces the old one."""
    RESTORED = "restored"
    """A checkpoint, or the empty store, is in place."""
    STEPPED = "stepped"
    """A step was trained after a restore."""
    READ = "read"
    """Tables began to be read while the training goes on."""
    STARTED = "started"
    """A save was handed to the background."""
    WON = "won"
    """It is committed."""
    LOST = "lost"
    """It is not committed; its rows are dirty again."""
    FENCED = "fenced"
    """It is not committed, because another training has taken the store over."""
    NO_REPLY = "no reply"
    """Whether it is committed is not known."""


_NEXT: dict[tuple[SaveState, SaveEvent], SaveState] = {
    (SaveState.IDLE, SaveEvent.WRITER_OPENED): SaveState.IDLE,
    (SaveState.RESTORED, SaveEvent.WRITER_OPENED): SaveState.IDLE,
    (SaveState.FENCED, SaveEvent.WRITER_OPENED): SaveState.FENCED,
    (SaveState.IDLE, SaveEvent.RESTORED): SaveState.RESTORED,
    (SaveState.FENCED, SaveEvent.RESTORED): SaveState.RESTORED,
    (SaveState.RESTORED, SaveEvent.STEPPED): SaveState.IDLE,
    (SaveState.IDLE, SaveEvent.READ): SaveState.READING,
    (SaveState.RESTORED, SaveEvent.READ): SaveState.READING,
    (SaveState.READING, SaveEvent.STARTED): SaveState.RUNNING,
    (SaveState.READING, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.IDLE, SaveEvent.STARTED): SaveState.RUNNING,
    (SaveState.RESTORED, SaveEvent.STARTED): SaveState.RUNNING,
    # A save that could not be handed to the background was never running.
    (SaveState.IDLE, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.RESTORED, SaveEvent.LOST): SaveState.RESTORED,
    (SaveState.RUNNING, SaveEvent.WON): SaveState.IDLE,
    (SaveState.RUNNING, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.RUNNING, SaveEvent.FENCED): SaveState.FENCED,
    (SaveState.RUNNING, SaveEvent.NO_REPLY): SaveState.UNKNOWN,
    (SaveState.UNKNOWN, SaveEvent.WON): SaveState.IDLE,
    (SaveState.UNKNOWN, SaveEvent.LOST): SaveState.IDLE,
}


def next_state(state: SaveState, event: SaveEvent) -> SaveState:
    """Return the state after an event. Pure.

    Raises
    ------
    AssertionError
        The event cannot happen in this state: an error of this library.
    """
    found = _NEXT.get((state, event))
    assert found is not None, f"{event} cannot happen in {state}"
    return found
