"""What a restore costs: baseline and ten deltas into preallocated memory, against a bare loop and safetensors.

``python tests/benchmarks/bench_restore.py``: 5,000,000 x 64 fp32, 20 % of the rows in each delta, every file in the
page cache. The bare loop reads the same files, decodes with the same codecs, adds with the same kernels on as many
threads and dequantizes; it checks nothing. What both leave in memory is compared.

``--model``: models are restored instead, each beside one table.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import harness
import many_tables
import numpy as np
import torch
from bench_load import Local
from drifting import DIM, SHARE, TABLE, DriftingTable, decode_ranges, replay_bare, saves
from many_tables import Side
from models import add_model_option
from safetensors.torch import save_file

from cnr_store import Store, TableOptions
from cnr_store.encodings import kernels
from cnr_store.runtime.threads import Workers, default_threads
from cnr_store.types import AffineBits

DELTAS = 10
RESTORE_TO_BARE, RESTORE_TO_SAFETENSORS, SPARE_MIB = 1.4, 5.0, 256


def write_store(folder: Path, rows: int, bits: AffineBits) -> None:
    """Write baseline, deltas and the same table as a safetensors file."""
    table = DriftingTable(rows)
    with Store.create(str(folder / "store"), fsync=False) as store, store.writer() as writer:
        list(saves(writer, table, TableOptions(bits=bits), DELTAS))
    save_file({TABLE: torch.from_numpy(table.values)}, folder / "table.safetensors")


class Sides(Local):
    """The ways to get the table into ``target``."""

    def __init__(self, folder: Path, rows: int) -> None:
        super().__init__(folder, rows)
        self.workers = Workers(default_threads())

    def restore_trainer(self) -> None:
        with self.store.writer() as writer:
            writer.restore({TABLE: {"values": self.target}})

    def bare(self, *, decodes_only: bool = False) -> None:
        """Decode, put or add, dequantize; with ``decodes_only`` the codes go nowhere."""
        codes = self.target.view(np.int32)
        snapshot = self.store.snapshot()
        scale = np.float32(snapshot.tables[TABLE].encoding.scale)  # type: ignore[union-attr]
        replay_bare(Path(self.store.url), snapshot.readers, codes, self.workers, decodes_only=decodes_only)
        if not decodes_only:
            self.workers.run(
                partial(kernels.lattice_decode_in_place, self.target[start:stop], scale)
                for start, stop in decode_ranges(len(self.target))
            )

    def close(self) -> None:
        super().close()
        self.workers.close()


def peak_memory(rows: int, folder: str, trains: bool) -> dict[str, int]:
    """Restore in a fresh process; returns the peak beyond the target, and the mirror, in bytes."""
    target = np.ones((rows, DIM), np.float32)
    peak = harness.PeakMemory()
    with Store.open(str(Path(folder) / "store")) as store:
        mirror = 0
        if trains:
            with store.writer() as writer:
                writer.restore({TABLE: {"values": target}})
                mirror = writer.mirror_bytes
        else:
            store.snapshot().table(TABLE).read_rectangle(values=target)
        return {"peak": peak.beyond_bytes, "mirror": mirror}


def main() -> None:
    parser = harness.arguments(__doc__, rows=5_000_000, repeats=5)
    parser.add_argument("--bits", type=int, default=4)
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    if options.model:
        works = {"reader": (Side.nothing, Side.read), "trainer": (Side.nothing, Side.restore)}
        many_tables.run(options, "restore", works, deltas=DELTAS, share=SHARE, bits=options.bits)
        return
    report = harness.Report(
        f"restore of {options.rows} x {DIM} fp32 at {options.bits} bits: baseline and {DELTAS} deltas of 20 %"
    )
    report.start()
    with harness.data_folder(options.folder) as folder:
        write_store(folder, options.rows, options.bits)
        for trains, name in ((False, "reader"), (True, "trainer")):
            found = harness.in_fresh_process(
                __file__, "peak_memory", rows=options.rows, folder=str(folder), trains=trains
            )
            peak, mirror = found["peak"] / harness.MIB, found["mirror"] / harness.MIB
            report.add(
                f"{name}: peak {peak:.0f} MiB beyond the target, mirror {mirror:.0f}: the rest",
                peak - mirror, goal=SPARE_MIB, unit=" MiB",
            )  # fmt: skip
        time_all(report, Sides(folder, options.rows), options.repeats)
    report.finish(options.json)


def time_all(report: harness.Report, sides: Sides, repeats: int) -> None:
    """Check that both sides agree, then time them."""
    sides.read()
    mine = sides.target.copy()
    sides.bare()
    if not np.array_equal(mine, sides.target):
        raise SystemExit("the bare loop and the store read different values")
    del mine
    sides.copied()
    work = {
        "read": sides.read, "bare": sides.bare, "trainer": sides.restore_trainer, "copied": sides.copied,
        "mapped": sides.mapped, "decode": partial(sides.bare, decodes_only=True),
    }  # fmt: skip
    found = harness.alternating(work, repeats)
    report.add_ratio("reader / bare loop", found["read"], found["bare"], RESTORE_TO_BARE)
    report.add_ratio("trainer (with its mirror) / bare loop", found["trainer"], found["bare"], RESTORE_TO_BARE)
    name = "reader / safetensors into the same tensor"
    report.add_ratio(name, found["read"], found["copied"], RESTORE_TO_SAFETENSORS)
    report.add_ratio("decoding and reading files alone / safetensors", found["decode"], found["copied"])
    report.note(f"      safetensors load_file alone, which maps the file: {found['mapped']}")
    sides.close()


if __name__ == "__main__":
    main()
