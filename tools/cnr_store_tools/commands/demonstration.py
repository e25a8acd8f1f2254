"""Show what the library does, on a small model: demo, serve-demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from cnr_store import BadInput
from cnr_store_tools import documents
from cnr_store_tools.exits import ExitCode
from cnr_store_tools.options import Debug, Json, check_bits
from cnr_store_tools.output import emit, make_console
from cnr_store_tools.text import one_line

DEFAULT_BITS = 4


def demo(
    data: Annotated[
        Path | None,
        typer.Option("--data", help="RecBole .inter, Criteo-style CSV or TSV, or Parquet; generated if not given."),
    ] = None,
    store: Annotated[str, typer.Option("--store", help="Where the store is left.")] = "./demo-store",
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep every bit: the resumed run equals the other one.")
    ] = False,
    bits: Annotated[
        int | None, typer.Option("--bits", help=f"As exact as rows of 2, 3, 4 or 8 bits ({DEFAULT_BITS} if not given).")
    ] = None,
    policy: Annotated[
        Literal["full", "consecutive", "one_shot", "intermittent"],
        typer.Option("--policy", help="What each save holds."),
    ] = "consecutive",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a store that no demonstration left behind.")] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Train a small model, kill it in the middle of a save, restore, finish, and compare."""
    if exact and bits is not None:
        raise BadInput("give --exact or --bits, not both")
    width = check_bits(DEFAULT_BITS if bits is None else bits)
    # Only this command needs the demonstration, and through it pyarrow.
    from cnr_store_tools.demo import report as demo_report
    from cnr_store_tools.demo.records import DemoOptions
    from cnr_store_tools.demo.run import run_demo

    options = DemoOptions(
        data=data, store=store, is_exact=exact, bits=width, policy=policy, steps=steps, force=force
    )  # fmt: skip
    report = run_demo(options, _silent if json else _tell)
    if json:
        emit(documents.demo_document(report), lambda *_: None, as_json=True)
    else:
        demo_report.render(report, make_console(markup=True))


def _tell(line: str) -> None:
    sys.stderr.write(f"{one_line(line)}\n")
    sys.stderr.flush()


def _silent(line: str) -> None:
    """Say nothing."""


def serve_demo(
    seconds: Annotated[float, typer.Option("--seconds", help="How long all processes run together.")] = 60.0,
    store: Annotated[str, typer.Option("--store", help="Where the store is left.")] = "./serve-demo-store",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of traffic, model and the times of the kills.")] = 0,
    kills: Annotated[int, typer.Option("--kills", min=0, help="How many processes are killed and restarted.")] = 10,
    rows: Annotated[int, typer.Option("--rows", help="Rows of all tables together.")] = 100_000,
    force: Annotated[bool, typer.Option("--force", help="Replace a store that no demonstration left behind.")] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - as above
) -> None:
    """Train, compact, serve and learn on one store while processes are killed. Exit code 1 if anything is wrong."""
    from cnr_store_tools.serve_demo import report as serve_report
    from cnr_store_tools.serve_demo.records import ServeOptions
    from cnr_store_tools.serve_demo.run import run_serve_demo

    options = ServeOptions(store=store, seconds=seconds, seed=seed, kills=kills, rows=rows, force=force)
    if json:
        report = run_serve_demo(options)
        emit(documents.serve_demo_document(report), lambda *_: None, as_json=True)
    else:
        with serve_report.progress_shown() as show:
            report = run_serve_demo(options, show)
        serve_report.render(report, make_console(markup=True))
    if report.problems:
        raise typer.Exit(ExitCode.PROBLEMS)
