"""Formats reports of the library as lines and tables for people. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from cnr_store import (
    CompactionReport,
    ExportReport,
    GcReport,
    LogReport,
    MaintenanceReport,
    Problem,
    RepairReport,
    VerifyReport,
)
from cnr_store_tools.output import Document, Part, table
from cnr_store_tools.text import count_text, duration_text, natural, ranges_text, size_text, time_text

SHORT_NAME = 8
"""Characters at the end of a segment's name, by which a narrow table names it."""


def encoding_text(encoding: Document, shift: int = 0) -> str:
    """Return an encoding in a few words; for a lattice its scale after ``shift`` halvings."""
    name = encoding["encoding"]
    if name == "lattice":
        return f"lattice, scale {encoding['scale'] * 0.5**shift:.4g}"
    if name == "float_bits":
        return f"float_bits {encoding['mantissa_bits']}"
    if name == "affine":
        return f"affine {encoding['bits']} bits, {encoding.get('search', 'grid')}"
    return str(name)


def verify_parts(report: VerifyReport) -> Iterator[Part]:
    """Yield what was read, the problems, and the undamaged versions."""
    versions = ranges_text(report.versions) or "none"
    depth = ", states replayed" if report.is_deep else ""
    yield (
        f"{report.url}: read {count_text(report.records, 'commit record')}, {count_text(report.segments, 'segment')}, "
        f"{count_text(report.objects, 'object')}, {size_text(report.size_bytes)}; versions {versions}{depth}"
    )
    if report.unreferenced:
        yield f"segments that no version needs: {report.unreferenced} (`cnr gc --dry-run` explains them)"
    if report.superseded:
        positions = ranges_text(sorted(report.superseded))
        yield f"log positions without a version, superseded by a repair: {positions}"
    for other in report.others:
        read = f"versions {ranges_text(other.versions) or 'none'}" if other.is_read else "only its records"
        yield f"{_log_text(other.branch)}: read {read}"
    if report.is_sound:
        yield "no problems found"
        return
    yield from _problems(count_text(len(report.problems), "problem"), report.problems)
    logs: tuple[VerifyReport | LogReport, ...] = (report, *(other for other in report.others if other.is_read))
    for log in logs:
        name = "" if log is report else f" of {_log_text(log.branch)}"
        yield f"undamaged versions{name}, of those that were read: {ranges_text(sorted(log.restorable)) or 'none'}"


def repair_parts(report: RepairReport) -> Iterator[Part]:
    """Yield what was done or would be done, what is lost, and which problems remain."""
    if not report.actions and report.has_log:
        yield f"{report.url}: nothing to repair"
    for action in report.actions:
        done = "would" if report.is_dry_run else "done" if action.version is None else f"version {action.version}"
        yield f"{done}: {action.kind}: {action.message}"
    if not report.has_log:
        yield (
            f"{report.url}: the commit log, or its beginning, is lost. A repair cannot recreate records, because "
            "segments do not record whether they were committed. Restore the log from a backup, or save to a new "
            "store. Nothing was deleted, and any Zarr reader opens the remaining arrays"
        )
    elif report.target is None:
        yield "no version is undamaged; restore a copy of the store, or save a new baseline"
    for state in report.lost:
        yield f"lost: version {state.version} (step {state.step}) is newer, but damaged"
    if report.remaining:
        yield from _problems("problems that remain", report.remaining)
    if report.is_dry_run and report.actions:
        yield "this was a dry run: nothing was changed"


def _log_text(branch: str | None) -> str:
    return "the store's own log" if branch is None else f"branch {branch!r}"


def _problems(title: str, problems: Sequence[Problem]) -> Iterator[Part]:
    """Yield a line for each problem: a table would break the path and the digests into pieces."""
    yield f"{title}:"
    for problem in problems:
        where = [problem.kind]
        where += [f"branch {problem.branch}"] if problem.branch else []
        where += [f"versions {ranges_text(problem.versions)}"] if problem.versions else []
        where += [problem.path] if problem.path and problem.path not in problem.message else []
        yield f"- {', '.join(where)}: {problem.message}"


def export_parts(report: ExportReport) -> Iterator[Part]:
    """Yield the tensors that were written."""
    title = f"step {report.step}, version {report.version}"
    tensors = sorted(report.tensors, key=lambda tensor: natural(tensor.name))
    yield table(title, tensors, ("name", "role", "dtype", "shape"))
    yield f"wrote {size_text(report.size_bytes)} in {count_text(len(report.files), 'file')} to {report.path}"


def compaction_texts(reports: Sequence[CompactionReport]) -> list[str]:
    """Return a sentence for each compaction; that there is nothing to compact only if nothing was compacted."""
    shown = [report for report in reports if report.outcome != "nothing"] or reports
    return [_compaction_text(report) for report in shown]


def _compaction_text(report: CompactionReport) -> str:
    """Return the result of one compaction in a sentence."""
    about = (
        f"{count_text(len(report.run), 'segment')}, {size_text(report.bytes_in)}, into one {report.kind} "
        f"({report.reason})"
    )
    chain = f"the chain has {count_text(report.chain_after, 'segment')}"
    match report.outcome:
        case "nothing":
            return f"nothing to compact; {chain}"
        case "planned":
            return f"would compact {about}; about {size_text(report.estimated_bytes)}{_growth(report)}"
        case "committed":
            reused = f", {report.reused_tasks} of {report.tasks} tasks were done before" if report.reused_tasks else ""
            return (
                f"version {report.version}: compacted {about}, {size_text(report.bytes_out)} in "
                f"{duration_text(report.duration_s)}{reused}; {chain}{_growth(report)}"
            )
        case "unfinished":
            return f"the time limit was reached; the next run continues: {report.reason}"
        case outcome:
            return f"{outcome}: {report.reason}"


