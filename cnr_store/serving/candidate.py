"""A version before it is served, for the caller's own check and warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from cnr_store.errors import VersionRefused
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.lookups import LookupBatch, lookup_in
from cnr_store.serving.rows.views import View


class Candidate:
    """Read-only lookups on a version before it is served. Valid only during the call that gets it.

    Attributes
    ----------
    version, step
        Of the version.
    serving
        The version that is served meanwhile; None before the first.
    """

    def __init__(self, view: View, serving: int | None) -> None:
        self.version = view.version
        self.step = view.step
        self.serving = serving
        self._view = view

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema."""
        return {name: table.schema for name, table in self._view.tables.items()}

    @property
    def dense(self) -> Mapping[str, Array]:
        """Dense tensors by name; not to be written."""
        return self._view.dense

    def lookup(self, table: str, row_ids: npt.ArrayLike) -> Array:
        """Return rows (n, dim) as they would be served.

        Raises
        ------
        TableNotFound, BadRowIds
        """
        return self.lookup_many({table: row_ids}).rows[table]

    def lookup_many(self, row_ids: Mapping[str, npt.ArrayLike], dense: Sequence[str] = ()) -> LookupBatch:
        """Return rows of several tables, and dense tensors."""
        return lookup_in(self._view, row_ids, dense)

    def row_ids(self, table: str) -> Array:
        """Return the sorted ids of all rows of a table that are there, int64."""
        return self._view.table(table).row_ids()


Check = Callable[[Candidate], Any]
"""``validate``: False, or an exception, refuses the version; anything else lets it pass."""


def pass_gate(candidate: Candidate, *, validate: Check | None, warm_up: Check | None) -> None:
    """Ask the caller's check about a version, then let the caller warm it up.

    Raises
    ------
    VersionRefused
        The check returns False, or one of the two raises; ``__cause__`` is its error.
    """
    for name, call in (("validate", validate), ("warm_up", warm_up)):
        if call is None:
            continue
        try:
            answer = call(candidate)
        except Exception as error:
            raise VersionRefused(
                f"{name} failed for version {candidate.version} (step {candidate.step}): "
                f"{type(error).__name__}: {error}",
                version=candidate.version,
            ) from error
        if call is validate and answer is not None and not answer:
            raise VersionRefused(
                f"validate refused version {candidate.version} (step {candidate.step})", version=candidate.version
            )
