"""A model that no machine here can hold, on 128 and 1,024 GPUs: what it would cost, computed from rates measured here.

``python tests/benchmarks/bench_plan.py [--put-1000 0.005] ...``: measures what one core of this machine does with
drifting rows at 4-bit and 8-bit quality, how many bytes come of it, and what a `CheckpointManager` takes for a save of
next to nothing; holds the model (`plan_model`) against real runs of two writers, policy by policy. Then it prints, for
a model of 1 TB and one of 100 TB: each policy; how often they can be saved; how soon lost ranks are back; relays in
three regions and the loaders behind them; what a month costs (`plan_fleet`). What is not measured (links, hosts, shares
of changed rows, prices) is an assumption, and stands beside the figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import harness
from plan_fleet import (
    MESSAGES_OF_RECOVERY,
    Frequency,
    Prices,
    Recovery,
    Serving,
    month_of,
    most_deltas,
    most_full,
    publish,
    recovery_of,
)  # fmt: skip
from plan_model import (
    MESSAGES_IN_STALL,
    POLICIES,
    Cluster,
    FixedCosts,
    Moment,
    Plan,
    PlanPolicy,
    Rates,
    Workload,
    play,
    simulate,
    summed,
)  # fmt: skip
from plan_runs import Run, measure_fixed, measure_rates
from wire_ranks import on_ranks

from cnr_store.types import AffineBits
from cnr_store.write.policy import Policy

COMPACTED: PlanPolicy = "consecutive + compaction"
CHECKED: tuple[Policy, ...] = ("baseline", "one_shot", "intermittent", "consecutive")
DIM = 64
TABLES_PER_RANK = 8
MODELS = (("1 TB", 1e12), ("100 TB", 1e14))
GPUS = (128, 1024)
GPUS_PER_HOST = 8
SHARE = 0.01
"""Of throughput that saves may take."""
OFTEN_S = 300.0
"""Between saves on the page of money, besides every 30 minutes and as often as `SHARE` allows."""
MOST_OBJECTS, MOST_REQUESTS = 2e6, 1e6
"""Goals: objects of a full save of 100 TB on 128 GPUs, requests per hour of its saves."""
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
    fixed = rates[4].fixed
    report.note(
        f"measured: a save by CheckpointManager takes {1e3 * fixed.stall_s:.2f} ms of its stall and "
        f"{1e3 * fixed.background_s:.1f} ms of CPU behind the training, each table {1e6 * fixed.stall_table_s:.0f} us "
        f"and {1e6 * fixed.background_table_s:.0f} us more"
    )
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
        plan = simulate(policy, work, replace(HERE, tables_per_rank=work.tables), replace(rates, fixed=FixedCosts()))
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
    if (bits, size) == (4, MODELS[-1][1]):
        report.add(f"{name}: objects of a full save", plans[1].saves[0].objects, goal=MOST_OBJECTS, unit="")
        report.add(f"{name}: requests of saves per hour", plans[-1].requests_per_hour, goal=MOST_REQUESTS, unit="")
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


@dataclass(frozen=True, slots=True)
class Fleet:
    """One model at one quality on one cluster."""

    name: str
    bits: AffineBits
    work: Workload
    cluster: Cluster
    rates: Rates

    @property
    def label(self) -> tuple[str, int, str]:
        """First cells of its rows."""
        return self.name, self.cluster.ranks, f"{self.bits}-bit"

    def most_deltas(self) -> Frequency:
        """Saves as often as `SHARE` allows."""
        return most_deltas(self.work, self.cluster, self.rates, SHARE)

    def moments(self, interval_s: float, policy: PlanPolicy = COMPACTED) -> tuple[Workload, list[Moment]]:
        """Return the training with this interval, and its run."""
        work = self.work.saved_every(interval_s)
        return work, list(play(policy, work, self.cluster, self.rates))


LABELS = ("model", "GPUs", "quality")


def fleets(rates: dict[AffineBits, Rates]) -> Iterator[Fleet]:
    """Yield every model on every cluster."""
    for name, size in MODELS:
        for gpus in GPUS:
            cluster = Cluster(ranks=gpus, hosts=gpus // GPUS_PER_HOST, tables_per_rank=TABLES_PER_RANK)
            for bits, one in rates.items():
                yield Fleet(name, bits, large(size), cluster, one)


def show_frequency(report: harness.Report, every: Sequence[Fleet]) -> None:
    """Print how often they can be saved."""
    rows = []
    for one in every:
        deltas = one.most_deltas()
        copied, written = (most_full(one.work, one.cluster, is_written_at_once=at_once) for at_once in (False, True))
        rows.append((
            *one.label, deltas.per_hour, deltas.interval_s, deltas.bound, 1e3 * deltas.save.stall_s,
            1e3 * MESSAGES_IN_STALL * one.cluster.message_s, deltas.save.commit_s,
            deltas.per_hour * deltas.save.size_bytes / 1e9, copied.per_hour, written.per_hour,
            deltas.per_hour / copied.per_hour, deltas.per_hour / written.per_hour,
        ))  # fmt: skip
    columns = (
        *LABELS, "saves per hour", "s between", "bound by", "stall, ms", "of it messages", "commit, s", "GB per hour",
        "fp32, copied, written behind: per hour", "fp32, training waits: per hour", "ratio", "ratio ",
    )  # fmt: skip
    work, cluster = every[0].work, every[0].cluster
    report.table(
        f"saves per hour that take at most {SHARE:.0%} of throughput", columns, rows,
        f"A save costs its stall, on hosts with {cluster.save_cores:.0f} cores to spare, and the next one begins when "
        f"it is committed. Rows that change in t: {work.touched_share:.0%} in 30 minutes, and as t^{work.union_power}. "
        f"A message goes around all ranks, {1e6 * cluster.hop_s:.0f} us from one to the next; saves in fp32 send none.",
    )  # fmt: skip


def show_recovery(report: harness.Report, every: Sequence[Fleet], peer_bytes_s: float) -> None:
    """Print how soon lost ranks are back."""
    rows = []
    for one in every:
        work, moments = one.moments(one.work.interval_s)
        ways = ((1, None), (1, peer_bytes_s), (GPUS_PER_HOST, None), (GPUS_PER_HOST, peer_bytes_s))
        found = [
            _mean([
                recovery_of(moment.chain, lost, work, one.cluster, one.rates, peer_bytes_s=peers) for moment in moments
            ])
            for lost, peers in (*ways, (one.cluster.ranks, None))
        ]  # fmt: skip
        whole = found[-1]
        rows.append((
            *one.label, *(recovery.seconds for recovery in found), found[0].seconds / whole.seconds,
            found[0].size_bytes / 1e9, whole.size_bytes / 1e9, round(found[0].gets), round(found[1].gets),
            round(whole.gets),
        ))  # fmt: skip
    cluster = every[0].cluster
    report.table(
        "recovery: a rank, a host of 8, or all ranks",
        (
            *LABELS, "a rank, s", "from a peer", "a host, s", "from peers", "all, s", "a rank / all", "a rank, GB",
            "all, GB", "GETs, a rank", "from a peer ", "all",
        ),
        rows,
        "Means over a week of compacted chains, a save every 30 minutes, whose newest is what the lost ranks get (all "
        f"ranks: everybody). A rank has {cluster.load_cores / GPUS_PER_HOST:.0f} cores; peers send "
        f"{peer_bytes_s / 1e9:.2g} GB/s from host to host (unless given, measured here over loopback), the store "
        f"{8 * cluster.link_bytes_s / 1e9:.0f} Gbit/s to each host; {MESSAGES_OF_RECOVERY} messages. No dense state.",
    )  # fmt: skip


def _mean(found: Sequence[Recovery]) -> Recovery:
    return Recovery(*(statistics.fmean(getattr(one, field.name) for one in found) for field in fields(Recovery)))


def show_regions(report: harness.Report, every: Sequence[Fleet], serving: Serving) -> None:
    """Print what relays and loaders get, at two intervals."""
    rows = []
    for one in every:
        for interval_s in (one.work.interval_s, one.most_deltas().interval_s):
            work, moments = one.moments(interval_s)
            hours = len(moments) * interval_s / 3600
            made = sum(save.size_bytes for moment in moments for save in moment.made)
            sent = publish(moments[-1].save, work, one.cluster, one.rates, serving)
            per_hour = (sum(moment.save.size_bytes for moment in moments) + made) / hours
            needed = per_hour / 3600 / serving.wide_bytes_s
            rows.append((
                *one.label, interval_s, sent.wide_bytes / 1e9, per_hour / 1e9, needed, serving.shards(work) *
                serving.replicas, sent.direct_bytes / sent.wide_bytes, sent.relay_s, sent.served_s, sent.direct_s,
                "yes" if needed < 1 and sent.relay_s < interval_s else "no",
            ))  # fmt: skip
    report.table(
        f"{serving.regions} regions, a relay and loaders in each",
        (
            *LABELS, "s between saves", "GB of a delta", "GB per hour and link", "share of the link", "loaders",
            "bytes without a relay, x", "at the relay, s", "served, s", "without a relay", "keeps up",
        ),
        rows,
        f"Each region: a link of {8 * serving.wide_bytes_s / 1e9:.0f} Gbit/s and {1e3 * serving.wide_rtt_s:.0f} ms a "
        f"round trip, a relay of {serving.relay_threads} threads, {serving.replicas} replicas of loaders with "
        f"{serving.loader_bytes / 1e9:.0f} GB for codes each; all look for news every {serving.poll_s} s. From commit "
        "to served, mean. A relay also copies what compaction writes.",
    )  # fmt: skip


def show_money(report: harness.Report, every: Sequence[Fleet], serving: Serving, prices: Prices) -> None:
    """Print what a month costs, at two or three intervals."""
    rows = []
    for one in every:
        shortest_s = one.most_deltas().interval_s
        for interval_s in sorted({one.work.interval_s, max(OFTEN_S, shortest_s), shortest_s}, reverse=True):
            work, moments = one.moments(interval_s)
            plan = summed(COMPACTED, moments, work, one.cluster, one.rates)
            month = month_of(plan, moments, work, one.cluster, one.rates, serving, prices)
            rows.append((
                *one.label, interval_s, round(plan.requests_per_hour),
                round(plan.job_gets_per_hour + plan.job_puts_per_hour), plan.peak_storage_bytes / 1e12, month.training,
                month.serving, month.storage, month.wide, month.total,
            ))  # fmt: skip
    report.table(
        "a month, dollars",
        (
            *LABELS, "s between saves", "requests per hour", "of compaction", "TB stored", "requests, training",
            "requests, serving", "storage", "between regions", "all",
        ),
        rows,
        f"Assumed: ${prices.put_1000} for 1,000 PUTs, ${prices.get_1000} for 1,000 GETs, ${prices.gb_month} for a GB "
        f"and month, ${prices.wide_gb} for a GB to another region; replicas, regions and looks for news as above; the "
        "store and each relay keep one chain. No machines.",
    )  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__, rows=1_000_000, repeats=1)
    for field in fields(Prices):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, default=field.default, help="dollars")
    parser.add_argument("--peer-bytes-s", type=float, help="from host to host; measured between two ranks if not given")
    options = parser.parse_args()
    report = harness.Report("plan: a large model on many GPUs, from rates measured here")
    report.start()
    work = Workload(num_rows=options.rows, dim=DIM, tables=1, touched_share=0.25, intervals=10)
    with harness.data_folder(options.folder) as folder:
        qualities: tuple[AffineBits, ...] = (4, 8)
        fixed = measure_fixed(folder)
        rates = {bits: replace(measure_rates(folder, bits, work), fixed=fixed) for bits in qualities}
        show_rates(report, rates)
        check(report, folder, replace(work, num_rows=options.rows // 4, tables=4), 4, rates[4])
    cluster = Cluster(tables_per_rank=TABLES_PER_RANK)
    for name, size in MODELS:
        for bits, one in rates.items():
            show_plans(report, name, size, bits, one, cluster)
    show_fleets(report, list(fleets(rates)), options)
    report.finish(options.json)


def show_fleets(report: harness.Report, every: Sequence[Fleet], options: argparse.Namespace) -> None:
    """Print the pages of all models on all clusters."""
    serving = Serving()
    prices = Prices(**{field.name: getattr(options, field.name) for field in fields(Prices)})
    show_frequency(report, every)
    show_recovery(report, every, options.peer_bytes_s or on_ranks(2, "plan_runs", "peer_bytes_s"))
    show_regions(report, every, serving)
    show_money(report, every, serving, prices)


if __name__ == "__main__":
    main()
