"""The command that writes a report of a store: report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cnr_store import BadInput, StorageFailure
from cnr_store_tools.options import Branch, Json, StorageOptions, Url, open_store
from cnr_store_tools.output import emit_message
from cnr_store_tools.report.facts import read_facts
from cnr_store_tools.report.page import report_html
from cnr_store_tools.text import count_text

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a path that cannot be a file; all others are those of the disk."""


def report(
    url: Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The HTML file to write; it replaces an existing one. - is standard output."
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every object and show what is damaged.")] = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Write an HTML page about a store. One file, which loads nothing: bytes, rows, restores, tables, names, damage."""
    is_printed = str(output) == "-"
    if is_printed and json:
        raise BadInput("--output - prints the page, and --json a document; give a file for the page")
    with open_store(url, storage_option, branch) as store:
        facts = read_facts(store, verify=verify)
    text = report_html(facts)
    if is_printed:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        kind = BadInput if isinstance(error, _NO_FILE) else StorageFailure
        raise kind(f"the report cannot be written to {output}: {error.strerror}", path=str(output)) from error
    document = {
        "url": facts.status.url, "path": str(output), "versions": len(facts.versions), "tables": len(facts.tables),
        "problems": None if facts.verified is None else len(facts.verified.problems),
    }  # fmt: skip
    shown = f"{count_text(len(facts.versions), 'version')}, {count_text(len(facts.tables), 'table')}"
    emit_message(f"wrote {output}: {shown}", document, as_json=json)
