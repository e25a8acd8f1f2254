"""Objects of one process: never pickled, and those that have something to close are context managers."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Self


class ProcessBound:
    """The base of what has, or reads through, threads and open files of this process: it cannot be pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has threads or open files of this process, or reads through them, so it cannot "
            "be pickled or copied: send the URL, and open it in the process that uses it"
        )


class Closing(ProcessBound):
    """The base of a class with `close`: used as a context manager, it closes at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """End it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
