"""The tables and plots of the quality suite: all settings, fewest bytes that hold, equal quality."""

from __future__ import annotations

import math
from collections.abc import Sequence

import harness
from click_cases import Case
from quality_points import Limits, Noise, Point, Rule, bytes_at, floor_of, holds, smallest
from restored_runs import cross_entropy

GOAL = 0.5
RULES: tuple[tuple[Rule, str], ...] = (("budget", "0.01 %"), ("spread", "spread"), ("either", "either"))

Judged = tuple[Noise, list[Point]]
"""The uninterrupted runs and the restored ones, of one model."""

_LOSSES = "losses in % of the uninterrupted run's, mean ± half of the 95 % interval over paired seeds, + is worse"


def print_case(report: harness.Report, case: Case, trained: Judged, served: Judged) -> None:
    """Print the uninterrupted runs, and each setting at each number of restores; keep a plot of each."""
    noise, points = trained
    name, past = case.source.name, case.past
    rows = "+".join(f"{count:,}" for count in past.table_rows)
    steps = len(past) // case.config.batch_size
    report.note(
        f"{name}: {len(past):,} samples to train on in {steps} steps, {len(case.future):,} later ones to judge by; "
        f"tables of {rows} rows x {case.config.dim}"
    )
    truth = "" if math.isnan(noise.true_logloss) else f", {noise.true_logloss:.5f} against the true probabilities"
    report.note(
        f"{name}, uninterrupted: AUC {noise.auc:.5f} (seeds spread by {noise.auc_spread:.4%}), logloss "
        f"{noise.logloss:.5f} (by {noise.logloss_spread:.4%}){truth}"
    )
    if case.truth is not None:
        report.note(f"{name}, the truth itself: logloss {cross_entropy(case.truth, case.truth):.5f}")
    _check_exact(report, name, points, served[1])
    for restores in dict.fromkeys(point.restores for point in points):
        pairs = [
            (before, after) for before, after in zip(points, served[1], strict=True) if before.restores == restores
        ]
        report.table(
            f"{name}, {restores} restores",
            ("encoding", "row bytes", "metadata", "baseline", "AUC, trained", "logloss, trained", "true logloss",
             "AUC, served", "logloss, served", "moved, 1e-6 nats", "0.01 %", "spread"),
            [
                (str(point.setting), round(point.row_bytes), round(point.other_bytes), round(point.baseline_bytes),
                 point.auc.percent, point.logloss.percent,
                 "" if math.isnan(point.true_logloss.mean) else point.true_logloss.percent,
                 after.auc.percent, after.logloss.percent, 1e6 * after.moved,
                 _yes(holds(point, noise.limits("budget"))), _yes(holds(point, noise.limits("spread"))))
                for point, after in pairs
            ],
            f"bytes of a delta, mean; {_LOSSES}; the last two: whether the trained model's mean losses stay within",
        )  # fmt: skip
        of_restores = {
            family: sorted(
                (after for _, after in pairs if after.setting.family == family), key=lambda one: one.row_bytes
            )
            for family in ("affine", "lattice")
        }
        report.plot(
            f"{name}-{restores}", f"{name}, {restores} restores: what the served model loses",
            "row bytes of a delta", "loss of logloss, %",
            {family: _losses(found) for family, found in of_restores.items() if found}, log_x=True,
        )  # fmt: skip


def print_slots(report: harness.Report, case: Case, optimizer: str, trained: Judged, served: Judged) -> None:
    """Print how exact the slots of an optimizer must be on one data set."""
    (noise, points), (_, after_restore) = trained, served
    name = f"{case.source.name}, {optimizer}"
    report.note(
        f"{name}, uninterrupted: AUC {noise.auc:.5f} (seeds spread by {noise.auc_spread:.4%}), logloss "
        f"{noise.logloss:.5f} (by {noise.logloss_spread:.4%})"
    )
    _check_exact(report, name, points, after_restore)
    elements = case.config.dim / 8
    report.table(
        f"{name}: slots",
        ("restores", "stored as", "slots, bits", "rows, bits", "AUC, trained", "logloss, trained", "AUC, served",
         "logloss, served", "moved, 1e-6 nats", "spread"),
        [
            (point.restores, str(point.setting), point.slot_bytes / (point.rows * elements),
             point.row_bytes / (point.rows * elements), point.auc.percent, point.logloss.percent, after.auc.percent,
             after.logloss.percent, 1e6 * after.moved, _yes(holds(point, noise.limits("spread"))))
            for point, after in zip(points, after_restore, strict=True)
        ],
        f"bits of a delta per element of the weights, for slots alone and for all of a row; {_LOSSES}; the last: "
        "whether the trained model's mean losses stay within the spread of the seeds",
    )  # fmt: skip


