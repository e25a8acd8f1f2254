"""Which rows wait: by their change, within an error, for so many saves; and what one transaction makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import (
    BadInput,
    CompactionPolicy,
    Shard,
    Store,
    TableOptions,
    Threshold,
    Transaction,
    Writer,
    compact,
    verify_store,
)
from cnr_store.encodings import reference, row_kernels, widths
from cnr_store.errors import BadRowIds
from cnr_store.format.records import WaitingEntry
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import TableDtype
from cnr_store.write.deferred_rows import SAMPLE_CHANGES, Hold, Waiting, quantile
from tests.support.faulty import IsolatedMemoryFileSystem

T = Shard("t")
ROWS, DIM = 40, 4


# ---- what each row changed


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 33), (64, 16)])
def test_energies_equal_reference(shape: tuple[int, int], dtype: type) -> None:
    limit = min(np.iinfo(dtype).max, 1 << 22)
    differences = np.random.default_rng(3).integers(-limit, limit, shape, endpoint=True).astype(dtype)
    energies, largest = np.empty(shape[0], np.int64), np.empty(shape[0], np.int32)

    row_kernels.row_energies(differences, energies, largest)

    expected = reference.row_energies(differences)
    np.testing.assert_array_equal(energies, expected[0])
    np.testing.assert_array_equal(largest, expected[1])


def test_the_largest_differences_do_not_overflow() -> None:
    differences = np.full((1, 512), -(1 << 22), np.int32)
    differences[0, 0] = 1 << 22
    energies, largest = np.empty(1, np.int64), np.empty(1, np.int32)

    row_kernels.row_energies(differences, energies, largest)

    assert (energies[0], largest[0]) == (512 << 44, 1 << 22)


# ---- which rows wait


@settings(deadline=None)
@given(
    energies=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    keep=st.floats(0, 1, exclude_min=True),
)
def test_the_quantile_lets_the_share_out_and_no_row_less_than_that(energies: list[int], keep: float) -> None:
    array = np.asarray(energies, np.int64)

    tau = quantile(array, keep)

    assert (array >= tau).sum() >= keep * len(array)
    assert (array > tau).sum() < max(1, keep * len(array))


def test_the_quantile_of_many_rows_is_that_of_a_sample() -> None:
    energies = np.random.default_rng(0).permutation(8 * SAMPLE_CHANGES).astype(np.int64)

    tau = quantile(energies, 0.25)

    assert tau == quantile(energies, 0.25)
    assert (energies >= tau).mean() == pytest.approx(0.25, abs=0.005)


def decide(threshold: Threshold, before: Waiting, energies: Any, *, largest: Any = None, changed: Any = None) -> Any:
    energies = np.asarray(energies, np.int64)
    rows = np.arange(len(energies), dtype=np.int64)
    largest = np.ones(len(energies), np.int32) if largest is None else np.asarray(largest, np.int32)
    changed = np.ones(len(energies), np.bool_) if changed is None else np.asarray(changed, np.bool_)
    return Hold(threshold, before, 0.5).decide(rows, changed, energies, largest)


NEVER = Waiting.none((1, 0))


def test_a_threshold_is_used_until_it_is_old() -> None:
    threshold = Threshold(keep=0.5, refresh_every=2, max_wait=100)

    first = decide(threshold, NEVER, [1, 2, 3, 4])
    second = decide(threshold, first.after, [5, 6, 7, 8])
    third = decide(threshold, second.after, [5, 6, 7, 8])

    assert [held.waits.tolist() for held in (first, second, third)] == [
        [True, True, False, False], [False] * 4, [True, True, False, False],
    ]  # fmt: skip
    assert [(held.after.tau, held.after.saves) for held in (first, second, third)] == [(3, 1), (3, 2), (7, 1)]


def test_a_save_without_a_change_chooses_no_threshold() -> None:
    held = decide(Threshold(keep=0.5), NEVER, [0, 0], changed=[False, False])

    assert held.after.tau is None
    assert not held.waits.any()


def test_unchanged_rows_neither_wait_nor_count_in_the_quantile() -> None:
    held = decide(Threshold(keep=0.5), NEVER, [0, 0, 0, 0, 4, 5], changed=[False] * 4 + [True] * 2)

    assert held.after.tau == 5
    assert held.after.rows.tolist() == [4]


@pytest.mark.parametrize(
    ("max_error", "waiting"),
    [(None, [0, 1, 2]), (0.2, []), (0.25, [0]), (0.75, [0, 1]), (0.7499, [0]), (2.25, [0, 1, 2]), (1e30, [0, 1, 2, 3])],
)
def test_a_row_waits_only_within_the_error(max_error: float | None, waiting: list[int]) -> None:
    """Steps of 0.5: a difference of d codes is an error of at most (d + 1/2) / 2."""
    threshold = Threshold(keep=0.01, max_error=max_error)

    held = decide(threshold, NEVER, [0, 1, 16, 25, 10_000], largest=[0, 1, 4, 5, 100])

    assert held.after.rows.tolist() == waiting
    assert held.max_error == ([0.25, 0.75, 2.25, 2.75][len(waiting) - 1] if waiting else 0.0)


def test_a_row_that_has_waited_long_enough_goes_out_and_waits_anew() -> None:
    threshold, before, waited = Threshold(keep=0.5, max_wait=2), NEVER, []
    for _ in range(6):
        held = decide(threshold, before, [1, 9])
        before = held.after
        waited.append(held.oldest)

    assert waited == [1, 2, 0, 1, 2, 0]


def test_waits_are_counted_by_row_and_forgotten_where_nothing_is_given() -> None:
    before = Waiting((1, 0), 5, 1, np.asarray([3, 7, 9], np.int64), np.asarray([1, 2, 3], np.int32))

    assert before.waited_of(np.asarray([0, 3, 9, 11], np.int64)).tolist() == [0, 1, 3, 0]
    assert before.cleared().waited_of(np.asarray([3, 7], np.int64)).tolist() == [0, 0]
    assert before.cleared().tau == 5


# ---- what a transaction makes of it


class Run:
    """A table, its live rows, and the rows that are to be saved."""

    def __init__(self, options: TableOptions, *, rows: int = ROWS) -> None:
        self.store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
        self.writer: Writer = self.store.writer()
        self.rng = np.random.default_rng(0)
        self.live = self.rng.normal(size=(rows, DIM)).astype(np.float32)
        self.slot = np.ones(rows, np.float32)
        self.step = 0
        with self.writer.begin(0, "full") as txn:
            txn.write_table("t", self.live, slots={"m": self.slot}, options=options)

    def train(self, rows: Any, change: float) -> npt.NDArray[np.int64]:
        rows = np.asarray(rows, np.int64)
        self.live[rows] += np.float32(change)
        self.slot[rows] *= np.float32(1.5)
        return rows

    def begin(self, **how: Any) -> Transaction:
        self.step += 1
        return self.writer.begin(self.step, **how)

    def write(self, txn: Transaction, rows: npt.NDArray[np.int64], **how: Any) -> int:
        return txn.write_rows("t", rows, self.live[rows], slots={"m": self.slot[rows]}, **how)

    def save(self, rows: npt.NDArray[np.int64], **how: Any) -> npt.NDArray[np.int64]:
        with self.begin(**how) as txn:
            self.write(txn, rows)
        return txn.waiting.get(T, np.empty(0, np.int64))


LATTICE = TableOptions(scale=0.25, threshold=Threshold(keep=0.5))


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(LATTICE)
    yield made
    made.writer.close()
    made.store.close()


def two_changes(run: Run) -> npt.NDArray[np.int64]:
    return np.sort(np.concatenate([run.train([1, 2, 3], 0.25), run.train([4, 5, 6], 5.0)]))


def test_small_changes_wait_with_their_slots_and_are_marked(run: Run) -> None:
    before = run.store.snapshot().table("t")
    old, old_slots = before.read(), before.read(slot="m")

    waiting = run.save(two_changes(run))

    assert waiting.tolist() == [1, 2, 3]
    snapshot = run.store.snapshot()
    found, slots = snapshot.table("t").read(), snapshot.table("t").read(slot="m")
    np.testing.assert_array_equal(found[[1, 2, 3]], old[[1, 2, 3]])
    np.testing.assert_array_equal(slots[[1, 2, 3]], old_slots[[1, 2, 3]])
    assert np.abs(found[[4, 5, 6]] - run.live[[4, 5, 6]]).max() <= 0.125
    marked = WaitingEntry(count=3, max_error=0.375, oldest=1)
    assert snapshot.waiting == {"t": marked}
    assert [part.waiting for part in snapshot.manifests[-1].parts] == [marked]
    assert verify_store(run.store, deep=True).is_sound


def test_records_behind_it_go_on_naming_what_waits(run: Run) -> None:
    run.save(two_changes(run))
    waiting = run.store.snapshot().waiting

    run.store.tag("good", run.store.head().record.v)
    compact(run.store, policy=CompactionPolicy(max_chain=1), force=True)

    assert waiting["t"].count == 3
    assert len(run.store.head().record.chain) == 1
    assert run.store.snapshot().waiting == waiting
    assert verify_store(run.store, deep=True).is_sound


def test_a_flush_writes_what_waits(run: Run) -> None:
    waiting = run.save(two_changes(run))

    assert run.save(waiting, flush=True).tolist() == []

    assert run.store.snapshot().waiting == {}
    assert np.abs(run.store.snapshot().table("t").read() - run.live).max() <= 0.125


def test_an_aborted_save_moves_nothing(run: Run) -> None:
    rows = two_changes(run)
    with run.begin() as txn:
        run.write(txn, rows)
        txn.abort()

    for _ in range(4):  # as many saves as a row may wait: the lost one does not count
        assert run.save(rows).tolist() == [1, 2, 3]
        rows = np.asarray([1, 2, 3], np.int64)
    assert run.save(rows).tolist() == []


def test_a_restore_forgets_what_waited_and_its_threshold(run: Run) -> None:
    run.save(two_changes(run))
    assert run.writer.mirrors.waiting(T, (1, 0)).rows.tolist() == [1, 2, 3]

    run.writer.restore()

    assert run.writer.mirrors.waiting(T, (1, 0)).tau is None
    assert run.writer.mirrors.waiting(T, (1, 0)).rows.tolist() == []


def test_nothing_waits_in_a_full_in_a_one_shot_delta_or_behind_a_finer_scale(run: Run) -> None:
    assert run.save(two_changes(run), kind="full").tolist() == []
    assert run.save(two_changes(run), base="baseline").tolist() == []
    run.writer.restore()
    rows = two_changes(run)
    with run.begin() as txn:
        txn.refine_scale("t")
        assert run.write(txn, rows, threshold=LATTICE.threshold) == 6
    assert txn.waiting == {}
    with run.begin() as txn:
        run.write(txn, two_changes(run), threshold=LATTICE.threshold)
    assert len(txn.waiting[T])


def test_set_escape_and_deleted_rows_do_not_wait() -> None:
    run = Run(TableOptions(scale=0.25, threshold=Threshold(keep=0.5), nonfinite="escape"))
    with run.begin() as txn:
        txn.delete_rows("t", np.asarray([1], np.int64))
    rows = two_changes(run)
    run.live[2] = np.nan

    waiting = run.save(rows)

    assert waiting.tolist() == [3]
    found = run.store.snapshot().table("t").read()
    assert np.abs(found[1] - run.live[1]).max() <= 0.125
    assert np.isnan(found[2]).all()
    assert verify_store(run.store, deep=True).is_sound


@pytest.mark.parametrize(
    ("dtype", "rounding", "scale", "middle"),
    [
        ("float32", 2.0**-23, 0.1, 1.8e5),
        ("float16", 2.0**-11, 0.21 * 2.0**-10, 1.2),
        ("bfloat16", 2.0**-8, 0.21 * 2.0**-7, 1.2),
    ],
)
def test_the_bound_holds_but_for_the_rounding_of_floats(
    dtype: TableDtype, rounding: float, scale: float, middle: float
) -> None:
    """Found by review: in codes of 20 bits and in 16-bit tables elements were further off than was stated."""
    rng = np.random.default_rng(0)
    store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
    before = (middle * rng.uniform(0.9, 1.1, (1000, DIM))).astype(np.float32)
    live = widths.from_float32((before + scale * rng.uniform(-4.7, 4.7, before.shape)).astype(np.float32), dtype)
    rows = np.arange(1000)

    with store.writer() as writer:
        with writer.begin(0, "full") as txn:
            options = TableOptions(encoding="lattice", scale=scale)
            txn.write_table("t", widths.from_float32(before, dtype), options=options)
        with writer.begin(1) as txn:
            txn.write_rows("t", rows, live, threshold=Threshold(keep=0.01))

    waiting = txn.waiting[T]
    found = widths.to_float32(store.snapshot().table("t").read(), dtype).astype(np.float64)[waiting]
    wanted = widths.to_float32(live, dtype).astype(np.float64)[waiting]
    assert len(waiting) > 50
    stated = store.snapshot().waiting["t"].max_error
    assert stated < np.abs(found - wanted).max()
    assert (np.abs(found - wanted) <= stated + rounding * np.abs(wanted)).all()


@pytest.fixture
def holding() -> Iterator[Run]:
    """A table whose threshold is above every small change."""
    made = Run(LATTICE)
    made.save(two_changes(made))
    made.save(np.asarray([1, 2, 3], np.int64), flush=True)
    yield made
    made.writer.close()
    made.store.close()


def test_rows_are_given_at_once_also_where_all_of_them_wait(holding: Run) -> None:
    """Found by review: a second call was taken, and the rows of the first were neither saved nor said to wait."""
    with holding.begin() as txn:
        assert holding.write(txn, holding.train([7, 8], 0.25)) == 0
        with pytest.raises(BadInput, match="already"):
            holding.write(txn, holding.train([9, 10], 0.25))

    assert txn.waiting[T].tolist() == [7, 8]


def test_a_row_that_waits_cannot_be_deleted_in_the_same_save(holding: Run) -> None:
    """Found by review: it was deleted, and came back with the next save as a row that still waits."""
    with holding.begin() as txn:
        holding.write(txn, holding.train([7, 8], 0.25))
        with pytest.raises(BadRowIds, match="row 8"):
            txn.delete_rows("t", np.asarray([8, 9], np.int64))
        txn.delete_rows("t", np.asarray([9], np.int64))

    assert txn.waiting[T].tolist() == [7, 8]
    assert verify_store(holding.store, deep=True).is_sound


def test_rows_given_as_codes_wait_alike(run: Run) -> None:
    other = Run(LATTICE)
    rows = two_changes(run)
    two_changes(other)

    with other.begin() as txn:
        codes = np.rint(other.live[rows] / np.float32(0.25)).astype(np.int16)
        txn.write_rows("t", rows, codes, slots={"m": other.slot[rows]})

    assert txn.waiting[T].tolist() == run.save(rows).tolist()
    assert other.writer.mirrors.digest(T) == run.writer.mirrors.digest(T)


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "float_bits", "threshold": Threshold(keep=0.5)},
        {"encoding": "float_bits", "mantissa_bits": 10, "threshold": Threshold(keep=0.5)},
        {"encoding": "affine", "threshold": Threshold(keep=0.5)},
        {"encoding": "raw", "threshold": Threshold(keep=0.5)},
        {"scale": 0.5, "threshold": 0.4},  # what a hurried caller writes
    ],
)
def test_tables_whose_rows_cannot_wait_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="threshold"):
        TableOptions(**options)


@pytest.mark.parametrize(
    "numbers",
    [
        {"keep": "most"}, {"keep": 0.0}, {"keep": 1.5}, {"keep": 0.5, "refresh_every": 0}, {"keep": 0.5, "max_wait": 0},
        {"keep": 0.5, "max_error": 0.0}, {"keep": 0.5, "max_error": float("nan")},
    ],
)  # fmt: skip
def test_numbers_that_are_none_of_a_threshold_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=list(numbers)[-1]):
        Threshold(**numbers)


def test_without_a_mirror_or_with_hashed_keys_a_threshold_is_refused(run: Run) -> None:
    run.writer.close()
    rows = two_changes(run)
    with run.store.writer(mirror="none") as writer:
        writer.restore()
        with writer.begin(9) as txn:
            with pytest.raises(BadInput, match="mirror"):
                run.write(txn, rows, threshold=LATTICE.threshold)
            with pytest.raises(BadInput, match="hashed"):
                txn.create_table("h", dim=2, options=LATTICE)
            txn.abort()
