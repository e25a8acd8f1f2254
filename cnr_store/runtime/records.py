"""Plain data as records, whatever thread looks at a record type first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

T = TypeVar("T")


def converter(kind: type[T]) -> Callable[[object], T]:
    """Return `msgspec.convert` into one type. Call it at import, and convert by what it returns.

    What msgspec must know of a record type is found when the type is first converted to. If two threads do that at
    once, msgspec 0.22 crashes the process. A decoder finds it when it is made; at import the lock of imports keeps
    other threads off.
    """
    msgspec.json.Decoder(kind)
    return partial(msgspec.convert, type=kind)
