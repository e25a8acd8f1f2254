"""Stores that grow in one way at a time, and what a save and a read of them cost: the subjects of `bench_growth`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
import torch
from counting import CountingStorage

from cnr_store import Store, TableOptions
from cnr_store.format.layout import segment_prefix
from cnr_store.storage import Storage
from cnr_store.training import CheckpointManager
from cnr_store.types import Float32s, Rectangle, RowIds
from cnr_store.write.encode import RowUpdate
from cnr_store.write.schema_changes import Declaration
from tests.support.ranks import ThreadRank, on_ranks

DIM = 16
SCALE = 0.01
_TILE = 1 << 16


class TiledRows:
    """float32 (num_rows, DIM) that takes no memory: 65,536 random rows, over and over.

    No chunk has a row twice, so what is stored is as large as of a table without repeats.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, num_rows: int) -> None:
        self.shape = (num_rows, DIM)
        self._tile = np.random.default_rng(0).standard_normal((_TILE, DIM), dtype=np.float32) * np.float32(0.1)

    def __getitem__(self, rows: slice | RowIds) -> Float32s:
        """Return rows, copied."""
        ids = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else np.asarray(rows)
        return np.asarray(self._tile[ids % _TILE])


class Growing:
    """A store of equal tables that takes one delta after the other, each of so many rows.

    ``seconds``, ``cpu_s``: of each commit, without those in which its rows are made. Requests are counted, and objects
    found, only on a `CountingStorage`.
    """

    def __init__(self, storage: Storage, tables: int, rows: int, *, touched: int) -> None:
        self.storage = storage
        self.store = Store.create_on(self.storage)
        self.writer = self.store.writer()
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []
        self._random = np.random.default_rng(0)
        self._rows, self._touched = rows, touched
        self._names = [f"table{number}" for number in range(tables)]
        self._values = TiledRows(rows)
        with self.writer.begin(0, "baseline") as txn:
            for table in self._names:
                slots = {"momentum1": np.zeros(rows, np.float32)}
                txn.write_table(table, self._values, slots=slots, options=TableOptions(scale=SCALE))

    @property
    def version(self) -> int:
        """Of the head."""
        return self.writer.head.record.v

    @property
    def chain(self) -> int:
        """Segments in the chain of the head."""
        return len(self.writer.head.record.chain)

    def grow_to(self, versions: int, chain: int) -> None:
        """Commit until there are so many versions and the chain has that length."""
        while self.version < versions or self.chain != chain:
            self.commit()

    def commit(self, tables: int = 1) -> None:
        """Commit new values of the touched rows, spread over so many tables."""
        count = self._touched // tables
        staged = []
        for name in self._names[:tables]:
            rows = np.sort(self._random.choice(self._rows, count, replace=False)).astype(np.int64)
            drift = self._random.standard_normal((count, DIM), dtype=np.float32) * np.float32(0.03)
            staged.append((name, rows, self._values[rows] + drift, np.full(count, self.version + 1.0, np.float32)))
        self._take_counts()
        started, cpu = time.perf_counter(), time.process_time()
        with self.writer.begin(self.version) as txn:
            txn.write_many(
                [RowUpdate(name, rows, values, {"momentum1": slot}) for name, rows, values, slot in staged]
            )  # fmt: skip
        self.seconds.append(time.perf_counter() - started)
        self.cpu_s.append(time.process_time() - cpu)
        self.counts = self._take_counts()

    def open(self) -> None:
        """Open the store anew and its newest snapshot, as a reader does."""
        with Store.open_on(self.storage) as opened:
            opened.snapshot()

    def objects_of_last(self) -> int:
        """Files of the last segment, the manifest included."""
        return sum(path.is_file() for path in self._last().rglob("*"))

    def bytes_of_last(self) -> int:
        """Bytes of the last segment and of its record."""
        record = Path(self.store.url) / "commits" / f"{self.version:020}.json"
        return harness.disk_bytes(self._last())[0] + record.stat().st_size

    def requests_of_poll(self) -> int:
        """Requests of asking for news when there is none."""
        head = self.store.head()
        self._take_counts()
        self.store.poll(head)
        return sum(self._take_counts().values())

    def close(self) -> None:
        """End writer and store."""
        self.writer.close()
        self.store.close()

    def _take_counts(self) -> Counter[str]:
        return self.storage.take() if isinstance(self.storage, CountingStorage) else Counter()

    def _last(self) -> Path:
        return Path(self.store.url) / segment_prefix(self.writer.head.record.chain[-1].seg)


