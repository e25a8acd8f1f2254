"""What a save of a large table costs: a delta and a baseline against `torch.save`, and against bare loops.

``python tests/benchmarks/bench_delta.py``: 5,000,000 x 64 fp32, of which 20 % of the rows drift between two saves.
Every round drifts the table once; then the sides save the same rows in turn. A sync of the disk, untimed, goes ahead
of each, so that nobody pays for another's dirty pages. Without fsync neither side waits for the disk; with it
`torch.save`'s file, every file of the bare loop, and every object of the store are made durable.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import harness
import numpy as np
import torch
from drifting import DIM, TABLE, BareWriter, DriftingTable

from cnr_store import Store, TableOptions
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import choose_scale
from cnr_store.runtime.threads import Workers, default_threads
from cnr_store.types import AffineBits, Float32s, Precision, RowIds
from cnr_store_gpu import RowRequest, StagingBuffers

COMMIT_TO_TORCH, COMMIT_TO_BARE, SPARE_MIB = 0.5, 1.3, 256


class Sides:
    """The store, `torch.save` and the bare loop over one table."""

    def __init__(self, folder: Path, table: DriftingTable, bits: AffineBits) -> None:
        self.folder = folder
        self.table = table
        self.options = TableOptions(bits=bits)
        self.workers = Workers(default_threads())
        self.rows: RowIds = np.empty(0, np.int64)
        self.staged: Float32s = np.empty((0, DIM), np.float32)
        self.fsync = True
        self.store = Store.create(str(folder / "store"))
        self.writer = self.store.writer()
        self.bare = BareWriter(folder / "bare", 1.0, self.workers)
        self.codes: list[np.ndarray[tuple[int, ...], np.dtype[np.int16]]] = []

    def set_fsync(self, fsync: bool) -> None:
        """Choose whether all sides wait for the disk."""
        self.fsync = fsync
        self.store.storage.fsync = fsync  # type: ignore[attr-defined]

    def drift(self) -> None:
        """Move the table and stage the rows, as a gather does."""
        self.rows = self.table.step()
        self.staged = self.table.values[self.rows]
        self.codes = self.bare.encode_only(self.rows, self.staged)

    def commit_delta(self) -> None:
        with self.writer.begin(1) as txn:
            txn.write_rows(TABLE, self.rows, self.staged)

    def commit_baseline(self) -> None:
        with self.writer.begin(1, "baseline") as txn:
            txn.write_table(TABLE, self.table.values, options=self.options)

    def save_with_torch(self) -> None:
        path = self.folder / "table.pt"
        torch.save(torch.from_numpy(self.table.values), path)
        if self.fsync:
            harness.fsync_file(path)

    def write_bare_delta(self) -> None:
        self.bare.write_delta(self.rows, self.staged)
        self._sync_bare()

    def write_bare_baseline(self) -> None:
        self.bare.write_baseline(self.table.values)
        self._sync_bare()

    def kernels_alone(self) -> None:
        self.bare.encode_only(self.rows, self.staged)

    def coder_alone(self) -> None:
        self.bare.compress_only(self.rows, self.codes)

    def start(self) -> None:
        """Write the first baseline on all sides; the bare loop takes the scale that the store chose."""
        self.commit_baseline()
        scale = self.writer.snapshot.tables[TABLE].encoding.scale  # type: ignore[union-attr]
        self.bare = BareWriter(self.folder / "bare", scale, self.workers)
        self.bare.write_baseline(self.table.values)

    def forget_segments(self) -> None:
        """Remove the store's old files, which nothing here reads again, so that the disk does not fill up."""
        keep = {entry.seg for entry in self.writer.head.record.chain}
        for segment in (self.folder / "store" / "data").glob("*/"):
            if segment.name not in keep:
                shutil.rmtree(segment)

    def close(self) -> None:
        self.writer.close()
        self.store.close()
        self.workers.close()

    def _sync_bare(self) -> None:
        if self.fsync:
            harness.fsync_tree(self.bare.folder)


def deltas(report: harness.Report, sides: Sides, bits: int, repeats: int) -> None:
    """Time commits of deltas, without and with fsync."""
    for fsync in (False, True):
        sides.set_fsync(fsync)
        how = "with fsync" if fsync else "no fsync"
        work = {
            "commit": sides.commit_delta, "bare": sides.write_bare_delta, "torch": sides.save_with_torch,
            "kernels": sides.kernels_alone, "coder": sides.coder_alone,
        }  # fmt: skip
        found = harness.alternating(work, repeats, before_round=sides.drift, before_each=os.sync)
        name = f"{bits} bits, {how}: delta"
        report.add_ratio(f"{name}, commit / torch.save of the table", found["commit"], found["torch"], COMMIT_TO_TORCH)
        report.add_ratio(f"{name}, commit / bare loop", found["commit"], found["bare"], COMMIT_TO_BARE)
        report.add_ratio(f"{name}, entropy coder alone / torch.save", found["coder"], found["torch"])
        both = found["kernels"].plus(found["coder"])
        report.add_ratio(f"{name}, commit / (kernels + coder) in memory", found["commit"], both)
        report.note(f"      kernels alone {found['kernels']}; coder alone {found['coder']}")
        entry = sides.writer.head.record.chain[-1]
        stored = 8 * entry.size_bytes / (sides.rows.size * DIM)
        size = f"{entry.size_bytes / 1e6:.1f} MB, {stored:.2f} bits per element"
        report.note(f"      last delta: {entry.rows} of {sides.rows.size} rows, {size}")


