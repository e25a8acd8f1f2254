"""Real runs of `plan_model`'s workloads on this machine: what each save put on disk, asked for and took."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from counting import REQUESTS, CountingStorage
from drifting import DRIFT, WIDTH
from growing import Trained, on_ranks
from plan_model import FixedCosts, Rates, Workload, id_bits

from cnr_store import Store, TableOptions
from cnr_store.encodings.scale import choose_scale
from cnr_store.format.documents import pack
from cnr_store.format.layout import MANIFEST, segment_prefix
from cnr_store.format.records import Manifest, Receipt
from cnr_store.format.sizes import SegmentSizes, segment_sizes
from cnr_store.relay import Relay
from cnr_store.segment.codes import Array
from cnr_store.serving import Loader, LoaderOptions
from cnr_store.training.ranks import ProcessRanks
from cnr_store.types import AffineBits, Precision, Rectangle, RowIds
from cnr_store.write.mirrors import HeldMirrors
from cnr_store.write.policy import CheckpointSize, Decision, Policy, decide
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from tests.support.ranks import ThreadRank

PARTS = 8
"""Tables of the run that tells what a part adds to the JSON of a save."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One save of a real run; ``cpu_s`` is that of all threads of the process."""

    decision: Decision
    rows: int
    sizes: SegmentSizes
    size_bytes: int
    objects: int
    requests: int
    seconds: float
    cpu_s: float

    @property
    def json_bytes(self) -> int:
        """Everything that is no row: manifest, receipts, record, Zarr metadata."""
        return self.size_bytes - self.sizes.rows - self.sizes.codes - self.sizes.slots


class ChangingRows:
    """Rows that change so that k intervals together touch ``Workload.changed_since(k)`` of them."""

    def __init__(self, work: Workload, seed: int = 0) -> None:
        self._work = work
        self._random = np.random.default_rng(seed)
        shape = (work.num_rows, work.dim)
        self.values = self._random.standard_normal(shape, dtype=np.float32) * np.float32(WIDTH)
        self.slots = np.abs(self._random.standard_normal(work.num_rows, dtype=np.float32)) + np.float32(0.1)
        self.start_anew()

    def step(self) -> RowIds:
        """Move the rows of one interval; returns their ids, sorted."""
        self._intervals += 1
        reach = round(self._work.num_rows * self._work.changed_since(self._intervals))
        fresh = self._order[self._reached : reach]
        count = round(self._work.num_rows * self._work.touched_share)
        again = self._random.choice(self._order[: self._reached], count - len(fresh), replace=False)
        self._reached = reach
        ids = np.sort(np.concatenate([fresh, again])).astype(np.int64)
        drift = self._random.standard_normal((len(ids), self._work.dim), dtype=np.float32)
        self.values[ids] += drift * np.float32(WIDTH * DRIFT)
        self.slots[ids] += np.square(drift).mean(axis=1)
        return ids

    def start_anew(self) -> None:
        """Count changed rows from here on, as behind a baseline."""
        self._order = self._random.permutation(self._work.num_rows).astype(np.int64)
        self._reached = self._intervals = 0

    def changed(self) -> RowIds:
        """Return all rows that changed since the count began, sorted."""
        return np.sort(self._order[: self._reached])


