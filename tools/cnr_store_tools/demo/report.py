"""What a demonstration found, as one table for a terminal."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cnr_store_tools.demo.records import Checkpoint, DemoReport, RunQuality
from cnr_store_tools.text import size_text


def render(report: DemoReport, console: Console) -> None:
    """Print the table, and what to try next."""
    console.print(demo_table(report))
    if report.options.is_exact:
        verdict = "equal bit for bit" if report.max_weight_difference == 0 else "NOT EQUAL: this is a defect"
        console.print(f"Killed, restored and finished against never interrupted: {verdict}.")
    store = escape(report.options.store)
    console.print(f"The store is left at [bold]{store}[/bold]. Next:")
    for command, effect in (
        (f"cnr show {store}", "tables, chain, encodings, sizes by kind of byte"),
        (f"cnr log {store}", "every commit record"),
        (f"cnr verify {store}", "read and check every object"),
        (f"cnr export {store} weights.safetensors", "the weights, for any program"),
        *(() if report.options.is_exact else (("cnr demo --exact", "the same, with a difference of exactly zero"),)),
    ):
        console.print(f"  [cyan]{command}[/cyan]  {effect}")


def demo_table(report: DemoReport) -> Table:
    """Return the table: checkpoints in order, the kill between them, and both runs at the end. Pure."""
    options = report.options
    how = "exact" if options.is_exact else f"{options.bits}-bit quality"
    table = Table(
        title=(
            f"{report.num_samples:,} samples, {report.table_rows:,} rows x {report.dim}, {how}, {options.policy}; "
            f"fp32 full checkpoint {size_text(report.fp32_bytes)}"
        ),
        caption=f"{report.seconds:.0f} s",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for name in ("step", "rows", "bytes", "vs fp32", "stall", "AUC", "logloss", "max |dw|"):
        table.add_column(name, justify="right", no_wrap=True)
    before = [one for one in report.checkpoints if one.version <= report.restored_version]
    for one in before:
        table.add_row(*_checkpoint_cells(one))
    table.add_section()
    kill = report.kill
    table.add_row("[red]killed in a save[/red]", "", f"{kill.objects} objects", f"{kill.size_bytes:,}", "no commit")
    table.add_row(
        f"[green]restored v{report.restored_version}[/green]", str(report.restored_step), "", "", "",
        f"{report.restore_s:.2f} s",
    )  # fmt: skip
    table.add_section()
    for one in report.checkpoints[len(before) :]:
        table.add_row(*_checkpoint_cells(one))
    table.add_section()
    table.add_row("uninterrupted", *_quality_cells(report.uninterrupted), "-")
    table.add_row("killed, finished", *_quality_cells(report.resumed), f"{report.max_weight_difference:.3g}")
    return table


def _checkpoint_cells(one: Checkpoint) -> list[str]:
    stall = "-" if one.stall_s is None else f"{1000 * one.stall_s:.1f} ms"
    return [
        f"v{one.version} {one.kind}",
        str(one.step),
        f"{one.rows:,}",
        f"{one.size_bytes:,}",
        f"{one.ratio:.1f}x",
        stall,
    ]


def _quality_cells(run: RunQuality) -> list[str]:
    values = ["-" if math.isnan(value) else f"{value:.4f}" for value in (run.auc, run.logloss)]
    return [str(run.steps), "", "", "", "", *values]
