"""How a serving demonstration stands and what it found, as tables for a terminal and lines for everything else."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cnr_store_tools.serve_demo.records import Progress, ServeReport, Spread
from cnr_store_tools.text import one_line, size_text

MAX_NEWS = 8
LINE_EVERY_S = 5.0

Watch = Callable[[Progress], None]


@contextmanager
def progress_shown() -> Iterator[Watch]:
    """Yield a function that shows how a run stands, on stderr: in place on a terminal, else line by line."""
    if sys.stderr.isatty():
        with Live(console=Console(stderr=True), transient=True) as live:
            yield lambda progress: live.update(progress_view(progress))
        return
    told = Lines()
    yield told.show


class Lines:
    """Progress as lines: news at once, how things stand every few seconds."""

    def __init__(self) -> None:
        self._news = 0
        self._phase = ""
        self._next_s = 0.0

    def show(self, progress: Progress) -> None:
        """Write what is new."""
        lines = [*progress.news[self._news :]]
        self._news = len(progress.news)
        if progress.phase != self._phase or progress.elapsed_s >= self._next_s:
            self._phase = progress.phase
            self._next_s = progress.elapsed_s + LINE_EVERY_S
            lines.append(progress_line(progress))
        for line in lines:
            sys.stderr.write(f"{one_line(line)}\n")
        sys.stderr.flush()


def phase_text(progress: Progress) -> str:
    """Return what a run is at. Pure."""
    if progress.phase == "running":
        return f"{progress.elapsed_s:.0f} of {progress.seconds:.0f} s"
    return progress.phase


def progress_line(progress: Progress) -> str:
    """Return how a run stands as one line. Pure."""
    served = ", ".join(f"v{version}" if version >= 0 else "-" for _, version in progress.served)
    return (
        f"{phase_text(progress)}: {progress.versions} versions, {progress.folds} folds, "
        f"serving {served}, {progress.lookups:,} lookups, {progress.torn} torn, "
        f"publish to served p50 {time_text(progress.publish_to_served_s.p50)}"
    )


def progress_view(progress: Progress) -> RenderableType:
    """Return how a run stands, to be drawn in place of the one before. Pure."""
    table = _figures(phase_text(progress))
    for name, state in progress.states:
        version = dict(progress.served).get(name, -1)
        table.add_row(name, state if version < 0 else f"{state}, serving version {version}")
    table.add_section()
    table.add_row("versions saved, folds", f"{progress.versions}, {progress.folds}")
    table.add_row("lookups, torn", f"{progress.lookups:,}, {progress.torn}")
    table.add_row("publish to served", spread_text(progress.publish_to_served_s))
    table.add_row("apply", spread_text(progress.apply_s))
    table.add_row("rows learned from the change stream", f"{progress.learned_rows:,}")
    return Group(table, *(escape(line) for line in progress.news[-MAX_NEWS:]))


def render(report: ServeReport, console: Console) -> None:
    """Print what was found, and the verdict."""
    console.print(report_table(report))
    for final in report.finals:
        same = "equal bit for bit" if not final.different_rows else f"{final.different_rows} ROWS DIFFER"
        console.print(f"{final.name}: all {final.rows:,} rows against the snapshot of version {final.version}: {same}")
    for problem in report.problems:
        console.print(f"[red]problem:[/red] {escape(problem)}")
    if not report.problems:
        console.print("[green]Nothing torn, nothing lost, every copy equal, and everything moved on.[/green]")
    store = escape(report.options.store)
    console.print(
        f"The store is left at [bold]{store}[/bold]: [cyan]cnr log {store}[/cyan], [cyan]cnr show {store}[/cyan]"
    )


def report_table(report: ServeReport) -> Table:
    """Return the table of figures. Pure."""
    saving, serving, learning = report.saving, report.serving, report.learning
    options = report.options
    table = _figures(f"{options.rows:,} rows, {options.seconds:.0f} s together, seed {options.seed}")
    for one in report.processes:
        ready = f"ready after {time_text(one.ready_s.p50)}"
        table.add_row(one.name, f"{one.starts} starts, {one.kills} kills, {one.crashes} ended by itself; {ready}")
    table.add_section()
    table.add_row("versions saved", f"{saving.versions}, {saving.steps:,} steps, {size_text(saving.saved_bytes)}")
    table.add_row("acknowledged saves, lost", f"{saving.acknowledged}, {saving.lost}")
    table.add_row(
        "folds", f"{saving.folds}, {size_text(saving.folded_bytes)} written, {size_text(saving.deleted_bytes)} deleted"
    )
    table.add_section()
    table.add_row("lookups", f"{serving.lookups:,} of {serving.rows:,} rows")
    table.add_row("torn reads", str(serving.torn))
    table.add_row("repeated lookups", f"{serving.retries:,}")
    table.add_row("publish to served", spread_text(serving.publish_to_served_s))
    table.add_row("staleness", spread_text(serving.staleness_s))
    table.add_row(
        "apply",
        f"{spread_text(serving.apply_s)}; {serving.applied_rows:,} rows, {size_text(serving.applied_bytes)}",
    )
    table.add_row(
        "rows compared with snapshots", f"{serving.compared_rows:,}, {serving.different_rows} of them different"
    )
    table.add_row("polls that failed", str(serving.errors))
    table.add_section()
    table.add_row(
        "change stream", f"{learning.rows:,} rows in {learning.batches:,} batches, {learning.versions_seen} versions"
    )
    table.add_row(
        "online training",
        f"{learning.steps:,} steps, {learning.warm_starts} starts from a snapshot, {learning.resumes} from its cursor",
    )
    return table


def spread_text(spread: Spread) -> str:
    """Return median, 99th percentile and how many values they are of. Pure."""
    if not spread.count:
        return "-"
    return f"p50 {time_text(spread.p50)}, p99 {time_text(spread.p99)} ({spread.count:,})"


def time_text(seconds: float) -> str:
    """Return a short time.

    >>> time_text(0.0123), time_text(2.5), time_text(float("nan"))
    ('12.3 ms', '2.50 s', '-')
    """
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _figures(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("")
    return table
