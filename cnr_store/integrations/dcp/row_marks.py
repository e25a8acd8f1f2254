"""The marks of a tracker: which rows a save takes, and that they are marked again unless it commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cnr_store.types import RowIds
from cnr_store_gpu import RowTracker, Taken

Signature = Mapping[str, tuple[tuple[int, ...], str]]
"""The tensors of a state dict: path to shape and dtype."""


LiveTables = dict[tuple[int, torch.Size], str]
"""Address and shape of a live weight or slot to the name of the tracked table."""


class RowMarks:
    """Marks of one tracker, for saves of which several may be under way.

    Attributes
    ----------
    tracker
        None where nobody tracks.
    saved
        What the newest committed save had, if it was staged; None before.
    """

    def __init__(self, tracker: RowTracker | None) -> None:
        self.tracker = tracker
        self.saved: Signature | None = None
        self._open: TakenMarks | None = None

    def live(self) -> LiveTables:
        """Return the tensors that the tracker watches now, and their slots."""
        assert self.tracker is not None  # the caller has asked
        found: LiveTables = {}
        for table, weight in self.tracker.weights.items():
            found |= {_memory(tensor): table for tensor in (weight, *self.tracker.slots(table).values())}
        return found

    def take(self, live: LiveTables, signature: Signature | None = None) -> TakenMarks:
        """Take the marked rows, and those of a save that is not known to be committed. On the training's thread.

        Raises
        ------
        BadInput
            Not between two optimizer steps; see `RowTracker.take`.
        """
        assert self.tracker is not None  # it has told what is live
        if self._open is not None:
            self.tracker.give_back(self._open.rows)
            self._open = None
        self._open = TakenMarks(self, self.tracker.take(), live, signature)
        return self._open

    def won(self, taken: TakenMarks) -> None:
        """Forget the marks of a save that is committed."""
        self.saved = taken.signature
        if self._open is taken:
            self._open = None


@dataclass(frozen=True, slots=True, eq=False)
class TakenMarks:
    """The rows of one save, by name of the tracked table, and which tensors these tables are."""

    marks: RowMarks
    rows: Mapping[str, Taken]
    live: LiveTables
    signature: Signature | None

    def rows_of(self, tensor: torch.Tensor) -> RowIds | None:
        """Return which rows of a live weight changed; None if it is no tracked table."""
        table = table_of(tensor, self.live)
        return None if table is None else self.rows[table].row_ids


def table_of(tensor: torch.Tensor, live: LiveTables) -> str | None:
    """Return which tracked table a tensor is the weight or a slot of; None for any other, copies included."""
    return live.get(_memory(tensor)) if tensor.numel() else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank holds of a DTensor; any other one as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    local = local_of(tensor)
    return local.data_ptr(), local.shape
