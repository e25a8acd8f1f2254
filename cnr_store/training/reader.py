"""The reader's position: which samples were consumed, committed with the weights that consumed them."""

from __future__ import annotations

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
