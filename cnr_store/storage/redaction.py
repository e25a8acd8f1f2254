"""Remove options and credentials from messages: from URLs, and from causes that contain an option."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
_SHORTEST_SECRET = 4
_USER_INFO = re.compile(r"(?<=://)[^/]*?:.*@")


def redact_url(url: str) -> str:
    """Return ``url`` for messages: without ``user:password@`` and without its query.

    >>> redact_url("s3://KEY:pass/word@bucket/root?sig=abc")
    's3://***@bucket/root?***'
    """
    if "://" not in url:
        return url
    head, mark, _ = url.partition("?")
    return _USER_INFO.sub(f"{MASK}@", head) + (mark + MASK if mark else "")


class RedactedCause(Exception):
    """Replaces a backend's exception whose text contains an option; its message names the original type."""


class Secrets:
    """The option values of one storage, to find and mask them in texts. Its repr does not show them."""

    def __init__(self, options: Mapping[str, Any] | None = None, url: str = "") -> None:
        found = set(_strings(dict(options or {})))
        if "://" in url:
            head, _, query = url.partition("?")
            info = _USER_INFO.search(head)
            if info:
                found.update([info.group(), info.group()[:-1], *info.group()[:-1].split(":")])
            found.update(value for pair in query.split("&") for value in (pair, pair.partition("=")[2]))
        found |= {urllib.parse.quote(value, safe="") for value in found}
        self._values = sorted((v for v in found if len(v) >= _SHORTEST_SECRET), key=len, reverse=True)

    def __repr__(self) -> str:
        return f"<Secrets: {len(self._values)} values>"

    def redact(self, text: str) -> str:
        """Return ``text`` with every option value masked."""
        for value in self._values:
            text = text.replace(value, MASK)
        return text

    def without(self, error: BaseException) -> BaseException:
        """Return ``error``, or a `RedactedCause` if its text or that of a cause contains an option."""
        if not self._values or not any(self._shows(link) for link in _all_behind(error)):
            return error
        return RedactedCause(f"{type(error).__module__}.{type(error).__name__}: {self.redact(str(error))}")

    def _shows(self, error: BaseException) -> bool:
        text = f"{error!r}\n{error}\n{getattr(error, '__notes__', '')}"
        return self.redact(text) != text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _strings(item)


def _all_behind(error: BaseException) -> list[BaseException]:
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and not any(link is other for other in seen):
            seen.append(link)
            todo += [link.__cause__, link.__context__]
    return seen
