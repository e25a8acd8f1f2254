"""What compaction's workers do: the pieces of the result, dealt out to tasks that write one folder each. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store.types import Rectangle


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of the result: a rectangle of a table. Of a hashed table it is the whole table."""

    table: str
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Pieces that one worker folds into one folder with one receipt; ``index`` is the task's rank in the segment."""

    index: int
    pieces: tuple[Piece, ...]