class Run:
    """Saves of one workload from several writers, threads of this process that hold equal parts of each table.

    ``after`` is called after each save.
    """

    def __init__(
        self, folder: Path, policy: Policy, work: Workload, writers: int, bits: AffineBits,
        after: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.saves: list[Measured] = []
        self._after = after
        self._folder, self._policy, self._work, self._writers = folder, policy, work, writers
        Store.create(str(folder), fsync=False).close()
        self._storage = CountingStorage(str(folder))
        self._rows = ChangingRows(work)
        self._scale = choose_scale(self._rows.values[:4096], Precision(bits=bits))
        self._touched: RowIds = np.zeros(0, np.int64)
        self._history: list[CheckpointSize] = []

    def play(self) -> list[Measured]:
        """Save every interval and return what each save was; blocks."""
        on_ranks(self._writers, self._save_all)
        return self.saves

    @property
    def _tables(self) -> dict[str, int]:
        """Name of each table to its first row among all rows."""
        rows = self._work.num_rows // self._work.tables
        return {f"table{number}": number * rows for number in range(self._work.tables)}

    def _mine(self, rank: int) -> Rectangle:
        share = self._work.num_rows // self._work.tables // self._writers
        return Rectangle((rank * share, (rank + 1) * share), (0, self._work.dim))

    def recover(self, lost: set[int]) -> list[Carried]:
        """Replace writers; returns what each of all reads to have its rows and mirrors, or to keep its mirrors."""
        kept = {} if len(lost) == self._writers else dict(enumerate(on_ranks(self._writers, self._mirrors)))

        def restored(rank: ThreadRank) -> Carried:
            storage = CountingStorage(str(self._folder))
            mine = self._mine(rank.rank)
            rows = mine.rows[1] - mine.rows[0]
            outputs: dict[str, dict[str, Array]] = {
                table: {"values": np.zeros((rows, self._work.dim), np.float32), "momentum1": np.zeros(rows, np.float32)}
                for table in self._tables
            }
            with (
                Store.open_on(storage) as store,
                store.writer(ranks=rank, shards={table: [mine] for table in self._tables}) as writer,
            ):
                carried(storage)
                is_lost = rank.rank in lost
                writer.restore(outputs if is_lost else None, held=None if is_lost else kept[rank.rank])
                return carried(storage)

        return on_ranks(self._writers, restored)

    def _mirrors(self, rank: ThreadRank) -> HeldMirrors:
        placement = {table: [self._mine(rank.rank)] for table in self._tables}
        with Store.open_on(self._storage) as store, store.writer(ranks=rank, shards=placement) as writer:
            writer.restore()
            return writer.mirrors.held()

    def _save_all(self, rank: ThreadRank) -> None:
        mine = self._mine(rank.rank)
        placement = {table: [mine] for table in self._tables}
        with Store.open_on(self._storage) as store, store.writer(ranks=rank, shards=placement) as writer:
            for step in range(self._work.intervals):
                decision = decide(self._policy, self._history)
                rank.exchange(b"")  # all have decided
                if rank.rank == 0:
                    self._touched = self._rows.step()
                    if decision.kind == "delta" and decision.base == "baseline":
                        self._touched = self._rows.changed()
                    self._storage.take()
                rank.exchange(b"")
                started, cpu = time.perf_counter(), time.process_time()
                with writer.begin(step, decision.kind, base=decision.base) as txn:
                    self._write(txn, mine, anew=step == 0)
                rank.exchange(b"")
                if rank.rank == 0:
                    self._keep(writer, decision, time.perf_counter() - started, time.process_time() - cpu)
                    if self._after is not None:
                        self._after()
                rank.exchange(b"")

    def _write(self, txn: Transaction, mine: Rectangle, *, anew: bool) -> None:
        values, slots = self._rows.values, self._rows.slots
        start, stop = mine.rows
        if anew:
            parts = {
                table: (values[first + start : first + stop], {"momentum1": slots[first + start : first + stop]})
                for table, first in self._tables.items()
            }
            options = TableOptions(scale=self._scale)
            txn.declare_tables({table: [Declaration(*part, options)] for table, part in parts.items()})
            for table, (rows, row_slots) in parts.items():
                txn.write_table(table, rows, slots=row_slots)
            return
        for table, first in self._tables.items():
            low, high = np.searchsorted(self._touched, [first + start, first + stop])
            ids = self._touched[low:high]
            txn.write_rows(table, ids - first, values[ids], slots={"momentum1": slots[ids]})

    def _keep(self, writer: Writer, decision: Decision, seconds: float, cpu_s: float) -> None:
        counts = self._storage.take()
        record = writer.head.record
        entry, manifest = record.chain[-1], writer.snapshot.manifests[-1]
        files = [path for path in (self._folder / segment_prefix(entry.seg)).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in [*files, self._folder / "commits" / f"{record.v:020}.json"])
        is_full = decision.kind == "baseline"
        if is_full:
            self._rows.start_anew()
            self._history = []
        self._history.append(CheckpointSize(decision.kind, size))
        self.saves.append(
            Measured(
                decision, self._work.num_rows if is_full else len(self._touched),
                segment_sizes(manifest, segment_bytes=entry.size_bytes), size, len(files),
                sum(counts[kind] for kind in REQUESTS), seconds, cpu_s,
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Carried:
    """What somebody asked a storage for, by kind of request, and the bytes that it read."""

    counts: Counter[str]
    read_bytes: int


def carried(storage: CountingStorage) -> Carried:
    """Return what a storage was asked for since the last call."""
    return Carried(storage.take(), sum(size for _, size in storage.take_reads()))


class FarAway:
    """A relay of the store in a folder, and a loader behind it: what each asks for, version by version."""

    def __init__(self, source: Path, near: Path) -> None:
        self.relay: list[tuple[Carried, Carried]] = []
        self.loader: list[Carried] = []
        self._storages = [CountingStorage(str(source)), CountingStorage(str(near)), CountingStorage(str(near))]
        self._store = Store.open_on(self._storages[0])
        self._relay = Relay(self._store, self._storages[1], fsync=False)
        self._serving: Loader | None = None

    def follow(self) -> None:
        """Copy what is new, and serve it; kept are the requests from the second version on."""
        self._take()
        self._relay.advance()
        if self._serving is None:
            self._serving = Loader(Store.open_on(self._storages[2]), options=LoaderOptions(kept_as="codes"))
            self._take()
            return
        assert self._serving.poll().is_updated
        source, near, loader = self._take()
        self.relay.append((source, near))
        self.loader.append(loader)

    def close(self) -> None:
        """End relay and loader."""
        if self._serving is not None:
            self._serving.close()
            self._serving.store.close()
        self._store.close()

    def _take(self) -> list[Carried]:
        return [carried(one) for one in self._storages]


MANY_TABLES = 33


def measure_fixed(folder: Path, saves: int = 9) -> FixedCosts:
    """Measure what a `CheckpointManager` takes for a save of few rows of 1 and of 33 tables with Adagrad; blocks."""
    found = []
    for tables in (1, MANY_TABLES):
        trained = Trained(folder, tables, 32 * MANY_TABLES, torch.optim.Adagrad)
        for _ in range(saves + 2):  # the first ones warm up
            trained.save()
        trained.close()
        found.append([statistics.median(seconds[2:]) for seconds in (trained.stall_s, trained.background_s)])
    (stall, background), many = found
    stall_table, background_table = (max(0.0, b - a) / (MANY_TABLES - 1) for a, b in zip(found[0], many, strict=True))
    return FixedCosts(
        max(0.0, stall - stall_table), stall_table, max(0.0, background - background_table), background_table
    )


def restored_documents(folder: Path) -> tuple[float, float]:
    """Return how often a rank reads each manifest in a restore, and its other GETs of documents."""
    trained = Trained(folder, 2, 64, torch.optim.Adagrad)
    for _ in range(3):
        trained.save()
    keys = [key for key, _ in trained.reads_of_restore() if "/c." not in key]
    manifests = [key for key in keys if key.endswith(MANIFEST)]
    return len(manifests) / len(set(manifests)), len(keys) - len(manifests)


def peer_bytes_s(size_bytes: int = 64 << 20, repeats: int = 5) -> float:
    """Return the bytes per second from this rank to another one by the messages of copies; both ranks call it."""
    ranks = ProcessRanks()
    data = np.ones(size_bytes, np.uint8)
    seconds = []
    for _ in range(repeats):
        ranks.exchange(b"")
        started = time.perf_counter()
        ranks.transfer([(1, data)] if ranks.rank == 0 else [], [(0, data)] if ranks.rank == 1 else [])
        ranks.exchange(b"")
        seconds.append(time.perf_counter() - started)
    return size_bytes / statistics.median(seconds)


def _receipt_bytes(manifest: Manifest) -> int:
    """Return the length of the receipt of a rank that wrote a whole segment."""
    receipt = Receipt(
        txn=manifest.txn, rank=1, world=2, attempt=manifest.txn[:8], base=manifest.base, l0=manifest.l0,
        parts=manifest.parts, objects=manifest.objects,
    )  # fmt: skip
    return len(pack(receipt))


def measure_rates(folder: Path, bits: AffineBits, work: Workload) -> Rates:
    """Measure what one core does with the rows of a workload, and the bytes that come of them; one writer, one table.

    Seconds are CPU seconds of the process. Blocks for six saves, a restore, three saves of eight tables, and three of
    two writers.
    """
    one = replace(work, tables=1, intervals=6)
    saves = Run(folder / f"rates{bits}", "consecutive", one, 1, bits).play()
    parted = Run(folder / f"parts{bits}", "consecutive", replace(one, tables=PARTS, intervals=3), 1, bits).play()
    shared = Run(folder / f"shared{bits}", "consecutive", replace(one, intervals=3), 2, bits).play()
    with Store.open(str(folder / f"rates{bits}")) as store:
        snapshot = store.snapshot()
        receipt_bytes = _receipt_bytes(snapshot.manifests[-1])
        snapshot.table("table0").read(0, 1)
        cpu = time.process_time()
        snapshot.table("table0").read()
        decode_s = time.process_time() - cpu
    with Store.open(str(folder / f"parts{bits}")) as store:
        part_receipt = (_receipt_bytes(store.snapshot().manifests[-1]) - receipt_bytes) / (PARTS - 1)
    full, deltas = saves[0], saves[1:]
    rows = statistics.fmean(save.rows for save in deltas)
    ids = 8 * statistics.fmean(save.sizes.rows for save in deltas) / rows
    part_json = (parted[-1].json_bytes - saves[2].json_bytes) / (PARTS - 1)
    return Rates(
        add_bits=8 * statistics.fmean(save.sizes.codes for save in deltas) / (rows * one.dim),
        set_bits=8 * full.sizes.codes / (full.rows * one.dim),
        slot_add_bits=8 * statistics.fmean(save.sizes.slots for save in deltas) / rows,
        slot_set_bits=8 * full.sizes.slots / full.rows,
        id_overhead=ids / id_bits(rows / one.num_rows),
        base_json=saves[2].json_bytes - part_json,
        part_json=part_json,
        group_json=shared[-1].json_bytes - saves[2].json_bytes - part_json - part_receipt,
        part_receipt=part_receipt,
        encode_values_s=rows * one.dim / statistics.median(save.cpu_s for save in deltas),
        decode_values_s=sum(save.rows for save in saves) * one.dim / decode_s,
        plain_requests=float(deltas[-1].requests - deltas[-1].objects),
    )
