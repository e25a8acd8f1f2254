"""A model that no machine here can hold, on 128 GPUs: what each policy would cost, computed from rates measured here.

``python tests/benchmarks/bench_plan.py``: measures what one core of this machine does with drifting rows at 4-bit and
8-bit quality and how many bytes come of it; holds the model (`plan_model`) against real runs of two writers, policy by
policy; prints a model of 1 TB and one of 100 TB. What is not measured (links, hosts, shares of changed rows) is an
assumption, and stands beside the figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import harness
from plan_model import POLICIES, Cluster, Plan, Rates, Workload, simulate
from plan_runs import Run, measure_rates

from cnr_store.types import AffineBits
from cnr_store.write.policy import Policy

CHECKED: tuple[Policy, ...] = ("baseline", "one_shot", "intermittent", "consecutive")
DIM = 64
TABLES_PER_RANK = 8
MODELS = (("1 TB", 1e12), ("100 TB", 1e14))
HERE = Cluster(
    ranks=2, hosts=1, link_bytes_s=math.inf, save_cores=2, load_cores=2, device_bytes_s=math.inf, put_s=0.0, get_s=0.0
)


def large(size_bytes: float) -> Workload:
    """Return a model of so many bytes in fp32, slots included: 26 % of its rows change in 30 minutes, for a week."""
    return Workload(num_rows=round(size_bytes / (4 * DIM + 4)), dim=DIM, tables=TABLES_PER_RANK, touched_share=0.26)


def show_rates(report: harness.Report, rates: dict[AffineBits, Rates]) -> None:
    """Print what was measured."""
    rows = [
        (
            f"{bits}-bit", one.add_bits, one.set_bits, one.slot_add_bits, one.slot_set_bits, one.id_overhead,
            one.encode_values_s / 1e6, one.decode_values_s / 1e6, one.base_json, one.part_json, one.group_json,
            one.part_receipt,
        )
        for bits, one in rates.items()
    ]  # fmt: skip
    report.table(
        "measured on one core of this machine",
        (
            "quality", "bits of a changed element", "of an absolute one", "bits of a changed slot",
            "of an absolute one ", "ids / entropy", "million elements/s saved", "restored", "JSON of a save, bytes",
            "of each part", "of each group of arrays", "of a part in a receipt",
        ),
        rows, "drifting rows, as in the other benchmarks: a change has 0.3 of the standard deviation of the values",
    )  # fmt: skip


def check(report: harness.Report, folder: Path, work: Workload, bits: AffineBits, rates: Rates) -> None:
    """Hold the model against a real run of each policy with two writers."""
    rows = []
    for policy in CHECKED:
        real = Run(folder / policy, policy, work, HERE.ranks, bits).play()
        plan = simulate(policy, work, replace(HERE, tables_per_rank=work.tables), rates)
        kinds = "".join("F" if save.decision.kind == "baseline" else "d" for save in real)
        ratio = plan.mean_bytes / statistics.fmean(save.size_bytes for save in real)
        rows.append((
            policy, kinds, "".join("F" if save.kind == "baseline" else "d" for save in plan.saves), ratio,
            sum(save.objects for save in real), sum(save.objects for save in plan.saves),
            sum(save.requests for save in real), round(sum(save.requests for save in plan.saves)),
            sum(save.seconds for save in real[1:]), sum(save.commit_s for save in plan.saves[1:]),
        ))  # fmt: skip
        report.add(
            f"{policy}: planned bytes / bytes on disk", ratio, goal=1.1, low=min(ratio, 1.0), high=max(ratio, 1.0)
        )
    columns = (
        "policy", "saves", "planned", "bytes: planned / on disk", "objects", "planned ", "requests", "planned  ",
        "saving, s", "planned   ",
    )  # fmt: skip
    report.table(
        f"the model against runs here: {work.num_rows:,} x {work.dim}, {work.tables} tables, {HERE.ranks} writers, "
        f"{bits}-bit quality", columns, rows,
        "F a baseline, d a delta; the seconds leave the first save out, and the model knows neither Python's "
        "own time nor that both writers share one interpreter",
    )  # fmt: skip


def show_plans(
    report: harness.Report, name: str, size: float, bits: AffineBits, rates: Rates, cluster: Cluster
) -> None:
    """Print one model under every policy."""
    work = large(size)
    plans = [simulate(policy, work, cluster, rates) for policy in POLICIES]
    base = plans[0]
    rows = [
        (
            plan.policy, plan.mean_bytes / 1e9, base.mean_bytes / plan.mean_bytes, round(plan.mean_objects),
            plan.stall_s, plan.commit_s, plan.worst_commit_s, plan.restore_s, plan.worst_restore_s,
            round(plan.requests_per_hour), plan.job_bytes_per_hour / 1e9, plan.peak_storage_bytes / 1e12,
            2 * base.mean_bytes / plan.peak_storage_bytes,
        )
        for plan in plans
    ]  # fmt: skip
    columns = (
        "policy", "GB per checkpoint", "less than fp32, x", "objects", "stall, s", "commit, s", "its worst",
        "restore, s", "its worst ", "requests per hour", "compaction, GB per hour", "peak storage, TB",
        "less than fp32, x ",
    )  # fmt: skip
    report.table(
        f"{name} in fp32 on {cluster.ranks} GPUs, {bits}-bit quality, a checkpoint every 30 minutes for a week",
        columns, rows,
        f"Assumed: {cluster.hosts} hosts with {8 * cluster.link_bytes_s / 1e9:.0f} Gbit/s to storage and "
        f"{cluster.save_cores:.0f} cores for saving ({cluster.load_cores:.0f} for restoring) each, "
        f"{cluster.device_bytes_s / 1e9:.0f} GB/s from each GPU, {1e3 * cluster.put_s:.0f} ms per PUT, "
        f"{cluster.concurrency} at a time; {work.touched_share:.0%} of the rows change in an interval, "
        f"that times k^{work.union_power} in k. fp32 keeps the last checkpoint until the next one is whole.",
    )  # fmt: skip
    if bits == 4:
        compacted = plans[-1]
        report.headline(
            f"planned: {name} on {cluster.ranks} GPUs, a checkpoint every 30 minutes, 4-bit quality, compaction: "
            "bytes, stall, until committed, restore; fp32",
            "; ".join(
                f"{harness.shown(plan.mean_bytes / 1e9)} GB, {harness.shown(plan.stall_s)} s, "
                f"{harness.shown(plan.commit_s)} s, {harness.shown(plan.restore_s)} s"
                for plan in (compacted, base)
            ),
            "", "python tests/benchmarks/bench_plan.py",
        )  # fmt: skip
        report.plot(
            f"bytes-{name.replace(' ', '')}", f"{name}: bytes of each checkpoint, first day", "checkpoint", "GB",
            {plan.policy: _series(plan) for plan in plans[1:-1]}, log_y=True,
        )  # fmt: skip


def _series(plan: Plan, first: int = 48) -> harness.Series:
    sizes: Sequence[float] = [save.size_bytes / 1e9 for save in plan.saves[:first]]
    return harness.Series(list(range(len(sizes))), sizes)


def main() -> None:
    parser = harness.arguments(__doc__, rows=1_000_000, repeats=1)
    options = parser.parse_args()
    report = harness.Report("plan: a large model on many GPUs, from rates measured here")
    report.start()
    work = Workload(num_rows=options.rows, dim=DIM, tables=1, touched_share=0.25, intervals=10)
    with harness.data_folder(options.folder) as folder:
        qualities: tuple[AffineBits, ...] = (4, 8)
        rates = {bits: measure_rates(folder, bits, work) for bits in qualities}
        show_rates(report, rates)
        check(report, folder, replace(work, num_rows=options.rows // 4, tables=4), 4, rates[4])
    cluster = Cluster(tables_per_rank=TABLES_PER_RANK)
    for name, size in MODELS:
        for bits, one in rates.items():
            show_plans(report, name, size, bits, one, cluster)
    report.finish(options.json)


if __name__ == "__main__":
    main()
