"""Ranks that fail, lose a record or hear nothing: a save ends alike on all, and they save again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import CnrStoreError
from cnr_store.errors import BadInput, CommitStateUnknown, NonFiniteValues, RankFailed, RankLost
from cnr_store.runtime.ranks import Parcels
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.store_oracle import TableModel
from tests.write.many_ranks import (
    KIND,
    Array,
    Change,
    Placed,
    check_state,
    declare,
    give,
    new_files,
    of,
    one_table,
    open_store,
    row_wise,
    save,
    shards_of,
    started,
    touch,
)


def _write_badly(txn: Transaction, values: Array, tile: Rectangle, moment: str) -> None:
    if moment == "before declaring":
        raise ZeroDivisionError
    table = "other" if moment == "while declaring" else "t"
    txn.declare_tables({table: [Declaration(values, {}, KIND.options)]})
    if moment == "after declaring":
        raise ZeroDivisionError
    if moment == "while writing":
        txn._staged.schemas.options.clear()  # as a writer that was told of no escapes
        values = np.where(values == values[0, 0], np.float32(np.inf), values)
    txn.write_table("t", values, rectangle=tile)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("moment", ["before declaring", "while declaring", "after declaring", "while writing"])
def test_a_save_that_one_rank_gives_up_ends_on_all_and_they_save_again(culprit: int, moment: str) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)

    def work(rank: ThreadRank) -> int:
        mine = placements[rank.rank]
        tile, fails = mine["t"][0], rank.rank == culprit
        values = of(models["t"].values, tile)
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            version = writer.head.record.v
            expected: Any = CnrStoreError
            if fails:
                expected = {"while declaring": BadInput, "while writing": NonFiniteValues}.get(
                    moment, ZeroDivisionError
                )
            with pytest.raises(expected), writer.begin(1) as txn:
                _write_badly(txn, values, tile, moment if fails else "")
            assert store.latest_version() == version
            rank.exchange(b"")
            with writer.begin(1) as txn:
                declare(txn, shards_of(mine), models)
            assert txn.version is not None
            return txn.version

    assert len(set(on_ranks(2, work))) == 1
    with open_store(files) as store:
        check_state(store.snapshot(), models)


def last_record_put(files: Any, placements: list[Placed], models: dict[str, TableModel], change: Change) -> int:
    """The index of rank 0's call that puts the commit record, in a run that restores and saves."""
    view = FaultyFileSystem(files.fork())
    restored_and_saved(view, placements, models, change)
    return max(call.index for call in view.calls if call.operation == "create" and "/commits/" in call.path)


