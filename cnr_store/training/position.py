"""Where the training is: its step, and the reader's state of that step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cnr_store.errors import BadInput
from cnr_store.training.reader import Stateful, reader_document


@dataclass(slots=True, eq=False)
class TrainingPosition:
    """The step that was trained last, and the reader's state behind it.

    Attributes
    ----------
    given_state
        The state that the caller gave with this step; None where the reader is asked.
    restored_state
        The state that was restored; a save before the next step commits it again.
    """

    reader: Stateful | None
    step: int = 0
    given_state: Any = None
    restored_state: Any = None

    def check_given(self, reader_state: Any) -> None:
        """Return if the step behind this one has a reader state, where earlier ones had.

        Raises
        ------
        BadInput
        """
        if reader_state is None and self.reader is None and self.given_state is not None:
            raise BadInput(
                f"the step after {self.step} has no reader_state, but an earlier one had; give it at every step, or "
                "give the manager a reader: a checkpoint would name batches that it has not seen"
            )

    def advance(self, step: int | None, reader_state: Any) -> None:
        """Count a trained step."""
        self.step = self.step + 1 if step is None else step
        self.given_state, self.restored_state = reader_state, None

    def restored(self, step: int, reader_state: Any) -> None:
        """Begin anew where a checkpoint was saved."""
        self.step = step
        self.given_state, self.restored_state = None, reader_state

    def document(self) -> dict[str, Any] | None:
        """Return the reader's document for a save, or None."""
        given = self.restored_state if self.given_state is None else self.given_state
        return reader_document(self.reader, given)
