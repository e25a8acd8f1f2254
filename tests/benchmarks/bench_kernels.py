"""Million elements per second of each row kernel, and its time against a memcpy of the same bytes, in one run.

``python tests/benchmarks/bench_kernels.py [--dim 64] [--table-rows 1000000]``. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from cnr_store.encodings import digest, float_bits, kernels


def seconds(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return (best, spread as (median - best) / best) after one call that compiles and warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    best = min(times)
    return best, (statistics.median(times) - best) / best


def cases(rows: int, dim: int, table_rows: int) -> list[tuple[str, int, Callable[[], Any]]]:
    """Return (name, bytes read and written, call) per kernel."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, dim), dtype=np.float32)
    floats = np.empty_like(values)
    ids = np.sort(rng.choice(table_rows, rows, replace=False)).astype(np.int64)
    mirror16, mirror32 = np.zeros((table_rows, dim), np.int16), np.zeros((table_rows, dim), np.int32)
    out16, out32 = np.zeros((rows, dim), np.int16), np.zeros((rows, dim), np.int32)
    zero16 = np.zeros_like(out16)
    codes16 = np.rint(100 * values).astype(np.int16)
    flags = np.zeros(rows, np.uint8)
    columns = digest.column_multipliers(0, dim)
    bits, out_bits = float_bits.as_bits(values), float_bits.as_bits(floats)
    step = np.float32(0.01)
    n = rows * dim
    present = digest.PRESENCE_CODED
    slot = np.abs(values[:, :1]).copy()
    slot_mirror, slot_out = np.zeros((table_rows, 1), np.int16), np.zeros((rows, 1), np.int16)
    slot_weights = digest.slot_multipliers("momentum1", 0, 1)
    k = kernels
    return [
        ("lattice_encode -> int16", 6 * n, lambda: k.lattice_encode(values, step, out16, flags)),
        ("lattice_encode -> int32", 8 * n, lambda: k.lattice_encode(values, step, out32, flags)),
        (
            "lattice_delta int16 mirror -> int16",
            8 * n,
            lambda: k.lattice_delta(values, ids, mirror16, 0, step, columns, out16, flags),
        ),
        (
            "lattice_delta int16 mirror -> int32",
            10 * n,
            lambda: k.lattice_delta(values, ids, mirror16, 0, step, columns, out32, flags),
        ),
        (
            "lattice_delta of codes, int16 mirror -> int16",
            6 * n,
            lambda: k.lattice_delta(codes16, ids, mirror16, 0, np.float32(1), columns, out16, flags),
        ),
        ("lattice_decode int16", 6 * n, lambda: k.lattice_decode(zero16, step, floats)),
        ("lattice_decode int32", 8 * n, lambda: k.lattice_decode(out32, step, floats)),
        ("lattice_decode_in_place", 8 * n, lambda: k.lattice_decode_in_place(floats, step)),
        ("float_bits_encode m=7 -> int16", 6 * n, lambda: k.float_bits_encode(bits, 16, out16, flags)),
        ("float_bits_encode m=23 -> int32", 8 * n, lambda: k.float_bits_encode(bits, 0, out32, flags)),
        (
            "float_bits_delta m=7, int16 mirror",
            8 * n,
            lambda: k.float_bits_delta(bits, ids, mirror16, 0, 16, columns, out16, flags),
        ),
        (
            "float_bits_delta m=23, int32 mirror",
            12 * n,
            lambda: k.float_bits_delta(bits, ids, mirror32, 0, 0, columns, out32, flags),
        ),
        (
            "float_bits_delta m=7, 1-d slot",
            8 * rows,
            lambda: k.float_bits_delta(slot.view(np.int32), ids, slot_mirror, 0, 16, slot_weights, slot_out, flags),
        ),
        ("float_bits_decode int16", 6 * n, lambda: k.float_bits_decode(zero16, 16, out_bits)),
        ("put_codes int16 <- int16", 4 * n, lambda: k.put_codes(mirror16, ids, 0, zero16, 0)),
        ("add_codes int16 <- int16", 6 * n, lambda: k.add_codes(mirror16, ids, 0, zero16, 0)),
        ("add_codes int32 <- int16", 10 * n, lambda: k.add_codes(mirror32, ids, 0, zero16, 0)),
        ("add_codes_wrapping int32 <- int16", 10 * n, lambda: k.add_codes_wrapping(mirror32, ids, 0, zero16)),
        ("put_block int32 <- int16", 6 * n, lambda: k.put_block(out32, zero16, 0)),
        ("add_block int32 <- int16", 10 * n, lambda: k.add_block(out32, zero16, 0)),
        ("digest_block int16", 2 * n, lambda: k.digest_block(zero16, 0, columns, present)),
        ("digest_block int32", 4 * n, lambda: k.digest_block(out32, 0, columns, present)),
        ("digest_gathered int16", 2 * n, lambda: k.digest_gathered(mirror16, ids, 0, columns, present)),
    ]


def main() -> None:
    parser = harness.arguments(__doc__, rows=200_000, repeats=7)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--table-rows", type=int, default=1_000_000)
    options = parser.parse_args()
    report = harness.Report(f"kernels: {options.rows:,} of {options.table_rows:,} rows x {options.dim}, one thread")
    report.start()
    source = np.ones(options.rows * options.dim * 4, np.uint8)
    target = np.empty_like(source)
    copy_s, _ = seconds(lambda: np.copyto(target, source), options.repeats)
    bytes_per_second = 2 * source.nbytes / copy_s
    report.note(f"memcpy of {source.nbytes / 1e6:.0f} MB: {bytes_per_second / 1e9:.1f} GB/s read and written")
    rows = []
    for name, size_bytes, work in cases(options.rows, options.dim, options.table_rows):
        elements = options.rows * (1 if "1-d" in name else options.dim)
        taken, spread = seconds(work, options.repeats)
        rows.append((name, elements / taken / 1e6, taken * bytes_per_second / size_bytes, spread))
    columns = ("kernel", "million elements/s", "time / memcpy of its bytes", "median over best, less 1")
    report.table("best of the repeats", columns, rows)
    report.finish(options.json)


if __name__ == "__main__":
    main()
