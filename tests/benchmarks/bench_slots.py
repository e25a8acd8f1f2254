"""Bytes of deltas of models whose optimizer has a state per element, by what they are, against fp32.

``python tests/benchmarks/bench_slots.py [--bits 4] [--share 0.25]``: generated clicks, and the real sets that lie
beside the checkout, are trained once. From half of the run on a delta is saved whenever a share of the rows was
touched. Rows, codes and slots count; documents and metadata do not: they are as large as the rows of tables so small.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass

import harness
import numpy as np
import torch
from click_cases import Case, Source, load, real_sources
from restored_runs import Optimizer, prepared

from cnr_store import TableOptions, segment_sizes
from cnr_store.training import CheckpointManager, StoreOptions, TrackingOptions
from cnr_store.types import AffineBits
from cnr_store_tools.demo.train import train_step

GOAL = 60.0
FP32_BITS = 32
SLOTS: dict[Optimizer, int] = {"adagrad": 1, "adam": 2}
NAMES: dict[Optimizer, str] = {"adagrad": "Adagrad", "adam": "SparseAdam"}


@dataclass(frozen=True, slots=True)
class DeltaBits:
    """Bits per element of the touched rows, means over deltas; ``share``: of the rows that were touched."""

    deltas: int
    share: float
    codes: float
    slots: float
    rows: float

    @property
    def total(self) -> float:
        """All three."""
        return self.codes + self.slots + self.rows


def measure(case: Case, optimizer: Optimizer, bits: AffineBits, share: float, folder: str) -> DeltaBits:
    """Train once and return what the deltas of the second half are made of."""
    model, optimizers, batches = prepared(case, 0, optimizer)
    sizes = [len(table) for _, table in model.table_parameters()]
    touched = [np.zeros(size, np.bool_) for size in sizes]
    found: list[tuple[float, int, int, int]] = []
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        CheckpointManager(
            f"{place}/store", model=model, optimizer=optimizers, options=TableOptions(bits=bits),
            store_options=StoreOptions(threads=1), tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
        ) as manager,
    ):  # fmt: skip
        has_baseline = False
        for step, batch in enumerate(batches, 1):
            train_step(model, optimizers, batch)
            manager.step()
            for number, mask in enumerate(touched):
                mask[np.asarray(batch.ids)[:, number]] = True
            fraction = sum(int(mask.sum()) for mask in touched) / sum(sizes)
            if fraction < share if has_baseline else step < len(batches) // 2:
                continue
            manager.save()
            manager.wait_until_finished()
            record = manager.store.head().record
            if has_baseline and record.kind == "delta":
                one = segment_sizes(manager.store.snapshot().manifests[-1])
                found.append((fraction, one.codes, one.slots, one.rows))
            has_baseline = True
            for mask in touched:
                mask[:] = False
    elements = sum(sizes) * case.config.dim
    fractions, codes, slots, rows = (np.array(column, np.float64) for column in zip(*found, strict=True))
    codes, slots, rows = (8 * column / (fractions * elements) for column in (codes, slots, rows))
    return DeltaBits(len(found), *(float(one.mean()) for one in (fractions, codes, slots, rows)))


def main() -> None:
    """Print what deltas of each source and optimizer are made of."""
    parser = harness.arguments(__doc__, rows=400_000, repeats=1)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--share", type=float, default=0.25, help="of the rows that a delta has, about")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = harness.Report(f"deltas of {options.share:.0%} of the rows at {options.bits} bits, slots of every element")
    report.start()
    rows = []
    for source in (Source("generated", samples=options.rows), *real_sources()):
        case = load(source)
        for optimizer, slots in SLOTS.items():
            found = measure(case, optimizer, options.bits, options.share, options.folder)
            smaller = FP32_BITS * (1 + slots) / (found.share * found.total)
            rows.append(
                (source.name, NAMES[optimizer], found.deltas, found.share, found.codes, found.slots, found.rows)
            )
            report.add(f"{source.name}, {NAMES[optimizer]}: fp32 / delta", smaller, goal=GOAL, sense="at least")
    columns = ("clicks", "optimizer", "deltas", "share", "codes", "slots", "row ids")
    report.table("bits per element of the touched rows", columns, rows)
    report.finish(options.json)


if __name__ == "__main__":
    main()
