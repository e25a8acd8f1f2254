"""What every benchmark of the store shares: paired timing, peak memory in a fresh process, bytes on disk, the report.

A figure counts only as a ratio within one run: the two sides alternate, so that other work on the machine weighs on
both alike. Timings are kept as pyperf benchmarks, with what pyperf knows of the machine. Run as a script it is the
fresh process: ``harness.py FILE FUNCTION JSON`` calls one function of a benchmark and prints what it returns as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyperf

# Scripts share helpers with the tests; imports of `tests.support` stand behind that of this module.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MIB = 1024 * 1024
DATA_FOLDER = "/var/tmp"
"""Not /tmp, which is memory on many machines: what is measured is a disk."""

QUICK_ROWS, QUICK_REPEATS = 100_000, 2

_LIBRARIES = ("numpy", "numba", "zstandard", "zarr", "torch", "safetensors")


@dataclass(frozen=True, slots=True)
class Line:
    """One ratio, its goal (None: for information) and the spread over the pairs or repeats."""

    name: str
    value: float
    goal: float | None
    sense: Literal["at most", "at least"]
    unit: str
    low: float
    high: float

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.sense == "at most" else self.value >= self.goal


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall and CPU seconds of one side, round by round; CPU is that of all threads of the process."""

    wall: list[float]
    cpu: list[float]

    def __str__(self) -> str:
        low, middle, high = spread(self.wall)
        return f"{middle:.3g} s ({low:.3g} to {high:.3g}; CPU {statistics.median(self.cpu):.3g})"

    def part(self, start: int, stop: int) -> Timings:
        """Return the rounds [start, stop)."""
        return Timings(self.wall[start:stop], self.cpu[start:stop])

    def plus(self, other: Timings) -> Timings:
        """Return the sums, round by round."""
        return Timings(
            [a + b for a, b in zip(self.wall, other.wall, strict=True)],
            [a + b for a, b in zip(self.cpu, other.cpu, strict=True)],
        )


Cell = str | float | int | None
"""What a table holds; None is an empty cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns and rows of equal length, with a note below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a plot; ``low`` and ``high`` are its spread, point by point."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over one axis; ``name`` is that of the picture's file."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """A row of the README's table: what was measured, the figure, its goal, and the command that prints it."""

    what: str
    measured: str
    goal: str
    command: str


