"""Where a command's result goes: one JSON document, or tables for people. Errors and progress go to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

Document = dict[str, Any]
Renderer = Callable[[Console, Document], None]

_PIPE_WIDTH = 160
"""Columns when nobody says how wide the output is; a terminal does."""


def emit(document: Document, render: Renderer, *, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False, indent=2) + "\n")
        return
    render(make_console(), document)


def make_console(*, markup: bool = False) -> Console:
    """Return the console on standard output."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=markup)
