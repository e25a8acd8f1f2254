"""Demonstrations on a small model: demo, serve-demo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cnr_store import BadInput
from cnr_store_tools.exits import ExitCode, need
from cnr_store_tools.options import Json, check_bits
from cnr_store_tools.output import Part, emit, table, to_document
from cnr_store_tools.text import duration_text, one_line, size_text

if TYPE_CHECKING:  # with torch and pyarrow, which are slow to import
    from cnr_store_tools.demo.run import DemoReport
    from cnr_store_tools.serve_demo.report import ServeReport, Spread

DEFAULT_BITS = 4


def demo(
    store: Annotated[str, typer.Option("--store", help="Where to write the store.")] = "./demo-store",
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep every bit: the resumed run equals the uninterrupted one.")
    ] = False,
    bits: Annotated[
        int | None, typer.Option("--bits", help=f"As exact as rows of 2, 3, 4 or 8 bits; default {DEFAULT_BITS}.")
    ] = None,
    policy: Annotated[
        Literal["baseline", "consecutive", "one_shot", "intermittent"],
        typer.Option("--policy", help="What each save contains."),
    ] = "consecutive",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 360,
    force: Annotated[bool, typer.Option("--force", help="Replace a store that is not from a demo.")] = False,
    json: Json = False,
) -> None:
    """Train a small model, kill it during a save, restore, finish, and compare."""
    if exact and bits is not None:
        raise BadInput("give --exact or --bits, not both")
    width = check_bits(DEFAULT_BITS if bits is None else bits)
    need("torch")
    from cnr_store_tools.demo.run import DemoOptions, run_demo

    options = DemoOptions(store=store, is_exact=exact, bits=width, policy=policy, steps=steps, force=force)
    report = run_demo(options, _silent if json else _print_line)
    emit(to_document(report), demo_parts(report), as_json=json)


def demo_parts(report: DemoReport) -> Iterator[Part]:
    """Yield the checkpoints, the kill, both runs, and commands to try next."""
    options, kill = report.options, report.kill
    how = "exact" if options.is_exact else f"{options.bits}-bit quality"
    columns = ("version", "kind", "step", "rows", "size_bytes", "ratio", "stall_s")
    before = [one for one in report.checkpoints if one.version <= report.restored_version]
    yield (
        f"{report.num_samples:,} samples, {report.table_rows:,} rows x {report.dim}, {how}, {options.policy}; "
        f"fp32 baseline {size_text(report.fp32_bytes)}; {report.seconds:.0f} s"
    )
    yield table("saved before the kill", before, columns)
    yield f"killed during a save: {kill.objects} objects, {size_text(kill.size_bytes)}, no commit"
    yield (
        f"restored version {report.restored_version}, step {report.restored_step}, in {duration_text(report.restore_s)}"
    )
    yield table("saved after it", report.checkpoints[len(before) :], columns)
    runs = [{"run": name, **to_document(run)} for name, run in (
        ("uninterrupted", report.uninterrupted), ("killed, restored, finished", report.resumed),
    )]  # fmt: skip
    yield table("evaluated on later samples", runs, ("run", "steps", "auc", "logloss"))
    verdict = "NOT EQUAL: this is a defect" if report.max_weight_difference else "equal bit for bit"
    yield f"largest difference of a weight: {report.max_weight_difference:.3g}" + (
        f"; {verdict}" if options.is_exact else ""
    )
    yield f"the store is kept at {options.store}; next:"
    yield f"  cnr show {options.store}    tables, chain, encodings, sizes by kind of byte"
    yield f"  cnr log {options.store}     every commit record"
    yield f"  cnr verify {options.store}  read and check every object"
    yield f"  cnr export {options.store} weights.safetensors"
    if not options.is_exact:
        yield "  cnr demo --exact          the same, with a difference of exactly zero"


def serve_demo(
    seconds: Annotated[float, typer.Option("--seconds", help="Seconds that all processes run together.")] = 60.0,
    store: Annotated[str, typer.Option("--store", help="Where to write the store.")] = "./serve-demo-store",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of traffic, model and kills.")] = 0,
    kills: Annotated[int, typer.Option("--kills", min=0, help="Number of kills; each process is restarted.")] = 10,
    rows: Annotated[int, typer.Option("--rows", help="Total rows of all tables.")] = 100_000,
    force: Annotated[bool, typer.Option("--force", help="Replace a store that is not from a demo.")] = False,
    json: Json = False,
) -> None:
    """Train, compact, serve and learn on one store while processes are killed. Exit code 1 if a check fails."""
    need("torch")
    from cnr_store_tools.serve_demo.report import ServeOptions
    from cnr_store_tools.serve_demo.run import run_serve_demo

    options = ServeOptions(store=store, seconds=seconds, seed=seed, kills=kills, rows=rows, force=force)
    report = run_serve_demo(options, _silent if json else _print_line)
    emit({"is_sound": not report.problems, **to_document(report)}, serve_demo_parts(report), as_json=json)
    if report.problems:
        raise typer.Exit(ExitCode.PROBLEMS)


def serve_demo_parts(report: ServeReport) -> Iterator[Part]:
    """Yield the figures and the result."""
    figures = {
        "versions saved": f"{report.versions}, {report.steps:,} steps",
        "acknowledged saves, lost": f"{report.acknowledged}, {report.lost}",
        "compactions": f"{report.compactions}, {size_text(report.deleted_bytes)} deleted",
        "lookups, torn, repeated": f"{report.lookups:,}, {report.torn}, {report.retries:,}",
        "publish to served": spread_text(report.publish_to_served_s),
        "staleness": spread_text(report.staleness_s),
        "apply": spread_text(report.apply_s),
        "rows compared, different": f"{report.compared_rows:,}, {report.different_rows}",
        "polls that failed": report.failed_polls,
        "change stream": f"{report.learned_rows:,} rows, {report.warm_starts} starts from a snapshot, "
        f"{report.resumes} from its cursor",
    }
    options = report.options
    yield table("processes", report.processes, ("name", "starts", "kills", "crashes"))
    title = f"{options.rows:,} rows, {options.seconds:.0f} s together, seed {options.seed}"
    yield table(title, [{"figure": name, "value": value} for name, value in figures.items()], ("figure", "value"))
    yield table("copies against the last snapshot", report.copies, ("name", "version", "rows", "different_rows"))
    yield from (f"problem: {problem}" for problem in report.problems)
    if not report.problems:
        yield "nothing torn, nothing lost, every copy equal bit for bit, and every process made progress"
    yield f"the store is kept at {options.store}: cnr log {options.store}, cnr show {options.store}"


def spread_text(spread: Spread) -> str:
    """Return the median, the 99th percentile and the number of values as text."""
    if not spread.count:
        return "-"
    return f"p50 {duration_text(spread.p50)}, p99 {duration_text(spread.p99)} ({spread.count:,})"


def _print_line(line: str) -> None:
    sys.stderr.write(f"{one_line(line)}\n")
    sys.stderr.flush()


def _silent(line: str) -> None:
    """Print nothing."""
