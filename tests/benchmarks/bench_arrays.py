"""Write and read int16 (1,000,000 x 64) codes: zarr-python against `cnr_store.format.arrays`, time and peak memory.

``python tests/benchmarks/bench_arrays.py``. Each run is a fresh process with two threads on a temporary folder; neither
side syncs. Peaks are VmHWM, reset before each phase, beyond what the array and the output take.
"""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np

DIM = 64


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measured(action: Any) -> tuple[float, float]:
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_mib(), time.perf_counter()
    action()
    return time.perf_counter() - start, peak_mib() - before


def through_zarr(folder: str, codes: Any, out: Any, chunk_rows: int) -> list[tuple[float, float]]:
    import zarr
    from zarr.codecs import Crc32cCodec
    from zarr.core.buffer.cpu import NDBuffer

    warnings.simplefilter("ignore")
    zarr.config.set({"async.concurrency": 2, "threading.max_workers": 2})
    configuration = {"level": 8, "mode_spec": "classic", "delta_spec": "none"}

    def write() -> None:
        array = zarr.create_array(
            folder,
            shape=codes.shape,
            chunks=(chunk_rows, DIM),
            dtype="int16",
            fill_value=0,
            filters=None,
            serializer={"name": "numcodecs.pcodec", "configuration": configuration},
            compressors=[Crc32cCodec()],
            zarr_format=3,
            config={"write_empty_chunks": True},
        )
        array[:] = codes

    def read() -> None:
        zarr.open_array(folder, mode="r").get_basic_selection(out=NDBuffer.from_numpy_array(out))

    return [measured(write), measured(read)]


def directly(folder: str, codes: Any, out: Any, chunk_rows: int) -> list[tuple[float, float]]:
    from cnr_store.format import arrays
    from cnr_store.segment.decoded import Scratch

    entry = arrays.describe("codes", codes.shape, codes.dtype, chunk_rows, "compact")
    memory = threading.local()
    chunks = range(arrays.chunk_count(entry))

    def write_chunk(k: int) -> None:
        block = codes[k * chunk_rows : (k + 1) * chunk_rows]
        (Path(folder) / str(k)).write_bytes(arrays.encode_chunk(entry, block))

    def read_chunk(k: int) -> None:
        scratch = memory.__dict__.setdefault("scratch", Scratch())
        chunk = scratch.take(arrays.chunk_shape(entry), codes.dtype)
        arrays.decode_chunk(entry, (Path(folder) / str(k)).read_bytes(), chunk, str(k))
        piece = out[k * chunk_rows : (k + 1) * chunk_rows]
        piece[...] = chunk[: len(piece)]

    with ThreadPoolExecutor(2) as pool:
        return [
            measured(lambda: list(pool.map(write_chunk, chunks))),
            measured(lambda: list(pool.map(read_chunk, chunks))),
        ]


def one_run(side: str, rows: int) -> list[float]:
    from cnr_store.format import arrays

    random = np.random.default_rng(0)
    codes = np.empty((rows, DIM), np.int16)
    for start in range(0, rows, 50_000):
        block = codes[start : start + 50_000]
        block[...] = np.rint(random.laplace(0, 1.2, block.shape))
    out = np.zeros_like(codes)
    run = through_zarr if side == "zarr-python" else directly
    with tempfile.TemporaryDirectory() as folder:
        results = run(folder, codes, out, arrays.chunk_rows_for(rows, 2 * DIM))
    assert np.array_equal(out, codes)
    return [figure for pair in results for figure in pair]


def main() -> None:
    options = harness.arguments(__doc__, rows=1_000_000, repeats=3).parse_args()
    report = harness.Report(f"chunks: int16 ({options.rows:,} x {DIM}) through zarr-python and directly, two threads")
    report.start()
    found: dict[str, list[list[float]]] = {"zarr-python": [], "cnr_store.format.arrays": []}
    for _ in range(options.repeats):
        for side, runs in found.items():
            runs.append(harness.in_fresh_process(__file__, "one_run", side=side, rows=options.rows))
    best = {side: [min(column) for column in zip(*runs, strict=True)] for side, runs in found.items()}
    columns = ("side", "write, s", "its peak, MiB", "read, s", "its peak, MiB")
    report.table(f"best of {options.repeats}", columns, [(side, *figures) for side, figures in best.items()])
    for name, column in (("write", 0), ("read", 2)):
        ratios = [
            ours[column] / theirs[column]
            for ours, theirs in zip(found["cnr_store.format.arrays"], found["zarr-python"], strict=True)
        ]
        value = best["cnr_store.format.arrays"][column] / best["zarr-python"][column]
        report.add(f"{name}: directly / zarr-python, best of each", value, low=min(ratios), high=max(ratios))
    report.finish(options.json)


if __name__ == "__main__":
    main()
