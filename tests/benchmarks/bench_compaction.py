"""What compacting costs: a baseline and ten deltas into a new baseline, against a bare loop; and what it leaves.

``python tests/benchmarks/bench_compaction.py``: 5,000,000 x 64 fp32, 5 % of the rows in each delta, every file in the
page cache. The bare loop reads the same files, decodes with the same codecs into one array, adds with the same kernels
on as many threads, encodes with the same codec and writes the bytes; it hashes, checks and describes nothing, and
keeps the whole table in memory. What both make of the codes is compared.

``--model``: models are compacted instead, each beside one table.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import harness
import many_tables
import numpy as np
from drifting import DIM, TABLE, DriftingTable, replay_bare, saves
from many_tables import Side
from models import add_model_option

from cnr_store import Store, TableOptions
from cnr_store.format import arrays
from cnr_store.format.records import ArrayEntry
from cnr_store.maintenance.compaction import compact_run
from cnr_store.runtime.threads import Workers, blocks, default_threads
from cnr_store.types import AffineBits, Float32s

DELTAS = 10
SHARE = 0.05
COMPACT_TO_BARE, PEAK_MIB, RESTORE_TO_FRESH = 0.7, 600, 1.1
Codes = np.ndarray[tuple[int, ...], np.dtype[np.int16]]


def write_stores(folder: Path, rows: int, bits: AffineBits) -> None:
    """Write a baseline with its deltas, and a fresh baseline of what they lead to."""
    table = DriftingTable(rows, share=SHARE)
    options = TableOptions(bits=bits)
    with Store.create(str(folder / "store"), fsync=False) as store, store.writer() as writer:
        list(saves(writer, table, options, DELTAS))
        scale = float(store.snapshot().tables[TABLE].encoding.scale)  # type: ignore[union-attr]
    with (
        Store.create(str(folder / "fresh"), fsync=False) as store,
        store.writer(mirror="none") as writer,
        writer.begin(0, "baseline") as txn,
    ):
        txn.write_table(TABLE, table.values, options=TableOptions(scale=scale))


def write_in_process(folder: str, rows: int, bits: AffineBits) -> None:
    """`write_stores` of a fresh process, whose memory ends with it."""
    write_stores(Path(folder), rows, bits)


class Sides:
    """The ways to compact the chain of a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bare_folder = folder / "bare"
        self.store = Store.open(str(folder / "store"), fsync=False)
        self.readers = self.store.snapshot().readers
        self.schema = self.readers[-1].manifest.tables[TABLE]
        self.workers = Workers(default_threads())
        self.copy = self.store
        self.renew()

    def renew(self) -> None:
        """Start from the store as it was: a copy of hard links, since nothing that is committed is written again."""
        if self.copy is not self.store:
            self.copy.close()
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        shutil.copytree(self.folder / "store", self.folder / "copy", copy_function=os.link)
        self.copy = Store.open(str(self.folder / "copy"), fsync=False)

    def compact(self) -> None:
        """Compact all segments of the copy into a new baseline."""
        report = compact_run(self.copy, run=(0, len(self.readers)))
        if report.outcome != "committed":
            raise SystemExit(f"the run was not compacted: {report}")

    def bare(self) -> None:
        """Decode, put or add, encode, write."""
        codes = np.empty((self.schema.num_rows, DIM), np.int16)
        replay_bare(Path(self.store.url), self.readers, codes, self.workers)
        chunk = arrays.chunk_rows_for(len(codes), 2 * DIM)
        shutil.rmtree(self.bare_folder, ignore_errors=True)
        self.bare_folder.mkdir()
        entry = arrays.describe("codes", codes.shape, codes.dtype, chunk)
        self.workers.run(
            partial(_encode, self.bare_folder / str(start), entry, codes[start:stop])
            for start, stop in blocks(len(codes), chunk)
        )

    def bare_codes(self) -> Codes:
        """The codes that the bare loop wrote."""
        codes = np.empty((self.schema.num_rows, DIM), np.int16)
        chunk = arrays.chunk_rows_for(len(codes), 2 * DIM)
        entry = arrays.describe("codes", codes.shape, codes.dtype, chunk)
        for start, stop in blocks(len(codes), chunk):
            out = np.empty(arrays.chunk_shape(entry), np.int16)
            arrays.decode_chunk(entry, (self.bare_folder / str(start)).read_bytes(), out, "bare")
            codes[start:stop] = out[: stop - start]
        return codes

    def close(self) -> None:
        self.copy.close()
        self.store.close()
        self.workers.close()


