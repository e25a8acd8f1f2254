"""Every error the library raises, grouped by what a handler can do.

::

    CnrStoreError
    ├── NotFound (KeyError)        ask for something that exists
    │   ├── NotAStore
    │   ├── VersionNotFound
    │   ├── VersionExpired
    │   │   └── CursorExpired
    │   ├── TableNotFound
    │   ├── TagNotFound
    │   ├── ChannelNotFound
    │   └── BranchNotFound
    ├── BadInput (ValueError)      fix the argument; nothing was written
    │   ├── BadName
    │   ├── BadShape
    │   ├── BadDtype
    │   ├── BadRowIds
    │   └── NonFiniteValues
    ├── Conflict                   somebody else moved the store; reopen or retry
    │   ├── Fenced
    │   ├── TransactionAborted
    │   ├── DoesNotApply
    │   ├── TagExists
    │   ├── BranchExists
    │   ├── StoreExists
    │   ├── SaveInProgress
    │   └── CommitStateUnknown
    ├── CorruptStore               stop; never repaired silently
    │   ├── CorruptRecord
    │   ├── CorruptObject
    │   └── MissingObject
    ├── StorageFailure             the backend failed; the cause is attached
    │   ├── AccessDenied
    │   ├── UnsafeBackend
    │   └── WrongClock
    ├── Unsupported                a newer or other program is needed
    │   ├── NewerFormat
    │   ├── UnknownFeature
    │   ├── ReadOnlyStore
    │   └── MissingDependency
    ├── BackgroundSaveFailed       a save behind training failed; its rows are still dirty
    ├── VersionRefused             the consumer's own check turned a version down; the one before it stays
    └── RankFailed                 another rank of the same training failed; nothing became visible
        └── RankLost               it does not answer: restart the training from the last checkpoint

``kind`` is stable and append-only: scripts and the command line key on it. Details are attributes
(``path``, ``table``, ``version``, ``expected``, ``found``), given by keyword and None when they do not apply.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CnrStoreError(Exception):
    """Base of every error of this library."""

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        table: str | None = None,
        version: int | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.table = table
        self.version = version
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details()))

    def details(self) -> dict[str, Any]:
        """Return the attributes that apply, by name (for ``--json`` output)."""
        names = ("path", "table", "version", "expected", "found")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _rebuild(cls: type[CnrStoreError], message: str, details: dict[str, Any]) -> CnrStoreError:
    return cls(message, **details)


class NotFound(CnrStoreError, KeyError):
    """What was asked for does not exist."""

    kind = "not_found"


class NotAStore(NotFound):
    """The URL holds no cnr_store (no readable ``cnr.json``)."""

    kind = "not_a_store"


class VersionNotFound(NotFound):
    """No version matches the version, step or time that was asked for."""

    kind = "version_not_found"


class VersionExpired(NotFound):
    """The version existed, and its data may be gone: an ``expire`` record names it."""

    kind = "version_expired"


class CursorExpired(VersionExpired):
    """What changed since a consumer's cursor cannot be told any more: compare a snapshot with your own copy."""

    kind = "cursor_expired"


class TableNotFound(NotFound):
    """The version has no table (or dense tensor) of that name."""

    kind = "table_not_found"


class TagNotFound(NotFound):
    """No tag of that name."""

    kind = "tag_not_found"


class ChannelNotFound(NotFound):
    """No channel of that name."""

    kind = "channel_not_found"


class BranchNotFound(NotFound):
    """No branch of that name, or it has ended."""

    kind = "branch_not_found"


class BadInput(CnrStoreError, ValueError):
    """An argument cannot be stored as it is; nothing was written."""

    kind = "bad_input"


class BadName(BadInput):
    """A table, tensor, slot or tag name that cannot be a name."""

    kind = "bad_name"


class BadShape(BadInput):
    """An array whose shape does not fit its table."""

    kind = "bad_shape"


