"""A long run on many GPUs, computed: bytes, objects, requests, seconds and storage of each policy. Pure.

A workload says what changes, a cluster what moves bytes, rates what this library was measured to do (`bench_plan`
measures them). Everything is of one rank or one host where it is spread evenly over them, and nothing waits for
anything but what is said here. `tests/benchmarks/test_plan.py` and `bench_plan` hold it against real runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from cnr_store.format.arrays import chunk_rows_for, describe, full_chunk_rows, in_shards, object_count
from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.plan import DEFAULT_POLICY, CompactionPolicy, choose_run
from cnr_store.read.prefetch import FETCH_BYTES
from cnr_store.write.policy import CheckpointSize, Decision, Policy, decide

PlanPolicy = Literal["fp32 full", "baseline", "one_shot", "consecutive", "intermittent", "consecutive + compaction"]
POLICIES: tuple[PlanPolicy, ...] = (
    "fp32 full", "baseline", "one_shot", "intermittent", "consecutive", "consecutive + compaction",
)  # fmt: skip

ARRAYS = 3
"""Of a group: row ids, codes, and one row-wise optimizer slot (`_stored_of_group`)."""
OBJECTS_PER_SEGMENT, OBJECTS_PER_ARRAY = 1, 1
"""Zarr metadata: the group of the segment; each array's own, its chunks come on top."""
MESSAGES_IN_STALL, GATHERS_OF_MESSAGE = 5, 2
"""Short messages that all ranks exchange before a save's stall ends, and gloo's gathers for each (docs/ranks.md)."""
READS_PER_RANK = 3
"""GETs for each rank but 0: its receipt, by rank 0; record and manifest, by itself."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained and how much of it changes.

    ``touched_share`` of the rows change in an interval; since a baseline k intervals ago it is that times
    ``k ** union_power``, at most 1 (Check-N-Run reports a concave curve: 26 % in 30 minutes, 52 % in a long run).
    """

    num_rows: int
    dim: int
    tables: int = 1
    touched_share: float = 0.25
    union_power: float = 0.4
    interval_s: float = 1800.0
    intervals: int = 336

    @property
    def fp32_bytes(self) -> int:
        """Of the rows and one row-wise slot."""
        return self.num_rows * (4 * self.dim + 4)

    def changed_since(self, intervals: float) -> float:
        """Share of the rows that changed in so many intervals, or in a part of one."""
        return min(1.0, self.touched_share * float(intervals) ** self.union_power)

    def saved_every(self, interval_s: float) -> Workload:
        """Return the same training with another interval: on the same curve, and as many intervals."""
        share = self.changed_since(interval_s / self.interval_s)
        return replace(self, interval_s=interval_s, touched_share=share)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What moves the bytes; each host has as many ranks, and each rank as large a part of each of its tables.

    ``tables_per_rank`` of the workload's tables have rows on a rank. A gather of all ranks goes around once (gloo's
    ring), so it takes ``hop_s`` for each of them.
    """

    ranks: int = 128
    hosts: int = 16
    tables_per_rank: int = 1
    link_bytes_s: float = 25e9 / 8
    save_cores: float = 16.0
    load_cores: float = 64.0
    device_bytes_s: float = 12e9
    put_s: float = 0.03
    get_s: float = 0.02
    concurrency: int = 16
    hop_s: float = 50e-6

    @property
    def parts(self) -> int:
        """Of a save that touches every table."""
        return self.ranks * self.tables_per_rank

    @property
    def message_s(self) -> float:
        """Seconds of a short message from all ranks to all."""
        return GATHERS_OF_MESSAGE * (self.ranks - 1) * self.hop_s


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """CPU seconds of one core that a `CheckpointManager` takes for a save, and for each table of its rank, of any size.

    Nothing in runs that save without one.
    """

    stall_s: float = 0.0
    stall_table_s: float = 0.0
    background_s: float = 0.0
    background_table_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the library does with one kind of rows, measured.

    Attributes
    ----------
    add_bits, set_bits
        Bits of an element as a difference to the version before, and by itself.
    slot_add_bits, slot_set_bits
        Bits of a row's slot.
    id_overhead
        Bytes of the row ids over their entropy.
    base_json, part_json
        Bytes of manifest, record and Zarr metadata of a save of one writer and one group, and what each part adds.
    group_json
        What each further group of arrays adds, as that of a further writer: its own Zarr metadata and receipt included.
    part_receipt
        Bytes that a part adds to the receipt of its rank, where that is not rank 0.
    encode_values_s, decode_values_s
        Elements per second of one core, from rows to a commit and from objects to rows.
    plain_requests
        Requests of a save beyond its objects: the record, looks at the log.
    """

    add_bits: float
    set_bits: float
    slot_add_bits: float
    slot_set_bits: float
    id_overhead: float
    base_json: float
    part_json: float
    group_json: float
    part_receipt: float
    encode_values_s: float
    decode_values_s: float
    plain_requests: float
    fixed: FixedCosts = FixedCosts()


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint of all ranks, or what compaction made of several; one that is not coded holds plain floats.

    ``chunk_objects`` are those that a restore reads beside the manifest; ``intervals`` is how many it covers.
    """

    kind: Literal["baseline", "delta"]
    base: Literal["head", "baseline"]
    rows: float
    size_bytes: float
    objects: int
    requests: float
    stall_s: float
    commit_s: float
    chunk_objects: int = 0
    intervals: int = 1
    is_coded: bool = True

    @property
    def puts(self) -> float:
        """Of its requests: its objects and the record."""
        return self.objects + 1.0

    @property
    def fetches(self) -> float:
        """GETs that read its rows: neighbouring chunks of a shard come together, but no more than that of it."""
        return max(float(self.chunk_objects), self.size_bytes / FETCH_BYTES)

    @property
    def chain_entry(self) -> ChainEntry:
        """What the planner of compaction sees."""
        size, rows = round(self.size_bytes), round(self.rows)
        return ChainEntry(seg="", sha256="", kind=self.kind, l0=0, l1=0, size_bytes=size, rows=rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy comes to; means are over all intervals, those behind ``restore`` over all points of the run.

    ``job_bytes_per_hour`` is what compaction reads and writes besides, in ``job_gets_per_hour`` and
    ``job_puts_per_hour`` requests.
    """

    policy: PlanPolicy
    saves: tuple[Save, ...]
    mean_bytes: float
    mean_objects: float
    stall_s: float
    commit_s: float
    worst_commit_s: float
    restore_s: float
    worst_restore_s: float
    requests_per_hour: float
    puts_per_hour: float
    job_bytes_per_hour: float
    job_gets_per_hour: float
    job_puts_per_hour: float
    peak_storage_bytes: float