def large_table(folder: str, rows: int, touched: int, repeats: int) -> dict[str, float]:
    """Write a table of so many rows and deltas of a fixed number of them, then read; for a fresh process.

    Returns seconds, bytes, and peaks of memory in MiB: of writing beyond the mirror, of reading beyond the target.
    """
    peak = harness.PeakMemory()
    started = time.perf_counter()
    store = Growing(CountingStorage(str(Path(folder) / f"rows{rows}")), 1, rows, touched=touched)
    found = {"baseline, s": time.perf_counter() - started, "baseline, bytes": float(store.bytes_of_last())}
    found["save, s"] = float(np.median([harness.timed(store.commit) for _ in range(repeats)]))
    found["peak of saves beyond mirrors, MiB"] = (peak.beyond_bytes - store.writer.mirror_bytes) / harness.MIB
    found["save, bytes"] = float(store.bytes_of_last())
    found["open, s"] = float(np.median([harness.timed(store.open) for _ in range(repeats)]))
    url = store.store.url
    store.close()
    del store
    reading = harness.PeakMemory()
    with Store.open(url) as opened:
        table = opened.snapshot().table("table0")
        ids = np.sort(np.random.default_rng(1).choice(rows, 100, replace=False)).astype(np.int64)
        found["100 rows, s"] = float(np.median([harness.timed(lambda: table.read_rows(ids)) for _ in range(repeats)]))
        target = np.zeros((rows, DIM), np.float32)
        target.fill(1.0)
        found["restore, s"] = harness.timed(lambda: table.read_rectangle(values=target))
        found["peak of reading beyond the target, MiB"] = (reading.beyond_bytes - target.nbytes) / harness.MIB
    return found


class Trained:
    """Embedding bags in training, as many touched rows spread over so many of them, saved by a `CheckpointManager`.

    ``stall_s``: seconds of the training thread's CPU time in which each save copied its rows; ``background_s``: CPU
    seconds of all threads from then until it was committed.
    """

    def __init__(self, folder: Path, bags: int, touched: int, optimizer: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        torch.sparse.check_sparse_tensor_invariants.disable()  # as they are, said aloud: else Adagrad's step warns
        self.stall_s: list[float] = []
        self.background_s: list[float] = []
        self._rows, self._touched = 10 * touched // bags, touched // bags
        self._bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(self._rows, DIM, mode="sum", sparse=True) for _ in range(bags)
        )
        self._optimizer = optimizer(self._bags.parameters(), lr=0.01)  # type: ignore[call-arg]  # each has one
        self._store = Store.create(str(folder / f"bags{bags}-{optimizer.__name__}"), fsync=False)
        self._manager = CheckpointManager(
            self._store, model=self._bags, optimizer=self._optimizer, options=TableOptions(scale=SCALE)
        )
        self._train()
        self._manager.save()

    def save(self) -> None:
        """Train on new rows, and save them."""
        self._train()
        started, cpu = time.thread_time(), time.process_time()
        self._manager.save(wait=False)
        self.stall_s.append(time.thread_time() - started)
        self._manager.wait_until_finished()
        self.background_s.append(time.process_time() - cpu - self.stall_s[-1])

    def reads_of_restore(self) -> list[tuple[str, int]]:
        """Close, and restore with another manager; returns key and bytes of each of its GETs."""
        self.close()
        storage = CountingStorage(self._store.url)
        with Store.open_on(storage) as store:
            manager = CheckpointManager(store, model=self._bags, optimizer=self._optimizer)
            storage.take_reads()
            manager.restore()
            reads = storage.take_reads()
            manager.close()
        return reads

    def _train(self) -> None:
        looked_up = [bag(torch.randperm(self._rows)[: self._touched].view(1, -1)).sum() for bag in self._bags]
        torch.stack(looked_up).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._manager.step()

    def close(self) -> None:
        """End manager and store."""
        self._manager.close()
        self._store.close()


@dataclass(slots=True)
class Shared:
    """Saves of one table that several writers hold an equal part of: seconds of each, of the last one the rest."""

    seconds: list[float]
    objects: int
    requests: int


def shared_saves(folder: Path, writers: int, rows: int, touched: int, repeats: int) -> Shared:
    """Save ``touched`` rows of one table so often, from so many writers that agree on each save."""
    root = folder / f"writers{writers}"
    Store.create(str(root), fsync=False).close()
    storage = CountingStorage(str(root))
    values = TiledRows(rows)
    share = rows // writers
    random = [np.random.default_rng(rank) for rank in range(writers)]
    stores = [Store.open_on(storage) for _ in range(writers)]
    seconds: list[float] = []

    def work(rank: ThreadRank) -> None:
        here = Rectangle((rank.rank * share, (rank.rank + 1) * share), (0, DIM))
        slots = {"momentum1": np.zeros(share, np.float32)}
        with stores[rank.rank].writer(ranks=rank, shards={"table0": [here]}) as writer:
            with writer.begin(0, "baseline") as txn:
                mine = values[here.rows[0] : here.rows[1]]
                txn.declare_tables({"table0": [Declaration(mine, slots, TableOptions(scale=SCALE))]})
                txn.write_table("table0", mine, slots=slots)
            for step in range(1, repeats + 1):
                ids = np.sort(random[rank.rank].choice(share, touched // writers, replace=False)).astype(np.int64)
                moved = values[ids] + np.float32(0.02 * step)
                rank.exchange(b"")
                if rank.rank == 0:
                    storage.take()
                started = time.perf_counter()
                with writer.begin(step) as txn:
                    slot = np.full(len(ids), float(step), np.float32)
                    txn.write_rows("table0", ids + here.rows[0], moved, slots={"momentum1": slot})
                if rank.rank == 0:
                    seconds.append(time.perf_counter() - started)

    on_ranks(writers, work)
    requests = sum(storage.take().values())
    head = stores[0].head().record
    last = root / segment_prefix(head.chain[-1].seg)
    for store in stores:
        store.close()
    return Shared(seconds, sum(path.is_file() for path in last.rglob("*")), requests)
