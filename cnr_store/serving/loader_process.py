"""A loader in a process of its own, for a server whose lookups must not wait while versions are decoded.

Threads of one process take turns at the interpreter. A lookup takes a tenth of a millisecond; an update has stretches
of half a millisecond between its compiled loops, some for each object that it reads. Another process takes no turns.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from cnr_store.errors import BadInput, StorageFailure
from cnr_store.serving.loader import Loader
from cnr_store.serving.loader_options import LoaderOptions
from cnr_store.serving.metrics import LoaderMetrics, PollResult
from cnr_store.serving.rows.attached import AttachedTables

_LONGEST_END_S = 30.0
"""Seconds until a process that was told to end is killed. That loses nothing: the next loader removes what it left."""

_STARTED: weakref.WeakSet[LoaderProcess] = weakref.WeakSet()
"""The loaders of this process."""


class LoaderProcess(AttachedTables):
    """Tables of a store that a `Loader` in a child process keeps up to date, in memory that both have.

    Lookups are those of `AttachedTables`. If the child dies they go on with its last version, and `is_running` is
    False; a new `LoaderProcess` on the folder takes over. The child ends with `close`, and when this process ends. A
    process that is forked from this one attaches by `AttachedTables`; the child stays this one's.

    Parameters
    ----------
    url
        As for `Loader`, which the child makes and starts.
    tables, options
        As for `Loader`. They are pickled: ``validate`` and ``warm_up`` are functions of modules that can be imported.
    shared
        A folder in memory, of this loader alone (``/dev/shm/ctr``). Other processes attach to it too.
    arguments
        Further arguments of `Loader`: ``version``, ``tag``, ``channel``, ``branch``, ``threads``, ``storage_options``.

    Raises
    ------
    BadInput
        What can only be changed between two lookups of one process is asked for: ``publish="apply"``. A forked process
        asks for what the child does.
    Exception
        Whatever the `Loader` raises.
    StorageFailure
        The child ended before it served anything.

    Examples
    --------
    The child imports the program's main module, as always with `multiprocessing`: begin the program with
    ``if __name__ == "__main__":``.

    >>> with LoaderProcess("s3://bucket/run-7", shared="/dev/shm/run-7") as loader:  # doctest: +SKIP
    ...     rows = loader.lookup("user", [17, 4])
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        tables: Sequence[str] | None = None,
        options: LoaderOptions = LoaderOptions(),  # noqa: B008  frozen
        *,
        shared: str | os.PathLike[str],
        **arguments: Any,
    ) -> None:
        if not isinstance(url, str | os.PathLike):
            raise BadInput(f"the loader of another process opens its store itself: give a URL, found {url!r}")
        if arguments.get("publish", "poll") != "poll":
            raise BadInput("a loader in another process publishes when it has loaded: leave publish away")
        self._asking, self._sending, self._owner = threading.Lock(), threading.Lock(), os.getpid()
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        given = {"tables": tables, "options": options, "shared": os.fspath(shared), **arguments}
        self._process = context.Process(
            target=_load, args=(end, os.fspath(url), given), name="cnr-loader", daemon=True
        )  # fmt: skip
        try:
            with end:
                _start(self._process)
            self._answer()
            super().__init__(os.fspath(shared))
        except BaseException:
            self._end()
            raise
        _STARTED.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the child lives."""
        self._check_owner()
        return self._process.is_alive()

    def wake(self) -> None:
        """As `Loader.wake`. Does not block; does nothing if the child has ended."""
        self._check_owner()
        with suppress(OSError), self._sending:
            self._pipe.send(("wake", ()))

    def poll(self) -> PollResult:
        """As `Loader.poll`; raises `StorageFailure` if the child has ended, as all that follow."""
        result: PollResult = self._ask("poll")
        return result

    def pin(self, version: int | None = None) -> None:
        """As `Loader.pin`."""
        self._ask("pin", version)

    def rollback(self, version: int) -> None:
        """As `Loader.rollback`."""
        self._ask("rollback", version)

    def unpin(self) -> None:
        """As `Loader.unpin`."""
        self._ask("unpin")

    def metrics(self) -> LoaderMetrics:
        """As `Loader.metrics`, with the lookups of this process. Waits for a `poll`, `pin` or `rollback` that runs."""
        found: LoaderMetrics = self._ask("metrics")
        return replace(found, lookups=self._lookups.count, retries=self._lookups.retries)

    def close(self) -> None:
        """End the child, unless this process is a fork of the child's parent; forget what is mapped. Idempotent."""
        super().close()
        if self._owner == os.getpid():
            self._end()

    def _end(self) -> None:
        self._pipe.close()
        if self._process.pid is not None:
            self._process.join(_LONGEST_END_S)
            self._process.kill()
            self._process.join()

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise BadInput(
                f"this loader is that of process {self._owner}, from which process {os.getpid()} was forked; call it "
                "there, and attach here with AttachedTables",
                expected=self._owner, found=os.getpid(),
            )  # fmt: skip

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._check_owner()
        with self._asking:
            with suppress(OSError), self._sending:  # a broken pipe shows when the answer is read
                self._pipe.send((name, arguments))
            return self._answer()

    def _answer(self) -> Any:
        try:
            error, value = self._pipe.recv()
        except (EOFError, OSError) as lost:
            self._process.join(1)
            raise StorageFailure(
                f"the process of a loader has ended (exit code {self._process.exitcode}); what it served last can be "
                "looked up; open another (a program without `if __name__ == '__main__':` cannot start one)",
                found=self._process.exitcode,
            ) from lost  # fmt: skip
        if error is not None:
            raise error
        return value


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (OSError, RuntimeError, AssertionError):
        raise  # this process may start none: it imports its program still, or is a daemon's
    except Exception as error:
        # What cannot be pickled raises errors of many kinds.
        raise BadInput(
            f"the arguments of a loader in another process cannot be sent there ({error}); give functions of modules "
            "that it can import, no lambdas and no functions within functions",
            found=str(error),
        ) from error


def _disown() -> None:
    """Forget, in a process that was just forked, the children of its parent: multiprocessing would end them with it."""
    for loader in _STARTED:
        loader._pipe.close()
        multiprocessing.process._children.discard(loader._process)  # type: ignore[attr-defined]
    _STARTED.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_disown)


def _load(pipe: Connection, url: str, arguments: dict[str, Any]) -> None:
    """What the child does: load, follow, and answer until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides what that means
    # So ends what its parent left open: multiprocessing sends it as the parent ends. The memory is to be freed then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        loader = Loader(url, **arguments)
    except Exception as error:  # noqa: BLE001  the parent raises it
        with suppress(OSError):  # unless it has ended
            pipe.send((error, None))
        return
    with loader:
        loader.start()
        with suppress(EOFError, OSError):
            pipe.send((None, None))
            while True:
                name, given = pipe.recv()
                failure: Exception | None = None
                value: Any = None
                try:
                    value = getattr(loader, name)(*given)
                except Exception as error:  # noqa: BLE001  the parent raises it
                    failure = error
                if name != "wake":
                    pipe.send((failure, value))
