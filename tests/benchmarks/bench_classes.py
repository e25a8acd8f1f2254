"""One scale per table, the next finer one, or scales by row class: bytes of a delta against quality after a restore.

``python tests/benchmarks/bench_classes.py``: a prototype, no format. The model of each seed is trained once; its tables
are rounded at the end, as a restore would give them back, and judged on later samples. Bytes are those of the last
interval: differences of codes of the touched rows, and with classes the rows that change theirs as absolute codes with
their ids and classes. A row's class is the power of two nearest its rms, among 8 below the largest; it keeps its class
until its rms is 0.75 octaves away. The curve of each kind is swept in steps of the square root of two around the scale
that is as exact as 2-, 3- and 4-bit affine rows; ids of rows and slots, the same for all, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import codings
import harness
import numpy as np
import numpy.typing as npt
import torch
from click_cases import Case, Source, load, real_sources
from dlrm_trace import Interval, train_on

from cnr_store.encodings.scale import choose_scale
from cnr_store.types import Float32s, Precision, RowIds
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import Quality, evaluate

BITS = (2, 3, 4)
FACTORS = tuple(0.5 ** (k / 2) for k in range(-2, 4))
"""Of the scale that is as exact as affine rows: the square root of two is one step finer or coarser."""
SAVES = 9
CLASSES = 8
STAYS = 0.75
ENOUGH_SAVED = 0.9

Octaves = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Point:
    """One setting: mean bytes of a delta's codes; change of logloss and of AUC as shares, root mean square over seeds.

    Either sign counts: with few test samples luck decides it, and what rounding does shows in the size of the change.
    """

    size: float
    logloss: float
    auc: float


def main() -> None:
    parser = harness.arguments(__doc__, rows=200_000, repeats=5)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats = 30_000, 2
    report = harness.Report(f"scales by row class against finer scales, {options.repeats} seeds")
    report.start()
    sources = [Source("generated", samples=options.rows)]
    sources += [source for source in real_sources() if source.name == "movielens"]
    for source in sources:
        print_curves(report, source.name, curves(load(source), options.repeats))
    report.finish(options.json)


def curves(case: Case, seeds: int) -> dict[tuple[int, str], list[Point]]:
    """Return a curve per width and kind, over `FACTORS`."""
    found: dict[tuple[int, str], list[list[Point]]] = {}
    for seed in range(seeds):
        for key, points in _curves_of(case, seed).items():
            found.setdefault(key, []).append(points)
    return {key: [_over_seeds(each) for each in zip(*runs, strict=True)] for key, runs in found.items()}


def print_curves(report: harness.Report, name: str, found: Mapping[tuple[int, str], list[Point]]) -> None:
    """Print every point, and the bytes of class scales at the quality of one scale."""
    rows: list[list[harness.Cell]] = [
        [bits, kind, factor, point.size, 100 * point.logloss, 100 * point.auc]
        for (bits, kind), points in found.items()
        for factor, point in zip(FACTORS, points, strict=True)
    ]
    columns = ["as exact as, bits", "scales", "factor", "bytes", "logloss, %", "AUC, %"]
    report.table(f"{name}: bytes of the codes of a delta, change of quality after a restore", columns, rows,
                 "changes: root mean square over the seeds, as shares of the unrounded model's")  # fmt: skip
    for bits in BITS:
        series = {
            kind: harness.Series([p.size for p in points], [p.logloss for p in points])
            for (width, kind), points in found.items()
            if width == bits
        }
        report.plot(f"classes-{name}-{bits}", f"{name}, {bits} bits", "bytes", "change of logloss", series,
                    log_x=True, log_y=True)  # fmt: skip
        for what in ("logloss", "auc"):
            ratio = bytes_at_equal_quality(found[bits, "one"], found[bits, "by class"], what)
            report.add(f"{name}, {bits} bits: class scales / one scale, bytes at equal {what}", ratio)
    report.note(f"class scales would be worth a change of the format at {ENOUGH_SAVED}x or less at every width")


def bytes_at_equal_quality(one: Sequence[Point], other: Sequence[Point], what: str) -> float:
    """Return the bytes of ``other`` over those of ``one`` at the change that ``one`` has at factor 1.

    Both are read off the straight line of logarithms through their points: single points are noisy.
    """
    (slope, height), (other_slope, other_height) = (_line(points, what) for points in (one, other))
    wanted = (np.log(one[FACTORS.index(1.0)].size) - height) / slope
    return float(np.exp(other_slope * wanted + other_height - slope * wanted - height))


def _line(points: Sequence[Point], what: str) -> tuple[float, float]:
    """Slope and height of log bytes over the log of the change, by least squares in the other direction.

    What is noisy is the change, so it is the side that is fitted.
    """
    changes = np.log(np.maximum([getattr(point, what) for point in points], 1e-9))
    slope, height = np.polyfit(np.log([point.size for point in points]), changes, 1)
    return 1 / slope, -height / slope


def octaves_of(values: Float32s, before: Octaves | None = None) -> Octaves:
    """Return each row's class: the power of two nearest its rms, 0 to 7 below the largest as absolute exponents.

    With ``before`` a row keeps its class while its rms is within `STAYS` octaves of it.
    """
    rms = np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=1))
    exact = np.log2(np.maximum(rms, 1e-30))
    top = int(np.rint(exact.max(initial=-30.0)))
    nearest = np.clip(np.rint(exact), top - CLASSES + 1, top).astype(np.int64)
    return nearest if before is None else np.where(np.abs(exact - before) <= STAYS, before, nearest)


def delta_bytes(before: Float32s, after: Float32s, rows: RowIds, steps: tuple[Float32s, Float32s]) -> int:
    """Return the bytes of an interval's codes; rows whose step is another one are absolute, with id and step."""
    first, second = (np.rint(v[rows] / s[rows, None]) for v, s in zip((before, after), steps, strict=True))
    stays = steps[0][rows] == steps[1][rows]
    changed = (second - first)[stays]
    size = len(codings.pack(changed[(changed != 0).any(axis=1)].astype(np.int16)))
    if not stays.all():
        exponents = np.log2(steps[1][rows][~stays] / steps[1].min()).astype(np.int16)
        size += len(codings.pack(second[~stays].astype(np.int16))) + len(codings.pack(exponents))
        size += len(codings.pack_ids(rows[~stays]))
    return size


