"""Write and read int16 (1,000,000 x 64) codes: zarr-python against `cnr_store.arrays`, time and peak memory.

    python tests/benchmarks/bench_arrays.py

Each run is a fresh process with two threads on a temporary folder; neither side syncs. Peaks are VmHWM, reset before
each phase, beyond what the array and the output take.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROWS, DIM, RUNS = 1_000_000, 64, 3


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
    from cnr_store import arrays
    from cnr_store.segment import Scratch

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


def one_run(side: str) -> None:
    from cnr_store import arrays

    random = np.random.default_rng(0)
    codes = np.empty((ROWS, DIM), np.int16)
    for start in range(0, ROWS, 50_000):
        codes[start : start + 50_000] = np.rint(random.laplace(0, 1.2, (50_000, DIM)))
    out = np.zeros_like(codes)
    run = through_zarr if side == "zarr" else directly
    with tempfile.TemporaryDirectory() as folder:
        results = run(folder, codes, out, arrays.chunk_rows_for(ROWS, 2 * DIM))
    assert np.array_equal(out, codes)
    print(" ".join(f"{seconds:.4f} {mib:.1f}" for seconds, mib in results))


def main() -> None:
    best: dict[str, list[float]] = {}
    for _ in range(RUNS):
        for side in ("zarr", "direct"):
            command = [sys.executable, __file__, side]
            found = [
                float(x) for x in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            ]
            best[side] = [min(pair) for pair in zip(best.get(side, found), found, strict=True)]
    for side, (write, write_mib, read, read_mib) in best.items():
        print(f"{side:7} write {write:.3f} s, peak +{write_mib:.0f} MiB; read {read:.3f} s, peak +{read_mib:.0f} MiB")
    ratio = [a / b for a, b in zip(best["direct"], best["zarr"], strict=True)]
    print(f"direct / zarr-python (best of {RUNS}): write time {ratio[0]:.2f}, read time {ratio[2]:.2f}")


if __name__ == "__main__":
    one_run(sys.argv[1]) if len(sys.argv) > 1 else main()
