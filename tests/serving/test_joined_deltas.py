"""Differences of many tables that one call adds: the changes, rows and errors are those of table by table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.format.commit_record import LogEntry
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving import Loader
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import Overlay
from cnr_store.serving.update import update_tables as updating
from cnr_store.serving.update.joined_deltas import LEAST_TABLES
from cnr_store.serving.update.update_plan import Apply, plan_update
from cnr_store.serving.update.update_tables import ServeAs, TableUpdates
from cnr_store.types import RowRange
from cnr_store.write.transaction import Transaction
from tests.support.consumers import Consumer, TrackedMemory
from tests.support.memory import store_in_memory

ROWS = 20
NARROW, WIDE = [f"narrow {k}" for k in range(6)], [f"wide {k}" for k in range(5)]
LATTICE = TableOptions(scale=0.25, nonfinite="escape")
OTHERS = {"exact": TableOptions(encoding="float_bits"), "affine": TableOptions(encoding="affine", bits=4)}
Write = Callable[[Transaction], object]


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory() as made:
        yield made


def values(rows: int, dim: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def begun(store: Store) -> None:
    """A baseline of tables that can be added to together, and of others."""
    with store.writer() as writer, writer.begin(0) as txn:
        for seed, name in enumerate((*NARROW, *WIDE)):
            txn.write_table(name, values(ROWS, 2 if name in NARROW else 3, seed), options=LATTICE)
        for name, options in OTHERS.items():
            txn.write_table(name, values(ROWS, 2, 7), options=options)
        txn.create_table("hashed", dim=2, options=LATTICE)
        txn.write_rows("hashed", np.array([5, 70]), values(2, 2, 8))


def touch(names: Any, seed: int = 50) -> Write:
    """Change some rows of each table."""

    def write(txn: Transaction) -> None:
        random = np.random.default_rng(seed)
        for name in names:
            rows = np.sort(random.choice(ROWS, random.integers(1, 6), replace=False))
            txn.write_rows(name, rows, random.normal(size=(len(rows), 3 if name in WIDE else 2)).astype(np.float32))

    return write


def save(store: Store, *writes: Write) -> None:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            for write in writes:
                write(txn)


ALL = (*NARROW, *WIDE, *OTHERS, "hashed")
SAVES: dict[str, tuple[Write, ...]] = {
    "all tables": (touch(ALL),),
    "some tables": (touch(NARROW[:LEAST_TABLES]),),
    "few tables": (touch(NARROW[: LEAST_TABLES - 1]),),
    "no table": (lambda txn: txn.put_scalars({"a": 1}),),
    "a row more and others without": (
        touch(NARROW), lambda txn: txn.resize_table(WIDE[0], ROWS + 4),
        lambda txn: txn.write_rows(WIDE[0], np.array([ROWS + 1]), np.ones((1, 3), np.float32)),
    ),
    "a row less": (touch(NARROW), lambda txn: txn.delete_rows(NARROW[5], np.array([9]))),
    "an exact row": (
        touch(NARROW[1:]),
        lambda txn: txn.write_rows(NARROW[0], np.array([3]), np.full((1, 2), np.nan, np.float32), nonfinite="escape"),
    ),
    "a finer scale": (lambda txn: txn.refine_scale(NARROW[2]), touch(NARROW)),
    "a table less": (touch(NARROW), lambda txn: txn.drop_table(WIDE[1])),
    "another table": (touch(NARROW), lambda txn: txn.write_table("new", values(4, 2, 9), options=LATTICE)),
    "far differences": (
        touch(NARROW), lambda txn: txn.write_rows(WIDE[2], np.array([1]), np.full((1, 3), 9e4, np.float32)),
    ),
}  # fmt: skip


class Moves:
    """A consumer at the first version, and what leads it to the head, with and without joined differences."""

    def __init__(self, store: Store, holding: ServeAs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.monkeypatch, self.memory = store, monkeypatch, TrackedMemory()
        self.consumer = Consumer(holding, np.random.default_rng(0), self.memory)
        self.consumer.go(store, [store.head()])
        self.alone: list[str] = []
        real = updating.apply_segment

        def counted(reader: Any, served: Any, *arguments: Any, **named: Any) -> Any:
            self.alone.append(served.name)
            return real(reader, served, *arguments, **named)

        monkeypatch.setattr(updating, "apply_segment", counted)

    def found(self, *, together: bool, memory: Memory | None = None) -> TableUpdates:
        consumer, entry = self.consumer, self.store.head()
        assert consumer.entry is not None
        plan = plan_update(consumer.entry, entry)
        assert isinstance(plan, Apply)
        self.alone.clear()
        with self.monkeypatch.context() as patched:
            if not together:
                patched.setattr(updating, "apply_together", lambda *_: {})
            return updating.update_tables(
                self.opened(entry), plan, consumer.tables, consumer.hold, consumer.recorded,
                memory=memory or self.memory,
            )  # fmt: skip

    def opened(self, entry: LogEntry) -> Snapshot:
        return Snapshot(self.store.storage, entry, self.store.internals.workers, known=self.consumer.known)


def content(change: Any) -> Any:
    if not isinstance(change, Overlay):
        return change if change is None else (change.schema, change.rows.tolist())
    order = np.argsort(change.ids)
    found = change.index.find(change.ids)
    assert found.tolist() == [*range(len(change))]
    assert (change.index.count, change.index.used) == (len(change), len(change))
    return change.schema, change.ids[order].tolist(), change.rows[order].tobytes(), change.status[order].tolist()


@pytest.mark.parametrize("what", SAVES)
@pytest.mark.parametrize(
    "holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs(shard=RowRange(3, 11))], ids=["plain", "codes", "a range"]
)
def test_changes_of_many_tables_are_those_of_each(
    store: Store, what: str, holding: ServeAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(store)
    moves = Moves(store, holding, monkeypatch)
    save(store, *SAVES[what])

    expected = moves.found(together=False)
    found = moves.found(together=True)

    assert {name: content(change) for name, change in found.changes.items()} == {
        name: content(change) for name, change in expected.changes.items()
    }
    assert (found.recorded, found.rows, found.size_bytes) == (expected.recorded, expected.rows, expected.size_bytes)
    assert [*found.exact_rows] == [*expected.exact_rows]
    moves.consumer.go(store, [store.head()])  # looks at every row


def test_tables_that_are_alike_are_not_applied_one_by_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(store)
    moves = Moves(store, ServeAs(), monkeypatch)
    save(store, *SAVES["all tables"])

    found = moves.found(together=True)

    assert sorted(moves.alone) == sorted((*OTHERS, "hashed"))
    assert len({moves.memory.block_of(found.changes[name].rows) for name in NARROW}) == 1  # type: ignore[union-attr]


def test_tables_without_rows_in_a_segment_are_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(store)
    moves = Moves(store, ServeAs(), monkeypatch)
    save(store, *SAVES["some tables"])

    moves.found(together=True)

    assert moves.alone == []


def test_a_delta_to_another_state_is_refused_as_table_by_table(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(store)
    moves = Moves(store, ServeAs(), monkeypatch)
    save(store, *SAVES["all tables"])
    recorded = moves.consumer.recorded
    assert recorded is not None
    parts = tuple(
        msgspec.structs.replace(part, state_digest=f"{5:016x}") if part.table == NARROW[1] else part
        for part in recorded.parts
    )
    moves.consumer.recorded = msgspec.structs.replace(recorded, parts=parts)

    with pytest.raises(CorruptStore, match=r"'narrow 1'.*belongs to another chain"):
        moves.found(together=True)


@pytest.mark.parametrize("wrong", ["other rows", "rows twice", "codes"])
def test_wrong_rows_are_left_to_the_definition(store: Store, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are not those of the manifest, or codes beyond their range: all that the joined way makes is dropped."""
    begun(store)
    moves = Moves(store, ServeAs(), monkeypatch)
    save(store, touch((*NARROW, *WIDE)))
    expected = moves.found(together=False)
    real = SegmentReader.read_chunk

    def read(self: SegmentReader, entry: Any, index: int, scratch: Any, **asked: Any) -> Any:
        chunk = real(self, entry, index, scratch, **asked)
        if entry.count < entry.shape[0]:
            return chunk
        chunk = chunk.copy()  # a whole one: read by the joined way alone
        if wrong == "codes" and entry.path.endswith("codes"):
            return np.full(chunk.shape, np.iinfo(np.int16).max, np.int32) << 15
        if wrong == "other rows" and entry.path.endswith("rows"):
            chunk[...] = 2**14
        elif wrong == "rows twice" and entry.path.endswith("rows"):  # but for the first and the last of a table
            between = 1 + np.flatnonzero((chunk[:-2] < chunk[1:-1]) & (chunk[1:-1] < chunk[2:]))
            chunk[between] = chunk[between - 1]
        return chunk

    monkeypatch.setattr(SegmentReader, "read_chunk", read)
    memory = TrackedMemory()
    found = moves.found(together=True, memory=memory)

    assert moves.alone if wrong == "rows twice" else {*moves.alone} >= {*NARROW, *WIDE}
    assert {name: content(change) for name, change in found.changes.items()} == {
        name: content(change) for name, change in expected.changes.items()
    }
    changes = [change for change in found.changes.values() if isinstance(change, Overlay)]
    assert {*memory.live} == memory.blocks_of(array for change in changes for array in (change.ids, change.rows))


