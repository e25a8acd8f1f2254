"""Rows of many tables that one call copies: the same as table by table, which has what it is not sure of."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from cnr_store.errors import BadRowIds, TableNotFound
from cnr_store.runtime.key_index import KeyIndex
from cnr_store.serving.rows.joined_lookups import LEAST_TABLES, JoinedLookups
from cnr_store.serving.rows.lookups import Lookups, lookup_in
from cnr_store.serving.rows.views import Publisher
from cnr_store.types import FloatBits, Raw, RowRange
from tests.support.served_rows import held_table, overlay_of, schema_of

MODEL = {row: 3 * row - 20 for row in range(40) if row % 5}
CHANGES = {1: 100, 3: None, 0: -7, 39: 4}
PLAIN = ("alike 1", "alike 2", "few bytes", "halves", "int8", "wide", "a range")
TABLES: dict[str, dict[str, Any]] = {
    "alike 1": {},
    "by key": {"keys": "hashed"},
    "alike 2": {},
    "codes": {"served": "float16"},
    "few bytes": {"dim": 1, "dtype": "bfloat16", "encoding": FloatBits(mantissa_bits=7)},
    "halves": {"dtype": "float16", "encoding": FloatBits(mantissa_bits=10)},
    "int8": {"encoding": Raw(), "served": "int8"},
    "wide": {"dim": 16},
    "a range": {"shard": RowRange(7, 31)},
}


def published(*, changed: bool) -> Publisher:
    publisher = Publisher(min_view_s=0.0)
    tables = {}
    for name, how in TABLES.items():
        how = dict(how)
        served, shard = how.pop("served", None), how.pop("shard", None)
        model = {row: number for row, number in MODEL.items() if shard is None or shard.start <= row < shard.stop}
        tables[name] = held_table(model, schema_of(**how), name=name, served=served, shard=shard)
    publisher.publish(1, 10, tables)
    if changed:
        changes = {
            name: overlay_of({8: 100, 9: None} if name == "a range" else CHANGES, held)
            for name, held in tables.items()
            if name != "alike 2"
        }
        publisher.publish(2, 20, changes)
    return publisher


def ids_of(**others: Any) -> dict[str, Any]:
    ids: dict[str, Any] = {name: np.array([39, 1, 0, 3, 4, 1]) for name in TABLES}
    return {
        **ids,
        "alike 2": np.empty(0, np.int64),
        "few bytes": [5, 39, 0],
        "a range": np.array([30, 8, 7, 9, 7])[::-1],
        **others,
    }


@pytest.mark.parametrize("changed", [False, True], ids=["merged", "with an overlay"])
def test_rows_of_many_tables_are_those_of_each(changed: bool) -> None:
    publisher = published(changed=changed)
    ids = ids_of()
    view = publisher.newest_view()[0]
    expected = lookup_in(view, ids)

    together = JoinedLookups(view, [*ids]).read(ids)
    found = Lookups(publisher).lookup(ids)

    assert {*together} == {*PLAIN}
    assert [*found.rows] == [*ids] == [*found.missing]
    for name in ids:
        assert found.rows[name].dtype == expected.rows[name].dtype
        np.testing.assert_array_equal(found.rows[name], expected.rows[name])
        np.testing.assert_array_equal(found.missing[name], expected.missing[name])
        if name in together:
            np.testing.assert_array_equal(together[name], expected.rows[name])


def test_an_overlay_that_is_rewritten_meanwhile_is_not_read_beyond_its_end() -> None:
    """A reader that was stalled looks rows up in memory that has another overlay by now; then it looks again."""
    view = published(changed=True).newest_view()[0]
    ids, joined = ids_of(), JoinedLookups(view, list(TABLES))
    for table in view.tables.values():
        if table.overlay is not None:
            table.overlay.index.slots[:, 1] += 1 << 40  # positions of a far larger overlay

    expected = lookup_in(view, ids)

    for name, rows in joined.read(ids).items():
        np.testing.assert_array_equal(rows, expected.rows[name])


def test_an_index_that_is_rewritten_meanwhile_ends_a_search() -> None:
    index = KeyIndex.allocate(4)
    index.slots[...] = 7  # every slot is taken: there is none at which a search for another key ends

    assert index.find(np.array([5, 7])).tolist() == [-1, 5]


@pytest.mark.parametrize(
    "given",
    [np.array([1, 2], np.int32), np.array([1, 2], ">i8"), np.array([], np.float64), np.array([5, 1], np.uint64)],
)
def test_ids_of_another_kind_are_read_table_by_table(given: Any) -> None:
    publisher = published(changed=True)
    ids = ids_of(wide=given)
    view = publisher.newest_view()[0]

    found = Lookups(publisher).lookup(ids)

    assert JoinedLookups(view, [*ids]).read(ids) == {}
    for name, rows in lookup_in(view, ids).rows.items():
        np.testing.assert_array_equal(found.rows[name], rows)


@pytest.mark.parametrize(
    ("table", "given"),
    [
        ("wide", np.array([0, 40])),
        ("wide", np.array([-1])),
        ("a range", np.array([6])),
        ("alike 1", np.ones((2, 2), np.int64)),
        ("halves", np.array([True])),
    ],
)
def test_ids_that_are_wrong_are_refused_as_by_one_table(table: str, given: Any) -> None:
    publisher = published(changed=True)
    with pytest.raises(BadRowIds) as expected:
        lookup_in(publisher.newest_view()[0], {table: given})

    with pytest.raises(BadRowIds) as found:
        Lookups(publisher).lookup(ids_of(**{table: given}))

    assert str(found.value) == str(expected.value)


def test_a_table_that_is_not_served_is_refused_among_many() -> None:
    with pytest.raises(TableNotFound, match="'other'"):
        Lookups(published(changed=False)).lookup(ids_of(other=np.array([1])))


def test_later_lookups_read_the_newest_view_and_their_own_tables() -> None:
    publisher = published(changed=False)
    lookups, ids = Lookups(publisher), ids_of()
    lookups.lookup(ids)
    held = publisher.newest_view()[0].tables["wide"].base
    publisher.publish(2, 20, {"wide": overlay_of({4: 1000}, held)})
    fewer = dict([*ids.items()][::-1][:LEAST_TABLES])

    for wanted in (ids, fewer, ids):
        found = lookups.lookup(wanted)

        assert [*found.rows] == [*wanted]
        for name, rows in lookup_in(publisher.newest_view()[0], wanted).rows.items():
            np.testing.assert_array_equal(found.rows[name], rows)


def test_a_lookup_of_many_tables_keeps_no_view_in_memory() -> None:
    publisher = published(changed=True)
    lookups = Lookups(publisher)
    lookups.lookup(ids_of())
    before = weakref.ref(publisher.newest_view()[0])

    publisher.merge()

    assert before() is None
    assert lookups.lookup(ids_of()).version == 2
