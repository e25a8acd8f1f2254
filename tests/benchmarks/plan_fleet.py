"""What a fleet pays, computed: how often it can save, how soon it is back, who serves it far away, what a month costs.

Pure. It rests on `plan_model`. `tests/benchmarks/test_plan.py` holds requests and bytes against runs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from plan_model import Cluster, Moment, Plan, Rates, Save, Workload, fp32_save, save_of

from cnr_store.write.policy import Decision

HOURS_PER_MONTH = 730.0
CODE_BYTES = 2
"""Of an element in the memory of a loader that keeps codes."""
MESSAGES_OF_RECOVERY = 12
"""Short messages that all ranks exchange in a restore."""
RELAY_READS, RELAY_WRITES, RELAY_LOOKS = 4, 2, 6
"""Requests of a relay for a version, beside its objects: records from the source; to its own place, record and hint;
its manifest, notes and listings there."""
LOADER_READS = 3
"""GETs of a loader for a version, beside its chunks: record, the next position, manifest."""
NEXT_DELTA = Decision("delta", "head", "the next one")


# ---- how often


@dataclass(frozen=True, slots=True)
class Frequency:
    """Saves as often as they may be, and what bounds them: the training's stall, or the time until one is committed.

    ``save`` is one of them.
    """

    interval_s: float
    bound: Literal["stall", "commit"]
    save: Save

    @property
    def per_hour(self) -> float:
        """Saves per hour."""
        return 3600 / self.interval_s


def most_saves(save_after: Callable[[float], Save], share: float) -> Frequency:
    """Return the shortest interval at which stalls take at most ``share`` of the time and a save ends before the next.

    ``save_after``: the save of an interval of so many seconds. Neither its stall nor its time to commit may grow faster
    than the interval.
    """

    def needed_s(interval_s: float) -> dict[Literal["stall", "commit"], float]:
        save = save_after(interval_s)
        return {"stall": save.stall_s / share, "commit": save.commit_s}

    low, high = 1e-3, 1e9
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if max(needed_s(middle).values()) <= middle else (middle, high)
    needed = needed_s(high)
    return Frequency(high, max(needed, key=lambda name: needed[name]), save_after(high))


def most_deltas(work: Workload, cluster: Cluster, rates: Rates, share: float = 0.01) -> Frequency:
    """Return how often a fleet can save deltas."""
    return most_saves(lambda s: save_of(NEXT_DELTA, 1, work.saved_every(s), cluster, rates), share)


def most_full(work: Workload, cluster: Cluster, *, is_written_at_once: bool, share: float = 0.01) -> Frequency:
    """Return how often a fleet can save everything in fp32 (`fp32_save`)."""
    save = fp32_save(work, cluster, is_written_at_once=is_written_at_once)
    return most_saves(lambda _: save, share)


# ---- how soon back


@dataclass(frozen=True, slots=True)
class DocumentReads:
    """How often a rank reads each manifest of the chain in a restore, and its other GETs of small documents."""

    manifests: float = 1.0
    others: float = 10.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery of some ranks.

    Attributes
    ----------
    seconds
        Until the training goes on.
    size_bytes
        Of rows that the lost ranks read, from the store or from peers.
    gets
        From the store, of all ranks.
    """

    seconds: float
    size_bytes: float
    gets: float


def recovery_of(
    chain: Sequence[Save], lost: int, work: Workload, cluster: Cluster, rates: Rates, *,
    peer_bytes_s: float | None = None, documents: DocumentReads = DocumentReads(),
) -> Recovery:  # fmt: skip
    """Return a recovery of ``lost`` ranks: one, those of a host, or all.

    Every rank reads the manifests of the chain, survivors too. The lost ranks of a host share its link, and each has
    its part of the host's cores. Dense state, which one rank sends to all, is left out.

    Parameters
    ----------
    peer_bytes_s
        From host to host, if the rows come from there. None: from the store.
    """
    per_host = cluster.ranks // cluster.hosts
    from_store = peer_bytes_s is None
    link = cluster.link_bytes_s if peer_bytes_s is None else min(peer_bytes_s, cluster.link_bytes_s)
    of_rank = sum(save.size_bytes - json_bytes(cluster, rates) for save in chain) / cluster.ranks
    chunks = sum(save.fetches for save in chain) / cluster.ranks if from_store else 0.0
    manifests = documents.manifests * len(chain)
    decode_s = sum(save.rows for save in chain) * work.dim / cluster.ranks
    decode_s /= rates.decode_values_s * cluster.load_cores / per_host
    rows_s = max(min(lost, per_host) * of_rank / link, decode_s, chunks / cluster.concurrency * cluster.get_s)
    documents_s = per_host * manifests * json_bytes(cluster, rates) / cluster.link_bytes_s
    waits_s = (documents.manifests + documents.others) * cluster.get_s + MESSAGES_OF_RECOVERY * cluster.message_s
    return Recovery(
        seconds=rows_s + documents_s + waits_s,
        size_bytes=lost * of_rank,
        gets=cluster.ranks * (manifests + documents.others) + lost * chunks,
    )


def json_bytes(cluster: Cluster, rates: Rates) -> float:
    """Return the bytes of the JSON of a save, which bound those of its manifest."""
    return rates.base_json + cluster.parts * rates.part_json


# ---- who serves it far away


