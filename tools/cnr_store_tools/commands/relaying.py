"""Copy a store's newest versions to where they are read: relay."""

from __future__ import annotations

import json as json_text
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cnr_store import BadInput, RetentionPolicy
from cnr_store_tools.options import (
    Branch,
    Debug,
    Json,
    StorageOptions,
    Url,
    open_store,
    parse_duration,
    parse_size,
    place_options,
)
from cnr_store_tools.output import emit
from cnr_store_tools.text import one_line

if TYPE_CHECKING:  # pyarrow is slow to import, and no other command needs it
    from cnr_store.relay import RelayReport

KEEP = RetentionPolicy()


def relay(
    url: Url,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where to: an empty place, or one begun before.")],
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often to look for news: 5s, 1m.")] = "5s",
    once: Annotated[bool, typer.Option("--once", help="Copy what is new, and end.")] = False,
    start: Annotated[
        int | None, typer.Option("--start", help="Begin with this version; the newest if not given.", min=0)
    ] = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", help="The newest so many checkpoints stay at the target.")
    ] = KEEP.keep_last,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", metavar="TIME", help="And versions of the last so much time.")
    ] = None,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="From letting data go to deleting it at the target.")
    ] = "24h",
    no_trim: Annotated[bool, typer.Option("--no-trim", help="Delete nothing at the target.")] = False,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="Most bytes per second that are copied: 200MiB.")
    ] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    target_option: Annotated[
        list[str] | None,
        typer.Option("--target-option", metavar="KEY=VALUE", help="As --storage-option, for the target."),
    ] = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Keep a copy of a store's newest versions elsewhere, for many to read; until it is stopped, which is always safe.

    Each look that copied something is a line, with --json a document on a line. Failures are told and tried again.
    """
    from cnr_store.relay import Relay

    every_s = parse_duration(every, "--every")
    if not every_s > 0:
        raise BadInput(f"--every takes a time above 0, found {every!r}", found=every)
    policy = RetentionPolicy(
        keep_last=keep_last, keep_within_s=None if keep_within is None else parse_duration(keep_within, "--keep-within")
    )
    with open_store(url, storage_option, branch) as store:
        mirror = Relay(
            store, target, start=start, policy=policy, grace_s=parse_duration(grace, "--grace"), trims=not no_trim,
            bytes_per_s=None if bandwidth is None else parse_size(bandwidth, "--bandwidth"),
            **place_options(target_option),
        )  # fmt: skip

        def tell(report: RelayReport) -> None:
            if report.problem is not None:
                sys.stderr.write(f"warning: {one_line(report.problem)}\n")
            if report.versions or report.segments or report.trimmed_segments:
                document = _document(store.url, report)
                if json:
                    sys.stdout.write(json_text.dumps(document) + "\n")
                else:
                    emit(document, _render, as_json=False)
                sys.stdout.flush()

        if not once:
            mirror.run(every_s, on_report=tell)
            return
        report = mirror.advance()
        if report.problem is not None:
            sys.stderr.write(f"warning: {one_line(report.problem)}\n")
        emit(_document(store.url, report), _render, as_json=json)


def _document(url: str, report: RelayReport) -> dict[str, Any]:
    return {"url": url, **asdict(report)}


def _render(console: Console, document: dict[str, Any]) -> None:
    if document["version"] is None:
        console.print("nothing was saved yet")
        return
    parts = [
        f"version {document['version']}",
        f"{document['versions']} versions",
        f"{document['segments']} segments",
        f"{document['objects']} objects",
        f"{document['bytes'] / (1 << 20):.1f} MiB",
    ]
    if document["skipped"]:
        parts.append(f"{document['skipped']} positions without their data")
    if document["reused_objects"]:
        parts.append(f"{document['reused_objects']} objects were there")
    if document["trimmed_segments"]:
        trimmed = f"{document['trimmed_segments']} segments, {document['trimmed_bytes'] / (1 << 20):.1f} MiB"
        parts.append(f"deleted {trimmed}")
    if document["delay_s"] is not None:
        parts.append(f"{document['delay_s']:.1f} s behind its commit")
    console.print(", ".join(parts))