@dataclass(slots=True)
class Report:
    """The result of one benchmark: lines with goals, tables, plots, notes, printed in the order in which they come."""

    title: str
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    headlines: list[Headline] = field(default_factory=list)
    timed: dict[str, Timings] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)
    """Kind and position of each line, note, table and plot, as they came."""

    def start(self) -> None:
        """Print title and machine."""
        print(f"{self.title}\n{machine()}\n", flush=True)

    def note(self, text: str) -> None:
        """Print and keep a line without a goal."""
        self._keep("notes", self.notes, text)
        print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> None:
        """Add a table and print it aligned.

        Raises
        ------
        ValueError
            A row has another length than the columns.
        """
        made = Table(title, tuple(columns), tuple(tuple(row) for row in rows), note)
        for row in made.rows:
            if len(row) != len(made.columns):
                raise ValueError(f"table {title!r} has {len(made.columns)} columns, a row has {len(row)}: {row}")
        self._keep("tables", self.tables, made)
        print(f"\n{aligned(made)}\n", flush=True)

    def plot(
        self,
        name: str,
        title: str,
        x_label: str,
        y_label: str,
        series: Mapping[str, Series],
        *,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        """Keep a plot for the page of all benchmarks; nothing is printed.

        Raises
        ------
        ValueError
            A curve has as many x as y not, or its spread is of another length.
        """
        for label, one in series.items():
            lengths = {len(values) for values in (one.x, one.y, one.low, one.high) if values is not None}
            if len(lengths) != 1:
                raise ValueError(f"curve {label!r} of plot {name!r} has lists of lengths {sorted(lengths)}")
        self._keep("plots", self.plots, Plot(name, title, x_label, y_label, dict(series), log_x, log_y))

    def headline(self, what: str, measured: str, goal: str, command: str) -> None:
        """Keep a row for the README's table."""
        self.headlines.append(Headline(what, measured, goal, command))

    def timings(self, name: str, timings: Timings) -> None:
        """Keep the seconds of one side for the JSON, where pyperf's commands can read them; nothing is printed."""
        self.timed[name] = timings

    def add(
        self,
        name: str,
        value: float,
        *,
        goal: float | None = None,
        sense: Literal["at most", "at least"] = "at most",
        unit: str = "x",
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        """Add a figure and print it."""
        line = Line(name, value, goal, sense, unit, value if low is None else low, value if high is None else high)
        self._keep("lines", self.lines, line)
        wanted = "" if goal is None else f"goal {sense} {_number(goal)}{unit}"
        verdict = {None: "", True: "pass", False: "MISS"}[line.is_met]
        spread = f"({_number(line.low)} to {_number(line.high)})" if line.low != line.high else ""
        print(f"  {name:<58} {_number(value) + unit:>10} {spread:<18} {wanted:<20} {verdict}", flush=True)

    def add_ratio(self, name: str, first: Timings, second: Timings, goal: float | None = None) -> None:
        """Add a ratio of timings that alternated: of the medians, its spread over the rounds; and the seconds.

        The ratio of CPU seconds stands beside it: on a busy machine it is the steadier one, but it knows no waiting.
        """
        low, middle, high = spread([a / b for a, b in zip(first.wall, second.wall, strict=True)])
        value = statistics.median(first.wall) / statistics.median(second.wall)
        self.add(name, value, goal=goal, low=low, high=high)
        cpu = statistics.median(first.cpu) / max(statistics.median(second.cpu), 1e-9)
        self.note(f"      {first} against {second}; median of the rounds' ratios {middle:.2f}; CPU {cpu:.2f}x")
        self.timings(f"{name}: first", first)
        self.timings(f"{name}: second", second)

    def finish(self, path: str | None) -> None:
        """Print the summary; write everything to ``path`` as JSON if it is given."""
        missed = [line.name for line in self.lines if line.is_met is False]
        goals = [line for line in self.lines if line.is_met is not None]
        print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met; load {load()}")
        if path is not None:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(self.as_document(), indent=1) + "\n")
            if self.timed:
                pyperf_suite(self.timed).dump(str(target.with_suffix(".pyperf.json")), replace=True)

    def as_document(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "title": self.title,
            "machine": machine(),
            "load": load(),
            "when": time.strftime("%Y-%m-%d", time.gmtime()),
            "lines": [asdict(line) | {"met": line.is_met} for line in self.lines],
            "notes": self.notes,
            "tables": [asdict(table) for table in self.tables],
            "plots": [asdict(plot) for plot in self.plots],
            "headlines": [asdict(row) for row in self.headlines],
            "order": self.order,
        }

    def _keep(self, kind: str, kept: list[Any], one: Any) -> None:
        self.order.append((kind, len(kept)))
        kept.append(one)


def alternating(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    before_round: Callable[[], object] | None = None,
    before_each: Callable[[], object] | None = None,
) -> dict[str, Timings]:
    """Time several functions in turn, in the opposite order in every other round; returns them by name.

    What runs before a round or a function is untimed. Nothing is warmed up here: the caller does, where a first call
    differs.
    """
    found = {name: Timings([], []) for name in sides}
    for repeat in range(repeats):
        if before_round is not None:
            before_round()
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            if before_each is not None:
                before_each()
            gc.collect()
            cpu = time.process_time()
            found[name].wall.append(timed(sides[name]))
            found[name].cpu.append(time.process_time() - cpu)
    return found


def pyperf_suite(sides: Mapping[str, Timings]) -> pyperf.BenchmarkSuite:
    """Return wall seconds as pyperf keeps them: one run per side, with the machine's description."""
    benchmarks = [
        pyperf.Benchmark([pyperf.Run(side.wall, metadata={"name": name, "unit": "second"})])
        for name, side in sides.items()
    ]
    return pyperf.BenchmarkSuite(benchmarks)


def aligned(table: Table) -> str:
    """Return a table as text in columns: numbers to the right, the title above, the note below."""
    cells = [list(table.columns), *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    is_number = [
        all(not isinstance(row[column], str) for row in table.rows) and bool(table.rows)
        for column in range(len(table.columns))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([table.title, *lines, *([table.note] if table.note else [])])


def shown(cell: Cell) -> str:
    """Return a cell as a reader sees it: numbers with three figures or all of their digits, whichever is more."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if not math.isfinite(cell):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"


def slug(name: str) -> str:
    """Return a name for files: letters and digits of it, others as a dash.

    >>> slug("SeaweedFS, 1 Gbit/s")
    'SeaweedFS--1-Gbit-s'
    """
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def timed(work: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return (min, median, max)."""
    return min(values), statistics.median(values), max(values)


def machine() -> str:
    """Return CPU model, cores, load and the versions of what is measured."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found.group(1) if found else model
    versions = []
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, load {load()}, Python {platform.python_version()}, {', '.join(versions)}"


def load() -> str:
    """Return the machine's load averages."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def arguments(description: str | None, *, rows: int, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has.

    ``--quick`` makes ``rows`` and ``repeats`` small, unless they are given behind it; what else it leaves out each
    benchmark decides.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--quick", action=_Quick, nargs=0, default=False, help="a small run: whether it works, not how fast"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--folder", default=DATA_FOLDER, help="where data is written, and removed again")
    return parser


@contextlib.contextmanager
def data_folder(parent: str) -> Iterator[Path]:
    """Yield a folder on the measured disk that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="cnr-bench-", dir=parent) as folder:
        yield Path(folder)


def fsync_file(path: Path) -> None:
    """Make a file and its entry in its folder durable."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder under ``folder`` durable."""
    for path in [*sorted(folder.rglob("*")), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Return (sum of file lengths, `du` in blocks) of the files under ``folder``."""
    sizes = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(size.st_size for size in sizes), sum(512 * size.st_blocks for size in sizes)


class _Quick(argparse.Action):
    """Sets ``quick``, and small numbers of rows and repeats."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *rest: object) -> None:
        namespace.quick = True
        namespace.rows = min(namespace.rows, QUICK_ROWS)
        namespace.repeats = min(namespace.repeats, QUICK_REPEATS)


class PeakMemory:
    """Peak resident memory of this process beyond what it holds now (Linux: the kernel's own high-water mark)."""

    def __init__(self) -> None:
        self.restart()
        self.base_bytes = _status_bytes("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far, and keep what it is measured against."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def beyond_bytes(self) -> int:
        """Bytes of the peak since the last restart beyond what was resident at first."""
        return _status_bytes("VmHWM") - self.base_bytes


def in_fresh_process(script: str, function: str, **options: Any) -> Any:
    """Call ``function(**options)`` of a benchmark in a new interpreter; returns what it returned, through JSON.

    Raises
    ------
    subprocess.CalledProcessError
    """
    command = [sys.executable, __file__, script, function, json.dumps(options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _call(script: str, function: str, options: str) -> None:
    sys.path.insert(0, str(Path(script).parent))
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    print(json.dumps(getattr(module, function)(**json.loads(options))))


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def _number(value: float) -> str:
    if value != 0 and math.isfinite(value) and abs(value) < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    _call(*sys.argv[1:4])
