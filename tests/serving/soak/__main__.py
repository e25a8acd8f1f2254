"""The serving soak as a program: ``python -m tests.serving.soak --seconds 60 --kills 10``; ``make serve-demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from cnr_store_tools.output import Part, emit, table
from tests.serving.soak.report import ServeOptions, ServeReport
from tests.serving.soak.run import run_soak


def report_parts(report: ServeReport) -> Iterator[Part]:
    """Yield the figures and the result."""
    options = report.options
    yield table("processes", report.processes, ("name", "starts", "kills", "crashes"))
    title = f"{options.rows:,} rows, {options.seconds:.0f} s together, seed {options.seed}"
    yield table(
        title, [{"figure": name, "value": value} for name, value in report.figures.items()], ("figure", "value")
    )
    yield table("copies against the last snapshot", report.copies, ("name", "version", "rows", "different_rows"))
    yield from (f"problem: {problem}" for problem in report.problems)
    if not report.problems:
        yield "nothing torn, nothing lost, every copy equal bit for bit, and every process made progress"
    yield f"the store is kept at {options.store}: cnr log {options.store}, cnr show {options.store}"


def main() -> int:
    """Run the soak of the arguments; return 1 if it found a problem."""
    parser = argparse.ArgumentParser(description="Train, compact, serve and learn on one store while processes die.")
    defaults = ServeOptions()
    parser.add_argument("--store", default=defaults.store, help="where to write the store")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="seconds that all processes run")
    parser.add_argument("--kills", type=int, default=defaults.kills, help="number of kills; each process is restarted")
    parser.add_argument("--rows", type=int, default=defaults.rows, help="total rows of all tables")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="random seed of traffic, model and kills")
    report = run_soak(ServeOptions(**vars(parser.parse_args())), lambda line: print(line, file=sys.stderr, flush=True))
    emit({}, report_parts(report), as_json=False)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
