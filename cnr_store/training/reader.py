"""The reader's position: which samples were consumed, committed with the weights that consumed them.

The state of a loader is that of the last batch fetched. Behind anything that fetches ahead it must not be saved as it
is: the batches between would be skipped. An `IntervalReader` says when its state is that of the last batch trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from cnr_store.errors import BadInput, CorruptStore

READER = "reader/0"


@runtime_checkable
class Stateful(Protocol):
    """What has a state and takes it back: torchdata's StatefulDataLoader, a scheduler, a GradScaler."""

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state back."""


@runtime_checkable
class IntervalReader(Stateful, Protocol):
    """A reader that knows what of its batches was trained; a save that is due waits until it is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether ``state_dict()`` is, now and until the next batch is trained, that of the last trained batch."""

    def trained(self) -> None:
        """Count one batch as trained; called once by each step, before a save."""

    def prepare(self) -> None:
        """A save is due and waits: become ready in as few batches as possible. Must not block."""


def check_stateful(name: str, value: object) -> None:
    """Return if ``value`` can be saved and restored.

    Raises
    ------
    BadInput
    """
    if not isinstance(value, Stateful):
        raise BadInput(
            f"{name} is a {type(value).__name__}, which has no state_dict() and load_state_dict(); use torchdata's "
            "StatefulDataLoader, or pass reader_state= to step() yourself",
            found=type(value).__name__,
        )


def reader_document(reader: Stateful | None, given: Any) -> dict[str, Any] | None:
    """Return what is saved of the reader: the caller's state of the last trained batch, else the reader's own.

    The reader's own is right only while no batch lies between it and the training: behind a prefetching queue the
    caller must give the state that came with the batch.
    """
    if given is not None:
        return {"state": given}
    return None if reader is None else {"state": reader.state_dict()}


def stored_reader_state(document: Any) -> Any:
    """Return the reader's state from the document, None if none was saved.

    Raises
    ------
    CorruptStore
        The document is not what `reader_document` makes.
    """
    if document is None:
        return None
    if not isinstance(document, dict) or "state" not in document:
        raise CorruptStore(f"document {READER} holds no reader state; restore another version", path=READER)
    return document["state"]


def reader_states_for(
    states: Sequence[Any], world: int, redistribute: Callable[[list[Any]], Sequence[Any]] | None = None
) -> list[Any]:
    """Return one reader state per rank of a training that resumes on ``world`` ranks. Pure, no I/O.

    A reader's state says what one rank has read of its share. With another number of ranks the shares are others, and
    only the caller knows how they are made; nothing is guessed.

    Parameters
    ----------
    states
        The saved states, by the rank that saved them; not changed.
    world
        Ranks that resume.
    redistribute
        Makes ``world`` states, by rank, of the saved ones; called only when their numbers differ.

    Raises
    ------
    BadInput
        The numbers differ and there is no ``redistribute``, or it returned another number of states.
    """
    if world < 1:
        raise BadInput(f"a training resumes on 1 rank or more, not {world}", found=world)
    if len(states) == world:
        return list(states)
    if redistribute is None:
        raise BadInput(
            f"the checkpoint holds the reader states of {len(states)} ranks, the training resumes on {world}; samples "
            f"would be trained twice or skipped. Resume on {len(states)} ranks, or pass redistribute=, a function "
            f"from the list of {len(states)} states to a list of {world}",
            expected=len(states), found=world,
        )  # fmt: skip
    made = list(redistribute(list(states)))
    if len(made) != world:
        raise BadInput(
            f"redistribute= made {len(made)} reader states of {len(states)}, the training resumes on {world} ranks; "
            "return one per rank",
            expected=world, found=len(made),
        )  # fmt: skip
    return made
