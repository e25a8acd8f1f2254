"""What a sink is, what it is fed from, and the words that both use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.types import Float32s, RowIds


@dataclass(frozen=True, slots=True)
class SinkTable:
    """What a sink must know of a table: its width, and how many rows it has (None: hashed, any int64 key)."""

    dim: int
    num_rows: int | None


@dataclass(frozen=True, slots=True)
class SinkState:
    """Which state of which store the rows of a sink are.

    Attributes
    ----------
    store, branch
        The store's uuid, and the branch's own uuid ("" for the store's own log).
    version, step
        The version, and its training step.
    scope
        Which tables and which of their rows, in any words that differ when the choice does ("" for all).
    """

    store: str
    branch: str
    version: int
    step: int
    scope: str = ""

    def continues(self, other: SinkState) -> bool:
        """Whether versions of the two are versions of one log, of the same rows."""
        return (self.store, self.branch, self.scope) == (other.store, other.branch, other.scope)


@dataclass(frozen=True, slots=True)
class Published:
    """What a source shows at present: the state, and the tables by name."""

    state: SinkState
    tables: Mapping[str, SinkTable]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one version: by table the values (n, dim) float32, and which of the ids it has (n,) bool."""

    version: int
    tables: Mapping[str, tuple[Float32s, npt.NDArray[np.bool_]]]


class SinkSource(Protocol):
    """Where a feed takes rows from: a loader. All methods may be called from any thread."""

    def published(self) -> Published | None:
        """Return what lookups see now; None before the first version."""

    def row_ids(self, table: str) -> Sequence[int] | RowIds:
        """Return the ids that the table has now, ascending: a range, or int64 (n,)."""

    def read_rows(self, row_ids: Mapping[str, RowIds]) -> SourceRows:
        """Return the rows of these ids, all of one version; an id that is not there is marked, not an error."""

    def changed_since(self, held: SinkState) -> Mapping[str, RowIds] | None:
        """Return which rows may differ between ``held``, an older or newer version, and the one published now.

        Rows that only one of the two has are among them. None if it cannot be told cheaply: the sink then gets all.
        """


class RowSink(Protocol):
    """A place that serves rows of one version; the plug-in point for caches. Called from one thread at a time.

    One batch: `begin`, any number of `put` and `delete`, then `commit` or `abort`. What readers of the sink see
    changes in `commit` alone, as one step. A table's row may come more than once in a batch: the last one counts.
    """

    @property
    def name(self) -> str:
        """What messages and metrics call it; holds no credentials."""

    def open(self) -> SinkState | None:
        """Take the sink over, undo what an interrupted batch left, and return what it serves; None for nothing.

        A second call is safe, and the way on after a failure. Blocks.

        Raises
        ------
        StorageFailure
        """

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch; ``tables`` is every table of it. With ``full`` rows that it does not put are absent after it.

        A feed that has nothing to push begins and aborts a batch from time to time, to learn whether either is so.

        Raises
        ------
        StorageFailure
            Also where the sink serves something else than was committed to it last, if it can tell; `open` tells what.
        Fenced
            Another process opened the sink after this one; also from all that follow.
        """

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Give rows their values: ids int64 (n,), sorted and unique; values (n, dim) float32, not kept.

        Raises
        ------
        StorageFailure, Fenced
        NonFiniteValues
            A row cannot be what the sink stores; the batch has to be aborted.
        """

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows absent; those that are not there are no error."""

    def commit(self, state: SinkState) -> None:
        """Show the batch as this state. After an error it may have landed: `open` tells.

        Raises
        ------
        StorageFailure, Fenced
        """

    def abort(self) -> None:
        """Drop the batch, if there is one; must not raise for a sink that is gone."""
