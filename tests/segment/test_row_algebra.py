from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadRowIds, BadShape, CorruptStore
from cnr_store.types import RowRange
from tests.support import row_algebra as algebra
from tests.support.row_algebra import RowArrays, RowContent, RowOps, RowState

LAWS = settings(max_examples=60)
MODES: dict[str, algebra.AddMode] = {"codes": "checked", "momentum1": "wrapping", "exp_avg": "replace"}
INT32 = np.iinfo(np.int32)
NUM_ROWS = 8

integers = st.integers(-1000, 1000)
any_int32 = st.integers(INT32.min, INT32.max)


def content(draw: st.DrawFn, n: int, *, escaped: bool = False) -> dict[str, np.ndarray]:
    """Arrays of n rows: two columns of codes (or floats), a wrapping slot, a slot that is absolute even in add rows."""
    codes = draw(st.lists(integers, min_size=2 * n, max_size=2 * n))
    primary = np.array(codes, np.float32 if escaped else np.int32).reshape(n, 2)
    slot = np.array(draw(st.lists(any_int32, min_size=n, max_size=n)), np.int32)
    absolute = np.array(draw(st.lists(integers, min_size=n, max_size=n)), np.int32)
    return {"values" if escaped else "codes": primary, "momentum1": slot, "exp_avg": absolute}


@st.composite
def parts(draw: st.DrawFn) -> RowOps:
    kinds = draw(
        st.lists(
            st.sampled_from(["none", "none", "add", "set", "delete", "escape"]), min_size=NUM_ROWS, max_size=NUM_ROWS
        )
    )
    rows = {kind: np.array([r for r, k in enumerate(kinds) if k == kind], np.int64) for kind in set(kinds)}
    empty = np.empty(0, np.int64)

    def arrays(kind: str) -> RowArrays:
        ids = rows.get(kind, empty)
        return RowArrays(ids, content(draw, len(ids), escaped=kind == "escape"))

    return RowOps(arrays("add"), arrays("set"), rows.get("delete", empty), arrays("escape"))


@st.composite
def states(draw: st.DrawFn) -> RowState:
    kinds = draw(
        st.lists(
            st.sampled_from(["absent", "coded", "coded", "coded", "escaped"]), min_size=NUM_ROWS, max_size=NUM_ROWS
        )
    )
    state: RowState = {}
    for row, kind in enumerate(kinds):
        if kind != "absent":
            arrays = content(draw, 1, escaped=kind == "escaped")
            state[row] = RowContent(kind == "escaped", {name: array[0] for name, array in arrays.items()})
    return state


def applied(state: RowState, *chain: RowOps) -> RowState | None:
    """Return the state after the chain, or None where it is not defined."""
    try:
        for ops in chain:
            state = algebra.apply(state, ops, MODES)
    except CorruptStore:
        return None
    return state


def plain_state(state: RowState) -> dict[int, Any]:
    return {r: (c.escaped, {name: np.asarray(a).tolist() for name, a in c.arrays.items()}) for r, c in state.items()}


def plain(ops: RowOps) -> dict[str, Any]:
    def of(part: RowArrays) -> Any:
        return part.rows.tolist(), {name: array.tolist() for name, array in part.arrays.items()} if len(part) else {}

    return {"add": of(ops.add), "set": of(ops.set), "delete": ops.delete.tolist(), "escape": of(ops.escape)}


def codes_of(rows: list[int], codes: list[int]) -> RowArrays:
    return RowArrays(np.array(rows, np.int64), {"codes": np.array(codes, np.int32)})


@LAWS
@given(states(), parts(), parts())
def test_applying_a_composition_is_applying_one_after_the_other(state: RowState, a: RowOps, b: RowOps) -> None:
    one_by_one = applied(state, a, b)
    assume(one_by_one is not None)
    assert one_by_one is not None

    together = algebra.apply(state, algebra.compose(a, b, MODES), MODES)

    assert plain_state(together) == plain_state(one_by_one)