def _growth(report: CompactionReport) -> str:
    """Return a warning if the result has more bytes than what it was made of, else nothing."""
    more = max(report.bytes_out, report.estimated_bytes) - report.bytes_in
    if more <= 0:
        return ""
    return f"; that is {size_text(more)} more than before: it restores in fewer reads, but saves no space"


def gc_parts(report: GcReport) -> Iterator[Part]:
    """Yield each decision: versions grouped by reason, segments to delete, and their bytes."""
    runs = [
        {"branch": branch, "versions": [version.version for version in run],
         "what": "kept" if stays else "expired", "reason": reason}
        for (branch, stays, reason), run in groupby(
            report.versions, lambda version: (version.branch, version.stays, version.reason)
        )
    ]  # fmt: skip
    yield table(f"{report.url}: live versions", runs, ("branch", "versions", "what", "reason"))
    going = [segment for segment in report.segments if segment.state != "stays"]
    if going:
        rows = [
            {
                "segment": segment.name[-SHORT_NAME:], "state": segment.state, "size_bytes": segment.size_bytes,
                "delete_after_ms": segment.delete_after_ms, "reason": segment.reason, "name": segment.name,
            }
            for segment in going
        ]  # fmt: skip
        columns = ("segment", "state", "size_bytes", "delete_after_ms", "reason", "name")
        yield table("segments to delete", rows, columns, ("name",))
    if report.side_objects:
        keys = [{"key": key} for key in report.side_objects]
        yield table("side objects that no record needs", keys, ("key",))
    yield gc_text(report)
    yield from (f"warning: {text}" for text in report.warnings)
    for failure in report.failures:
        yield f"not deleted: {failure}"
    if report.is_dry_run and report.outcome == "planned":
        yield "this was a dry run: nothing was changed"


def gc_text(report: GcReport) -> str:
    """Return the result of a collection in a sentence."""
    expire, list_ = ("would expire", "list") if report.is_dry_run else ("expired", "listed")
    count = len(report.side_objects)
    lists = f" and {count_text(count, 'side object')}" if count else ""
    if report.is_dry_run:
        size = f" ({size_text(report.side_object_bytes)})" if count else ""
        gone = f"{_amount(report, 'due')}{lists}{size} may be deleted now"
    else:
        segments = count_text(report.deleted_segments, "segment")
        gone = f"deleted {segments}{lists} ({size_text(report.deleted_bytes)})"
    pending = ("waiting", "failed") if report.is_dry_run else ("waiting", "failed", "marked", "due")
    return (
        f"{report.outcome}: {expire} {count_text(report.expired, 'version')} and {list_} "
        f"{count_text(report.marked, 'segment')} for deletion; {gone}; kept: {_amount(report, 'stays')}, "
        f"pending delete: {_amount(report, *pending)}"
    )


def _amount(report: GcReport, *states: str) -> str:
    """Return the number of segments in these states, with their bytes if all sizes are known."""
    sizes = [segment.size_bytes for segment in report.segments if segment.state in states]
    count = count_text(len(sizes), "segment")
    known = [size for size in sizes if size is not None]
    return f"{count} ({size_text(sum(known))})" if known and len(known) == len(sizes) else count


def maintenance_parts(report: MaintenanceReport) -> Iterator[Part]:
    """Yield the result of each part, and the total."""
    for stage in report.stages:
        where = "" if stage.stage.branch is None else f" branch {stage.stage.branch}"
        yield f"{stage.stage.kind}{where}: {stage.outcome} in {duration_text(stage.duration_s)}"
        yield from (f"  {text}" for text in compaction_texts(stage.compactions))
        if stage.collection is not None:
            yield f"  {gc_text(stage.collection)}"
            yield from (f"  warning: {text}" for text in stage.collection.warnings)
        if stage.outcome == "skipped":
            yield "  nothing is deleted from a store with corrupt data; run `cnr verify`"
    yield (
        f"{report.url}: {report.outcome} in {duration_text(report.duration_s)}, "
        f"{size_text(report.rewritten_bytes)} rewritten, {size_text(report.deleted_bytes)} deleted"
    )


def rate_lines(rate: Any) -> Iterator[str]:
    """Yield what a training recorded about its restores and scales, if anything."""
    if rate is None:
        return
    if rate["restores"]:
        yield f"the training was restored {count_text(rate['restores'], 'time')} before this version"
    if rate["calibrated"]:
        yield f"scales that a validation chose: {', '.join(rate['calibrated'])}"


def place_text(document: Document) -> str:
    """Return the URL, with the branch if there is one."""
    return document["url"] if document["branch"] is None else f"{document['url']}, branch {document['branch']}"


def until_text(expires_ms: int | None, never: str) -> str:
    """Return the expiry time as text, or ``never``."""
    return never if expires_ms is None else time_text(expires_ms)
