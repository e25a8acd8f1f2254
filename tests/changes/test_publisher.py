"""A published store: rows that changed most first within a limit of bytes, every row in the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import Store, TableOptions
from cnr_store.changes import PriorityPublisher, PublishReport
from cnr_store.changes.priority import OLDEST_SHARE, WaitingRows, choose_rows
from cnr_store.errors import BadInput, CnrStoreError, Conflict, Fenced, StoreExists, Unsupported
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.maintain import maintain
from cnr_store.serving import Loader
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, DIM = 400, 8
Floats = npt.NDArray[np.float32]


class Training:
    """A training's store, and the values that it saved."""

    def __init__(self, url: str, options: TableOptions | None = None) -> None:
        self.store = Store.create(url)
        self.values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
        self._writer = self.store.writer()
        self._step = 0
        with self._writer.begin(self._step, "baseline") as txn:
            txn.write_table("t", self.values, options=options or TableOptions(scale=0.01), slots={"s": self.values})
            txn.put_dense({"top": np.zeros(3, np.float32), "optimizer/0/top/sum": np.zeros(3, np.float32)})

    def move(self, rows: list[int] | npt.NDArray[np.int64], by: float | Floats) -> None:
        """Save rows that moved."""
        chosen = np.asarray(rows, np.int64)
        self.values[chosen] += by
        self._step += 1
        with self._writer.begin(self._step) as txn:
            txn.write_rows("t", chosen, self.values[chosen], slots={"s": self.values[chosen]})
            txn.put_dense({"top": np.full(3, self._step, np.float32)})

    def stored(self) -> Floats:
        return np.asarray(self.store.snapshot().table("t").read())


@pytest.fixture
def training(request: pytest.FixtureRequest) -> Training:
    return Training(f"memory://{request.node.name}-training")


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Store:
    return Store.create(f"memory://{request.node.name}-published")


def published(target: Store) -> Floats:
    return np.asarray(target.snapshot().table("t").read())


def one(reports: list[PublishReport]) -> PublishReport:
    (report,) = reports
    return report


@pytest.mark.parametrize("options", [TableOptions(scale=0.01), TableOptions(bits=4), TableOptions.exact()], ids=repr)
def test_with_room_for_all_rows_each_version_is_the_sources(
    options: TableOptions, request: pytest.FixtureRequest, target: Store
) -> None:
    training = Training(f"memory://{request.node.name}-training", options)
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        publisher.advance()
        with Loader(target) as loader:
            for step in range(1, 4):
                training.move(np.arange(step, ROWS, 3), 0.1 * step)
                report = one(publisher.advance())
                loader.poll()

                assert (report.step, report.waiting_rows) == (step, 0)
                assert np.array_equal(loader.lookup("t", range(ROWS)), training.stored())
                assert loader.dense["top"].tolist() == [step] * 3
                assert loader.dense.keys() == {"top"}
                assert not loader.tables["t"].slots


def test_rows_that_changed_most_go_first_and_the_others_later(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=2 * DIM * 50) as publisher:
        publisher.advance()
        before = published(target)
        by = np.zeros((ROWS, DIM), np.float32)
        by[:] = (0.1 + 0.01 * np.arange(ROWS))[:, None]  # the later a row, the more it changes
        training.move(np.arange(ROWS), by)

        report = one(publisher.advance())

        went = np.flatnonzero((published(target) != before).any(axis=1))
        assert 0 < report.waiting_rows == ROWS - len(went)
        assert went.min() == ROWS - len(went)
        assert np.array_equal(published(target)[went], training.stored()[went])
        while publisher.waiting_rows:
            one(publisher.advance())  # without a new version
        assert np.array_equal(published(target), training.stored())
        assert publisher.advance() == []


def test_the_limit_holds_on_average(training: Training, target: Store) -> None:
    limit = 2_500
    random = np.random.default_rng(1)
    with PriorityPublisher(training.store, target, bytes_per_update=limit) as publisher:
        publisher.advance()
        sizes = []
        for _ in range(20):
            training.move(np.arange(ROWS), random.normal(size=(ROWS, DIM)).astype(np.float32))
            sizes.append(one(publisher.advance()).size_bytes)

    assert publisher.waiting_rows > 0
    assert 0.8 * limit < np.mean(sizes[1:]) < 1.05 * limit


def test_what_one_update_takes_too_much_the_later_ones_leave(target: Store) -> None:
    limit, rows = 20_000, np.arange(4_000)
    values, random = np.zeros((4_000, 16), np.float32), np.random.default_rng(1)
    source = Store.create("memory://rows-of-which-some-take-a-bit-and-some-a-byte-an-element")
    sizes = []
    with source.writer() as writer, PriorityPublisher(source, target, bytes_per_update=limit) as publisher:
        with writer.begin(0, "baseline") as txn:
            txn.write_table("t", values, options=TableOptions(scale=0.01))
        publisher.advance()
        for step in range(1, 41):
            # After rows of a bit an element, all are expected to take so much, and no row waits.
            values += 0.01 if step % 2 else random.normal(size=values.shape)
            with writer.begin(step, "delta") as txn:
                txn.write_rows("t", rows, values)
            sizes.append(one(publisher.advance()).size_bytes)

    assert max(sizes) > 2 * limit
    assert np.mean(sizes) < 1.1 * limit