def without_adds_to(ops: RowOps, gone: np.ndarray) -> RowOps:
    return RowOps(ops.add.take(~np.isin(ops.add.rows, gone)), ops.set, ops.delete, ops.escape)


def gone_after(before: set[int], ops: RowOps) -> set[int]:
    lost = {*ops.delete.tolist(), *ops.escape.rows.tolist()}
    return (before - set(ops.set.rows.tolist())) | lost


@LAWS
@given(parts(), parts(), parts())
def test_composition_is_associative(a: RowOps, b: RowOps, c: RowOps) -> None:
    gone = gone_after(set(), a)
    b = without_adds_to(b, np.array(sorted(gone), np.int64))
    c = without_adds_to(c, np.array(sorted(gone_after(gone, b)), np.int64))

    left = algebra.compose(algebra.compose(a, b, MODES), c, MODES)
    right = algebra.compose(a, algebra.compose(b, c, MODES), MODES)

    assert plain(left) == plain(right)


@LAWS
@given(parts(), parts())
def test_a_composition_is_a_valid_part_and_changes_no_input(a: RowOps, b: RowOps) -> None:
    b = without_adds_to(b, np.concatenate([a.delete, a.escape.rows]))
    before = plain(a), plain(b)

    both = algebra.compose(a, b, MODES)

    algebra.check_ops(both, NUM_ROWS)
    assert (plain(a), plain(b)) == before


@LAWS
@given(parts())
def test_the_empty_part_is_neutral(a: RowOps) -> None:
    assert plain(algebra.compose(a, RowOps(), MODES)) == plain(a)
    assert plain(algebra.compose(RowOps(), a, MODES)) == plain(a)


@LAWS
@given(parts(), parts(), st.integers(0, NUM_ROWS))
def test_composing_row_windows_is_composing_the_whole(a: RowOps, b: RowOps, cut: int) -> None:
    b = without_adds_to(b, np.concatenate([a.delete, a.escape.rows]))
    whole = algebra.compose(a, b, MODES)

    for window in (RowRange(0, cut), RowRange(cut, NUM_ROWS)):
        part = algebra.compose(algebra.window(a, window), algebra.window(b, window), MODES)
        assert plain(part) == plain(algebra.window(whole, window))


@LAWS
@given(states(), parts())
def test_dropping_unchanged_add_rows_changes_no_state(state: RowState, a: RowOps) -> None:
    modes: dict[str, algebra.AddMode] = {"codes": "checked", "momentum1": "wrapping"}
    add = RowArrays(a.add.rows, {name: a.add.arrays[name] for name in modes})
    add.arrays["codes"][::2] = 0
    add.arrays["momentum1"][::2] = 0
    present = np.isin(add.rows, [row for row, held in state.items() if not held.escaped])
    add = add.take(present)

    changed, unchanged = algebra.split_unchanged(add, modes)

    assert sorted([*changed.rows.tolist(), *unchanged.tolist()]) == add.rows.tolist()
    after_all = algebra.apply(state, RowOps(add=add), modes)
    after_changed = algebra.apply(state, RowOps(add=changed), modes)
    assert plain_state(after_all) == plain_state(after_changed)


@pytest.mark.parametrize("gone", ["delete", "escape"])
def test_an_add_after_delete_or_escape_is_corrupt(gone: str) -> None:
    row = np.array([3], np.int64)
    first = (
        RowOps(delete=row)
        if gone == "delete"
        else RowOps(escape=RowArrays(row, {"values": np.zeros((1, 2), np.float32)}))
    )
    then = RowOps(add=codes_of([3], [1]))

    with pytest.raises(CorruptStore, match=r"row 3 of table 'user'"):
        algebra.compose(first, then, table="user")


