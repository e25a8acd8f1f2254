"""Formats numbers, times and untrusted strings for a terminal. Pure."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Sequence
from typing import Any


def one_line(text: str) -> str:
    r"""Return text without line breaks and with control characters escaped.

    >>> one_line("a\nb\x1b[31m")
    'a b\\x1b[31m'
    """
    joined = " ".join(text.split("\n"))
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in joined)


def natural(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    """Return the key that sorts names for people: numbers in them by their value.

    >>> sorted(["emb.10", "emb.2", "emb"], key=natural)
    ['emb', 'emb.2', 'emb.10']
    """
    pieces = enumerate(re.split("([0-9]+)", name))
    # A number's length and digits, because int() refuses very long ones.
    key = tuple((len(one.lstrip("0")), one.lstrip("0")) if at % 2 else one for at, one in pieces)
    return key, name


def size_text(size_bytes: int) -> str:
    """Return a size with three digits.

    >>> size_text(0), size_text(1023), size_text(1536), size_text(3 << 40)
    ('0 B', '1023 B', '1.50 KiB', '3.00 TiB')
    """
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{size_bytes} B"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def time_text(time_ms: int) -> str:
    """Return a time in milliseconds since 1970 as UTC, in ISO 8601."""
    try:
        moment = dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_text(seconds: float) -> str:
    """Return a short time.

    >>> duration_text(0.0123), duration_text(2.5), duration_text(float("nan"))
    ('12.3 ms', '2.50 s', '-')
    """
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> count_text(1, "segment"), count_text(2, "segment")
    ('1 segment', '2 segments')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def value_text(name: str, value: Any) -> str:
    """Return the value of a field as text; the ending of the field's name gives its unit.

    >>> value_text("size_bytes", 1536), value_text("apply_s", 2.5), value_text("versions", (1, 2, 3))
    ('1.50 KiB', '2.50 s', '1-3')
    >>> value_text("ts_ms", 1_700_000_000_000), value_text("ratio", 12.34)
    ('2023-11-14 22:13:20', '12.3x')
    """
    if value is None:
        return ""
    if name == "ratio":
        return f"{value:.1f}x"
    if name.endswith("_bytes"):
        return size_text(value)
    if name.endswith("_ms"):
        return time_text(value)[:19].replace("T", " ")
    if name == "seconds" or name.endswith("_s"):
        return duration_text(value)
    if isinstance(value, list | tuple):
        is_numbers = all(isinstance(item, int) for item in value) and list(value) == sorted(value)
        return ranges_text(value) if is_numbers else ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ranges_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with runs as ranges.

    >>> ranges_text([1, 2, 3, 7])
    '1-3, 7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