@dataclass(frozen=True, slots=True)
class Moment:
    """What is stored after one save, and what compaction did about it.

    Attributes
    ----------
    save
        The newest one.
    chain
        What a restore reads: one baseline and the deltas behind it.
    kept_bytes
        Most bytes on disk so far since the save before: what is replaced goes when the new one is valid.
    read, made
        Segments that compaction has read, and written.
    """

    save: Save
    chain: tuple[Save, ...]
    kept_bytes: float
    read: tuple[Save, ...]
    made: tuple[Save, ...]


def play(
    policy: PlanPolicy, work: Workload, cluster: Cluster, rates: Rates, limits: CompactionPolicy = DEFAULT_POLICY
) -> Iterator[Moment]:
    """Yield a run, save by save."""
    chain: list[Save] = []
    for save in _saves(policy, work, cluster, rates, chain):
        replaced: list[Save] = []
        if save.kind == "baseline":
            replaced, chain[:] = chain[:], [save]
        elif save.base == "baseline":
            replaced, chain[1:] = chain[1:], [save]
        else:
            chain.append(save)
        kept = sum(one.size_bytes for one in (*chain, *replaced))
        read, made = list[Save](), list[Save]()
        while policy == "consecutive + compaction":
            run = choose_run([one.chain_entry for one in chain], limits)
            if run is None:
                break
            inputs = chain[run.start : run.stop]
            since = sum(one.intervals for one in inputs)
            # Differences of several intervals are larger than of one: they count as absolute codes.
            result = save_of(Decision(run.kind, "baseline", run.reason), max(since, 2), work, cluster, rates)
            kept = max(kept, sum(one.size_bytes for one in (*chain, result)))
            read += inputs
            made.append(result)
            chain[run.start : run.stop] = [result]
        yield Moment(save, tuple(chain), kept, tuple(read), tuple(made))


def simulate(policy: PlanPolicy, work: Workload, cluster: Cluster, rates: Rates) -> Plan:
    """Play a run and add up what it costs."""
    return summed(policy, list(play(policy, work, cluster, rates)), work, cluster, rates)