class BadDtype(BadInput):
    """An array whose dtype does not fit its table."""

    kind = "bad_dtype"


class BadRowIds(BadInput):
    """Row ids that are unsorted, repeated or outside the table."""

    kind = "bad_row_ids"


class NonFiniteValues(BadInput):
    """Rows that hold NaN or Inf, or values beyond the code range of the table's scale."""

    kind = "non_finite_values"


class Conflict(CnrStoreError):
    """Another process changed the store first; nothing of this attempt became visible."""

    kind = "conflict"


class Fenced(Conflict):
    """A newer writer took over (its epoch is higher): this one must stop."""

    kind = "fenced"


class TransactionAborted(Conflict):
    """Maintenance declared this transaction dead before it committed."""

    kind = "transaction_aborted"


class DoesNotApply(Conflict):
    """A delta whose start (``l0`` or state digest) is not the head's state."""

    kind = "does_not_apply"


class TagExists(Conflict):
    """Tags are immutable, and this one exists with another version."""

    kind = "tag_exists"


class BranchExists(Conflict):
    """A branch of that name exists already."""

    kind = "branch_exists"


class StoreExists(Conflict):
    """A store exists at the URL already."""

    kind = "store_exists"


class SaveInProgress(Conflict):
    """A save is still running and the caller chose to refuse rather than to wait."""

    kind = "save_in_progress"


class CommitStateUnknown(Conflict):
    """Whether the commit happened could not be learned before the deadline.

    The staged data must be left alone. Reading the log position again resolves it.
    """

    kind = "commit_state_unknown"


class CorruptStore(CnrStoreError):
    """Stored data contradicts itself. Stop; `cnr verify` names what is damaged."""

    kind = "corrupt_store"


class CorruptRecord(CorruptStore):
    """A commit record is torn, not canonical, or breaks the digest chain."""

    kind = "corrupt_record"


class CorruptObject(CorruptStore):
    """An object's size, digest or content is not what the inventory says."""

    kind = "corrupt_object"


class MissingObject(CorruptStore):
    """An object that the inventory names is not there."""

    kind = "missing_object"


class StorageFailure(CnrStoreError):
    """The storage backend failed; ``__cause__`` is its own error."""

    kind = "storage_failure"


class AccessDenied(StorageFailure):
    """The backend refused the credentials (never read as "not found")."""

    kind = "access_denied"


class UnsafeBackend(StorageFailure):
    """The backend cannot create an object exclusively, so commits would not be safe on it."""

    kind = "unsafe_backend"


class WrongClock(StorageFailure):
    """The clock of this machine and that of the storage differ too much to stamp a record, or to delete by time."""

    kind = "wrong_clock"


class Unsupported(CnrStoreError):
    """This version of the library cannot do it."""

    kind = "unsupported"


class NewerFormat(Unsupported):
    """The store has a newer major format."""

    kind = "newer_format"


class UnknownFeature(Unsupported):
    """The version needs a reader feature that this library does not know."""

    kind = "unknown_feature"


class ReadOnlyStore(Unsupported):
    """The store uses a writer feature that this library does not know: reading works, writing does not."""

    kind = "read_only_store"


class MissingDependency(Unsupported):
    """An optional package is needed; the message names the extra to install."""

    kind = "missing_dependency"


class BackgroundSaveFailed(CnrStoreError):
    """A background save failed; ``__cause__`` says why. The rows it held are dirty again."""

    kind = "background_save_failed"


class VersionRefused(CnrStoreError):
    """A consumer's ``validate`` turned a version down; ``__cause__`` is what it raised, if it did."""

    kind = "version_refused"


class RankFailed(CnrStoreError):
    """Another rank of the same training failed, so what all do together did not happen."""

    kind = "rank_failed"


class RankLost(RankFailed):
    """Another rank does not answer: it died, or is slower than the ranks wait for each other."""

    kind = "rank_lost"
