"""A file system that fails on purpose: one fault at one storage call, over any fsspec file system.

It is what the crash sweeps stand on: the code under test runs unchanged, and every way in which a storage
call can go wrong is injected at every call. The files live in the inner file system; an instance of
`FaultyFileSystem` is one process's view of it, and dies with that process.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar

import fsspec
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

_T = TypeVar("_T")

Operation = Literal["read", "write", "create", "list", "stat", "delete"]
_CHANGES: frozenset[Operation] = frozenset({"write", "create", "delete"})
_WRITES: frozenset[Operation] = frozenset({"write", "create"})
_ALL: frozenset[Operation] = frozenset({"read", "write", "create", "list", "stat", "delete"})


class SimulatedCrash(BaseException):
    """The process is dead from here on. No Exception, so no handler of the code under test survives it."""


class FaultKind(Enum):
    """One way a storage call goes wrong."""

    FAIL_BEFORE = "fail_before"
    """An error, and the request had no effect."""
    FAIL_AFTER = "fail_after"
    """An error, although the request took effect."""
    LOST_REPLY = "lost_reply"
    """The request took effect and its reply timed out."""
    DUPLICATE = "duplicate"
    """The request is delivered twice and the second reply is seen: a create meets its own object."""
    DELAYED_PUT = "delayed_put"
    """The request times out, and its bytes land some calls later (a create only if nothing is there then)."""
    STALL = "stall"
    """The request takes long: ``on_stall`` is called before it."""
    SHORT_READ = "short_read"
    """A read returns the first half of what was asked for."""
    STALE_LISTING = "stale_listing"
    """A listing lacks the newest objects."""
    DISK_FULL = "disk_full"
    """``OSError(ENOSPC)`` and no effect."""
    CRASH = "crash"
    """The process dies before the request."""
    CRASH_AFTER = "crash_after"
    """The process dies after the request took effect."""

    def applies_to(self, operation: Operation) -> bool:
        """Say whether this fault can happen to an operation and differs there from the other kinds."""
        return operation in _APPLIES[self]


_APPLIES: dict[FaultKind, frozenset[Operation]] = {
    FaultKind.FAIL_BEFORE: _ALL,
    FaultKind.FAIL_AFTER: _CHANGES,
    FaultKind.LOST_REPLY: _CHANGES,
    FaultKind.DUPLICATE: _CHANGES,
    FaultKind.DELAYED_PUT: _WRITES,
    FaultKind.STALL: _ALL,
    FaultKind.SHORT_READ: frozenset({"read"}),
    FaultKind.STALE_LISTING: frozenset({"list"}),
    FaultKind.DISK_FULL: _WRITES,
    FaultKind.CRASH: _ALL,
    FaultKind.CRASH_AFTER: _CHANGES,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Attributes
    ----------
    at
        Index of the first storage call that it may hit, counted from 0.
    calls
        How many calls in a row it hits, of those it applies to.
    delay_calls
        `DELAYED_PUT`: how many calls later the bytes land.
    objects
        `STALE_LISTING`: how many of the newest objects are not shown.
    only
        Hit calls of this operation only; None hits every one that the kind applies to.
    """

    kind: FaultKind
    at: int
    calls: int = 1
    delay_calls: int = 3
    objects: int = 2
    only: Operation | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One storage call as it was counted."""

    index: int
    operation: Operation
    path: str


@dataclass(frozen=True, slots=True)
class _Delayed:
    due: int
    operation: Operation
    path: str
    effect: Callable[[], Any]


class IsolatedMemoryFileSystem(MemoryFileSystem):
    """A memory file system of its own; fsspec's keeps the files of all instances in one dict."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, MemoryFile] = {}
        self.pseudo_dirs: list[str] = [""]

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_options: Any) -> None:
        """Write a file. Quicker than the inherited one, which looks at every parent: sweeps write all the time."""
        path = self._strip_protocol(path)
        if mode == "create" and path in self.store:
            raise FileExistsError(path)
        self.store[path] = MemoryFile(self, path, value)

    def fork(self) -> IsolatedMemoryFileSystem:
        """Return a copy of all files; later changes to one are not seen by the other."""
        other = IsolatedMemoryFileSystem()
        other.pseudo_dirs = list(self.pseudo_dirs)
        for path, file in self.store.items():
            # Adds itself to the store; times are kept, since ages are judged by them.
            copied = MemoryFile(other, path, file.getvalue())
            copied.created, copied.modified = file.created, file.modified
            other.store[path] = copied
        return other


