"""The demonstration on a small model: demo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cnr_store import BadInput
from cnr_store_tools.exits import need
from cnr_store_tools.options import Json, check_bits
from cnr_store_tools.output import Part, emit, table, to_document
from cnr_store_tools.text import duration_text, one_line, size_text

if TYPE_CHECKING:  # with torch, which is slow to import
    from cnr_store_tools.demo.run import DemoReport

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
    """Train a small model, kill it during a save, and resume it. Compares the result with an unkilled training."""
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
    yield "the baseline stalls until whole tables are written; in a new environment it also compiles kernels, once"
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


def _print_line(line: str) -> None:
    sys.stderr.write(f"{one_line(line)}\n")
    sys.stderr.flush()


def _silent(line: str) -> None:
    """Print nothing."""