def baselines(report: harness.Report, sides: Sides, bits: AffineBits, repeats: int) -> None:
    """Time baselines with a new scale, and the choice of the scale alone."""
    for fsync in (False, True):
        sides.set_fsync(fsync)
        how = "with fsync" if fsync else "no fsync"
        sample = RowSample(sides.table.values, "float32").rows()
        work = {
            "commit": sides.commit_baseline, "bare": sides.write_bare_baseline, "torch": sides.save_with_torch,
            "scale": partial(choose_scale, sample, Precision(bits=bits)),
        }  # fmt: skip
        found = harness.alternating(work, repeats, before_round=sides.forget_segments, before_each=os.sync)
        name = f"{bits} bits, {how}: baseline"
        report.add_ratio(f"{name}, commit / bare loop", found["commit"], found["bare"], COMMIT_TO_BARE)
        report.add_ratio(f"{name}, commit / torch.save", found["commit"], found["torch"])
        report.note(f"      choosing the scale alone {found['scale']}")


def peak_memory(rows: int, bits: AffineBits, folder: str) -> dict[str, int]:
    """Save a baseline and deltas in a fresh process; returns peaks beyond the model and what is allowed, in bytes."""
    with harness.data_folder(folder) as path:
        table = DriftingTable(rows)
        weight, buffers = torch.from_numpy(table.values), StagingBuffers()
        peak = harness.PeakMemory()
        store = Store.create(str(path / "store"))
        writer = store.writer()
        with writer.begin(1, "baseline") as txn:
            txn.write_table(TABLE, table.values, options=TableOptions(bits=bits))
        found = {"model": table.values.nbytes, "mirror": writer.mirror_bytes, "baseline": peak.beyond_bytes}
        peak.restart()
        for step in (2, 3):
            changed = table.step()
            staged = buffers.gather({TABLE: RowRequest(changed, {"weight": weight})})
            with writer.begin(step) as txn:
                txn.write_rows(TABLE, changed, staged.tensors[TABLE]["weight"].numpy())
            staged.release()
        found |= {"delta": peak.beyond_bytes, "staged": staged.size_bytes, "codes": changed.size * DIM * 2}
        peak.restart()
        with writer.begin(4, "baseline"):
            pass
        found["baseline_from_mirror"] = peak.beyond_bytes
        store.close()
        return found


def memory(report: harness.Report, rows: int, bits: AffineBits, folder: str) -> None:
    """Report peak memory beyond the model, as MiB beyond what the design allows without its 256 MiB."""
    found = harness.in_fresh_process(__file__, "peak_memory", rows=rows, bits=bits, folder=folder)
    mib = {name: size / harness.MIB for name, size in found.items()}
    report.note(
        f"peak RSS, fresh process, {bits} bits: model {mib['model']:.0f} MiB; mirror {mib['mirror']:.0f}, "
        f"staged rows {mib['staged']:.0f}, their codes {mib['codes']:.0f} MiB"
    )
    allowed = {"baseline": mib["mirror"], "delta": mib["mirror"] + mib["staged"] + mib["codes"]}
    allowed["baseline_from_mirror"] = allowed["delta"]
    for name, base in allowed.items():
        label = f"{bits} bits: {name.replace('_', ' ')}, peak {mib[name]:.0f} MiB, beyond the stated {base:.0f} MiB"
        report.add(label, mib[name] - base, goal=SPARE_MIB, unit=" MiB")


def main() -> None:
    parser = harness.arguments(__doc__, rows=5_000_000, repeats=5)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    report = harness.Report(f"a save of {options.rows} x {DIM} fp32, 20 % of the rows changed")
    report.start()
    for bits in options.bits:
        memory(report, options.rows, bits, options.folder)
    table = DriftingTable(options.rows)
    for bits in options.bits:
        with harness.data_folder(options.folder) as folder:
            sides = Sides(folder, table, bits)
            sides.start()
            deltas(report, sides, bits, options.repeats)
            baselines(report, sides, bits, max(1, options.repeats // 2))
            sides.close()
    report.finish(options.json)


if __name__ == "__main__":
    main()
