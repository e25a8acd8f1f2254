"""One Markdown page of what the suites found: tables, goals, notes, plots as SVG beside it, machine and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import matplotlib as mpl
from matplotlib.figure import Figure

PAGE = "report.md"
INTRODUCTION = """# Benchmarks

What `make bench` printed on the machine that each section names. A ratio's two sides took turns in one run; in
brackets is its spread. A goal is what the project wants of itself, met or not. Other figures (seconds, bytes per
second) are of that machine and that hour.
"""

mpl.rcParams["svg.hashsalt"] = "cnr_store"  # the same picture is the same file
mpl.rcParams["svg.fonttype"] = "none"


def write(folder: Path, suites: Sequence[tuple[str, str, str]], into: Path | None = None) -> Path:
    """Write the page of the results that lie in ``folder``, and its plots beside it; returns its path.

    Parameters
    ----------
    folder
        Where each suite's ``NAME.json`` lies; those that are missing are left out.
    into
        Folder of the page, by default the same one.
    suites
        Name, what it is about, and the command that runs it, in the order of the page.
    """
    found = [
        (name, about, command, json.loads((folder / f"{name}.json").read_text()))
        for name, about, command in suites
        if (folder / f"{name}.json").exists()
    ]
    target = into or folder
    target.mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION, *headline_table([document for *_, document in found])]
    for name, about, command, document in found:
        parts += [f"## {name}: {about}\n", f"    {command}\n", f"{document['when']}, {document['machine']}.\n"]
        parts += section(name, document, target)
    written = target / PAGE
    written.write_text("\n".join(parts).rstrip() + "\n")
    return written


def headline_table(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the rows that suites put forward, as Markdown; empty if there are none."""
    rows = [row for document in documents for row in document["headlines"]]
    if not rows:
        return []
    lines = [f"| {row['what']} | {row['measured']} | {row['goal']} | `{row['command']}` |" for row in rows]
    return ["| what | measured | goal | command |\n|---|---|---|---|", *lines, ""]


def section(name: str, document: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield what one suite found, as Markdown, in the order in which it came; draws its plots into ``folder``.

    Figures and notes between two tables or plots stand together, the figures first.
    """
    figures: list[str] = []
    notes: list[str] = []
    for kind, position in document["order"]:
        one = document[kind][position]
        if kind == "lines":
            figures.append(_goal_row(one))
        elif kind == "notes":
            notes += [f"    {line.strip()}" for line in one.splitlines() if line.strip()]
        else:
            yield from _figures_and_notes(figures, notes)
            figures, notes = [], []
            if kind == "tables":
                yield _table(one)
            else:
                picture = f"{name}-{one['name']}.svg"
                draw(one, folder / picture)
                yield f"![{one['title']}]({picture})\n"
    yield from _figures_and_notes(figures, notes)


def draw(plot: Mapping[str, Any], path: Path) -> None:
    """Draw one plot as SVG: a curve per series, its spread as a band."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, one in plot["series"].items():
        (line,) = axes.plot(one["x"], one["y"], marker="o", markersize=3, label=label)
        if one["low"] is not None and one["high"] is not None:
            axes.fill_between(one["x"], one["low"], one["high"], color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(title=plot["title"], xlabel=plot["x_label"], ylabel=plot["y_label"])
    axes.set_xscale("log" if plot["log_x"] else "linear")
    axes.set_yscale("log" if plot["log_y"] else "linear")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def _figures_and_notes(figures: list[str], notes: list[str]) -> Iterator[str]:
    if figures:
        yield "| figure | value | spread | goal | |\n|---|---|---|---|---|\n" + "\n".join(figures) + "\n"
    if notes:
        yield "\n".join(notes) + "\n"


def _goal_row(line: Mapping[str, Any]) -> str:
    value, low, high = (harness.shown(float(line[key])) + line["unit"] for key in ("value", "low", "high"))
    around = "" if line["low"] == line["high"] else f"{low} to {high}"
    goal = "" if line["goal"] is None else f"{line['sense']} {harness.shown(float(line['goal']))}{line['unit']}"
    verdict = {None: "", True: "met", False: "**missed**"}[line["met"]]
    return f"| {_escaped(line['name'])} | {value} | {around} | {goal} | {verdict} |"


def _table(table: Mapping[str, Any]) -> str:
    head = "| " + " | ".join(_escaped(column) for column in table["columns"]) + " |"
    rule = "|" + "---|" * len(table["columns"])
    rows = ["| " + " | ".join(_escaped(harness.shown(cell)) for cell in row) + " |" for row in table["rows"]]
    note = ["", table["note"]] if table["note"] else []
    return "\n".join([f"**{table['title']}**", "", head, rule, *rows, *note]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
