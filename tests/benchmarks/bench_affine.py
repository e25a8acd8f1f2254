"""Affine row search against torch's greedy prepack: time per row and mean squared error, in one run.

``python tests/benchmarks/bench_affine.py``. One thread each. Time is the thread's CPU time, ours and torch's
repeats alternate, and the least of each counts, so that other work on the machine weighs on both alike. Each
error is that of the rows as that library decodes them. Targets: at least 40 times faster, error at most 1.01
times torch's. At 2 bits torch's greedy falls back to min-max on many rows (quantization reference, section
4.3), so there the last column compares with our greedy, which keeps its best point.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch

from cnr_store.encodings import affine, packing
from cnr_store.types import Affine, Float32s

SPEED_TARGET, ERROR_TARGET = 40.0, 1.01


def rows_of(kind: str, num_rows: int, dim: int, rng: np.random.Generator) -> Float32s:
    """Return synthetic rows: gauss, laplace, or gauss with 2 % outliers 4 to 10 times as large."""
    if kind == "laplace":
        return (0.1 * rng.laplace(size=(num_rows, dim))).astype(np.float32)
    rows = 0.1 * rng.standard_normal((num_rows, dim))
    if kind == "outlier":
        factor = rng.uniform(4, 10, rows.shape)
        rows = np.where(rng.random(rows.shape) < 0.02, rows * factor, rows)
    return rows.astype(np.float32)


class Ours:
    """One affine encoding with its outputs preallocated."""

    def __init__(self, rows: Float32s, bits: int, **search: Any) -> None:
        self.rows, self.bits, self.search = rows, bits, search
        num_rows, dim = rows.shape
        self.codes = np.empty((num_rows, packing.packed_width(dim, bits)), np.uint8)
        self.scale = np.empty(num_rows, np.float16)
        self.zero_point = np.empty(num_rows, np.float16)

    def encode(self) -> None:
        affine.encode(
            self.rows,
            Affine(self.bits, **self.search),  # type: ignore[arg-type]
            out_codes=self.codes,
            out_scale=self.scale,
            out_zero_point=self.zero_point,
        )

    def error(self) -> float:
        self.encode()
        decoded = np.empty_like(self.rows)
        affine.decode(self.codes, self.scale, self.zero_point, bits=self.bits, dim=self.rows.shape[1], out=decoded)
        return float(np.mean(np.square(decoded - self.rows), dtype=np.float64))


def seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def main() -> None:
    options = harness.arguments(__doc__, rows=1000, repeats=9).parse_args()
    torch.set_num_threads(1)
    report = harness.Report(f"affine rows against torch's greedy prepack, {options.rows:,} rows, one thread")
    report.start()
    rng = np.random.default_rng(0)
    cells = [
        compare(bits, kind, rows_of(kind, options.rows, dim, rng), options.repeats)
        for bits in (2, 4)
        for dim in (16, 64, 128)
        for kind in ("gauss", "laplace", "outlier")
    ]
    columns = (
        "bits",
        "dim",
        "rows",
        "torch, us",
        "grid, us",
        "faster",
        "error / torch",
        "error / greedy",
        "minmax, us",
    )
    report.table("one row", columns, cells, "least CPU time of a row; errors are mean squares of what comes back")
    faster, errors = [float(cell[5]) for cell in cells], [float(cell[6]) for cell in cells]
    report.add(
        "faster than torch, slowest cell", min(faster), goal=SPEED_TARGET, sense="at least",
        low=min(faster), high=max(faster),
    )  # fmt: skip
    report.add("error / torch, worst cell", max(errors), goal=ERROR_TARGET, low=min(errors), high=max(errors))
    report.finish(options.json)


def compare(
    bits: int, kind: str, rows: Float32s, repeats: int
) -> tuple[int, int, str, float, float, float, float, float, float]:
    """Time one kind of rows in turns: ours three times for each of torch's."""
    quantized = torch.ops.quantized
    prepack = {2: quantized.embedding_bag_2bit_prepack, 4: quantized.embedding_bag_4bit_prepack}[bits]
    unpack = {2: quantized.embedding_bag_2bit_unpack, 4: quantized.embedding_bag_4bit_unpack}[bits]
    tensor = torch.from_numpy(rows)
    grid, minmax = Ours(rows, bits), Ours(rows, bits, search="minmax")
    greedy = Ours(rows, bits, search="greedy", num_bins=200, ratio=0.5 if bits == 2 else 0.16)
    grid_error, greedy_error = grid.error(), greedy.error()
    torch_error = float(torch.mean(torch.square(unpack(prepack(tensor, True, 200, 0.16)) - tensor).double()))
    torch_s, grid_s, minmax_s = [], [], []
    for _ in range(repeats):
        torch_s.append(seconds(lambda: prepack(tensor, True, 200, 0.16)))
        grid_s += [seconds(grid.encode) for _ in range(3)]
        minmax_s += [seconds(minmax.encode) for _ in range(3)]
    torch_us, grid_us, minmax_us = (1e6 * min(times) / len(rows) for times in (torch_s, grid_s, minmax_s))
    return (
        bits, rows.shape[1], kind, torch_us, grid_us, torch_us / grid_us,
        grid_error / torch_error, grid_error / greedy_error, minmax_us,
    )  # fmt: skip


if __name__ == "__main__":
    main()
