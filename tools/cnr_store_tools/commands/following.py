"""The command that follows the changes of a store: changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cnr_store import BadInput
from cnr_store_tools.options import Branch, Json, StorageOptions, Url, open_store, parse_duration
from cnr_store_tools.output import Document, Part, emit, json_line, table
from cnr_store_tools.render import place_text
from cnr_store_tools.text import count_text, natural, size_text

if TYPE_CHECKING:  # pyarrow is slow to import, and no other command needs it
    from cnr_store.changes import ChangeStream

Target = Literal["counts", "rows", "parquet", "ipc"]


def changes(
    url: Url,
    since: Annotated[
        int | None,
        typer.Option("--since", min=0, help="Only changes after this version; default the whole newest one first."),
    ] = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", "-t", metavar="TABLE", help="Only this table; may be repeated.")
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="Include optimizer state.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep running until interrupted; print a line for each table that changes.")
    ] = False,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Poll interval with --follow: 0.5s, 1m.")
    ] = "0.5s",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="parquet:FOLDER|ipc:FOLDER|-",
            help="Write files, which the next run continues; or (-) print rows as JSON lines. Default: counts.",
        ),
    ] = None,
    cursor: Annotated[
        str | None,
        typer.Option(
            "--cursor", metavar="NAME", help="Register this consumer; expiry keeps its data until drop-cursor."
        ),
    ] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Report which rows change, version by version. Prints counts or every row, or writes files for a query engine."""
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
        reported: list[Document] = []

        def report_change(item: Document) -> None:
            if not follow:
                reported.append(item)
            elif json:
                sys.stdout.write(json_line(item))
                sys.stdout.flush()
            else:
                emit(item, (_sentence(item),), as_json=False)

        document: Document = {"url": store.url, "branch": store.branch, "since": since, "changes": reported}
        if folder is None:
            for item in _counted(stream):
                report_change(item)
        else:
            write = streams.write_parquet if kind == "parquet" else streams.write_ipc

            def report_version(recorded: streams.RecordedVersion) -> None:
                for name in sorted({*recorded.upserts, *recorded.deletes}, key=natural):
                    counts = recorded.upserts.get(name, 0), recorded.deletes.get(name, 0)
                    report_change(_change(recorded.version, recorded.step, name, *counts))

            report = write(stream, folder, on_version=report_version)
            document |= {"folder": str(folder), "files": report.files, "size_bytes": report.size_bytes}
        document["cursor"] = None if stream.cursor is None else stream.cursor.version
    emit(document, _parts(document), as_json=json)


def _change(version: int, step: int, table_name: str, upserts: int, deletes: int) -> Document:
    """Return the number of rows of one table that one version changes, as a document."""
    return {"version": version, "step": step, "table": table_name, "upserts": upserts, "deletes": deletes}


def _sentence(item: Document) -> str:
    counts = f"{count_text(item['upserts'], 'upsert')}, {count_text(item['deletes'], 'delete')}"
    return f"version {item['version']}, step {item['step']}: {item['table']}: {counts}"


def _parts(document: Document) -> Iterator[Part]:
    """Yield the changed rows of each version, and the last version."""
    if document["changes"]:
        yield table(place_text(document), document["changes"], ("version", "step", "table", "upserts", "deletes"))
    if "folder" in document:
        files = f"{count_text(document['files'], 'file')} ({size_text(document['size_bytes'])})"
        yield f"wrote {files} to {document['folder']}"
    cursor = document["cursor"]
    yield "the store is empty" if cursor is None else f"these are all changes up to version {cursor}"


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
    raise BadInput(f"--to must be parquet:FOLDER, ipc:FOLDER or -, found {text!r}", found=text)


def _counted(stream: ChangeStream) -> Iterator[Document]:
    """Yield the number of rows that each version changes in each table."""
    for version in stream.versions():
        counts: dict[str, list[int]] = {}
        for batch in version.batches:
            deletes = batch["op"].to_pylist().count("delete")
            here = counts.setdefault(batch["table"][0].as_py(), [0, 0])
            here[0] += batch.num_rows - deletes
            here[1] += deletes
        for name, (upserts, deletes) in counts.items():
            yield _change(version.version, version.step, name, upserts, deletes)


def _print_rows(stream: ChangeStream) -> None:
    """Print each row as one line of JSON; NaN and Inf become null."""
    for batch in stream:
        for row in batch.to_pylist():
            sys.stdout.write(json_line(row))
        sys.stdout.flush()
