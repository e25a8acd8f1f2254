"""Records of what a check of a store found. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock

from cnr_store.errors import CnrStoreError
from cnr_store.runtime.notebook import ShownReport

_ADVICE = re.compile(r"[;,.]? run `cnr verify`\.?$", re.IGNORECASE)
"""Removed from error messages: the advice to run the check that is running."""

ProgressCallback = Callable[[str, int, int], None]
"""Called as (stage, done, total): ``objects`` in bytes, ``states`` in rows. One call at a time, from any thread."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a store.

    Attributes
    ----------
    kind
        The stable kind of the error that a reader gets (``corrupt_object``, ``missing_object``, ...).
    path
        The object's key below the store's root.
    versions
        Live versions that it makes unreadable or untrustworthy; empty if no reader needs the object.
    message
        What, where, found, expected.
    table
        The affected table, if it is a single one.
    branch
        The branch of ``versions``; None is the store's own log.
    """

    kind: str
    path: str
    versions: tuple[int, ...]
    message: str
    table: str | None = None
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class LogReport(ShownReport):
    """The result for another log of the store.

    Attributes
    ----------
    branch
        The branch of the log; None is the store's own log.
    is_read
        Whether its chains were read. If the check was of one version or of a branch, only its records were read.
    head, versions, restorable, superseded
        As in `VerifyReport`.
    """

    branch: str | None
    is_read: bool
    head: int | None
    versions: tuple[int, ...]
    restorable: tuple[int, ...]
    superseded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport(ShownReport):
    """The result of a check. Versions are those of the opened log; ``others`` has the other logs.

    Attributes
    ----------
    url
        The store, without credentials.
    branch
        The branch that was opened; None is the store's own log.
    head
        The newest version that can be read; None if there is none.
    versions
        The versions whose chains were read.
    is_deep
        Whether states were replayed, too.
    records, segments, objects, size_bytes
        Amounts read, over all logs.
    problems
        The problems of all logs, in the order in which they were found; empty for a sound store.
    restorable
        Live versions that were read completely and that no problem affects, newest first.
    superseded
        Torn log positions that a repair has superseded: they are no versions, and no problem.
    unreferenced
        Number of segment folders that no live version needs: saves in progress, failed saves, and pending deletes.
    others
        The other logs of the store: its own first, then the branches by name.
    """

    url: str
    branch: str | None
    head: int | None
    versions: tuple[int, ...]
    is_deep: bool
    records: int
    segments: int
    objects: int
    size_bytes: int
    problems: tuple[Problem, ...]
    restorable: tuple[int, ...] = ()
    superseded: tuple[int, ...] = ()
    unreferenced: int = 0
    others: tuple[LogReport, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(slots=True)
class Findings:
    """Collects the problems of one log, one per object, kind and table. Thread-safe."""

    branch: str | None = None
    problems: list[Problem] = field(default_factory=list)
    _seen: set[tuple[str, str, str | None]] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def add(self, problem: Problem) -> None:
        """Add ``problem`` unless one of its kind, object and table is known."""
        key = (problem.kind, problem.path, problem.table)
        with self._lock:
            if key not in self._seen:
                self._seen.add(key)
                self.problems.append(replace(problem, branch=self.branch))

    def add_error(self, error: CnrStoreError, path: str, versions: tuple[int, ...]) -> None:
        """Add an error as a problem of the object at ``path``."""
        self.add(Problem(error.kind, path, versions, _ADVICE.sub("", error.message), error.table))

    def affects(self, path_start: str) -> bool:
        """Return whether an object whose key begins with ``path_start`` has a problem."""
        with self._lock:
            return any(problem.path.startswith(path_start) for problem in self.problems)
