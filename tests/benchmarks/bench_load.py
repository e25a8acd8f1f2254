"""What it costs to load a compacted state: against safetensors from the page cache, and over a link of 1 Gbit/s.

``python tests/benchmarks/bench_load.py``: 5,000,000 x 64 fp32; a baseline and two deltas of 5 % of the rows, compacted
into one segment. Every check of a reader is on: digests of objects and of the state.

In memory means in the same touched array on both sides: safetensors maps its file, so `load_file` alone has read
nothing, and its figure stands beside the ratio, which is to `load_file` and one copy by as many threads as the store
has. Over the link, which throttles SeaweedFS in a process of its own, the other side fetches the bytes of the fp32 file
by ranges in eight threads, and does nothing with them.

``--model``: a `Loader` loads models instead, each beside one table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import harness
import many_tables
import numpy as np
import torch
from drifting import DIM, TABLE, DriftingTable, decompress, saves, stored_bytes
from many_tables import Side
from models import add_model_option
from safetensors.torch import load_file, save_file

from cnr_store import CompactionPolicy, Store, TableOptions
from cnr_store.encodings import digest, kernels
from cnr_store.format import arrays
from cnr_store.format.layout import segment_prefix
from cnr_store.format.records import ArrayEntry
from cnr_store.maintenance.compaction import compact_run
from cnr_store.runtime.threads import blocks, default_threads
from cnr_store.storage import Storage, object_digest, open_storage
from cnr_store.types import Float32s
from tests.support.servers import S3Server, running_seaweed
from tests.support.throttled_proxy import throttled_proxy

DELTAS, SHARE = 2, 0.05
LOAD_TO_SAFETENSORS, LINK_TO_FP32 = 2.0, 4.0
LINK_BYTES_PER_S = 125e6
LOCAL_BITS, LINK_BITS = (4, 2, 8), (2, 3, 4, 8)
RANGE_BYTES, RANGE_THREADS = 8 * 1024 * 1024, 8


def write_store(url: str, table: DriftingTable, bits: Any, options: Mapping[str, Any] | None = None) -> float:
    """Write baseline and deltas, and compact them; returns the bits per element of the codes."""
    with Store.create(url, fsync=False, storage_options=options) as store:
        with store.writer() as writer:
            list(saves(writer, table, TableOptions(bits=bits), DELTAS))
        while len(store.snapshot().readers) > 1:
            compact_run(store, policy=CompactionPolicy(max_chain=1))
        manifest = store.snapshot().manifests[-1]
        paths = tuple(f"{part.set.arrays['codes'].path}/c." for part in manifest.parts if part.set is not None)
        size = sum(item.size for item in manifest.objects if item.path.startswith(paths))
        return 8 * size / table.values.size


def _codes(store: Store) -> ArrayEntry:
    row_list = store.snapshot().manifests[-1].parts[0].set
    assert row_list is not None
    return row_list.arrays["codes"]


class Local:
    """The ways to get the table from files into memory."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.file = folder / "table.safetensors"
        self.store = Store.open(str(folder / "store"))
        self.target: Float32s = np.ones((rows, DIM), np.float32)
        torch.set_num_threads(self.store.internals.workers.threads)

    def read(self) -> None:
        """Open the state and read it."""
        self.store.snapshot().table(TABLE).read_rectangle(values=self.target)

    def read_fresh(self) -> None:
        """The same into memory that is taken anew."""
        self.store.snapshot().table(TABLE).read()

    def copied(self) -> None:
        """Map the file and copy it."""
        torch.from_numpy(self.target).copy_(load_file(self.file)[TABLE])

    def copied_fresh(self) -> None:
        """The same into memory that is taken anew."""
        load_file(self.file)[TABLE].clone()

    def mapped(self) -> None:
        """Map the file."""
        load_file(self.file)

    def close(self) -> None:
        """End the store's threads."""
        self.store.close()


def note_parts(report: harness.Report, local: Local) -> None:
    """Print what each piece of work of a load costs, on one thread; of the rows that the first writer's part has."""
    entry, reader = _codes(local.store), local.store.snapshot().readers[-1]
    segment = Path(local.store.url) / segment_prefix(reader.name)

    chunks = range(arrays.chunk_count(entry))

    def read() -> None:
        for index in chunks:  # none is kept: memory that is taken anew costs more than what is read into it
            stored_bytes(segment, entry, index)

    data = [stored_bytes(segment, entry, index) for index in chunks]
    codes = np.empty(arrays.chunk_shape(entry), entry.dtype)
    multipliers = digest.column_multipliers(0, DIM)

    def convert(start: int, stop: int) -> None:
        out = local.target[start:stop]
        block = codes[: stop - start]
        kernels.lattice_decode_digest(block, np.float32(0.01), out, start, multipliers, digest.PRESENCE_CODED)

    ranges = blocks(entry.shape[0], entry.chunk_rows)
    work: dict[str, Callable[[], object]] = {
        "reading chunks": read,
        "xxh3": lambda: [object_digest(one) for one in data],
        f"{entry.codec} of {entry.dtype}": lambda: [decompress(entry, one, codes) for one in data],
        "codes to floats, and digest": lambda: [convert(*one) for one in ranges],
    }
    found = harness.alternating(work, 3)
    values = entry.shape[0] * DIM
    for name, timings in found.items():
        report.note(f"      one thread, {name}: {timings}, {values / min(timings.wall) / 1e6:.0f} million values per s")


