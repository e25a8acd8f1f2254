"""A long run on many GPUs, computed: bytes, objects, requests, seconds and storage of each policy. Pure.

A workload says what changes, a cluster what moves bytes, rates what this library was measured to do (`bench_plan`
measures them). Everything is of one rank or one host where it is spread evenly over them, and nothing waits for
anything but what is said here. `tests/benchmarks/test_plan.py` and `bench_plan` hold it against real runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cnr_store.format.arrays import chunk_rows_for, describe, full_chunk_rows, in_shards, object_count
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
MESSAGES_PER_SAVE = 7
"""Short messages that all ranks exchange in a save (docs/ranks.md)."""
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

    def changed_since(self, intervals: int) -> float:
        """Share of the rows that changed in so many intervals."""
        return min(1.0, self.touched_share * float(intervals) ** self.union_power)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What moves the bytes; each host has as many ranks, and each rank as large a part of each of its tables.

    ``tables_per_rank`` of the workload's tables have rows on a rank.
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
    message_s: float = 0.001

    @property
    def parts(self) -> int:
        """Of a save that touches every table."""
        return self.ranks * self.tables_per_rank


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


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint, of all ranks; one that is not coded holds floats as they are."""

    kind: Literal["baseline", "delta"]
    base: Literal["head", "baseline"]
    rows: float
    size_bytes: float
    objects: int
    requests: float
    stall_s: float
    commit_s: float
    is_coded: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy comes to; means are over all intervals, those behind ``restore`` over all points of the run.

    ``job_bytes_per_hour`` is what compaction reads and writes besides.
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
    job_bytes_per_hour: float
    peak_storage_bytes: float


@dataclass(slots=True)
class _Chain:
    """What a restore reads: one baseline and the deltas behind it, and what else is kept on disk."""

    policy: PlanPolicy
    segments: list[Save] = field(default_factory=list)
    replaced: list[Save] = field(default_factory=list)

    def add(self, save: Save) -> None:
        """Put a save behind; a baseline begins anew, a one-shot delta replaces the deltas before."""
        if save.kind == "baseline":
            self.replaced, self.segments = self.segments, [save]
        elif save.base == "baseline":
            self.replaced, self.segments = self.segments[1:], [self.segments[0], save]
        else:
            self.replaced = []
            self.segments.append(save)

    @property
    def kept_bytes(self) -> float:
        """On disk while the newest save replaces what was before it: the old one goes when the new one is valid."""
        return sum(save.size_bytes for save in (*self.segments, *self.replaced))


def simulate(
    policy: PlanPolicy,
    work: Workload,
    cluster: Cluster,
    rates: Rates,
    *,
    compact_at: int = 16,
    compact_ratio: float = 1.5,
) -> Plan:
    """Play a run and add up what it costs.

    ``compact_at`` and ``compact_ratio`` bound a chain: its length, and its bytes over those of its baseline.
    """
    chain, saves, restores, peak, job_bytes = _Chain(policy), [], [], 0.0, 0.0
    for save in _saves(policy, work, cluster, rates, chain):
        saves.append(save)
        chain.add(save)
        peak = max(peak, chain.kept_bytes)
        restores.append(restore_s(chain.segments, work, cluster, rates))
        baseline, total = chain.segments[0].size_bytes, sum(one.size_bytes for one in chain.segments)
        if policy == "consecutive + compaction" and (
            len(chain.segments) > compact_at or total > compact_ratio * baseline
        ):
            compacted = save_of(Decision("baseline", "baseline", "compacted"), 1, work, cluster, rates)
            job_bytes += total + compacted.size_bytes
            peak = max(peak, chain.kept_bytes + compacted.size_bytes)
            chain.segments = [compacted]
    hours = work.intervals * work.interval_s / 3600
    return Plan(
        policy=policy,
        saves=tuple(saves),
        mean_bytes=float(np.mean([save.size_bytes for save in saves])),
        mean_objects=float(np.mean([save.objects for save in saves])),
        stall_s=max(save.stall_s for save in saves[1:]),
        commit_s=float(np.mean([save.commit_s for save in saves])),
        worst_commit_s=max(save.commit_s for save in saves),
        restore_s=float(np.mean(restores)),
        worst_restore_s=max(restores),
        requests_per_hour=sum(save.requests for save in saves) / hours,
        job_bytes_per_hour=job_bytes / hours,
        peak_storage_bytes=peak,
    )


