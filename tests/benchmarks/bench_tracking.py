"""What tracking costs: marking against ``unique``, memory per row, take, hooks against the lookup they watch.

Run: ``python tests/benchmarks/bench_tracking.py``. One process, median and spread (10th to 90th
percentile) of repeated rounds; ratios are between figures of the same run.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from cnr_store_gpu import RowBitmap, RowRequest, RowTracker, StagingBuffers, warmup

NUM_ROWS, NUM_IDS, DIM, ROUNDS = 10_000_000, 200_000, 64, 31


def measure(work: Callable[[], object], before: Callable[[], object] | None = None) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile in milliseconds; ``before`` runs ahead of each round, untimed."""
    times = []
    for _ in range(ROUNDS + 1):
        if before is not None:
            before()
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    low, middle, high = np.percentile(times[1:], [10, 50, 90])
    return float(middle), float(low), float(high)


def line(name: str, result: tuple[float, float, float], ratio: str = "") -> None:
    middle, low, high = result
    print(f"  {name:<46} {middle:9.3f} ms  ({low:.3f} to {high:.3f})  {ratio}")


def bench_mark(name: str, ids: torch.Tensor) -> None:
    bitmap = RowBitmap({"t": NUM_ROWS})
    flags = torch.zeros(NUM_ROWS, dtype=torch.uint8)
    unique = measure(lambda: torch.unique(ids))
    fresh = measure(lambda: bitmap.mark("t", ids), before=lambda: bitmap.clear())
    again = measure(lambda: bitmap.mark("t", ids))
    as_bytes = measure(lambda: flags.index_fill_(0, ids, 1), before=lambda: flags.zero_())
    print(f"{NUM_IDS} {name} ids into {NUM_ROWS} rows")
    line("torch.unique", unique)
    line("mark, first time in an interval", fresh, f"unique / mark = {unique[0] / fresh[0]:.1f} (goal: at least 5)")
    line("mark, rows already marked", again, f"unique / mark = {unique[0] / again[0]:.1f}")
    line("one byte per row, index_fill_", as_bytes, f"bytes / mark = {as_bytes[0] / fresh[0]:.1f}")


def bench_take(ids: torch.Tensor) -> None:
    bitmap = RowBitmap({"t": NUM_ROWS})
    taken = measure(lambda: bitmap.take_all(), before=lambda: bitmap.mark("t", ids))
    print("the end of an interval")
    line(f"take_all of {len(torch.unique(ids))} marked rows", taken)
    share = bitmap.size_bytes / (NUM_ROWS * DIM * 4)
    print(
        f"  memory: {bitmap.size_bytes} bytes for {NUM_ROWS} rows = {bitmap.size_bytes * 8 / NUM_ROWS:.4f} "
        f"bits per row, {share:.4%} of {DIM}-dim fp32 weights"
    )


def bench_hooks(ids: torch.Tensor) -> None:
    model = nn.EmbeddingBag(1_000_000, DIM, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bags = (ids[:65536] % 1_000_000).view(-1, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(bags).sum().backward()
        optimizer.step()

    bare = measure(step)
    tracker = RowTracker(model, optimizers=[optimizer])
    tracked = measure(step)
    print("a step of one EmbeddingBag alone (1M x 64, 65536 ids, sparse SGD)")
    line("without tracker", bare)
    line("with tracker", tracked, f"tracked / bare = {tracked[0] / bare[0]:.3f}")

    buffers, weight = StagingBuffers(), model.weight.detach()
    taken = tracker.take()["weight"]
    request = {"weight": RowRequest(taken.row_ids, {"weight": model.weight})}
    index = torch.from_numpy(taken.row_ids)
    bare = measure(lambda: torch.index_select(weight, 0, index))
    staged = measure(lambda: buffers.gather(request).release())
    print(f"gather of {len(taken)} rows")
    line("index_select into fresh memory", bare)
    line("StagingBuffers.gather", staged, f"staged / bare = {staged[0] / bare[0]:.2f}")


def main() -> None:
    warmup()
    threads = f"{torch.get_num_threads()} torch threads of {os.cpu_count()} CPUs"
    print(f"{platform.machine()}, {threads}, torch {torch.__version__}, median of {ROUNDS} (10 % to 90 %)")
    random = np.random.default_rng(0)
    uniform = torch.from_numpy(random.integers(0, NUM_ROWS, NUM_IDS))
    zipf = torch.from_numpy((random.zipf(1.2, NUM_IDS) - 1) % NUM_ROWS)
    bench_mark("uniform", uniform)
    bench_mark("Zipf (1.2)", zipf)
    bench_take(uniform)
    bench_hooks(uniform)


if __name__ == "__main__":
    main()
