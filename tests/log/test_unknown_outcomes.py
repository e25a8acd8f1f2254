"""One store, one log, several things that append: an unknown outcome belongs to the one that sent the record."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

from cnr_store import StorageFailure, Store, TableOptions, Writer
from cnr_store.errors import CommitStateUnknown
from cnr_store.format.layout import COMMITS
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import CreateOutcome, Storage, open_storage
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from tests.support.ranks import ThreadRank, on_ranks


class Network:
    """The way to a storage's log, which can be cut: records then land or do not, and no answer comes back."""

    def __init__(self, storage: Storage) -> None:
        self._real_create, self._real_read = storage.create, storage.read
        self.is_cut = False
        self.lands = True
        # Until a record was sent reads are answered, so that an append gets as far as sending one.
        self.is_silent = False
        storage.create = self._create  # type: ignore[method-assign]
        storage.read = self._read  # type: ignore[method-assign]

    def cut(self, *, lands: bool) -> None:
        self.is_cut, self.lands, self.is_silent = True, lands, False

    def heal(self) -> None:
        self.is_cut = False

    def _create(self, key: str, data: bytes) -> CreateOutcome:
        if not (self.is_cut and key.startswith(COMMITS)):
            return self._real_create(key, data)
        if self.lands:
            self._real_create(key, data)
            self.lands = False
        self.is_silent = True
        return CreateOutcome.UNKNOWN

    def _read(self, key: str, *, start: int | None = None, stop: int | None = None) -> bytes | None:
        if self.is_cut and key.startswith(COMMITS) and self.is_silent:
            raise StorageFailure("no answer", path=key)
        return self._real_read(key, start=start, stop=stop)


VALUES = np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://unknown-{uuid.uuid4().hex}")


@pytest.fixture
def store(storage: Storage) -> Store:
    return Store.create_on(storage, threads=1, retry=RetryPolicy(deadline_s=0.0))


@pytest.fixture
def writer(store: Store) -> Writer:
    made = store.writer()
    with made.begin(1) as txn:
        txn.write_table("t", VALUES, options=TableOptions.exact())
    return made


def save_row(writer: Writer, step: int, row: int) -> int:
    with writer.begin(step) as txn:
        assert txn.kind == "delta"
        txn.write_rows("t", np.asarray([row]), VALUES[[row]] + step)
        return txn.commit()


def expected(**rows: int) -> np.ndarray:
    values = VALUES.copy()
    for name, step in rows.items():
        values[int(name[1:])] += step
    return values


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("still_cut", [True, False])
def test_an_unknown_tag_is_never_taken_for_the_next_commit(
    storage: Storage, store: Store, writer: Writer, *, lands: bool, still_cut: bool
) -> None:
    """A commit behind an unknown tag was acknowledged with the tag's record, and its rows were nowhere."""
    network = Network(storage)
    network.cut(lands=lands)
    with pytest.raises(CommitStateUnknown) as tagged:
        store.tag("good")
    if still_cut:
        with pytest.raises(CommitStateUnknown, match="nothing new was sent") as refused:
            save_row(writer, 2, 5)
        assert refused.value.version == tagged.value.version
        assert writer.settle() is None
        assert writer.is_synced, "nothing was sent, so the mirrors are still the head's state"
    network.heal()

    version = save_row(writer, 3, 6)

    assert version == store.latest_version() == 4
    assert [record.kind for record in store.log()][:2] == ["delta", "tag"]
    assert store.tags() == {"good": 2}
    assert np.array_equal(store.snapshot().table("t").read(), expected(_6=3))
    assert writer.settle() is None
    save_row(writer, 4, 7)
    assert np.array_equal(store.snapshot().table("t").read(), expected(_6=3, _7=4))