def restored_and_saved(
    view: FaultyFileSystem, placements: list[Placed], models: dict[str, TableModel], change: Change,
    after: Callable[[ThreadRank, Writer, BaseException | None], Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Rank 0 writes through ``view``, the others beside it; ``after`` gets what became of the save."""

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(view if rank.rank == 0 else view.inner) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            error: BaseException | None = None
            try:
                save(writer, mine, models, change, 1)
            except CnrStoreError as raised:
                error = raised
            return None if after is None else after(rank, writer, error)

    return on_ranks(len(placements), work, timeout_s=5)


def test_a_lost_reply_of_the_record_is_read_back_and_acknowledged_by_all() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)

    view = FaultyFileSystem(files, fault=Fault(FaultKind.LOST_REPLY, at))
    outcomes = restored_and_saved(view, placements, models, change, lambda rank, w, error: (error, w.head.record.v))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] is None
    with open_store(files) as store:
        assert store.latest_version() == outcomes[0][1]
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_outcome_is_settled_by_all_ranks_together(landed: bool) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)
    # A reply is lost, or the put fails, and no read back comes through before the deadline.
    is_dark = [True]

    class Dark(FaultyFileSystem):
        cachable = False

        def _hit(self, call: Any) -> Any:
            if not is_dark[0] or call.index < at:
                return None
            if call.index == at:
                return FaultKind.FAIL_AFTER if landed else FaultKind.FAIL_BEFORE
            return FaultKind.FAIL_BEFORE

    def after(rank: ThreadRank, writer: Writer, error: BaseException | None) -> Any:
        assert isinstance(error, CommitStateUnknown), error
        with pytest.raises(CommitStateUnknown):
            writer.begin(2)
        with pytest.raises(CommitStateUnknown):
            writer.settle()
        if rank.rank == 0:
            is_dark[0] = False
        rank.exchange(b"")
        entry = writer.settle()
        assert entry is not None  # the same bytes were sent again where they had not landed
        assert writer.settle() is None
        mine = placements[rank.rank]
        return entry.record.v, save(writer, mine, again, later, 2)

    again = {"t": models["t"].copy()}
    later = touch(again, 2)
    outcomes = restored_and_saved(Dark(files), placements, models, change, after)

    assert outcomes[0] == outcomes[1]
    with open_store(files) as store:
        check_state(store.snapshot(version=outcomes[0][0]), models)
        check_state(store.snapshot(), again)


class Deaf:
    """A rank whose line breaks at its n-th message, after it was sent or before."""

    def __init__(self, inner: ThreadRank, at: Callable[[], bool], *, sends: bool) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._at, self._sends = inner, at, sends

    def exchange(self, message: bytes) -> list[bytes]:
        if self._at():
            if self._sends:
                self._inner.exchange(message)
            self._inner.leave()
            raise RankLost("cut")
        return self._inner.exchange(message)

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        self._inner.broadcast(data, source)

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        self._inner.transfer(sent, received)

    def another(self) -> Deaf:
        return Deaf(self._inner.another(), self._at, sends=self._sends)


def test_ranks_that_hear_no_more_of_a_commit_find_it_in_the_log() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    with open_store(files) as store:
        before = store.latest_version()

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(files) as store:
            # Rank 0 is cut off when the record is in the log, before it can say so.
            line = rank if rank.rank else Deaf(rank, lambda: store.latest_version() == before + 2, sends=False)
            writer = store.writer(ranks=line, shards=mine)
            writer.restore()
            txn = writer.begin(1)
            give(txn, shards_of(mine), models, change)
            with pytest.raises(RankLost):
                txn.commit()
            known = txn.version
            settled = writer.settle()
            return known, None if settled is None else settled.record.v, txn.version, writer.is_synced

    zero, one = on_ranks(2, work)

    assert zero == (before + 2, None, before + 2, True)
    assert one == (None, before + 2, before + 2, True)
    with open_store(files) as store:
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_with_a_rank_that_is_too_slow_is_lost_on_all_ranks(slow: int) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    old = {"t": models["t"].copy()}
    change = touch(models, 1)
    lost = threading.Event()

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            txn = writer.begin(1)
            give(txn, shards_of(mine), models, change)
            if rank.rank == slow:
                lost.wait(20)
            try:
                txn.commit()
            except RankFailed as error:
                if rank.rank:
                    with pytest.raises(CommitStateUnknown):
                        writer.settle()
                return type(error), txn.version
            finally:
                lost.set()
            return None

    assert on_ranks(2, work, timeout_s=0.5) == [(RankLost, None)] * 2
    with open_store(files) as store:
        check_state(store.snapshot(), old)


def test_rank_zero_learns_alone_that_its_commit_lost() -> None:
    """It raised that the outcome is unknown, because the others could not be told."""
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)
    rival = open_store(files)

    class Beaten(FaultyFileSystem):
        """Another record takes the position, and the storage is dark until the test says so."""

        cachable = False
        is_dark = True

        def _hit(self, call: Any) -> Any:
            if call.index == at:
                rival.tag("rival", rival.latest_version())
            return FaultKind.FAIL_BEFORE if self.is_dark and call.index >= at else None

    view = Beaten(files)

    def after(rank: ThreadRank, writer: Writer, error: BaseException | None) -> Any:
        assert isinstance(error, CommitStateUnknown), error
        if rank.rank:
            rank.leave()
            with pytest.raises(CommitStateUnknown):
                writer.settle()
            return None
        view.is_dark = False
        return writer.settle(), writer._state.pending

    assert restored_and_saved(view, placements, models, change, after)[0] == (None, None)
    rival.close()