def test_no_row_waits_longer_than_the_bound(training: Training, target: Store) -> None:
    limit, updates = 2_500, 40
    with PriorityPublisher(training.store, target, bytes_per_update=limit) as publisher:
        publisher.advance()
        training.move([7], 0.02)  # the smallest change, once
        training.move(np.arange(100, ROWS), 1.0)
        waits = []
        for number in range(updates):
            training.move(np.arange(100, ROWS), 5.0 * (-1) ** number)  # and larger ones in every update
            waits += [report.oldest_updates for report in publisher.advance()]
            if np.array_equal(published(target)[7], training.stored()[7]):
                break
        else:
            pytest.fail("the row that changed least was never published")
        # All rows wait, of about 2 bytes an element.
        assert max(waits) <= ROWS * DIM * 2 / (OLDEST_SHARE * limit)


def test_a_new_publisher_finds_the_rows_that_wait(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=800) as publisher:
        publisher.advance()
        training.move(np.arange(ROWS), 1.0)
        waiting = one(publisher.advance()).waiting_rows

    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        report = one(publisher.advance())

    assert (report.kind, report.rows, report.waiting_rows) == ("delta", waiting, 0)
    assert np.array_equal(published(target), training.stored())


@pytest.mark.parametrize("kind", [FaultKind.FAIL_AFTER, FaultKind.LOST_REPLY])
def test_after_a_failed_call_the_next_one_goes_on(kind: FaultKind, training: Training) -> None:
    inner = IsolatedMemoryFileSystem()
    faulty = FaultyFileSystem(inner)
    target = Store.create_on(storage_from_filesystem(faulty, "/root"), threads=1)
    with PriorityPublisher(training.store, target, bytes_per_update=1_500) as publisher:
        publisher.advance()
        before = faulty.count()
        training.move(np.arange(ROWS), 1.0)
        publisher.advance()
        calls = faulty.count() - before
        failures = 0
        for at in range(calls):
            training.move(np.arange(at, ROWS, 2), 0.5)
            faulty.arm(Fault(kind, faulty.count() + at, calls=30))
            try:
                publisher.advance()
            except CnrStoreError:
                failures += 1
            faulty.arm(None)
            publisher.advance()
        while publisher.waiting_rows:
            publisher.advance()

    assert failures > 0
    with Store.open_on(storage_from_filesystem(inner, "/root")) as seen:
        assert np.array_equal(published(seen), training.stored())


def test_a_row_that_changes_back_waits_no_longer(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=300) as publisher:
        publisher.advance()
        training.move(np.arange(ROWS), 1.0)
        waiting = one(publisher.advance()).waiting_rows
        training.move(np.arange(ROWS), -1.0)

        report = one(publisher.advance())

        assert 0 < report.waiting_rows < ROWS - waiting


def test_a_table_with_another_scale_is_written_whole(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=300) as publisher:
        publisher.advance()
        training.move(np.arange(ROWS), 1.0)
        publisher.advance()
        with training.store.writer() as writer, writer.begin(9, "baseline") as txn:
            txn.write_table("t", training.values, options=TableOptions(scale=0.003))
            txn.write_table("new", training.values)

        report = one(publisher.advance())

        assert (report.kind, report.waiting_rows) == ("baseline", 0)
        assert np.array_equal(published(target), training.stored())
        assert target.snapshot().tables.keys() == {"t", "new"}


def test_rows_that_are_not_finite_and_deleted_ones_are_published(target: Store, request: pytest.FixtureRequest) -> None:
    training = Training(f"memory://{request.node.name}-training", TableOptions(scale=0.01, nonfinite="escape", fill=2))
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        publisher.advance()
        training.values[3, 0] = np.nan
        training.move([3], 0.0)
        publisher.advance()
        with training.store.writer() as writer:
            writer.restore()
            with writer.begin(20) as txn:
                txn.delete_rows("t", np.array([5]))
        publisher.advance()

        assert np.array_equal(published(target), training.stored(), equal_nan=True)
        assert published(target)[5].tolist() == [2] * DIM
        assert np.isnan(published(target)[3, 0])


