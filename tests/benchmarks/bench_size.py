"""How many bytes one delta of the DLRM trace takes: lattice against Check-N-Run rows at equal error, and against fp32.

``python tests/benchmarks/bench_size.py``: 1,500 steps of 2,048 samples on six tables (200k to 1k rows x 32, row-wise
Adagrad), a save every 150 steps, about 40 % of the rows touched in each. The model is trained once; every encoding
saves the same rows into a store of its own. Counted is the segment of the last save as it lies on disk, receipt and
manifest included; dense tensors stand apart and are in no ratio.

The scale of a lattice is chosen when a baseline is written. ``lattice`` chose it at the first save and keeps it, as a
run does; training then widens the rows, so its error at the end is no longer that of affine rows. ``lattice, fresh``
chose it by ``bits=`` at the save before the last. ``lattice, equal`` took it there from the touched rows alone, whose
error is what is compared; ``bits=`` samples all rows, and cold rows are smaller. Slots are float_bits 7 in all stores
(affine tables have no mirror, so there they are absolute).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
from dlrm_trace import SLOT, Interval, train

from cnr_store import Store, TableOptions
from cnr_store.encodings.scale import choose_scale
from cnr_store.layout import segment_prefix
from cnr_store.options import sample_of
from cnr_store.records import ChainEntry
from cnr_store.sizes import segment_sizes
from cnr_store.types import Float32s, Precision
from cnr_store.writer import Writer
from cnr_store_tools.demo.presets import trace_config

BITS = (2, 4, 8)
AGAINST_AFFINE = {2: 0.4, 4: 0.5, 8: 0.7}
AGAINST_FP32 = {2: 55.0, 4: 25.0, 8: 11.0}
KINDS = ("rows", "codes", "scales", "slots", "metadata", "receipt", "dense")


class Candidate:
    """One encoding in a store of its own."""

    def __init__(
        self, folder: Path, name: str, options: TableOptions, *, starts_at: int = 1, on_touched: bool = False
    ) -> None:
        self.name = name
        self.store = Store.create(str(folder / name.replace(" ", "-").replace(",", "")), fsync=False)
        self._options = options
        self._starts_at = starts_at
        self._on_touched = on_touched
        self._writer: Writer = self.store.writer()

    def save(self, number: int, interval: Interval) -> None:
        """Save an interval: the first from ``starts_at`` on is the baseline, later ones are deltas."""
        if number < self._starts_at:
            return
        with self._writer.begin(interval.step) as txn:
            for table, values in interval.tables.items():
                slots, rows = interval.slots[table], interval.touched[table]
                if txn.kind == "full":
                    options = self._options_for(values[rows]) if self._on_touched else self._options
                    txn.write_table(table, values, slots={SLOT: slots}, options=options)
                else:
                    txn.write_rows(table, rows, values[rows], slots={SLOT: slots[rows]})
            txn.put_dense(interval.dense)

    def sizes(self) -> dict[str, int]:
        """Bytes of the last segment by kind: file lengths, receipt included."""
        entry, manifest = self._last()
        sizes = segment_sizes(manifest, segment_bytes=entry.bytes).as_dict()
        folder = Path(self.store.url) / segment_prefix(entry.seg)
        length, blocks = harness.disk_bytes(folder)
        dense_length, dense_blocks = harness.disk_bytes(next(folder.glob("*/dense")))
        sizes["receipt"] = length - sizes["total"]
        sizes["metadata"] -= dense_length - sizes["dense"]
        sizes["dense"] = dense_length
        sizes["total"] = length - dense_length
        sizes["du"] = blocks - dense_blocks
        return sizes

    def error(self, interval: Interval) -> float:
        """Mean squared error of the touched rows as the store gives them back."""
        total, count = 0.0, 0
        snapshot = self.store.snapshot()
        for table, rows in interval.touched.items():
            difference = snapshot.table(table).read()[rows].astype(np.float64) - interval.tables[table][rows]
            total += float(np.square(difference).sum())
            count += difference.size
        return total / count

    def _options_for(self, touched: Float32s) -> TableOptions:
        bits = self._options.bits
        assert isinstance(bits, int)
        return TableOptions(scale=choose_scale(sample_of(touched, "float32"), Precision(bits=bits)))

    def kept_rows(self) -> int:
        """Rows in the last segment."""
        return int(self._last()[0].rows or 0)

    def _last(self) -> tuple[ChainEntry, Any]:
        snapshot = self.store.snapshot()
        return snapshot.record.chain[-1], snapshot.manifests[-1]


def candidates(folder: Path, saves: int) -> list[Candidate]:
    """Return a store for every encoding and width."""
    made = []
    for bits in BITS:
        lattice = TableOptions(bits=bits)
        made += [
            Candidate(folder, f"affine {bits}", TableOptions(encoding="affine", bits=bits, search="greedy")),
            Candidate(folder, f"lattice {bits}", lattice),
            Candidate(folder, f"lattice {bits}, fresh", lattice, starts_at=saves - 1),
            Candidate(folder, f"lattice {bits}, equal", lattice, starts_at=saves - 1, on_touched=True),
        ]
    return made


def main() -> None:
    parser = harness.arguments(__doc__, rows=0, repeats=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = trace_config(steps=options.steps, seed=options.seed)
    saves = config.steps // config.save_every
    report = harness.Report(f"size of a delta: DLRM trace, {config.steps} steps, save every {config.save_every}")
    report.start()
    with harness.data_folder(options.folder) as folder:
        stores = candidates(folder, saves)
        for number, interval in enumerate(train(config), start=1):
            for store in stores:
                store.save(number, interval)
        print_sizes(report, stores, interval)
    report.finish(options.json)


def print_sizes(report: harness.Report, stores: list[Candidate], interval: Interval) -> None:
    """Print the table of the last delta and the ratios."""
    rows = sum(len(table) for table in interval.tables.values())
    touched = sum(len(ids) for ids in interval.touched.values())
    elements = sum(ids.size * interval.tables[name].shape[1] for name, ids in interval.touched.items())
    full = sum(a.nbytes for named in (interval.tables, interval.slots) for a in named.values())
    share = f"{touched} of {rows} rows touched ({touched / rows:.1%})"
    report.note(f"last interval: {share}; fp32 full {full / 1e6:.2f} MB")
    header = "".join(f"{kind:>10}" for kind in KINDS)
    report.note(f"{'bytes, last delta':<20}{header}{'total':>10}{'du':>10} {'bits/el':>8} {'error':>10} {'rows':>8}")
    sizes: dict[str, Mapping[str, int]] = {}
    errors: dict[str, float] = {}
    for store in stores:
        found = sizes[store.name] = store.sizes()
        errors[store.name] = store.error(interval)
        cells = "".join(f"{found[kind]:>10}" for kind in KINDS)
        report.note(
            f"{store.name:<20}{cells}{found['total']:>10}{found['du']:>10} {8 * found['codes'] / elements:>8.3f} "
            f"{errors[store.name]:>10.3g} {store.kept_rows():>8}"
        )
    report.note("total and du are without dense; bits/el: codes per element of touched rows; du counts disk blocks")
    for bits in BITS:
        affine = sizes[f"affine {bits}"]
        for variant in (", equal", ", fresh", ""):
            name = f"lattice {bits}{variant}"
            # The others are finer than affine rows by then: their sizes are for information.
            goals = (1.02, AGAINST_AFFINE[bits], AGAINST_FP32[bits]) if variant == ", equal" else (None, None, None)
            found = sizes[name]
            report.add(f"{name}: error / error of affine", errors[name] / errors[f"affine {bits}"], goal=goals[0])
            report.add(f"{name} / affine, file lengths", found["total"] / affine["total"], goal=goals[1])
            report.add(f"{name} / affine, du", found["du"] / affine["du"], goal=goals[1])
            report.add(f"fp32 full / {name}, file lengths", full / found["total"], goal=goals[2], sense="at least")
            report.add(f"fp32 full / {name}, du", full / found["du"], goal=goals[2], sense="at least")


if __name__ == "__main__":
    main()