def test_chunks_of_joined_and_other_tables_are_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is dropped when all its rows were asked for, by whichever way."""
    begun(store)
    save(store, lambda txn: txn.delete_rows(NARROW[0], np.array([9])))  # from now on it goes alone
    moves = Moves(store, ServeAs(), monkeypatch)
    before = kept_bytes(moves)
    save(store, touch(NARROW))

    moves.found(together=True)

    assert moves.alone == [NARROW[0]]
    assert kept_bytes(moves) == before


def kept_bytes(moves: Moves) -> int:
    (reader, *_) = moves.consumer.known.values()
    return reader.shared.nbytes  # which all readers share


def test_joined_overlays_of_several_chunks_are_written_in_turn(store: Store, tmp_path: Path) -> None:
    """Tables of two widths have two blocks for their overlays: both come back, and none is lost."""
    begun(store)
    with store.writer() as writer, Loader(store, [*NARROW, *WIDE], shared=str(tmp_path), publish="apply") as loader:
        writer.restore()
        for step in range(1, 12):
            with writer.begin(step) as txn:
                touch((*NARROW, *WIDE), step)(txn)
            loader.poll()
            loader.apply()
            assert loader.version == store.head().record.v
            if step > 6:
                assert len([*tmp_path.glob("g*/*joined.overlays")]) <= 6