def summed(policy: PlanPolicy, moments: Sequence[Moment], work: Workload, cluster: Cluster, rates: Rates) -> Plan:
    """Add up what a run costs."""
    saves = tuple(moment.save for moment in moments)
    restores = [restore_s(moment.chain, work, cluster, rates) for moment in moments]
    read, made = ([one for moment in moments for one in getattr(moment, name)] for name in ("read", "made"))
    hours = len(moments) * work.interval_s / 3600
    return Plan(
        policy=policy,
        saves=saves,
        mean_bytes=float(np.mean([save.size_bytes for save in saves])),
        mean_objects=float(np.mean([save.objects for save in saves])),
        stall_s=max(save.stall_s for save in saves[1:]),
        commit_s=float(np.mean([save.commit_s for save in saves])),
        worst_commit_s=max(save.commit_s for save in saves),
        restore_s=float(np.mean(restores)),
        worst_restore_s=max(restores),
        requests_per_hour=sum(save.requests for save in saves) / hours,
        puts_per_hour=sum(save.puts for save in saves) / hours,
        job_bytes_per_hour=sum(one.size_bytes for one in (*read, *made)) / hours,
        job_gets_per_hour=sum(one.fetches for one in read) / hours,
        job_puts_per_hour=sum(one.puts for one in made) / hours,
        peak_storage_bytes=max(moment.kept_bytes for moment in moments),
    )


def save_of(decision: Decision, since: int, work: Workload, cluster: Cluster, rates: Rates) -> Save:
    """Return what one save is: a baseline, or a delta of the rows changed in the last ``since`` intervals."""
    is_full = decision.kind == "baseline"
    share = 1.0 if is_full else work.changed_since(since)
    # The first delta behind a baseline is a difference to what the mirror holds, under every policy.
    adds = not is_full and (decision.base == "head" or since == 1)
    rows = share * work.num_rows
    bits = work.dim * (rates.add_bits if adds else rates.set_bits)
    slot_bits = rates.slot_add_bits if adds else rates.slot_set_bits
    ids = 0.0 if is_full else id_bits(share) * rates.id_overhead
    others = cluster.ranks - 1
    receipts = cluster.parts * others / cluster.ranks * rates.part_receipt
    documents = rates.base_json + cluster.parts * rates.part_json
    documents += (groups_of(rows / cluster.parts, work.dim, cluster) - 1) * rates.group_json
    size = rows * (bits + slot_bits + ids) / 8 + documents + receipts
    objects = objects_of(rows / cluster.parts, work.dim, cluster)
    copied = rows / cluster.ranks * (4 * work.dim + 4)
    # Later baselines come from the mirror: training stalls for the rows of the last interval alone.
    stalling = min(copied, work.touched_share * work.num_rows / cluster.ranks * (4 * work.dim + 4))
    # A one-shot delta takes back what the one before it did: its writers read that one's chunks.
    reads = 0 if is_full or adds else chunks_of(rows / cluster.parts, work.dim, cluster)
    per_host = size / cluster.hosts
    work_s = rows / cluster.hosts * work.dim / (rates.encode_values_s * cluster.save_cores)
    fixed, tables = rates.fixed, cluster.tables_per_rank
    work_s += fixed.background_s + tables * fixed.background_table_s
    puts_s = math.ceil(objects / cluster.ranks / cluster.concurrency) * cluster.put_s
    # The other ranks' receipts, which rank 0 reads; then manifest and record.
    last_s = 2 * cluster.put_s
    if others:
        last_s += cluster.put_s + math.ceil(others / cluster.concurrency) * cluster.get_s
    return Save(
        kind=decision.kind,
        base=decision.base,
        rows=rows,
        size_bytes=size,
        objects=objects,
        requests=objects + reads + rates.plain_requests + READS_PER_RANK * others,
        stall_s=stalling / cluster.device_bytes_s
        + MESSAGES_IN_STALL * cluster.message_s
        + fixed.stall_s
        + tables * fixed.stall_table_s,
        commit_s=max(work_s, per_host / cluster.link_bytes_s, puts_s) + last_s,
        chunk_objects=stored_of(rows / cluster.parts, work.dim, cluster, has_ids=not is_full),
        intervals=since if not is_full else 1,
    )


