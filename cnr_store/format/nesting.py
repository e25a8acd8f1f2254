"""How deep a JSON document nests, told from its bytes before anything parses it (spec, section 3.6). Pure.

Parsers recurse: how deep a document they can parse depends on how deep the caller's stack is already. What one caller
reads and another refuses would be a commit to the one and damage to the other, so the limit is far below what any of
them can parse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 20
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(sorted({*range(256)} - {*b'[]{}"'}))
_STEP = np.zeros(256, np.int32)
_STEP[[*b"[{"]] = 1
_STEP[[*b"]}"]] = -1


def nesting_of(data: bytes, enough: int) -> int:
    """Return how many objects and arrays of a JSON document are open at once, at most; 0 if not more than ``enough``.

    Of bytes that are no JSON it is some number. Memory: some MiB.

    >>> nesting_of(b'{"a":[[1],"[[[["]}', enough=1)
    3
    """
    if data.count(b"[") + data.count(b"{") <= enough:
        return 0
    depth = deepest = start = 0
    is_text = False
    while start < len(data):
        stop = start + _BLOCK_BYTES
        while data[stop - 1 : stop] == b"\\":  # an escape is not cut
            stop += 1
        block, start = data[start:stop], stop
        if b"\\" in block:
            block = _ESCAPE.sub(b"", block)
        # Of texts without brackets nothing is left but two quotes, which stand beside each other.
        marks = block.translate(None, _NO_MARKS)
        brackets = marks if is_text else marks.replace(b'""', b"")
        if is_text or b'"' in brackets:
            pieces = marks.split(b'"')
            brackets = b"".join(pieces[is_text::2])
            is_text ^= len(pieces) % 2 == 0
        depth, reached = _deepest(brackets, depth)
        deepest = max(deepest, reached)
    return deepest


def _deepest(brackets: bytes, depth: int) -> tuple[int, int]:
    """Return the depth after these brackets and the greatest one, at least 0, from a depth before them."""
    if not brackets:
        return depth, 0
    depths = depth + np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)])
    return int(depths[-1]), max(0, int(depths.max()))


def nests_deeper(value: Any, limit: int) -> bool:
    """Return whether dicts, lists and tuples lie in each other deeper than ``limit``, or one lies in itself.

    >>> nests_deeper({"a": [1]}, 2), nests_deeper({"a": [1]}, 1)
    (False, True)
    """
    level: list[Iterable[Any]] = [[value]]
    for _ in range(limit + 1):
        level = [
            item.values() if isinstance(item, dict) else item
            for items in level
            for item in items
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return False
    return True