def _curves_of(case: Case, seed: int) -> dict[tuple[int, str], list[Point]]:
    steps = len(case.past) // case.config.batch_size
    config = replace(case.config, seed=seed, steps=steps, save_every=max(1, steps // SAVES))
    *_, before, after = train_on(case.past, config)
    model = SmallDLRM(config.model_config(case.past))
    exact = _judged(model, case, after, after.tables)
    found: dict[tuple[int, str], list[Point]] = {}
    octaves = {}
    for name, values in before.tables.items():
        first = octaves_of(values)
        octaves[name] = first, octaves_of(after.tables[name], first)
    for bits in BITS:
        for kind in ("one", "by class"):
            for factor in FACTORS:
                size, rounded = 0, {}
                for name, values in after.tables.items():
                    touched = before.tables[name][before.touched[name]]
                    scale = np.float32(factor * choose_scale(touched, Precision(bits=bits)))
                    steps = tuple(np.full(len(values), scale, np.float32) for _ in range(2))
                    if kind == "by class":
                        # The class of the mean square keeps the scale: the others are finer or coarser than it.
                        middle = np.rint(np.log2(np.sqrt(np.mean(np.square(touched, dtype=np.float64)))))
                        steps = tuple(scale * np.exp2(one - middle).astype(np.float32) for one in octaves[name])
                    rows = after.touched[name]
                    size += delta_bytes(before.tables[name], values, rows, (steps[0], steps[1]))
                    rounded[name] = np.rint(values / steps[1][:, None]) * steps[1][:, None]
                quality = _judged(model, case, after, rounded)
                point = Point(size, quality.logloss / exact.logloss - 1, 1 - quality.auc / exact.auc)
                found.setdefault((bits, kind), []).append(point)
    return found


def _judged(model: SmallDLRM, case: Case, interval: Interval, tables: Mapping[str, Float32s]) -> Quality:
    state = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in {**interval.dense, **tables}.items()}
    model.load_state_dict(state, strict=False)
    return evaluate(model, case.future)


def _over_seeds(points: tuple[Point, ...]) -> Point:
    changes = (math.sqrt(np.mean([getattr(p, name) ** 2 for p in points])) for name in ("logloss", "auc"))
    return Point(float(np.mean([p.size for p in points])), *changes)


if __name__ == "__main__":
    main()
