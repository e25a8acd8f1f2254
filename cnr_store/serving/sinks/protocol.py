"""The interfaces and records of sinks, and of the sources that feed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.types import Float32s, RowIds


@dataclass(frozen=True, slots=True)
class SinkTable:
    """The shape of a table: its width, and its number of rows (None: hashed, any int64 key)."""

    dim: int
    num_rows: int | None


@dataclass(frozen=True, slots=True)
class SinkState:
    """The store and the version of a sink's rows.

    Attributes
    ----------
    store, branch
        The store's uuid, and the branch's own uuid ("" for the store's own log).
    version, step
        The version, and its training step.
    scope
        A text that identifies the choice of tables and rows ("" for all).
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
    """The present state of a source, and its tables by name."""

    state: SinkState
    tables: Mapping[str, SinkTable]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one version: by table the values (n, dim) float32, and whether each id is present (n,) bool."""

    version: int
    tables: Mapping[str, tuple[Float32s, npt.NDArray[np.bool_]]]


class SinkSource(Protocol):
    """The source of a feed's rows, such as a loader. All methods are thread-safe."""

    def published(self) -> Published | None:
        """Return the served state; None before the first version."""

    def row_ids(self, table: str) -> Sequence[int] | RowIds:
        """Return the ids that the table has now, ascending: a range, or int64 (n,)."""

    def read_rows(self, row_ids: Mapping[str, RowIds]) -> SourceRows:
        """Return the rows of these ids, all of one version; absent ids are marked, and no error."""

    def changed_since(self, state: SinkState) -> Mapping[str, RowIds] | None:
        """Return which rows may differ between ``state``, an older or newer version, and the one published now.

        Includes rows that only one of the two has. None if finding them is expensive: the sink then gets all rows.
        """


class RowSink(Protocol):
    """A place outside the loader that serves rows of one version. Implement it for your cache.

    Called from one thread at a time. One batch: `begin`, any number of `put` and `delete`, then `commit` or `abort`. A
    batch becomes visible to readers of the sink in `commit`, in one step. If a row is put twice, the last one counts.
    """

    @property
    def name(self) -> str:
        """The name for messages and metrics; without credentials."""

    def open(self) -> SinkState | None:
        """Open the sink, undo an interrupted batch, and return the state that it serves; None if it serves none.

        Idempotent; also called after a failure. Blocks.

        Raises
        ------
        StorageFailure
        Fenced
            Another process opened the sink since this one did.
        """

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch of ``tables``. With ``full``, rows that it does not put are absent after it.

        An idle feed begins and aborts a batch from time to time, to find errors.

        Raises
        ------
        StorageFailure
            Also if the sink finds that it does not serve the last committed state; then `open` returns what it serves.
        Fenced
            Another process opened the sink after this one; also raised by the methods below.
        """

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Write rows: ids int64 (n,), sorted and unique; values (n, dim) float32, valid during the call.

        Raises
        ------
        StorageFailure, Fenced
        NonFiniteValues
            A row cannot be stored; the batch must be aborted.
        """

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows absent; no error if they are."""

    def commit(self, state: SinkState) -> None:
        """Make the batch visible as this state. After an error it may be visible: `open` returns what is.

        Raises
        ------
        StorageFailure, Fenced
        """

    def abort(self) -> None:
        """Drop the batch, if there is one; must not raise if the sink is unreachable."""