def local_load(report: harness.Report, folder: Path, rows: int, repeats: int) -> None:
    """Loads from the page cache."""
    for bits in LOCAL_BITS:
        with harness.data_folder(str(folder)) as here:
            table = DriftingTable(rows, share=SHARE)
            stored = write_store(str(here / "store"), table, bits)
            save_file({TABLE: torch.from_numpy(table.values)}, here / "table.safetensors")
            local = Local(here, rows)
            del table
            work: dict[str, Callable[[], object]] = {"read": local.read, "copied": local.copied}
            if bits == LOCAL_BITS[0]:
                work |= {"fresh": local.read_fresh, "cloned": local.copied_fresh, "mapped": local.mapped}
            for side in work.values():
                side()
            found = harness.alternating(work, repeats)
            name = f"{bits}-bit quality ({stored:.2f} bits): load / safetensors and copy"
            report.add_ratio(name, found["read"], found["copied"], LOAD_TO_SAFETENSORS)
            if "fresh" in found:
                report.add_ratio("the same, both into fresh memory", found["fresh"], found["cloned"])
                report.note(f"      safetensors load_file alone, which maps the file: {found['mapped']}")
            note_parts(report, local)
            local.close()


def throttled_load(report: harness.Report, folder: Path, rows: int, repeats: int) -> None:
    """Loads from SeaweedFS behind the link."""
    with running_seaweed(folder) as server:
        client = server.client()
        client.create_bucket(Bucket="bench")
        stored = {}
        for bits in LINK_BITS:
            table = DriftingTable(rows, share=SHARE)
            url = f"s3://bench/store-{bits}"
            stored[bits] = write_store(url, table, bits, {**server.storage_options, "use_listings_cache": False})
        save_file({TABLE: torch.from_numpy(table.values)}, folder / "table.safetensors")
        size = (folder / "table.safetensors").stat().st_size
        client.upload_file(str(folder / "table.safetensors"), "bench", "fp32/table.safetensors")
        del table
        port = int(server.endpoint_url.rpartition(":")[2])
        with throttled_proxy(port, LINK_BYTES_PER_S) as link:
            slow = S3Server(f"http://127.0.0.1:{link.port}", server.access_key, server.secret_key)
            stores = {b: Store.open(f"s3://bench/store-{b}", storage_options=slow.storage_options) for b in LINK_BITS}
            target = np.ones((rows, DIM), np.float32)

            def load(bits: int) -> None:
                stores[bits].snapshot().table(TABLE).read_rectangle(values=target)

            fp32 = open_storage("s3://bench/fp32", storage_options=slow.storage_options)
            work: dict[str, Callable[[], object]] = {"fp32": partial(fetch, fp32, "table.safetensors", size)}
            work |= {str(bits): partial(load, bits) for bits in LINK_BITS}
            found = harness.alternating(work, repeats)
            for bits in LINK_BITS:
                name = f"{bits}-bit quality ({stored[bits]:.2f} bits): fp32 file / load"
                ratios = [a / b for a, b in zip(found["fp32"].wall, found[str(bits)].wall, strict=True)]
                low, middle, high = harness.spread(ratios)
                report.add(name, middle, goal=LINK_TO_FP32, sense="at least", low=low, high=high)
                report.note(f"      fp32 {found['fp32']}, load {found[str(bits)]}; by bytes {32 / stored[bits]:.2f}x")
            rate = size / min(found["fp32"].wall) / 1e6
            report.note(f"      the fp32 file came at {rate:.0f} MB/s of {LINK_BYTES_PER_S / 1e6:.0f}")
            for store in stores.values():
                store.close()


def fetch(storage: Storage, key: str, size: int) -> int:
    """Fetch an object by ranges; returns its bytes."""
    with ThreadPoolExecutor(RANGE_THREADS) as pool:
        pieces = pool.map(lambda ends: len(storage.read(key, start=ends[0], stop=ends[1]) or b""),
                          blocks(size, RANGE_BYTES))  # fmt: skip
        return sum(pieces)


def main() -> None:
    """Measure."""
    parser = harness.arguments(__doc__, rows=5_000_000, repeats=5)
    parser.add_argument("--only", choices=("local", "link"))
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    if options.model:
        works = {"load of the compacted chain": (Side.compact_whole, Side.load)}
        many_tables.run(options, "load", works, deltas=DELTAS, share=SHARE, bits=LOCAL_BITS[0])
        return
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    report = harness.Report(f"load of a compacted {options.rows} x {DIM} fp32, {default_threads()} threads")
    report.start()
    with harness.data_folder(options.folder) as folder:
        if options.only != "link":
            local_load(report, folder, options.rows, options.repeats)
        if options.only != "local":
            throttled_load(report, folder, options.rows, min(options.repeats, 3))
    report.finish(options.json)


if __name__ == "__main__":
    main()
