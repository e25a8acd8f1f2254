"""The command that copies a store's newest versions near its readers: relay."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from cnr_store import BadInput, RetentionPolicy
from cnr_store_tools.options import (
    Branch,
    Json,
    StorageOptions,
    TargetOptions,
    Url,
    open_store,
    optional_duration,
    optional_size,
    parse_duration,
    place_options,
)
from cnr_store_tools.output import emit, json_line, to_document
from cnr_store_tools.text import count_text, one_line, size_text

if TYPE_CHECKING:  # pyarrow is slow to import, and no other command needs it
    from cnr_store.relay import Relay, RelayReport

KEEP = RetentionPolicy()


def relay(
    url: Url,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Place of the copy: empty, or an existing relay.")],
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="Poll interval: 5s, 1m.")] = "5s",
    once: Annotated[bool, typer.Option("--once", help="Copy new versions once, and exit.")] = False,
    start: Annotated[
        int | None, typer.Option("--start", help="First version to copy; default the newest.", min=0)
    ] = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", help="Keep this many of the newest checkpoints at the target.")
    ] = KEEP.keep_last,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", metavar="TIME", help="Also keep versions younger than this.")
    ] = None,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Time for readers between listing and deleting data.")
    ] = "24h",
    no_trim: Annotated[bool, typer.Option("--no-trim", help="Delete nothing at the target.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Copy at once what is committed to a source in a local folder (inotify).")
    ] = False,
    news: Annotated[
        str | None, typer.Option("--news", metavar="REDIS", help="Redis for --listen and --announce: redis://host/0.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="NAME", help="Copy at once what is announced by this name.")
    ] = None,
    announce: Annotated[
        str | None, typer.Option("--announce", metavar="NAME", help="Announce versions of the copy by this name.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="Maximum bytes per second to copy: 200MiB.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Objects to copy at once; each is in memory.", min=1)
    ] = None,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    json: Json = False,
) -> None:
    """Keep a copy of a store's newest versions for many readers. Runs until stopped; that is always safe.

    Prints a line for each round that copied something, with --json a document per line. Reports failures and retries.
    """
    from cnr_store.relay import Relay

    interval_s = parse_duration(every, "--every")
    if not interval_s > 0:
        raise BadInput(f"--every must be a time above 0, found {every!r}", found=every)
    if (news is None) != (listen is None and announce is None):
        raise BadInput("--news names the Redis for --listen and --announce: give it with one of them, or none of these")
    if once and (watch or news is not None):
        raise BadInput("--once looks once: leave out --watch and --news")
    policy = RetentionPolicy(keep_last=keep_last, keep_within_s=optional_duration(keep_within, "--keep-within"))
    with open_store(url, storage_option, branch, threads) as store, ExitStack() as stack:
        mirror = Relay(
            store, target, start=start, policy=policy, grace_s=parse_duration(grace, "--grace"), trims=not no_trim,
            bytes_per_s=optional_size(bandwidth, "--bandwidth"),
            **place_options(target_option),
        )  # fmt: skip

        def print_report(report: RelayReport) -> None:
            if report.problem is not None:
                sys.stderr.write(f"warning: {one_line(report.problem)}\n")
            document = {"url": store.url, **to_document(report)}
            if once or not json:
                emit(document, (_sentence(report),), as_json=json)
            else:
                sys.stdout.write(json_line(document))
                sys.stdout.flush()

        def print_changes(report: RelayReport) -> None:
            if report.versions or report.segments or report.trimmed_segments or report.problem is not None:
                print_report(report)

        if once:
            print_report(mirror.advance())
        else:
            if watch:
                from cnr_store.integrations.folder_watch import FolderWatch

                stack.enter_context(FolderWatch(store, mirror.wake))
            if news is not None:
                _carry_news(mirror, news, listen, announce, stack)
            mirror.run(poll_interval_s=interval_s, on_report=print_changes)


def _carry_news(mirror: Relay, url: str, listen: str | None, announce: str | None, stack: ExitStack) -> None:
    """Let a relay hear of commits at its source, and tell of its own versions, until the stack ends."""
    from cnr_store.integrations.redis import RedisNews

    if listen is not None:
        stack.enter_context(RedisNews.connect(url, listen)).listen(mirror.wake)
    if announce is not None:
        mirror.announce_to(stack.enter_context(RedisNews.connect(url, announce)).announce)


def _sentence(report: RelayReport) -> str:
    if report.version is None:
        return "nothing was saved yet"
    parts = [
        f"version {report.version}", count_text(report.versions, "version"), count_text(report.segments, "segment"),
        count_text(report.objects, "object"), size_text(report.size_bytes),
    ]  # fmt: skip
    if report.skipped:
        parts.append(f"{count_text(report.skipped, 'position')} without data")
    if report.reused_objects:
        parts.append(f"{count_text(report.reused_objects, 'object')} already there")
    if report.trimmed_segments:
        parts.append(f"deleted {count_text(report.trimmed_segments, 'segment')}, {size_text(report.trimmed_bytes)}")
    if report.delay_s is not None:
        parts.append(f"{report.delay_s:.1f} s after its commit")
    return ", ".join(parts)