def _encode(path: Path, entry: ArrayEntry, block: Codes) -> None:
    path.write_bytes(arrays.encode_chunk(entry, block))


def peak_memory(folder: str) -> int:
    """Compact in a fresh process; returns the peak beyond the interpreter in bytes."""
    peak = harness.PeakMemory()
    sides = Sides(Path(folder))
    sides.compact()
    sides.close()
    return peak.beyond_bytes


class Restores:
    """The table read whole: from the compacted store, and from a baseline that a writer made."""

    def __init__(self, sides: Sides) -> None:
        self.target: Float32s = np.ones((sides.schema.num_rows, DIM), np.float32)
        self.fresh_store = Store.open(str(sides.folder / "fresh"))
        self.compacted_store = sides.copy

    def compacted(self) -> None:
        self.compacted_store.snapshot().table(TABLE).read_rectangle(values=self.target)

    def fresh(self) -> None:
        self.fresh_store.snapshot().table(TABLE).read_rectangle(values=self.target)

    def close(self) -> None:
        self.fresh_store.close()


def main() -> None:
    parser = harness.arguments(__doc__, rows=5_000_000, repeats=5)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    if options.model:
        works = {
            "compaction into one segment": (Side.copy, Side.compact),
            "compaction of the deltas into one": (Side.copy, partial(Side.compact, start=1)),
        }
        many_tables.run(options, "compaction", works, deltas=DELTAS, share=SHARE, bits=options.bits)
        return
    report = harness.Report(
        f"compact of {options.rows} x {DIM} fp32 at {options.bits} bits: baseline and {DELTAS} deltas of {SHARE:.0%}"
    )
    report.start()
    for rows in options.memory_rows:
        with harness.data_folder(options.folder) as folder:
            harness.in_fresh_process(
                __file__, "write_in_process", folder=str(folder), rows=rows, bits=options.bits
            )  # fmt: skip
            peak = harness.in_fresh_process(__file__, "peak_memory", folder=str(folder)) / harness.MIB
            report.add(f"peak beyond the interpreter, {rows} rows", peak, goal=PEAK_MIB, unit=" MiB")
    with harness.data_folder(options.folder) as folder:
        harness.in_fresh_process(
            __file__, "write_in_process", folder=str(folder), rows=options.rows, bits=options.bits
        )  # fmt: skip
        sides = Sides(folder)
        time_all(report, sides, options.repeats)
        sides.close()
    report.finish(options.json)


def time_all(report: harness.Report, sides: Sides, repeats: int) -> None:
    """Check that both sides agree, then time them, and the restores."""
    sides.compact()
    sides.bare()
    restores = Restores(sides)
    restores.compacted()
    codes = sides.bare_codes()
    step = np.float32(sides.schema.encoding.scale)  # type: ignore[union-attr]
    for start, stop in blocks(len(codes), 1 << 16):
        if not np.array_equal(step * codes[start:stop].astype(np.float32), restores.target[start:stop]):
            raise SystemExit("the bare loop and the compaction make different codes")
    del codes
    restores.fresh()
    found = harness.alternating({"compacted": restores.compacted, "fresh": restores.fresh}, repeats)
    report.add_ratio(
        "restore after the compaction / of a fresh baseline", found["compacted"], found["fresh"], RESTORE_TO_FRESH
    )
    restores.close()
    del restores
    found = harness.alternating({"compact": sides.compact, "bare": sides.bare}, repeats, before_each=sides.renew)
    # Speeds: the bare loop's seconds over the compaction's.
    low, _, high = harness.spread([b / f for f, b in zip(found["compact"].wall, found["bare"].wall, strict=True)])
    _, compact_s, _ = harness.spread(found["compact"].wall)
    _, bare_s, _ = harness.spread(found["bare"].wall)
    report.add(
        "speed of the compaction / speed of the bare loop", bare_s / compact_s, goal=COMPACT_TO_BARE, sense="at least",
        low=low, high=high,
    )  # fmt: skip
    _, compact_cpu_s, _ = harness.spread(found["compact"].cpu)
    _, bare_cpu_s, _ = harness.spread(found["bare"].cpu)
    report.note(
        f"      compact {found['compact']}; bare {found['bare']}; of CPU seconds {bare_cpu_s / compact_cpu_s:.2f}x"
    )


if __name__ == "__main__":
    main()