class FaultyFileSystem(fsspec.AbstractFileSystem):
    """One process's view of ``inner``: counts its storage calls and injects a fault. Thread safe.

    Parameters
    ----------
    inner
        Where the files are. Several views may share one; exclusive creates are exclusive among them.
    fault
        What goes wrong, or None to count only.
    on_call
        Called before each call, outside any lock; a scheduler may block in it.
    on_stall
        Called for a stalled call, outside any lock; None returns at once.

    Attributes
    ----------
    calls
        Every call so far, in order.
    hits
        How many calls the fault has hit so far.
    is_crashed
        Whether the process that this view belongs to is dead.
    """

    protocol = "faulty"
    cachable = False
    cnr_exclusive_create: ClassVar[bool] = True

    # One for all views: it makes check-and-write of the inner file system one step between them.
    _effects: ClassVar[threading.RLock] = threading.RLock()

    def __init__(
        self,
        inner: fsspec.AbstractFileSystem,
        *,
        fault: Fault | None = None,
        on_call: Callable[[Call], None] | None = None,
        on_stall: Callable[[Call], None] | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[Call] = []
        self.hits = 0
        self.is_crashed = False
        self._fault = fault
        self._on_call = on_call
        self._on_stall = on_stall
        self._delayed: list[_Delayed] = []

    @property
    def fault(self) -> Fault | None:
        """What goes wrong here."""
        return self._fault

    def arm(self, fault: Fault | None) -> None:
        """Let something else go wrong from now on, or nothing; it has hit no call yet."""
        self._fault, self.hits = fault, 0

    def count(self, *operations: Operation) -> int:
        """Return how many calls of these operations were made; of all without arguments."""
        return sum(not operations or call.operation in operations for call in self.calls)

    def paths(self, *operations: Operation) -> list[str]:
        """Return the paths of the calls of these operations, in order."""
        return [call.path for call in self.calls if call.operation in operations]

    def deliver_delayed(self) -> int:
        """Let every put that is still under way land now, as a network may long after its sender died."""
        with self._effects:
            waiting, self._delayed = self._delayed, []
            for delayed in waiting:
                _land(delayed)
            return len(waiting)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return bytes [start, end) of a file."""
        data: bytes = self._do("read", path, lambda: self.inner.cat_file(path, start=start, end=end, **kwargs))
        return data

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file; ``mode="create"`` is exclusive and raises FileExistsError for the loser."""
        data = bytes(value)
        operation: Operation = "create" if mode == "create" else "write"
        self._do(operation, path, lambda: self._write(path, data, operation, kwargs))

    def rm_file(self, path: str) -> None:
        """Delete one file."""
        self._do("delete", path, lambda: self.inner.rm_file(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file or a folder, as one call."""
        shown = path if isinstance(path, str) else " ".join(path)
        self._do("delete", shown, lambda: self.inner.rm(path, recursive=recursive, maxdepth=maxdepth))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List one level."""
        entries = self._do("list", path, lambda: list(self.inner.ls(path, detail=True, **kwargs)))
        return list(entries) if detail else sorted(entry["name"] for entry in entries)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """List recursively, as one call."""
        found: dict[str, Any] = self._do(
            "list",
            path,
            lambda: dict(self.inner.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)),
        )
        return found if detail else sorted(found)

    def info(self, path: str, **kwargs: Any) -> Any:
        """Return size and type of a file."""
        return self._do("stat", path, lambda: self.inner.info(path, **kwargs))

    def created(self, path: str) -> Any:
        """Return when a file was created."""
        return self._do("stat", path, lambda: self.inner.created(path))

    def modified(self, path: str) -> Any:
        """Return when a file was written last."""
        return self._do("stat", path, lambda: self.inner.modified(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make folders; not counted, since object stores have none."""
        self._check_alive()
        self.inner.makedirs(path, exist_ok=exist_ok)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drop listings that the inner file system keeps."""
        self.inner.invalidate_cache(path)

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> io.BytesIO:
        if mode != "rb":
            raise NotImplementedError("files are written whole, with pipe_file")
        return io.BytesIO(self.cat_file(path))

    def _do(self, operation: Operation, path: str, effect: Callable[[], _T]) -> _T | Any:
        with self._effects:
            self._check_alive()
            call = Call(len(self.calls), operation, path)
            self.calls.append(call)
            kind = self._hit(call)
        if self._on_call is not None:
            self._on_call(call)
        if kind is FaultKind.STALL and self._on_stall is not None:
            self._on_stall(call)
        with self._effects:
            self._check_alive()
            self._deliver_due(call.index)
            return effect() if kind is None else self._fail(kind, call, effect)

    def _hit(self, call: Call) -> FaultKind | None:
        fault = self._fault
        if fault is None or call.index < fault.at or self.hits == fault.calls:
            return None
        if not fault.kind.applies_to(call.operation) or fault.only not in (None, call.operation):
            return None
        self.hits += 1
        return fault.kind

    def _fail(self, kind: FaultKind, call: Call, effect: Callable[[], _T]) -> _T | Any:
        match kind:
            case FaultKind.FAIL_BEFORE:
                raise OSError(errno.EIO, f"injected before the effect of call {call.index}")
            case FaultKind.FAIL_AFTER:
                effect()
                raise OSError(errno.EIO, f"injected after the effect of call {call.index}")
            case FaultKind.LOST_REPLY:
                effect()
                raise FSTimeoutError(f"injected: the reply of call {call.index} was lost")
            case FaultKind.DUPLICATE:
                effect()
                return effect()
            case FaultKind.DELAYED_PUT:
                self._delayed.append(_Delayed(call.index + self._delay_calls(), call.operation, call.path, effect))
                raise FSTimeoutError(f"injected: call {call.index} is still under way")
            case FaultKind.SHORT_READ:
                data: Any = effect()
                return data[: len(data) // 2]
            case FaultKind.STALE_LISTING:
                return self._without_newest(effect())
            case FaultKind.DISK_FULL:
                raise OSError(errno.ENOSPC, f"injected: no space left at call {call.index}")
            case FaultKind.CRASH:
                self.is_crashed = True
            case FaultKind.CRASH_AFTER:
                try:
                    effect()
                finally:
                    self.is_crashed = True
        self._check_alive()
        return effect()

    def _write(self, path: str, data: bytes, operation: Operation, options: dict[str, Any]) -> None:
        if operation == "create":
            self.inner.pipe_file(path, data, mode="create", **options)
        else:
            self.inner.pipe_file(path, data, **options)

    def _deliver_due(self, index: int) -> None:
        due = [delayed for delayed in self._delayed if delayed.due <= index]
        self._delayed = [delayed for delayed in self._delayed if delayed.due > index]
        for delayed in due:
            _land(delayed)

    def _delay_calls(self) -> int:
        return 0 if self._fault is None else self._fault.delay_calls

    def _without_newest(self, listing: Any) -> Any:
        entries = list(listing.values()) if isinstance(listing, dict) else list(listing)
        files = [entry["name"] for entry in entries if entry.get("type") == "file"]
        hidden = set(sorted(files, key=self.inner.modified)[-self._hidden_objects() :])
        if isinstance(listing, dict):
            return {name: entry for name, entry in listing.items() if name not in hidden}
        return [entry for entry in listing if entry["name"] not in hidden]

    def _hidden_objects(self) -> int:
        return 1 if self._fault is None else self._fault.objects

    def _check_alive(self) -> None:
        if self.is_crashed:
            raise SimulatedCrash("this process is dead")


def _land(delayed: _Delayed) -> None:
    try:
        delayed.effect()
    except FileExistsError:
        pass  # A create that arrives late and finds the key taken; nobody waits for its reply any more.