def print_smallest(report: harness.Report, cases: Sequence[tuple[str, Judged, Judged]], command: str) -> None:
    """Print the fewest bytes that hold at each number of restores, of both sides, and the goals.

    The goal is judged by whichever limit is larger, on the trained model: the paper's measure.
    """
    ratios = []
    for when, index in (("trained", 1), ("served", 2)):
        rows: list[list[harness.Cell]] = []
        for name, *judged in cases:
            noise, points = judged[index - 1]
            for restores in dict.fromkeys(point.restores for point in points):
                found = [point for point in points if point.restores == restores]
                row: list[harness.Cell] = [name, restores]
                for rule, _ in RULES:
                    theirs, ours, ratio = compare(found, noise.limits(rule))
                    row += [_point(theirs), _point(ours), ratio]
                rows.append(row)
                even = [point for point in found if point.setting.finer == 1.0]
                row.append(compare(even, noise.limits("either"))[2])
                if when == "trained":
                    ratios.append((name, restores, ratio, theirs, ours))
        columns = [f"{side}, {label}" for _, label in RULES for side in ("Check-N-Run", "ours", "ratio")]
        columns.append("ratio, either, at 2, 3, 4, 8 bits alone")
        report.table(
            f"fewest row bytes that hold, {when} model", ["data", "restores", *columns], rows,
            "mean losses within the limits, and no finer setting beyond them with its whole interval; limits of AUC "
            "and logloss: 0.01 %, the spread of the uninterrupted seeds, or the larger of the two; where no lattice "
            "holds, ours is exact mode; a lattice's scale is any number, so more of them were tried than there are "
            "widths of affine rows: the last column is without those that are no width",
        )  # fmt: skip
    for name, restores, ratio, theirs, _ in ratios:
        if ratio is not None:
            report.add(f"{name}, {restores} restores: bytes, ours / Check-N-Run", ratio, goal=GOAL)
        else:
            verdict = "no width of Check-N-Run holds" if theirs is None else "nothing of ours was run that holds"
            report.note(f"  {name}, {restores} restores: {verdict}, so there is no ratio")
    known = [ratio for *_, ratio, _, _ in ratios if ratio is not None]
    if command and known:
        report.headline(
            "bytes of a delta that cost no quality, against Check-N-Run's rows",
            f"{min(known):.2f}x to {max(known):.2f}x",
            f"at most {GOAL}x at every number of restores", command,
        )  # fmt: skip


def compare(points: Sequence[Point], limits: Limits) -> tuple[Point | None, Point | None, float | None]:
    """Return (Check-N-Run's smallest point that holds, ours, ours / theirs in bytes). Pure."""
    sides = {family: [one for one in points if one.setting.family == family] for family in ("affine", "lattice")}
    theirs, ours = smallest(sides["affine"], limits), smallest(sides["lattice"], limits)
    if ours is None:
        ours = next((point for point in points if point.setting.family == "exact"), None)
    ratio = None if theirs is None or ours is None else ours.row_bytes / theirs.row_bytes
    return theirs, ours, ratio


def print_equal_quality(report: harness.Report, cases: Sequence[tuple[str, Judged, Judged]]) -> None:
    """Print what the lattice needs to move predictions no further than each width of Check-N-Run does."""
    rows: list[list[harness.Cell]] = []
    for name, _, (_, points) in cases:
        curves: dict[str, harness.Series] = {}
        for restores in dict.fromkeys(point.restores for point in points):
            found = [point for point in points if point.restores == restores]
            ours = [point for point in found if point.setting.family == "lattice"]
            floor = floor_of(found)
            for theirs in (point for point in found if point.setting.family == "affine"):
                needed = bytes_at(ours, max(theirs.moved, floor))
                rows.append(
                    [name, restores, str(theirs.setting), 1e6 * theirs.moved, 1e6 * floor, round(theirs.row_bytes),
                     None if needed is None else round(needed), None if needed is None else needed / theirs.row_bytes]
                )  # fmt: skip
            for family in ("affine", "lattice"):
                known = sorted((one for one in found if one.setting.family == family), key=lambda one: one.row_bytes)
                curves[f"{family}, {restores} restores"] = harness.Series(
                    [one.row_bytes for one in known], [one.moved for one in known]
                )
        report.plot(
            f"{name}-moved", f"{name}: how far restores move the served model's predictions",
            "row bytes of a delta", "mean divergence, nats", curves, log_x=True, log_y=True,
        )  # fmt: skip
    report.table(
        "row bytes at equal quality, served model",
        ("data", "restores", "Check-N-Run", "moved, 1e-6 nats", "floor", "its bytes", "lattice bytes", "ratio"), rows,
        "quality is the mean divergence of predictions from those of the uninterrupted run, which has far less noise "
        "than AUC; what moves them less than the floor (1.5 times the least of all settings: training amplifies any "
        "change) counts as the floor; the lattice's bytes are interpolated between its scales, empty where all of "
        "them move less",
    )  # fmt: skip


def _check_exact(report: harness.Report, name: str, trained: Sequence[Point], served: Sequence[Point]) -> None:
    changes = [
        abs(value.mean)
        for point in (*trained, *served)
        if point.setting.family == "exact"
        for value in (point.auc, point.logloss)
    ]
    if changes:
        report.add(f"{name}: change of AUC and logloss in exact mode", max(changes), goal=0.0, unit="")


def _losses(points: Sequence[Point]) -> harness.Series:
    ordered = sorted(points, key=lambda one: one.row_bytes)
    losses = [(100 * one.logloss.mean, 100 * one.logloss.half_width) for one in ordered]
    return harness.Series(
        [one.row_bytes for one in ordered], [mean for mean, _ in losses],
        [mean - width for mean, width in losses], [mean + width for mean, width in losses],
    )  # fmt: skip


def _point(point: Point | None) -> str:
    return "none" if point is None else f"{point.row_bytes:,.0f} ({point.setting})"


def _both(trained: Point, served: Point, limits: Limits) -> bool:
    return holds(trained, limits) and holds(served, limits)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
