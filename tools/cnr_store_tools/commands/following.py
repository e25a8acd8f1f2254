"""Follow what changes in a store: changes."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cnr_store import BadInput
from cnr_store_tools import documents, render
from cnr_store_tools.options import Branch, Debug, Json, StorageOptions, Url, open_store, parse_duration
from cnr_store_tools.output import Document, emit, make_console

if TYPE_CHECKING:  # pyarrow is slow to import, and no other command needs it
    from cnr_store.changes import ChangeStream

Target = Literal["counts", "rows", "parquet", "ipc"]


def changes(
    url: Url,
    since: Annotated[
        int | None,
        typer.Option("--since", min=0, help="Only what changed behind this version; else the whole newest one first."),
    ] = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", "-t", metavar="TABLE", help="Only this table; repeat it for more.")
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="Optimizer state too.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more until interrupted; a line for each table that changes.")
    ] = False,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="How often to look for news when following: 0.5s, 1m.")
    ] = "0.5s",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="parquet:FOLDER|ipc:FOLDER|-",
            help="Files, to which a next run adds from where they end; or (-) the rows as JSON lines. Else counts.",
        ),
    ] = None,
    cursor: Annotated[
        str | None,
        typer.Option("--cursor", metavar="NAME", help="Register as this consumer: expiry waits, until `drop-cursor`."),
    ] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Tell which rows change, version by version: how many, or as files for a query engine, or each of them."""
    from cnr_store import changes as streams

    kind, folder = _target(to)
    interval_s = parse_duration(every, "--every")
    with open_store(url, storage_option, branch) as store:
        begin = streams.recorded_cursor(folder) if folder is not None and since is None else since
        stream = streams.changes(
            store, begin, tables=tables, slots=slots, follow=follow, poll_interval_s=interval_s, cursor=cursor
        )
        if kind == "rows":
            _print_rows(stream)
            return
        told: list[Document] = []

        def tell(item: Document) -> None:
            if follow:
                _print_line(item, as_json=json)
            else:
                told.append(item)

        document: Document = {"url": store.url, "branch": store.branch, "since": since, "changes": told}
        if folder is None:
            for item in _counted(stream):
                tell(item)
        else:
            write = streams.write_parquet if kind == "parquet" else streams.write_ipc

            def tell_all(recorded: streams.RecordedVersion) -> None:
                for item in documents.recorded_documents(recorded):
                    tell(item)

            report = write(stream, folder, on_version=tell_all)
            document |= {"folder": str(folder), "files": report.files, "size_bytes": report.size_bytes}
        document["cursor"] = None if stream.cursor is None else stream.cursor.version
    emit(document, render.changes, as_json=json)


def _target(text: str | None) -> tuple[Target, Path | None]:
    if text is None:
        return "counts", None
    if text == "-":
        return "rows", None
    kind, _, folder = text.partition(":")
    if kind == "parquet" and folder:
        return "parquet", Path(folder)
    if kind == "ipc" and folder:
        return "ipc", Path(folder)
    raise BadInput(f"--to takes parquet:FOLDER, ipc:FOLDER or -, found {text!r}", found=text)


def _counted(stream: ChangeStream) -> Iterator[Document]:
    """How many rows of each table each version changes."""
    for version in stream.versions():
        counts: dict[str, list[int]] = {}
        for batch in version.batches:
            deletes = batch["op"].to_pylist().count("delete")
            here = counts.setdefault(batch["table"][0].as_py(), [0, 0])
            here[0] += batch.num_rows - deletes
            here[1] += deletes
        for table, (upserts, deletes) in counts.items():
            yield documents.change_document(version.version, version.step, table, upserts, deletes)


def _print_line(item: Document, *, as_json: bool) -> None:
    """One line, at once: whoever reads a pipe wants to see it."""
    if as_json:
        sys.stdout.write(json_text.dumps(item, ensure_ascii=True) + "\n")
    else:
        render.change(make_console(), item)
    sys.stdout.flush()


def _print_rows(stream: ChangeStream) -> None:
    """Each row as one line of JSON; what is no number in JSON is null."""
    for batch in stream:
        for row in batch.to_pylist():
            sys.stdout.write(json_text.dumps(documents.plain_floats(row), ensure_ascii=True, allow_nan=False) + "\n")
        sys.stdout.flush()