def test_an_add_to_an_absent_row_is_corrupt() -> None:
    with pytest.raises(CorruptStore, match="row 5 is absent"):
        algebra.apply({}, RowOps(add=codes_of([5], [1])))


def test_each_pair_of_operations_composes_as_the_table_says() -> None:
    row = np.array([0], np.int64)
    first = {
        "add": RowOps(add=codes_of([0], [1])),
        "set": RowOps(set=codes_of([0], [1])),
        "delete": RowOps(delete=row),
        "escape": RowOps(escape=codes_of([0], [1])),
    }
    then = {
        "add": RowOps(add=codes_of([0], [10])),
        "set": RowOps(set=codes_of([0], [10])),
        "delete": RowOps(delete=row),
        "escape": RowOps(escape=codes_of([0], [10])),
    }
    found = {}
    for a, one in first.items():
        for b, two in then.items():
            if b == "add" and a in ("delete", "escape"):
                continue
            both = algebra.compose(one, two)
            kind = next(k for k in ("add", "set", "delete", "escape") if len(getattr(both, k)))
            assert len(both) == 1
            codes = None if kind == "delete" else int(getattr(both, kind).arrays["codes"][0])
            found[a, b] = kind, codes
    later_wins = {(a, b): (b, None if b == "delete" else 10) for a in first for b in ("set", "delete", "escape")}
    assert found == {**later_wins, ("add", "add"): ("add", 11), ("set", "add"): ("set", 11)}


def test_a_checked_sum_beyond_int32_is_corrupt_and_a_wrapping_one_wraps() -> None:
    first, then = RowOps(add=codes_of([1], [INT32.max])), RowOps(add=codes_of([1], [1]))

    with pytest.raises(CorruptStore, match="int32"):
        algebra.compose(first, then)

    wrapped = algebra.compose(first, then, {"codes": "wrapping"})
    assert wrapped.add.arrays["codes"].tolist() == [INT32.min]


def test_rows_with_different_arrays_do_not_compose() -> None:
    other = RowArrays(np.array([1], np.int64), {"codes": np.zeros(1, np.int32), "slot": np.zeros(1, np.int32)})
    with pytest.raises(CorruptStore, match="different arrays"):
        algebra.compose(RowOps(add=codes_of([1], [1])), RowOps(add=other))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([3, 2], "id 2 at position 1 is smaller"),
        ([1, 5, 5, 4], "id 5 at position 2 repeats"),
        ([-1, 2], "row id -1 at position 0 is outside"),
        ([2, 10, 11], "row id 10 at position 1 is outside table 'user' with 10 rows"),
    ],
)
def test_bad_row_ids_name_the_first_offender(rows: list[int], message: str) -> None:
    with pytest.raises(BadRowIds, match=message):
        algebra.check_row_ids(np.array(rows, np.int64), 10, table="user")


@pytest.mark.parametrize("rows", [np.array([1, 2], np.int32), np.zeros((2, 1), np.int64), np.array([0.0, 1.0])])
def test_row_ids_of_another_type_or_shape_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(BadRowIds, match="one-dimensional int64"):
        algebra.check_row_ids(rows, 10)


def test_hashed_keys_may_be_any_int64() -> None:
    keys = np.array([-(2**63), -1, 2**63 - 1], np.int64)
    assert algebra.check_row_ids(keys) is keys
    with pytest.raises(BadRowIds, match="is smaller"):
        algebra.check_row_ids(keys[::-1].copy())


def test_a_row_in_two_lists_is_refused() -> None:
    with pytest.raises(BadRowIds, match="row 4 stands in two"):
        algebra.check_ops(RowOps(add=codes_of([1, 4], [1, 1]), delete=np.array([4], np.int64)))


def test_an_array_with_another_number_of_rows_is_refused() -> None:
    with pytest.raises(BadShape, match="set/codes: expected 2 rows"):
        algebra.check_ops(RowOps(set=codes_of([1, 4], [1, 1, 1])))
