"""Every error the library raises, grouped by what a handler can do.

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
    │   ├── NonFiniteValues
    │   └── MemoryMoved
    ├── Conflict                   another process changed the store; reopen or retry
    │   ├── Fenced
    │   ├── TransactionAborted
    │   ├── DoesNotApply
    │   ├── TagExists
    │   ├── BranchExists
    │   ├── StoreExists
    │   ├── PathExists
    │   ├── SaveInProgress
    │   └── CommitStateUnknown
    ├── CorruptStore               stop; never repaired silently
    │   ├── CorruptRecord
    │   ├── CorruptObject
    │   └── MissingObject
    ├── StorageFailure             the backend failed; `__cause__` is its error
    │   ├── AccessDenied
    │   ├── UnsafeBackend
    │   └── WrongClock
    ├── Unsupported                a newer or other program is needed
    │   ├── NewerFormat
    │   ├── UnknownFeature
    │   ├── ReadOnlyStore
    │   ├── MissingDependency
    │   └── UnsupportedModule
    ├── BackgroundSaveFailed       a background save failed; its rows are still dirty
    ├── VersionRefused             the consumer's own check rejected a version; the one before is still served
    └── RankFailed                 another rank of the same training failed; nothing became visible
        └── RankLost               it does not answer: restart the training from the last checkpoint

``kind`` is stable and append-only: scripts and the command line depend on it. Details are attributes
(``path``, ``table``, ``version``, ``expected``, ``found``), given by keyword and None if they do not apply.
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
    """The URL contains no store (no readable ``cnr.json``)."""

    kind = "not_a_store"


class VersionNotFound(NotFound):
    """No version matches the requested version, step or time."""

    kind = "version_not_found"


class VersionExpired(NotFound):
    """The version existed, but an ``expire`` record ended it, so its data may be deleted."""

    kind = "version_expired"


class CursorExpired(VersionExpired):
    """The changes since a consumer's cursor are no longer stored: compare a snapshot with your own copy."""

    kind = "cursor_expired"


class TableNotFound(NotFound):
    """The version has no table (or dense tensor) with that name."""

    kind = "table_not_found"


class TagNotFound(NotFound):
    """No tag has that name."""

    kind = "tag_not_found"


class ChannelNotFound(NotFound):
    """No channel has that name."""

    kind = "channel_not_found"


class BranchNotFound(NotFound):
    """No branch has that name, or it was dropped."""

    kind = "branch_not_found"


class BadInput(CnrStoreError, ValueError):
    """An argument is invalid; nothing was written."""

    kind = "bad_input"


class BadName(BadInput):
    """An invalid name of a table, tensor, slot or tag."""

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
    """Rows that contain NaN or Inf, or values beyond the code range of the table's scale."""

    kind = "non_finite_values"


class MemoryMoved(BadInput):
    """The memory of a table was freed or replaced between the marks of its changes and their copy."""

    kind = "memory_moved"


class Conflict(CnrStoreError):
    """Another process changed the store first; nothing of this attempt became visible."""

    kind = "conflict"


class Fenced(Conflict):
    """A newer writer took over (its epoch is higher): this one must stop."""

    kind = "fenced"


class TransactionAborted(Conflict):
    """Maintenance marked this transaction for deletion before it committed."""

    kind = "transaction_aborted"


class DoesNotApply(Conflict):
    """A delta whose start (``l0`` or state digest) is not the head's state."""

    kind = "does_not_apply"


class TagExists(Conflict):
    """The tag exists with another version, and tags are immutable; or the name is a channel's."""

    kind = "tag_exists"


class BranchExists(Conflict):
    """A branch with that name already exists."""

    kind = "branch_exists"


class StoreExists(Conflict):
    """A store, or the remains of one, already exists at the URL."""

    kind = "store_exists"


class PathExists(Conflict):
    """A local file or folder that would be replaced already exists."""

    kind = "path_exists"


class SaveInProgress(Conflict):
    """A save is still running, and the caller chose an error instead of waiting."""

    kind = "save_in_progress"


class CommitStateUnknown(Conflict):
    """Whether the commit happened was still unknown at the deadline.

    Keep the staged data. Reading the log position later resolves it.
    """

    kind = "commit_state_unknown"


class CorruptStore(CnrStoreError):
    """Stored data is inconsistent. Stop; `cnr verify` reports what is damaged."""

    kind = "corrupt_store"


class CorruptRecord(CorruptStore):
    """A commit record is torn, not canonical, or breaks the digest chain."""

    kind = "corrupt_record"


class CorruptObject(CorruptStore):
    """An object's size, digest or content differs from the inventory."""

    kind = "corrupt_object"


class MissingObject(CorruptStore):
    """An object that the inventory names does not exist."""

    kind = "missing_object"


class StorageFailure(CnrStoreError):
    """The storage backend failed; ``__cause__`` is its own error."""

    kind = "storage_failure"


class AccessDenied(StorageFailure):
    """The backend refused the credentials (never interpreted as "not found")."""

    kind = "access_denied"


class UnsafeBackend(StorageFailure):
    """The backend cannot create an object exclusively, so commits would not be safe on it."""

    kind = "unsafe_backend"


class WrongClock(StorageFailure):
    """The clocks of this machine and of the storage differ too much to stamp records or to delete by time."""

    kind = "wrong_clock"


class Unsupported(CnrStoreError):
    """This version of the library does not support the operation."""

    kind = "unsupported"


class NewerFormat(Unsupported):
    """The store has a newer major format."""

    kind = "newer_format"


class UnknownFeature(Unsupported):
    """The version needs a reader feature that this library does not know."""

    kind = "unknown_feature"


class ReadOnlyStore(Unsupported):
    """Reading works, writing does not: an unknown writer feature, a relay, or a store behind a web server."""

    kind = "read_only_store"


class MissingDependency(Unsupported):
    """An optional package is needed; the message names the extra to install."""

    kind = "missing_dependency"


class UnsupportedModule(Unsupported):
    """A sharded module, its kernel or its sharding keeps rows where a checkpoint could not have them right."""

    kind = "unsupported_module"


class BackgroundSaveFailed(CnrStoreError):
    """A background save failed; ``__cause__`` is the reason. Its rows are dirty again."""

    kind = "background_save_failed"


class VersionRefused(CnrStoreError):
    """A consumer's ``validate`` rejected a version; ``__cause__`` is what it raised, if it raised."""

    kind = "version_refused"


class RankFailed(CnrStoreError):
    """Another rank of the same training failed, so the joint operation did not happen."""

    kind = "rank_failed"


class RankLost(RankFailed):
    """Another rank does not answer within the timeout: it died or is too slow."""

    kind = "rank_lost"