@pytest.mark.parametrize("fate", ["landed", "sent again", "lost"])
@pytest.mark.parametrize("tag_is_unknown", [True, False])
def test_a_commit_that_another_append_settled_is_still_learned(
    storage: Storage, store: Store, writer: Writer, fate: str, *, tag_is_unknown: bool
) -> None:
    network = Network(storage)
    network.cut(lands=fate == "landed")
    transaction = writer.begin(2)
    transaction.write_rows("t", np.asarray([5]), VALUES[[5]] + 2)
    with pytest.raises(CommitStateUnknown):
        transaction.commit()
    network.heal()
    if fate == "lost":
        Store.open_on(open_storage(storage.url)).tag("other")

    store.tag("behind")
    if tag_is_unknown:
        network.cut(lands=True)
        with pytest.raises(CommitStateUnknown):
            store.tag("unclear")
        network.heal()
    with pytest.raises(CommitStateUnknown, match="settle"):
        writer.begin(3)
    entry = writer.settle()

    if fate == "lost":
        assert entry is None
        assert transaction.version is None
        writer.restore()
    else:
        assert entry is not None
        assert (entry.record.kind, entry.record.step) == ("delta", 2)
        assert transaction.version == entry.record.v == 3
    save_row(writer, 3, 6)
    rows = {"_6": 3} if fate == "lost" else {"_5": 2, "_6": 3}
    assert np.array_equal(store.snapshot().table("t").read(), expected(**rows))
    assert "behind" in store.tags()


@pytest.mark.parametrize("lands", [True, False])
def test_an_unknown_fence_does_not_block_its_store(storage: Storage, store: Store, *, lands: bool) -> None:
    """After a fence with an unknown outcome every append of the store was refused until a restart."""
    network = Network(storage)
    network.cut(lands=lands)
    with pytest.raises(CommitStateUnknown):
        store.writer()
    network.heal()

    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", VALUES, options=TableOptions.exact())

    assert [record.kind for record in store.log()] == ["baseline", "fence", "fence", "init"]
    assert np.array_equal(store.snapshot().table("t").read(), VALUES)


@pytest.mark.parametrize("lands", [True, False])
def test_a_rollback_with_an_unknown_outcome_can_be_asked_for_again(
    storage: Storage, store: Store, writer: Writer, *, lands: bool
) -> None:
    save_row(writer, 2, 5)
    network = Network(storage)
    network.cut(lands=lands)
    with pytest.raises(CommitStateUnknown):
        store.rollback(2)
    network.heal()

    store.rollback(2)

    assert np.array_equal(store.snapshot().table("t").read(), VALUES)


def test_ranks_settle_together_where_one_of_them_cannot_read_the_log(storage: Storage, store: Store) -> None:
    """Rank 0 was done with an unknown commit, the rank without the record asked again alone: they were out of step."""
    networks: dict[int, Network] = {0: Network(storage)}

    def heard(writer: Writer) -> Any:
        try:
            entry = writer.settle()
        except StorageFailure as error:
            return type(error)
        return entry and entry.record.v

    def train(rank: ThreadRank) -> tuple[list[Any], list[bool]]:
        tile = Rectangle((0, 5), (0, 2)) if rank.rank == 0 else Rectangle((5, 10), (0, 2))
        mine = VALUES[slice(*tile.rows)]
        if rank.rank == 0:
            opened = store
        else:
            others = open_storage(storage.url)
            opened, networks[1] = Store.open_on(others, threads=1), Network(others)
        writer = opened.writer(ranks=rank, shards={"t": [tile]})
        with writer.begin(1) as txn:
            txn.declare_tables({"t": [Declaration(mine, {}, TableOptions.exact())]})
            txn.write_table("t", mine)
        txn = writer.begin(2)
        txn.write_rows("t", np.asarray([tile.rows[0]]), mine[:1] + 2)
        networks[rank.rank].cut(lands=True)
        with pytest.raises(CommitStateUnknown):
            txn.commit()
        if rank.rank == 0:
            networks[0].heal()
        else:
            networks[1].is_silent = True
        outcomes, synced = [heard(writer)], [writer.is_synced]
        networks[rank.rank].heal()
        outcomes.append(heard(writer))
        synced.append(writer.is_synced)
        with writer.begin(3) as txn:
            txn.write_rows("t", np.asarray([tile.rows[0]]), mine[:1] + 3)
        return outcomes, synced

    ends = on_ranks(2, train)

    assert ends == [([StorageFailure, 3], [False, True])] * 2
    assert np.array_equal(store.snapshot().table("t").read(), expected(_0=3, _5=3))
