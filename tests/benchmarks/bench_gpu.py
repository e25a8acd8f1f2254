"""What collecting costs on a GPU: mark, compact and clear, gather and quantize, copy to the host; and of a whole step.

Run: ``python tests/benchmarks/bench_gpu.py [--json FILE]``. Each figure is a time and a ratio to its byte floor: the
bytes that must be read and written, over the bandwidth of a large copy on the same GPU in the same run. The last
ones are of a whole DLRM: the share of tracking in its step (two models, equal but for the tracker, train on the same
batches in turn), and what a manager's saves cost it: the stall, and the steps behind it. Without a GPU it says so and
ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from harness import DATA_FOLDER, Report, Timings, alternating, data_folder, spread, timed
from torch import nn

from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from cnr_store_gpu import RowTracker, kernels

DIM, FEATURES, BATCH = 64, 26, 65_536
TOUCHED = 0.10
SECTOR = 32
"""Bytes that a GPU reads or writes at least: one touched bit costs a sector, not a bit."""
RUN_AHEAD_CYCLES = 2_000_000
"""The GPU spins this long before the clock starts, so that it never waits for Python to launch."""
STEP_ROWS, DENSE, STEPS_AT_A_TIME = 1_000_000, 13, 10
"""The step's rows per table, dense features, and steps between two looks at the clock: training does not wait for the
GPU after each of its steps."""
SAVED_ROWS, SAVES = 200_000, 6
"""Rows per table of the model that is saved (the first save writes all of them), and saves for each way to stage."""
SHARE_OF_STEP = 1.0
"""Goal: percent of the step at most."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The measured device: seconds per byte are its floor."""

    device: torch.device
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """Return the least time in which these bytes can be read and written."""
        return size_bytes / self.bytes_per_second


def gpu_seconds(work: Callable[[], object], *, repeats: int, before: Callable[[], object] | None = None) -> list[float]:
    """Return the seconds of each repeat on the GPU's clock; ``before`` is untimed. One call warms up."""
    found = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(RUN_AHEAD_CYCLES)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3)
    return found[1:]