@dataclass(frozen=True, slots=True)
class Serving:
    """Regions with a relay each, and loaders behind it: ``replicas`` of the model, each spread over many loaders.

    A loader has ``loader_bytes`` for rows, kept as codes, ``load_cores``, and a link to its relay's place. Relays and
    loaders look for news every ``poll_s``. ``wide_bytes_s``: of the link from the store to each region.
    """

    regions: int = 3
    replicas: int = 4
    loader_bytes: float = 256e9
    load_cores: float = 16.0
    link_bytes_s: float = 25e9 / 8
    wide_bytes_s: float = 25e9 / 8
    wide_rtt_s: float = 0.1
    relay_threads: int = 64
    concurrency: int = 16
    poll_s: float = 0.5

    def shards(self, work: Workload) -> int:
        """Loaders that together have the model once."""
        return math.ceil(work.num_rows * work.dim * CODE_BYTES / self.loader_bytes)


@dataclass(frozen=True, slots=True)
class Published:
    """One version on its way to the loaders.

    Attributes
    ----------
    wide_bytes
        Over the link to one region.
    wide_gets
        Of its relay, from the store.
    relay_puts, relay_gets
        Of the relay, to its own place.
    loader_gets
        Of all loaders of a region together.
    relay_s, served_s
        From the commit to a version at the relay's place; to one that the loaders serve. Means.
    direct_s
        The same for loaders that read from the store over the wide link.
    direct_bytes
        Over the wide link to one region, without a relay.
    """

    wide_bytes: float
    wide_gets: float
    relay_puts: float
    relay_gets: float
    loader_gets: float
    relay_s: float
    served_s: float
    direct_s: float
    direct_bytes: float


def publish(save: Save, work: Workload, cluster: Cluster, rates: Rates, serving: Serving) -> Published:
    """Return how a delta gets from a store over a relay to the loaders of one region."""
    shards = serving.shards(work)
    documents = json_bytes(cluster, rates)
    objects = save.objects - (cluster.ranks - 1)  # without receipts
    size = save.size_bytes - receipt_bytes(cluster, rates)
    wide_gets = objects + RELAY_READS
    relay_s = serving.poll_s / 2 + 4 * serving.wide_rtt_s + 2 * cluster.put_s
    relay_s += max(size / serving.wide_bytes_s, wide_gets / serving.relay_threads * serving.wide_rtt_s)
    # A loader reads the whole manifest, and of the chunks its part.
    chunks = (size - documents) / shards
    gets = max(1.0, save.fetches / shards)
    apply_s = save.rows * work.dim / shards / (rates.decode_values_s * serving.load_cores)

    def load_s(get_s: float, link_bytes_s: float) -> float:
        of_chunks = max(chunks / link_bytes_s, apply_s, gets / serving.concurrency * get_s)
        return serving.poll_s / 2 + 2 * get_s + documents / link_bytes_s + of_chunks

    loaders = shards * serving.replicas
    direct_bytes = loaders * (chunks + documents)
    return Published(
        wide_bytes=size,
        wide_gets=wide_gets,
        relay_puts=objects + RELAY_WRITES,
        relay_gets=RELAY_LOOKS,
        loader_gets=loaders * (LOADER_READS + gets),
        relay_s=relay_s,
        served_s=relay_s + load_s(cluster.get_s, serving.link_bytes_s),
        direct_s=load_s(serving.wide_rtt_s, serving.wide_bytes_s / loaders),
        direct_bytes=direct_bytes,
    )


def receipt_bytes(cluster: Cluster, rates: Rates) -> float:
    """Return the bytes of the receipts of a save."""
    return cluster.parts * (cluster.ranks - 1) / cluster.ranks * rates.part_receipt


# ---- what a month costs


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: of 1,000 PUTs (creations and listings too), of 1,000 GETs, of a GB for a month, of a GB between regions.

    Of the order that large providers list for object stores; give your own.
    """

    put_1000: float = 0.005
    get_1000: float = 0.0004
    gb_month: float = 0.023
    wide_gb: float = 0.02


@dataclass(frozen=True, slots=True)
class Month:
    """Dollars of a month, and what they are for: requests of the training and of compaction, of relays and loaders."""

    training: float
    serving: float
    storage: float
    wide: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.training + self.serving + self.storage + self.wide


def month_of(
    plan: Plan, moments: Sequence[Moment], work: Workload, cluster: Cluster, rates: Rates, serving: Serving,
    prices: Prices,
) -> Month:  # fmt: skip
    """Return what a training and its loaders pay in a month for an object store. Relays keep one chain each."""

    def paid(gets: float, puts: float) -> float:
        return HOURS_PER_MONTH * (gets * prices.get_1000 + puts * prices.put_1000) / 1000

    per_hour = 3600 / work.interval_s
    hours = len(moments) / per_hour
    loaders = serving.shards(work) * serving.replicas
    sent = [publish(moment.save, work, cluster, rates, serving) for moment in moments]
    made = [one for moment in moments for one in moment.made]
    # A relay copies what compaction made, loaders have its rows already.
    wide_bytes = (sum(one.wide_bytes for one in sent) + sum(one.size_bytes for one in made)) / hours
    copied = sum(one.puts for one in made) / hours
    polls = 3600 / serving.poll_s
    wide_gets = sum(one.wide_gets for one in sent) / hours + copied + polls
    near_gets = sum(one.relay_gets + one.loader_gets for one in sent) / hours + loaders * polls
    near_puts = sum(one.relay_puts for one in sent) / hours + copied
    return Month(
        training=paid(
            plan.requests_per_hour - plan.puts_per_hour + plan.job_gets_per_hour,
            plan.puts_per_hour + plan.job_puts_per_hour,
        ),
        serving=serving.regions * paid(wide_gets + near_gets, near_puts),
        storage=(1 + serving.regions) * plan.peak_storage_bytes / 1e9 * prices.gb_month,
        wide=serving.regions * HOURS_PER_MONTH * wide_bytes / 1e9 * prices.wide_gb,
    )
