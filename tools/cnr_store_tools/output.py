"""Prints results on standard output: one JSON document, or lines and tables. Errors and progress use standard error.

Every string from a store passes through `cell`, so that no name can control the terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cnr_store import CnrStoreError
from cnr_store_tools.text import one_line, value_text

Document = dict[str, Any]
Part = str | Table
"""A part of a result: a line or a table."""

_PIPE_WIDTH = 160
"""Number of columns if the output is not a terminal."""


def to_document(report: Any) -> Any:
    """Return a report (a dataclass, a struct, a list of such, ...) as plain JSON values.

    Paths become text; NaN and Inf become null; an error becomes its kind, message and details.
    """
    return _finite(msgspec.to_builtins(report, enc_hook=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, CnrStoreError):
        details = {name: item if isinstance(item, int | float | str) else str(item)
                   for name, item in value.details().items()}  # fmt: skip
        return {"kind": value.kind, "message": value.message, "details": details}
    raise NotImplementedError(f"a report contains a {type(value).__name__}, which has no JSON form")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(to_document(value), ensure_ascii=True, allow_nan=False) + "\n"


def emit(document: Document, parts: Iterable[Part], *, as_json: bool) -> None:
    """Print a result: the JSON document, or its parts in order."""
    if as_json:
        sys.stdout.write(json.dumps(to_document(document), ensure_ascii=True, allow_nan=False, indent=2) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    for part in parts:
        if isinstance(part, Table):
            console.print(part)
        else:
            console.print(cell(part), soft_wrap=True)
    sys.stdout.flush()


def cell(text: str) -> Text:
    """Return text that is printed literally, without markup and control characters."""
    return Text(one_line(text))


def table(title: str, items: Iterable[Any], columns: Sequence[str]) -> Table:
    """Return records or documents as a table, one row each.

    A column is a field name. Its ending gives the unit (``_bytes``, ``_ms``, ``_s``), which is printed with the value.
    """
    rows = [item if isinstance(item, Mapping) else {name: getattr(item, name) for name in columns} for item in items]
    drawn = Table(title=cell(title), title_justify="left", header_style="bold")
    for name in columns:
        is_number = all(isinstance(row.get(name), int | float | None) for row in rows)
        header = name.removesuffix("_bytes").removesuffix("_ms").removesuffix("_s").replace("_", " ")
        drawn.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(cell(value_text(name, row.get(name))) for name in columns))
    return drawn


def emit_message(message: str, document: Document, *, as_json: bool) -> None:
    """Print a result of one sentence."""
    emit({**document, "message": message}, (message,), as_json=as_json)
