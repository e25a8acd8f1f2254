"""What a check of a store found: plain records, newest damage first is for the caller to decide. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock

from cnr_store.errors import CnrStoreError

_ADVICE = re.compile(r"[;,.]? run `cnr verify`\.?$", re.IGNORECASE)
"""What an error tells others to do is what is being done here."""

ProgressCallback = Callable[[str, int, int], None]
"""Called as (stage, done, total), one call at a time but from any thread: ``objects`` in bytes, ``states`` in rows."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes
    ----------
    kind
        The stable kind of the error that a reader gets (``corrupt_object``, ``missing_object``, ...).
    path
        The object's key below the store's root.
    versions
        Live versions that cannot be read, or not trusted, because of it; empty when no reader needs the object.
    message
        What, where, found, expected.
    table
        The table that is hurt, if it is one.
    branch
        The branch whose versions these are; None is the store's own log.
    """

    kind: str
    path: str
    versions: tuple[int, ...]
    message: str
    table: str | None = None
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class LogReport:
    """What was found of one more log of the store.

    Attributes
    ----------
    branch
        The branch whose log it is; None is the store's own.
    is_read
        Whether its chains were read; else only its records were, since a version or another log was asked for.
    head, versions, restorable, superseded
        As of `VerifyReport`.
    """

    branch: str | None
    is_read: bool
    head: int | None
    versions: tuple[int, ...]
    restorable: tuple[int, ...]
    superseded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and what was found. Versions are those of the log that was opened; ``others`` has the rest.

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
        Whether states were replayed too.
    records, segments, objects, size_bytes
        How much was read, of all logs.
    problems
        Of all logs, in the order in which they were found; empty for a sound store.
    restorable
        Live versions that were read whole and that no problem hurts, newest first.
    superseded
        Torn log positions that a repair has superseded: they hold no version, and are no problem.
    unreferenced
        Segment folders that no live version needs: of a save under way or given up, or waiting to be deleted.
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
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def newest_restorable(self) -> int | None:
        """The newest version that was found whole; None if there is none."""
        return self.restorable[0] if self.restorable else None


@dataclass(slots=True)
class Findings:
    """Collects problems of one log from several threads, each object and kind once."""

    branch: str | None = None
    problems: list[Problem] = field(default_factory=list)
    _seen: set[tuple[str, str, str | None]] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def add(self, problem: Problem) -> None:
        """Keep ``problem`` unless one of its kind, object and table is known."""
        key = (problem.kind, problem.path, problem.table)
        with self._lock:
            if key not in self._seen:
                self._seen.add(key)
                self.problems.append(replace(problem, branch=self.branch))

    def add_error(self, error: CnrStoreError, path: str, versions: tuple[int, ...], table: str | None = None) -> None:
        """Keep what an error says about the object at ``path``."""
        self.add(Problem(error.kind, path, versions, _ADVICE.sub("", error.message), table or error.table))

    def hurts(self, path_start: str) -> bool:
        """Whether an object whose key begins with ``path_start`` is known to be bad."""
        with self._lock:
            return any(problem.path.startswith(path_start) for problem in self.problems)