def test_versions_are_published_as_they_come(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        reports = publisher.follow(poll_interval_s=0.01)
        assert next(reports).kind == "baseline"
        training.move([1, 2], 1.0)
        assert next(reports).rows == 2
        reports.close()  # type: ignore[attr-defined]  # a generator

    assert np.array_equal(published(target), training.stored())


def test_rows_that_wait_go_out_while_the_training_is_quiet(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_500) as publisher:
        reports = publisher.follow(poll_interval_s=0.01, quiet_s=0.01)
        assert next(reports).kind == "baseline"
        training.move(np.arange(ROWS), 1.0)
        first = next(reports)
        assert first.waiting_rows > 0
        while publisher.waiting_rows:
            next(reports)  # without a new version
        reports.close()  # type: ignore[attr-defined]  # a generator

    assert np.array_equal(published(target), training.stored())


def test_a_publisher_that_was_away_for_too_long_compares_both_stores(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        publisher.advance()
        for number in range(40):
            training.move([number], 1.0)
        for _ in range(2):
            maintain(training.store, retention=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True)

        assert one(publisher.advance()).rows == 40

    assert np.array_equal(published(target), training.stored())


def test_a_publisher_goes_on_after_a_rollback_of_its_target(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        first = one(publisher.advance()).version
        training.move([3], 1.0)
        publisher.advance()
        target.rollback(first)
        training.move([4], 1.0)
        with pytest.raises(Conflict):
            publisher.advance()

        assert one(publisher.advance()).rows == 2

    assert np.array_equal(published(target), training.stored())


def test_a_second_publisher_ends_the_first_for_good(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as earlier:
        earlier.advance()
        with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as later:
            training.move([3], 1.0)
            for _ in range(3):
                with pytest.raises(Fenced):
                    earlier.advance()
            assert one(later.advance()).rows == 1


def test_a_store_with_rows_of_its_own_is_no_target(training: Training, target: Store) -> None:
    with PriorityPublisher(training.store, target, bytes_per_update=1_000_000) as publisher:
        publisher.advance()
    version = training.store.latest_version()

    with pytest.raises(StoreExists, match="source first"):
        PriorityPublisher(target, training.store, bytes_per_update=1_000)
    other = Training("memory://another-training-than-that-of-the-target")
    with pytest.raises(StoreExists):
        PriorityPublisher(other.store, target, bytes_per_update=1_000)

    assert training.store.latest_version() == version
    training.move([3], 1.0)  # its writer was not fenced


def test_tables_without_differences_are_refused_by_name(training: Training, target: Store) -> None:
    with training.store.writer() as writer:
        writer.restore()
        with writer.begin(9) as txn:
            txn.create_table("keyed", dim=2, options=TableOptions(scale=0.1))
            txn.write_rows("keyed", np.array([5, 1 << 40]), np.ones((2, 2), np.float32))
    with (
        PriorityPublisher(training.store, target, bytes_per_update=1_000) as publisher,
        pytest.raises(Unsupported) as refused,
    ):
        publisher.advance()
    assert refused.value.table == "keyed"
    with PriorityPublisher(training.store, target, bytes_per_update=1_000, tables=["t"]) as publisher:
        assert one(publisher.advance()).rows == ROWS


def test_a_store_is_not_published_into_itself(training: Training) -> None:
    with pytest.raises(BadInput):
        PriorityPublisher(training.store, training.store, bytes_per_update=1_000)


def waiting_rows(change: list[float], since: list[int]) -> WaitingRows:
    count = len(change)
    return WaitingRows(
        np.arange(count), np.zeros((count, 1), np.float32), np.asarray(change, np.float64), np.asarray(since, np.int64)
    )


def test_the_choice_ranks_rows_of_all_tables_by_their_change() -> None:
    waiting = {
        "a": waiting_rows([9, 1, 8, 1], [5, 5, 5, 5]),
        "b": waiting_rows([7, 2, 2], [5, 5, 1]),
        "none": waiting_rows([], []),
    }

    chosen = choose_rows(waiting, {"a": 10.0, "b": 10.0, "none": 10.0}, 40.0)

    # The oldest one first, because there is always one; then by change.
    assert {table: rows.tolist() for table, rows in chosen.items()} == {
        "a": [True, False, True, False], "b": [True, False, True], "none": []
    }  # fmt: skip


def test_one_row_goes_out_however_small_the_limit_is() -> None:
    chosen = choose_rows({"a": waiting_rows([1, 2], [3, 2])}, {"a": 100.0}, 1.0)

    assert chosen["a"].tolist() == [False, True]


def test_newer_values_replace_waiting_ones_and_keep_their_age() -> None:
    held = waiting_rows([1, 2, 3], [0, 0, 0])
    newer = WaitingRows(np.array([1, 2, 5]), np.ones((3, 1), np.float32), np.array([4.0, 0, 6]), np.full(3, 9))

    merged = held.with_newer(newer)

    assert merged.row_ids.tolist() == [0, 1, 5]
    assert merged.change.tolist() == [1, 4, 6]
    assert merged.since.tolist() == [0, 0, 9]
    assert merged.values[:, 0].tolist() == [0, 1, 1]