def save_of(decision: Decision, since: int, work: Workload, cluster: Cluster, rates: Rates) -> Save:
    """Return what one save is: a baseline, or a delta of the rows changed in the last ``since`` intervals."""
    is_full = decision.kind == "baseline"
    share = 1.0 if is_full else work.changed_since(since)
    # The first delta behind a baseline is a difference to what the mirror holds, under every policy.
    adds = not is_full and (decision.base == "head" or since == 1)
    rows = share * work.num_rows
    bits = work.dim * (rates.add_bits if adds else rates.set_bits)
    bits += rates.slot_add_bits if adds else rates.slot_set_bits
    ids = 0.0 if is_full else id_bits(share) * rates.id_overhead
    others = cluster.ranks - 1
    receipts = cluster.parts * others / cluster.ranks * rates.part_receipt
    documents = rates.base_json + cluster.parts * rates.part_json
    documents += (groups_of(rows / cluster.parts, work.dim, cluster) - 1) * rates.group_json
    size = rows * (bits + ids) / 8 + documents + receipts
    objects = objects_of(rows / cluster.parts, work.dim, cluster)
    copied = rows / cluster.ranks * (4 * work.dim + 4)
    # Later baselines come from the mirror: training stalls for the rows of the last interval alone.
    stalling = min(copied, work.touched_share * work.num_rows / cluster.ranks * (4 * work.dim + 4))
    # A one-shot delta takes back what the one before it did: its writers read that one's chunks.
    reads = 0 if is_full or adds else chunks_of(rows / cluster.parts, work.dim, cluster)
    per_host = size / cluster.hosts
    work_s = rows / cluster.hosts * work.dim / (rates.encode_values_s * cluster.save_cores)
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
        stall_s=stalling / cluster.device_bytes_s + MESSAGES_PER_SAVE * cluster.message_s,
        commit_s=max(work_s, per_host / cluster.link_bytes_s, puts_s) + last_s,
    )


def fp32_save(work: Workload, cluster: Cluster) -> Save:
    """Return a checkpoint as it is written without any of this: all rows as floats, one file per rank and table."""
    size = float(work.fp32_bytes)
    copied = size / cluster.ranks
    return Save(
        "baseline", "baseline", float(work.num_rows), size, cluster.parts, float(cluster.parts),
        copied / cluster.device_bytes_s, size / cluster.hosts / cluster.link_bytes_s + 2 * cluster.put_s,
        is_coded=False,
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


def stored_of(rows_per_part: float, dim: int, cluster: Cluster) -> int:
    """Return the objects with chunks of such a save: a chunk each, or a shard."""
    rows = max(1, round(rows_per_part))
    full = full_chunk_rows(2 * dim)
    if rows >= full:
        return cluster.parts * _stored_of_group(rows, dim, chunk_rows_for(rows, 2 * dim))
    together = rows * cluster.tables_per_rank
    return cluster.ranks * _stored_of_group(together, dim, min(full, together))


def _stored_of_group(rows: int, dim: int, chunk_rows: int) -> int:
    group = (((rows,), np.int64), ((rows, dim), np.int16), ((rows,), np.int16))
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


def restore_s(chain: list[Save], work: Workload, cluster: Cluster, rates: Rates) -> float:
    """Return the seconds of reading a chain on all hosts: fetching or decoding, whichever bounds it."""
    if not any(save.is_coded for save in chain):
        return sum(save.size_bytes for save in chain) / cluster.hosts / cluster.link_bytes_s
    fetch = sum(save.size_bytes for save in chain) / cluster.hosts / cluster.link_bytes_s
    decode = sum(save.rows for save in chain) * work.dim / cluster.hosts
    # Neighbouring chunks of a shard come together, but no more than that of it.
    requests = sum(max(save.objects, save.size_bytes / FETCH_BYTES) for save in chain)
    gets = requests / cluster.ranks / cluster.concurrency * cluster.get_s
    return max(fetch, decode / (rates.decode_values_s * cluster.load_cores), gets)


def _saves(policy: PlanPolicy, work: Workload, cluster: Cluster, rates: Rates, chain: _Chain) -> Iterator[Save]:
    if policy == "fp32 full":
        for _ in range(work.intervals):
            yield fp32_save(work, cluster)
        return
    asked: Policy = "consecutive" if policy == "consecutive + compaction" else policy
    history: list[CheckpointSize] = []
    since = 0
    for _ in range(work.intervals):
        decision = decide(asked, history, chain_length=len(chain.segments))
        since = 1 if decision.base == "head" else since + 1
        if decision.kind == "baseline":
            history, since = [], 0
        save = save_of(decision, since, work, cluster, rates)
        history.append(CheckpointSize(save.kind, round(save.size_bytes)))
        yield save
