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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.text import Text

from cnr_store import CnrStoreError
from cnr_store_tools.drawing import GAP, Column, drawn, widths_within
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
            _print_table(part, console)
        else:
            console.print(cell(part), soft_wrap=True)
    sys.stdout.flush()


class _Printer(Console):
    """A console that raises when the reader of the output goes away; rich's own exits with 1 then."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error, which becomes an exit code (`cnr_store_tools.exits`)."""
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")


def _fitted(rows: PrintedTable, width: int) -> tuple[list[Column], list[str]]:
    """Return a table's columns as they fit the width, and the lines below it.

    What all names begin with is said once, spare columns are left out.
    """
    columns = {name: _column(name, [item.get(name) for item in rows.items]) for name in rows.columns}
    filled = {name for name in columns if any(item.get(name) not in (None, "", [], ()) for item in rows.items)}
    columns = {name: column for name, column in columns.items() if name in filled or name not in rows.spare}
    taken = {name: column.width + GAP for name, column in columns.items()}

    def fits() -> bool:
        return sum(taken.values()) - GAP <= width

    caption: list[str] = []
    beginning = "" if fits() else _common_beginning([str(item.get("table", "")) for item in rows.items])
    if beginning:
        shortened = [f"\N{HORIZONTAL ELLIPSIS}{str(item['table'])[len(beginning) :]}" for item in rows.items]
        columns["table"] = _column("table", shortened)
        taken["table"] = columns["table"].width + GAP
        caption.append(f"\N{HORIZONTAL ELLIPSIS} is {beginning}")
    for name in rows.spare:
        if fits():
            break
        if name in columns:
            del columns[name], taken[name]
    left_out = [name for name in rows.spare if name in filled and name not in columns]
    if left_out:
        caption.append(f"a wider terminal, or --json, also has: {', '.join(map(header, left_out))}")
    return list(columns.values()), caption


def _column(name: str, values: Sequence[Any]) -> Column:
    return Column(
        header(name), [one_line(value_text(name, value)) for value in values],
        is_number=all(isinstance(value, int | float | None) for value in values), keeps_width=name.endswith("_ms"),
    )  # fmt: skip


def _print_table(rows: PrintedTable, console: Console) -> None:
    columns, caption = _fitted(rows, console.width)
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" if console.encoding.startswith("utf") else "-"
    lines = drawn(columns, widths_within(columns, console.width), rule)
    console.print(cell(rows.title), style="bold", soft_wrap=True)
    console.print(Text(next(lines)), style="bold", soft_wrap=True)
    console.file.writelines(f"{line}\n" for line in lines)
    for line in caption:
        console.print(cell(line), soft_wrap=True)


def _common_beginning(names: Sequence[str]) -> str:
    """Return what all of several names begin with, up to a dot or slash; nothing if that is too short to matter.

    >>> _common_beginning(["model.embeddings.user", "model.embeddings.use"]), _common_beginning(["model.user"])
    ('model.embeddings.', '')
    """
    shared = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 - by letters is what is wanted
    length = max(shared.rfind("."), shared.rfind("/")) + 1
    return shared[:length] if length >= MIN_SHARED else ""


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
