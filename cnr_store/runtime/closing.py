"""A context manager that closes at its end."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Self


class Closing:
    """The base of a class with `close`: used as a context manager, it closes at the end of the block. Never pickled."""

    __slots__ = ()

    def close(self) -> None:
        """End it; a second call does nothing."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has threads or open files of this process, so it, and what reads through it, "
            "cannot be pickled or copied: send the URL, and open it in the process that uses it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
