"""Commands that maintain and monitor stores: compact, gc, maintain, metrics."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cnr_store import (
    BadInput,
    CnrStoreError,
    CompactionPolicy,
    GcReport,
    MaintenanceReport,
    RetentionPolicy,
    Store,
    collect_garbage,
    maintain,
    read_status,
)
from cnr_store import compact as compact_store
from cnr_store.integrations.ray import RayPool
from cnr_store_tools.exits import ExitCode, exit_code
from cnr_store_tools.options import (
    Branch,
    DryRun,
    Json,
    StorageOptions,
    Url,
    open_store,
    optional_duration,
    optional_size,
    parse_address,
    parse_best,
    parse_duration,
)
from cnr_store_tools.output import Document, emit, to_document
from cnr_store_tools.progress import progress_bars
from cnr_store_tools.render import compaction_texts, gc_parts, maintenance_parts, place_text
from cnr_store_tools.text import one_line

if TYPE_CHECKING:
    from cnr_store_tools.metrics import StoreCollector

POLICY = CompactionPolicy()
KEEP = RetentionPolicy()

MaxChain = Annotated[int, typer.Option("--max-chain", help="Maximum number of segments that a restore reads.")]
MaxRatio = Annotated[
    float, typer.Option("--max-restore-ratio", help="Maximum bytes of a restore, as a multiple of the baseline's.")
]
Fanout = Annotated[int, typer.Option("--fanout", help="Number of deltas of similar size that become one.")]
Engine = Annotated[
    Literal["threads", "processes", "ray"], typer.Option("--engine", help="What runs compactions; results are equal.")
]
Workers = Annotated[int | None, typer.Option("--workers", help="Number of tasks at once; default all CPUs.", min=1)]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth", metavar="SIZE", help="Maximum bytes per second that compaction writes: 200MiB."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="Start nothing after this time: 30m; default no limit."),
]
KeepLast = Annotated[int, typer.Option("--keep-last", help="Keep this many of the newest checkpoints.")]
KeepWithin = Annotated[
    str | None, typer.Option("--keep-within", metavar="TIME", help="Keep versions younger than this: 7d.")
]
KeepEvery = Annotated[int | None, typer.Option("--keep-every", help="Keep every N-th checkpoint.")]
BestBy = Annotated[
    str | None,
    typer.Option(
        "--keep-best",
        metavar="METRIC:N",
        help="Keep the N saves with the largest metric; METRIC:N:smallest the smallest.",
    ),
]
Grace = Annotated[
    str, typer.Option("--grace", metavar="TIME", help="Time for readers between listing and deleting data.")
]
OrphanAge = Annotated[
    str, typer.Option("--orphan-age", metavar="TIME", help="Age at which unreferenced data is listed for deletion.")
]
MetricsFile = Annotated[
    Path | None,
    typer.Option("--metrics-file", help="Write the store's Prometheus metrics to this file (name it *.prom)."),
]


def compact(
    url: Url,
    max_chain: MaxChain = POLICY.max_chain,
    max_restore_ratio: MaxRatio = POLICY.max_restore_ratio,
    fanout: Fanout = POLICY.fanout,
    engine: Engine = "threads",
    workers: Workers = None,
    bandwidth: Bandwidth = None,
    budget: Budget = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compact even if another compaction appears to be active. Always safe.")
    ] = False,
    dry_run: DryRun = False,
    branch: Branch = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Merge deltas until restores are fast enough. Writers continue. Exit code 9 if the budget ended it."""
    policy = CompactionPolicy(max_chain=max_chain, max_restore_ratio=max_restore_ratio, fanout=fanout)
    with open_store(url, storage_option, branch) as store, progress_bars() as progress:
        reports = compact_store(
            store, policy=policy, engine=_engine(engine), workers=workers,
            bytes_per_s=optional_size(bandwidth, "--bandwidth"),
            budget_s=optional_duration(budget, "--budget"), force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    last = reports[-1].outcome
    document = {
        "url": store.url, "branch": store.branch, "is_dry_run": dry_run, "outcome": last,
        "compactions": to_document(reports),
        "bytes_in": sum(report.bytes_in for report in reports if report.outcome == "committed"),
        "bytes_out": sum(report.bytes_out for report in reports),
    }  # fmt: skip
    emit(document, (f"{place_text(document)}: {text}" for text in compaction_texts(reports)), as_json=json)
    if last == "busy":
        raise typer.Exit(ExitCode.CONFLICT)
    if last != "nothing" and not (dry_run and last == "planned"):
        raise typer.Exit(ExitCode.UNFINISHED)


def gc(
    url: Url,
    keep_last: KeepLast = KEEP.keep_last,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    keep_best: BestBy = None,
    grace: Grace = "24h",
    orphan_age: OrphanAge = "7d",
    force: Annotated[bool, typer.Option("--force", help="Allow a grace below 1h and an orphan age below 1d.")] = False,
    despite_damage: Annotated[
        bool, typer.Option("--despite-damage", help="Expire versions whose records or segments are lost permanently.")
    ] = False,
    budget: Budget = None,
    dry_run: DryRun = False,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Expire versions, and delete what no version needs. Also in branches. A dry run explains each decision."""
    policy = _retention(keep_last, keep_within, keep_every, keep_best)
    with open_store(url, storage_option) as store, progress_bars() as progress:
        report = collect_garbage(
            store, policy=policy, grace_s=parse_duration(grace, "--grace"),
            orphan_age_s=parse_duration(orphan_age, "--orphan-age"), dry_run=dry_run, force=force,
            despite_damage=despite_damage, budget_s=optional_duration(budget, "--budget"), progress=progress,
        )  # fmt: skip
    emit(_collection(report), gc_parts(report), as_json=json)
    if report.failures:
        raise typer.Exit(ExitCode.STORAGE)
    if report.outcome in ("stopped", "incomplete"):
        raise typer.Exit(ExitCode.UNFINISHED)


def maintain_(
    url: Url,
    budget: Budget = None,
    max_chain: MaxChain = POLICY.max_chain,
    max_restore_ratio: MaxRatio = POLICY.max_restore_ratio,
    fanout: Fanout = POLICY.fanout,
    engine: Engine = "threads",
    workers: Workers = None,
    bandwidth: Bandwidth = None,
    keep_last: KeepLast = KEEP.keep_last,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    keep_best: BestBy = None,
    grace: Grace = "24h",
    orphan_age: OrphanAge = "7d",
    force: Annotated[bool, typer.Option("--force", help="Allow a grace below 1h and an orphan age below 1d.")] = False,
    dry_run: DryRun = False,
    metrics_file: MetricsFile = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Compact, expire and delete in the store and its branches. Run it from cron. Exit code 9: more to do."""
    policy = CompactionPolicy(max_chain=max_chain, max_restore_ratio=max_restore_ratio, fanout=fanout)
    retention = _retention(keep_last, keep_within, keep_every, keep_best)
    try:
        opened = open_store(url, storage_option)
    except CnrStoreError:
        if metrics_file is not None:
            _replace(_unopened(url), metrics_file)
        raise
    with opened as store, progress_bars() as progress:
        collector = None if metrics_file is None else _collector(store, 0.0)
        try:
            report = maintain(
                store, compaction=policy, retention=retention, grace_s=parse_duration(grace, "--grace"),
                orphan_age_s=parse_duration(orphan_age, "--orphan-age"), budget_s=optional_duration(budget, "--budget"),
                engine=_engine(engine), workers=workers,
                bytes_per_s=optional_size(bandwidth, "--bandwidth"), force=force,
                dry_run=dry_run, progress=progress,
            )  # fmt: skip
        finally:
            # Write metrics also after a failure. A failure to write them must not hide the result of maintenance.
            file_error = None if collector is None or metrics_file is None else _replace(collector, metrics_file)
    emit(_maintenance(report) | {"metrics_file_error": file_error}, maintenance_parts(report), as_json=json)
    if not json:
        for stage in report.stages:
            if stage.error is not None:
                sys.stderr.write(f"error: {stage.stage.kind}: {one_line(stage.error.message)}\n")
        if file_error is not None:
            sys.stderr.write(f"error: metrics file: {one_line(file_error)}\n")
    if report.error is not None:
        raise typer.Exit(exit_code(report.error))
    if file_error is not None:
        raise typer.Exit(ExitCode.STORAGE)
    if report.outcome == "stopped":
        raise typer.Exit(ExitCode.UNFINISHED)


def _collection(report: GcReport) -> Document:
    return {**to_document(report), "expired": report.expired, "marked": report.marked}


def _maintenance(report: MaintenanceReport) -> Document:
    """Return the report without kept versions and segments, so that a cron job's log is short."""
    stages = []
    for stage in report.stages:
        document = to_document(stage) | {"stage": stage.stage.kind, "branch": stage.stage.branch}
        document["compactions"] = document.pop("compactions")
        if stage.collection is not None:
            collection = _collection(stage.collection)
            del collection["versions"]
            collection["segments"] = [item for item in collection["segments"] if item["state"] != "stays"]
            document["collection"] = collection
        stages.append(document)
    return {
        **to_document(report), "stages": stages, "outcome": report.outcome,
        "rewritten_bytes": report.rewritten_bytes, "deleted_bytes": report.deleted_bytes,
    }  # fmt: skip


def metrics(
    url: Url,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Serve metrics here until SIGTERM, e.g. 127.0.0.1:9464."),
    ] = None,
    max_age: Annotated[
        str, typer.Option("--max-age", metavar="TIME", help="Scrapes within this time share one reading of the store.")
    ] = "30s",
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Print the store's Prometheus metrics, or serve them by HTTP. With --json: what they are made of."""
    address = None if listen is None else parse_address(listen)
    if json and address is not None:
        raise BadInput("give --listen or --json, not both")
    max_age_s = parse_duration(max_age, "--max-age")
    with open_store(url, storage_option) as store:
        if json:
            emit({"url": store.url, **to_document(read_status(store))}, (), as_json=True)
            return
        collector = _collector(store, max_age_s)
        # Imported here, because the client library is optional.
        from cnr_store_tools.metrics import metrics_text, serve_metrics

        if address is None:
            sys.stdout.write(metrics_text(collector))
            return
        serve_metrics(collector, *address, announce=_announce)


def _collector(store: Store, max_age_s: float) -> StoreCollector:
    from cnr_store_tools.metrics import StoreCollector

    return StoreCollector(lambda: read_status(store), store.url, max_age_s=max_age_s)


def _unopened(url: str) -> StoreCollector:
    """Return the metrics of a store that could not be opened: ``cnr_up 0``, with the label that it has when open."""
    from cnr_store_tools.metrics import StoreCollector

    label = url if "://" in url else os.path.abspath(url)  # noqa: PTH100 - as the URL of a store: links are kept
    return StoreCollector(lambda: None, label)


def _replace(collector: StoreCollector, path: Path) -> str | None:
    """Write the file; return the error message, or None."""
    from cnr_store_tools.metrics import write_metrics

    try:
        write_metrics(collector, path)
    except OSError as error:
        return str(error)
    return None


def _announce(host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"serving http://{shown}:{port}/metrics\n")
    sys.stderr.flush()


def _retention(
    keep_last: int, keep_within: str | None, keep_every: int | None, keep_best: str | None
) -> RetentionPolicy:
    return RetentionPolicy(
        keep_last=keep_last, keep_within_s=optional_duration(keep_within, "--keep-within"), keep_every=keep_every,
        keep_best=None if keep_best is None else parse_best(keep_best),
    )  # fmt: skip


def _engine(name: Literal["threads", "processes", "ray"]) -> Literal["threads", "processes"] | RayPool:
    return RayPool() if name == "ray" else name