def kernel_seconds(work: Callable[[], object], before: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the seconds that the GPU was busy in each repeat: without the gaps in which it waits for the host."""
    found = []
    for _ in range(repeats):
        before()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        found.append(sum(event.self_device_time_total for event in profile.key_averages()) / 1e6)
    return found


def add(report: Report, gpu: Gpu, name: str, seconds: list[float], size_bytes: float, goal: float | None) -> None:
    """Add a ratio to the byte floor, and the time beside it."""
    floor = gpu.seconds(size_bytes)
    low, middle, high = spread([one / floor for one in seconds])
    report.add(name, middle, goal=goal, low=low, high=high)
    report.note(
        f"      {statistics.median(seconds) * 1e6:.1f} us against {floor * 1e6:.1f} us for {size_bytes / 1e6:.2f} MB"
    )


def measured_gpu(report: Report, repeats: int) -> Gpu:
    """Measure the bandwidth of a large copy."""
    device = torch.device("cuda")
    free_bytes, _ = torch.cuda.mem_get_info()
    size = min(4 << 30, free_bytes // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    rate = 2 * size / statistics.median(gpu_seconds(lambda: target.copy_(source), repeats=repeats))
    properties = torch.cuda.get_device_properties(device)
    report.note(
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}; triton runs: {kernels.uses_triton(source)}; "
        f"copy of {size / 1e9:.1f} GB: {rate / 1e12:.2f} TB/s read + written"
    )
    return Gpu(device, rate)


def lookups(kind: str, rows_per_table: int, device: torch.device) -> torch.Tensor:
    """Return the ids of one batch, feature by feature; int64 (FEATURES * BATCH,)."""
    random = torch.Generator(device=device).manual_seed(0)
    shares = torch.rand(FEATURES * BATCH, generator=random, device=device, dtype=torch.float64)
    if kind == "uniform":
        return (shares * rows_per_table).to(torch.int64).clamp_(max=rows_per_table - 1)
    # Inverse of the distribution function of a density x^-1.05 on [1, rows].
    power = 1.0 - 1.05
    ranks = (shares * (float(rows_per_table + 1) ** power - 1.0) + 1.0) ** (1.0 / power)
    return (ranks.to(torch.int64) - 1).clamp_(0, rows_per_table - 1)


def bench_mark(report: Report, gpu: Gpu, num_rows: int, repeats: int) -> None:
    """Mark one batch of every feature in one launch, into clear words and once more."""
    report.note(f"\nmark {BATCH} x {FEATURES} lookups, {num_rows:.0e} rows in {FEATURES} tables")
    rows = num_rows // FEATURES
    table_words = -(-rows // 1024) * 32
    words = torch.zeros(FEATURES * table_words, dtype=torch.int32, device=gpu.device)
    ends = torch.arange(FEATURES + 1, device=gpu.device) * BATCH
    firsts = torch.arange(FEATURES, device=gpu.device) * table_words
    sizes = torch.full((FEATURES,), rows, device=gpu.device)
    for kind in ("uniform", "Zipf 1.05"):
        for dtype in (torch.int64, torch.int32):
            ids = lookups(kind, rows, gpu.device).to(dtype)
            table = torch.arange(FEATURES, device=gpu.device).repeat_interleave(BATCH)
            sectors = torch.unique((firsts[table] + (ids >> 5)) // (SECTOR // 4)).numel()
            read = ids.numel() * ids.element_size() + sectors * SECTOR

            def work(ids: torch.Tensor = ids) -> None:
                kernels.mark_slices(words, ids, ends, firsts, sizes)

            name = f"{kind}, {str(dtype).removeprefix('torch.')}"
            first = gpu_seconds(work, repeats=repeats, before=words.zero_)
            again = gpu_seconds(work, repeats=repeats)
            add(report, gpu, f"mark, {name}, clear words", first, read + sectors * SECTOR, 1.5)
            add(report, gpu, f"mark, {name}, marked before", again, read, 1.5)


def bench_take(report: Report, gpu: Gpu, num_rows: int, repeats: int) -> None:
    """Take a random tenth of the rows."""
    report.note(f"\ncompact and clear, {num_rows:.0e} rows, {TOUCHED:.0%} marked")
    size = -(-num_rows // 1024) * 32
    kept = torch.zeros(size, dtype=torch.int32, device=gpu.device)
    chunk = 1 << 26
    for start in range(0, num_rows, chunk):
        share = torch.rand(min(chunk, num_rows - start), device=gpu.device)
        kernels.mark(kept, torch.nonzero(share < TOUCHED).reshape(-1) + start, 0, num_rows)
    words = kept.clone()

    def before() -> None:
        words.copy_(kept)

    def work() -> None:
        kernels.take_rows(words, [(0, size)])

    work()
    before()
    taken = len(kernels.take_rows(words, [(0, size)])[0][0])
    # Read to count, read to emit, write the copy, clear; and the ids.
    size_bytes = 4 * 4 * size + 8 * taken
    add(report, gpu, "take_rows, its kernels", kernel_seconds(work, before, repeats=repeats), size_bytes, 1.5)
    add(report, gpu, "take_rows, with its wait", gpu_seconds(work, repeats=repeats, before=before), size_bytes, None)


def bench_gather(report: Report, gpu: Gpu, num_rows: int, repeats: int) -> None:
    """Gather a random tenth of the rows raw, and as lattice codes."""
    free_bytes, _ = torch.cuda.mem_get_info()
    # Table, staging for a tenth of it, and the random choice of rows.
    wanted = num_rows
    num_rows = min(num_rows, int(free_bytes * 0.8) // (4 * DIM + 4 * DIM // 8 + 16))
    slices = "" if num_rows == wanted else f" (all that fits, of {wanted:.0e})"
    report.note(f"\ngather and quantize {TOUCHED:.0%} of {num_rows:.1e} x {DIM} float32{slices}")
    table = torch.empty((num_rows, DIM), device=gpu.device).normal_()
    rows = torch.nonzero(torch.rand(num_rows, device=gpu.device) < TOUCHED).reshape(-1)
    bench_raw(report, gpu, table, rows, repeats)
    bench_codes(report, gpu, table, rows, repeats)


def bench_raw(report: Report, gpu: Gpu, table: torch.Tensor, rows: torch.Tensor, repeats: int) -> None:
    """Copy rows as they are, of the table and of a slot with one number per row."""
    num_taken = len(rows)
    out = torch.empty((num_taken, DIM), device=gpu.device)
    raw = gpu_seconds(lambda: kernels.gather_rows(table, rows, out), repeats=repeats)
    add(report, gpu, "gather, raw: the stall", raw, num_taken * (8 + 8 * DIM), 1.5)
    by_torch = gpu_seconds(lambda: torch.index_select(table, 0, rows, out=out), repeats=repeats)
    report.add("torch.index_select / gather", statistics.median(by_torch) / statistics.median(raw))
    slot, slots = table[:, 0].clone(), torch.empty(num_taken, device=gpu.device)
    slot_bytes = num_taken * (8 + 4) + min(num_taken * SECTOR, slot.numel() * 4)
    seconds = gpu_seconds(lambda: kernels.gather_rows(slot, rows, slots), repeats=repeats)
    add(report, gpu, "gather, a row-wise slot", seconds, slot_bytes, 1.5)


def bench_codes(report: Report, gpu: Gpu, table: torch.Tensor, rows: torch.Tensor, repeats: int) -> None:
    """Code gathered rows."""
    num_taken = len(rows)
    gathered = table[rows]
    flag = torch.zeros(1, dtype=torch.int32, device=gpu.device)
    codes = torch.empty((num_taken, DIM), dtype=torch.int16, device=gpu.device)
    seconds = gpu_seconds(lambda: kernels.lattice_quantize(gathered, 1e-3, codes, flag), repeats=repeats)
    add(report, gpu, "lattice, int16 codes", seconds, num_taken * (4 + 2) * DIM, 1.5)


def bench_host_copy(report: Report, gpu: Gpu, repeats: int) -> None:
    """Copy to pinned and to pageable memory."""
    report.note("\ndevice to host")
    for size in (64 << 20, 1 << 30):
        source = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        started = time.perf_counter()
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pinning = time.perf_counter() - started
        pageable = torch.zeros(size, dtype=torch.uint8)
        fast, slow = (
            statistics.median(gpu_seconds(partial(host.copy_, source, non_blocking=True), repeats=repeats))
            for host in (pinned, pageable)
        )
        report.note(f"  {size >> 20} MiB into pinned memory: {size / fast / 1e9:.1f} GB/s")
        report.add(f"pageable / pinned, {size >> 20} MiB", slow / fast)
        report.add(f"pinning once / copying once, {size >> 20} MiB", pinning / fast)


class Dlrm(nn.Module):
    """Tables of one lookup per feature, an MLP of the dense features, all pairwise products, an MLP over them."""

    pairs: torch.Tensor

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, device=device) for _ in range(FEATURES)
        )
        first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, 1, device=device)
        self.register_buffer("pairs", first * (FEATURES + 1) + second)
        self.bottom = _mlp((DENSE, 512, 256, DIM), device)
        self.top = _mlp((DIM + len(first), 1024, 1024, 512, 256, 1), device)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (batch,) of dense features (batch, DENSE) and ids (FEATURES, batch, 1)."""
        below = self.bottom(dense)
        vectors = torch.stack([below, *(table(one) for table, one in zip(self.tables, ids, strict=True))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: torch.Tensor = self.top(torch.cat([below, products], dim=1)).squeeze(1)
        return logits


def _mlp(sizes: tuple[int, ...], device: torch.device) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (size, after) in enumerate(pairwise(sizes)):
        layers += [nn.ReLU()] if number else []
        layers.append(nn.Linear(size, after, device=device))
    return nn.Sequential(*layers)


class Side:
    """A model in training, with or without a tracker; it takes the same batches in the same order again and again."""

    def __init__(self, rows: int, batches: list[tuple[torch.Tensor, ...]], *, is_tracked: bool) -> None:
        self.device = batches[0][0].device
        self.model = Dlrm(rows, self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.tracker = RowTracker(self.model, optimizers=[self.optimizer]) if is_tracked else None
        self._batches, self._next = batches, 0

    def train(self) -> None:
        """Take some steps and wait for them."""
        for _ in range(STEPS_AT_A_TIME):
            dense, ids, labels = self._batches[self._next % len(self._batches)]
            self._next += 1
            self.optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), labels).backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def step_batches(rows: int, batch: int, device: torch.device, *, count: int = 8) -> list[tuple[torch.Tensor, ...]]:
    """Return batches of (dense features, ids, labels); ids are drawn by Zipf's law, in another order in each batch."""
    ids = lookups("Zipf 1.05", rows, device).view(FEATURES, BATCH, 1)
    made: list[tuple[torch.Tensor, ...]] = []
    for number in range(count):
        chosen = ids.roll(number * (BATCH // count), 1)[:, :batch].contiguous() if batch < BATCH else ids
        shifted = (chosen + number * 7) % rows
        labels = (torch.rand(batch, device=device) < 0.3).float()
        made.append((torch.randn(batch, DENSE, device=device), shifted, labels))
    return made


def bench_step(report: Report, device: torch.device, rows: int, batch: int, repeats: int) -> None:
    """Train two models in turn, one of them tracked; the share is of the medians."""
    batches = step_batches(rows, batch, device)
    bare, tracked = (Side(rows, batches, is_tracked=is_tracked) for is_tracked in (False, True))
    tracker = tracked.tracker
    assert tracker is not None
    sides = {"bare": bare.train, "tracked": tracked.train}
    for work in (*sides.values(), *sides.values()):
        work()
    tracker.take()
    take_s: list[float] = []

    def take() -> None:
        started = time.perf_counter()
        tracker.take()
        take_s.append(time.perf_counter() - started)

    found: dict[str, Timings] = alternating(sides, repeats, before_round=take)
    shares = [100 * (a / b - 1) for a, b in zip(found["tracked"].wall, found["bare"].wall, strict=True)]
    share = 100 * (statistics.median(found["tracked"].wall) / statistics.median(found["bare"].wall) - 1)
    name = "tracking, share of the step"
    report.add(name, share, goal=SHARE_OF_STEP, unit="%", low=min(shares), high=max(shares))
    step_ms = 1e3 * statistics.median(found["bare"].wall) / STEPS_AT_A_TIME
    report.note(
        f"      steps of {step_ms:.2f} ms without a tracker; take of the rows of {STEPS_AT_A_TIME} steps "
        f"{1e3 * statistics.median(take_s[1:] or take_s):.2f} ms"
    )


def bench_full_step(report: Report, gpu: Gpu, repeats: int) -> None:
    """Measure the step of a DLRM of the size that fits."""
    free_bytes, _ = torch.cuda.mem_get_info()
    # Two models, and half of the memory for activations and gradients.
    rows = min(STEP_ROWS, free_bytes // 4 // (FEATURES * DIM * 4))
    batch = BATCH if free_bytes > 40e9 else BATCH // 8
    report.note(
        f"\na step of a DLRM, {FEATURES} tables of {rows:.1e} x {DIM}, batch {batch}, SGD with sparse gradients"
    )
    bench_step(report, gpu.device, rows, batch, repeats)


def bench_saves(report: Report, device: torch.device, rows: int, batch: int, folder: str) -> None:
    """Save every few steps: what the training thread waits for, and what the steps behind a save cost."""
    report.note(f"\nsaves of a DLRM, {FEATURES} tables of {rows:.1e} x {DIM}, every {STEPS_AT_A_TIME} steps")
    batches = step_batches(rows, batch, device)
    for with_codes in (False, True):
        side = Side(rows, batches, is_tracked=False)
        with data_folder(folder) as place:
            manager = CheckpointManager(
                str(place),
                model=side.model,
                optimizer=side.optimizer,
                tracking=TrackingOptions(quantize_on_device=with_codes),
                save_policy=SavePolicy(rng=False),
            )
            side.train()
            full_s = timed(manager.save)
            stalls, alone, beside = [], [], []
            for _ in range(SAVES + 1):
                alone.append(timed(side.train))
                stalls.append(timed(partial(_save_and_settle, manager, device)))
                beside.append(timed(side.train))
                saved = manager.wait_until_finished()
                assert saved is not None
            manager.close()
        way = "codes made on the GPU" if with_codes else "floats"
        step_s = statistics.median(alone[1:]) / STEPS_AT_A_TIME
        low, middle, high = spread([stall / step_s for stall in stalls[1:]])
        report.add(f"stall of a save / a step, {way}", middle, low=low, high=high)
        pairs = zip(beside[1:], alone[1:], strict=True)
        low, middle, high = spread([a / b for a, b in pairs])
        report.add(f"steps behind a save / steps without, {way}", middle, low=low, high=high)
        stall_ms, host_ms = 1e3 * statistics.median(stalls[1:]), 1e3 * saved.stall_s
        report.note(
            f"      step {1e3 * step_s:.2f} ms, stall {stall_ms:.2f} for {saved.rows} rows ({host_ms:.2f} on host), "
            f"{saved.encode_s:.2f} s to encode, {saved.commit_s:.2f} s to commit {saved.size_bytes / 1e6:.1f} MB; "
            f"the first, baseline {full_s:.1f} s"
        )


def _save_and_settle(manager: CheckpointManager, device: torch.device) -> None:
    manager.save(wait=False)
    torch.cuda.current_stream(device).synchronize()


def main() -> None:
    """Run all of it on the first GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows of the table; compaction also ten times it")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--folder", default=DATA_FOLDER, help="where saves go, and are removed again")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA GPU here, nothing measured")
        return
    report = Report("What collecting costs on a GPU: times over byte floors")
    report.start()
    gpu = measured_gpu(report, options.repeats)
    bench_mark(report, gpu, options.rows, options.repeats)
    for num_rows in (options.rows, 10 * options.rows):
        bench_take(report, gpu, num_rows, options.repeats)
        torch.cuda.empty_cache()
    bench_gather(report, gpu, options.rows, options.repeats)
    torch.cuda.empty_cache()
    bench_host_copy(report, gpu, options.repeats)
    torch.cuda.empty_cache()
    bench_full_step(report, gpu, options.repeats)
    torch.cuda.empty_cache()
    bench_saves(report, gpu.device, SAVED_ROWS, BATCH, options.folder)
    report.finish(options.json)


if __name__ == "__main__":
    main()