def fp32_save(work: Workload, cluster: Cluster, *, is_written_at_once: bool = False) -> Save:
    """Return a checkpoint as it is written without any of this: all rows as floats, one file per rank and table.

    ``is_written_at_once``: the training waits until it is written, else only while it is copied.
    """
    size = float(work.fp32_bytes)
    commit_s = size / cluster.hosts / cluster.link_bytes_s + 2 * cluster.put_s
    copied_s = size / cluster.ranks / cluster.device_bytes_s
    return Save(
        "baseline", "baseline", float(work.num_rows), size, cluster.parts, float(cluster.parts),
        commit_s if is_written_at_once else copied_s, commit_s, chunk_objects=cluster.parts, is_coded=False,
    )  # fmt: skip


def objects_of(rows_per_part: float, dim: int, cluster: Cluster) -> int:
    """Return the objects of a save whose parts all have so many rows: chunks, Zarr metadata, manifest, receipts.

    Rank 0 puts no receipt. The commit record is no object of the segment; it is a request.
    """
    metadata = OBJECTS_PER_SEGMENT + groups_of(rows_per_part, dim, cluster) * ARRAYS * OBJECTS_PER_ARRAY
    return metadata + stored_of(rows_per_part, dim, cluster) + cluster.ranks


def groups_of(rows_per_part: float, dim: int, cluster: Cluster) -> int:
    """Return the groups of arrays of such a save: one per part that fills a chunk, else one per rank."""
    return cluster.parts if round(rows_per_part) >= full_chunk_rows(2 * dim) else cluster.ranks


def stored_of(rows_per_part: float, dim: int, cluster: Cluster, *, has_ids: bool = True) -> int:
    """Return the objects with chunks of such a save: a chunk each, or a shard. Without ids: what a restore skips."""
    rows = max(1, round(rows_per_part))
    full = full_chunk_rows(2 * dim)
    if rows >= full:
        return cluster.parts * _stored_of_group(rows, dim, chunk_rows_for(rows, 2 * dim), has_ids=has_ids)
    together = rows * cluster.tables_per_rank
    return cluster.ranks * _stored_of_group(together, dim, min(full, together), has_ids=has_ids)


@lru_cache(maxsize=1024)
def _stored_of_group(rows: int, dim: int, chunk_rows: int, *, has_ids: bool) -> int:
    group = [((rows, dim), np.int16), ((rows,), np.int16), *([((rows,), np.int64)] if has_ids else [])]
    described = (describe("array", shape, np.dtype(dtype), chunk_rows) for shape, dtype in group)
    return sum(object_count(in_shards(entry)) for entry in described)


def chunks_of(rows_per_part: float, dim: int, cluster: Cluster) -> int:
    """Return the chunks of all arrays of such a save."""
    rows = max(1, round(rows_per_part))
    full = full_chunk_rows(2 * dim)
    if rows >= full:
        return cluster.parts * ARRAYS * math.ceil(rows / chunk_rows_for(rows, 2 * dim))
    return cluster.ranks * ARRAYS * math.ceil(rows * cluster.tables_per_rank / full)


def id_bits(share: float) -> float:
    """Return the least bits of a row id where a share of the rows is listed: ``H2(share) / share``."""
    if share >= 1.0:
        return 0.0
    rest = 1.0 - share
    return (-share * math.log2(share) - rest * math.log2(rest)) / share


def restore_s(chain: Sequence[Save], work: Workload, cluster: Cluster, rates: Rates) -> float:
    """Return the seconds of reading a chain on all hosts: fetching or decoding, whichever bounds it."""
    fetch = sum(save.size_bytes for save in chain) / cluster.hosts / cluster.link_bytes_s
    if not any(save.is_coded for save in chain):
        return fetch
    decode = sum(save.rows for save in chain) * work.dim / cluster.hosts
    gets = sum(save.fetches for save in chain) / cluster.ranks / cluster.concurrency * cluster.get_s
    return max(fetch, decode / (rates.decode_values_s * cluster.load_cores), gets)


def _saves(policy: PlanPolicy, work: Workload, cluster: Cluster, rates: Rates, chain: Sequence[Save]) -> Iterator[Save]:
    if policy == "fp32 full":
        for _ in range(work.intervals):
            yield fp32_save(work, cluster)
        return
    asked: Policy = "consecutive" if policy == "consecutive + compaction" else policy
    history: list[CheckpointSize] = []
    since = 0
    for _ in range(work.intervals):
        decision = decide(asked, history, chain_length=len(chain))
        since = 1 if decision.base == "head" else since + 1
        if decision.kind == "baseline":
            history, since = [], 0
        save = save_of(decision, since, work, cluster, rates)
        history.append(CheckpointSize(save.kind, round(save.size_bytes)))
        yield save
