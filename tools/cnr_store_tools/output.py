"""Prints results on standard output: one JSON document, or lines and tables. Errors and progress use standard error.

Every string from a store passes through `cell`, so that no name can control the terminal.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cnr_store import CnrStoreError
from cnr_store_tools.text import one_line, value_text

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PrintedTable:
    """A table to print: a title, rows by column name, and the columns.

    ``spare`` are the columns that a narrow terminal does without, the first of them first.
    """

    title: str
    items: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    spare: Sequence[str] = ()


Part = str | PrintedTable
"""A part of a result: a line or a table."""

MIN_SHARED = 16
"""Letters that all names of a table must begin with, before a narrow terminal prints them once."""

_PIPE_WIDTH = 160
"""Number of columns if the output is not a terminal and COLUMNS is not set."""


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
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = _Printer(width=None if is_sized else _PIPE_WIDTH, highlight=False, markup=False)
    for part in parts:
        if isinstance(part, PrintedTable):
            console.print(_fitted(part, console))
        else:
            console.print(cell(part), soft_wrap=True)
    sys.stdout.flush()


class _Printer(Console):
    """A console that raises when the reader of the output goes away; rich's own exits with 1 then."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error, which becomes an exit code (`cnr_store_tools.exits`)."""
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")


def _fitted(rows: PrintedTable, console: Console) -> Table:
    """Return the table as it fits the console: what all names begin with is said once, spare columns are left out."""
    filled = {name for name in rows.columns if any(item.get(name) not in (None, "", [], ()) for item in rows.items)}
    columns = [name for name in rows.columns if name in filled or name not in rows.spare]
    unbounded = console.options.update_width(10_000)

    def drawn_if_it_fits(given: PrintedTable, caption: Sequence[str]) -> tuple[Table, bool]:
        drawn = _drawn(given, columns, caption)
        return drawn, Measurement.get(console, unbounded, drawn).maximum <= console.width

    drawn, fits = drawn_if_it_fits(rows, ())
    beginning = "" if fits else _common_beginning([str(item.get("table", "")) for item in rows.items])
    caption: list[str] = []
    if beginning:
        items = [{**item, "table": f"\N{HORIZONTAL ELLIPSIS}{item['table'][len(beginning) :]}"} for item in rows.items]
        rows = replace(rows, items=items)
        caption.append(f"\N{HORIZONTAL ELLIPSIS} is {beginning}")
        drawn, fits = drawn_if_it_fits(rows, caption)
    for name in rows.spare:
        if fits:
            break
        if name in columns:
            columns.remove(name)
            left_out = [other for other in rows.spare if other in filled and other not in columns]
            also = f"a wider terminal, or --json, also has: {', '.join(map(header, left_out))}"
            drawn, fits = drawn_if_it_fits(rows, [*caption, also])
    return drawn


def _common_beginning(names: Sequence[str]) -> str:
    """Return what all of several names begin with, up to a dot or slash; nothing if that is too short to matter.

    >>> _common_beginning(["model.embeddings.user", "model.embeddings.use"]), _common_beginning(["model.user"])
    ('model.embeddings.', '')
    """
    shared = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 - by letters is what is wanted
    length = max(shared.rfind("."), shared.rfind("/")) + 1
    return shared[:length] if length >= MIN_SHARED else ""


def _drawn(rows: PrintedTable, columns: Sequence[str], caption: Sequence[str]) -> Table:
    drawn = Table(
        title=cell(rows.title), title_justify="left", title_style="bold",
        caption=Text("\n").join(map(cell, caption)) if caption else None, caption_justify="left",
        header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in columns:
        is_number = all(isinstance(item.get(name), int | float | None) for item in rows.items)
        drawn.add_column(
            header(name), justify="right" if is_number else "left", overflow="fold", no_wrap=name.endswith("_ms")
        )
    for item in rows.items:
        drawn.add_row(*(cell(value_text(name, item.get(name))) for name in columns))
    return drawn


def header(column: str) -> str:
    """Return the heading of a column: its name without the unit.

    >>> header("size_bytes"), header("head_step")
    ('size', 'head step')
    """
    return column.removesuffix("_bytes").removesuffix("_ms").removesuffix("_s").replace("_", " ")


def cell(text: str) -> Text:
    """Return text that is printed literally, without markup and control characters."""
    return Text(one_line(text))


def table(title: str, items: Iterable[Any], columns: Sequence[str], spare: Sequence[str] = ()) -> PrintedTable:
    """Return records or documents as a table, one row each.

    A column is a field name. Its ending gives the unit (``_bytes``, ``_ms``, ``_s``), which is printed with the value.
    ``spare`` columns are printed if one of them has a value and the terminal is wide enough.
    """
    rows = [item if isinstance(item, Mapping) else {name: getattr(item, name) for name in columns} for item in items]
    return PrintedTable(title, rows, columns, spare)


def emit_message(message: str, document: Document, *, as_json: bool) -> None:
    """Print a result of one sentence."""
    emit({**document, "message": message}, (message,), as_json=as_json)
