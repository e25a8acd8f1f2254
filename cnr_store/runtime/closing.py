"""A context manager that closes at its end."""

from __future__ import annotations

from typing import Self


class Closing:
    """The base of a class with `close`: used as a context manager, it closes at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """End it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
