"""What one field says of another: writers say nothing that readers refuse, and sweeps find every overlap."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import BadInput, CorruptStore, Store, TableOptions, verify_store
from cnr_store.errors import BadShape
from cnr_store.format.documents import pack
from cnr_store.format.limits import MAX_DIM
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.manifest_checks import Fitting, is_plain, manifest_problems, part_problems
from cnr_store.format.records import ArrayEntry, ListLine, Manifest, PartEntry, RowListEntry, TableSchema
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.segment.writer import write_manifest
from cnr_store.types import Lattice, Raw
from format_spec.reader.compare import compare
from tests.support.documents import segment_document

FIELDS: dict[str, Any] = {
    "negative epoch": {"epoch": 5, "step": -1},
    "name with a line feed": {"tags": {"a\nb": 1}},
    "version that is not there": {"tags": {"a": 9}},
    "floor behind the record": {"floor": 9},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    return store


@pytest.mark.parametrize("case", sorted(FIELDS))
def test_a_record_that_no_reader_takes_is_not_sent(store: Store, case: str) -> None:
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), **FIELDS[case])

    with pytest.raises(BadInput, match="readers would refuse it"):
        store.internals.log.append(head, draft, rebase_expire)

    assert store.head().digest == head.digest


def test_a_manifest_that_no_reader_takes_is_not_put(store: Store) -> None:
    reader = store.snapshot().readers[-1]
    manifest = msgspec.structs.replace(reader.manifest, parts=())

    with pytest.raises(BadInput, match="do not make it up"):
        write_manifest(store.storage, reader.name, manifest)

    assert store.snapshot().readers[-1].manifest == reader.manifest


def test_a_manifest_with_a_number_that_is_not_finite_is_not_put(store: Store) -> None:
    reader = store.snapshot().readers[-1]
    [(table, schema)] = reader.manifest.tables.items()
    tables = {table: msgspec.structs.replace(schema, fill=float("nan"))}

    with pytest.raises(BadInput, match=r"`float`, got `null`.*fill"):
        write_manifest(store.storage, reader.name, msgspec.structs.replace(reader.manifest, tables=tables, parts=()))


def test_a_manifest_of_a_newer_format_may_have_other_fields() -> None:
    with pytest.raises(Exception, match="manifest format 2") as caught:
        decode_manifest(pack({"format": 2, "parts": "elsewhere"}), "here")

    assert getattr(caught.value, "kind", "") == "newer_format"


def test_tensors_without_elements_lie_in_an_array_that_is_there(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store.create(str(root), fsync=False, threads=1) as store:
        with store.writer() as writer:
            for step in (1, 2):
                with writer.begin(step=step) as txn:
                    txn.put_dense({"none": np.empty((0, 3), np.float64), "one": np.full(1, step, np.int32)})
        snapshot = store.snapshot()

        assert snapshot.read_dense("none").shape == (0, 3)
        assert snapshot.manifests[0].dense["none"].path in {one.path for one in snapshot.manifests[0].dense_arrays}
        assert verify_store(store, deep=True).is_sound
    assert compare(root) > 0


def test_more_columns_than_readers_take_are_refused_when_given(store: Store) -> None:
    with store.writer() as writer, pytest.raises(BadShape, match="1 to 1048576"), writer.begin(2, "baseline") as txn:
        txn.write_table("wide", np.zeros((1, MAX_DIM + 1), np.float32), options=TableOptions(scale=1.0))


def rectangles(rows: int, columns: int) -> st.SearchStrategy[list[tuple[tuple[int, int], tuple[int, int]]]]:
    span = lambda size: st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple)  # noqa: E731
    return st.lists(st.tuples(span(rows), span(columns).filter(lambda one: one[0] < one[1])), max_size=8)


@given(rectangles(6, 5))
def test_the_sweep_finds_an_overlap_where_two_parts_share_an_element(found: Any) -> None:
    parts = tuple(PartEntry(table="t", rows=rows, columns=cols) for rows, cols in found)
    schema = TableSchema(num_rows=6, dim=5, dtype="float32", encoding=Raw())
    manifest = Manifest(
        format=1, txn="0" * 32, base=0, kind="baseline", l0=0, l1=1, step=0, tables={"t": schema},
        parts=parts, objects=(),
    )  # fmt: skip

    problems = list(manifest_problems(manifest))

    shared = any(meets(a.rows, b.rows) and meets(a.columns, b.columns) for a, b in combinations(parts, 2))
    covered = sum((p.rows[1] - p.rows[0]) * (p.columns[1] - p.columns[0]) for p in parts)
    assert any("overlap" in problem for problem in problems) == shared
    assert any("do not make it up" in problem for problem in problems) == (covered != 30)


def meets(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def test_a_table_name_of_more_bytes_than_characters_is_refused(store: Store) -> None:
    manifest = segment_document(store)
    tables = {**manifest["tables"], "ü" * 513: TableSchema(num_rows=0, dim=1, dtype="float32", encoding=Raw())}

    with pytest.raises(CorruptStore, match="1024 bytes"):
        decode_manifest(pack({**manifest, "tables": tables}), "here")


SPAN = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted).map(tuple)
OPERATION = st.sampled_from(["add", "add", "set", "set", "delete", "escape"])
LISTS = st.builds(
    ListLine, group=st.just("a.add-0"), count=st.integers(1, 4),
    first=st.lists(st.integers(-1, 4), max_size=2).map(tuple), last=st.lists(st.integers(0, 5), max_size=2).map(tuple),
)  # fmt: skip


@given(
    rows=st.just((0, 4)) | SPAN, columns=st.just((0, 2)) | SPAN, lists=st.dictionaries(OPERATION, LISTS, max_size=2),
    chunk_rows=st.integers(3, 7), keys=st.sampled_from(["dense", "dense", "hashed"]),
)  # fmt: skip
def test_parts_are_told_to_be_plain_if_they_are_whole_and_have_no_problem(
    rows: Any, columns: Any, lists: dict[Any, ListLine], chunk_rows: int, keys: Any
) -> None:
    group = {
        name: ArrayEntry(
            path=f"a.add-0.{name}", dtype="int64", codec="digits", shape=shape, chunk_rows=chunk_rows, start=0, count=9
        )
        for name, shape in (("rows", (9,)), ("codes", (9, 2)))
    }
    schema = TableSchema(num_rows=4, dim=2, dtype="float32", keys=keys, encoding=Lattice(scale=1.0))
    entries = {
        operation: RowListEntry(count=one.count, first=one.first, last=one.last, group=group, start=3)
        for operation, one in lists.items()
    }
    part = PartEntry(table="t", rows=rows, columns=columns, **entries)
    fitting: Fitting = {(id(group), 0, operation, 2) for operation in lists}

    problems = list(part_problems(part, schema, 0, fitting))

    is_whole = (rows, columns, keys) == ((0, 4), (0, 2), "dense")
    is_one_chunk = [(operation, entry.chunks) for operation, entry in entries.items()] in ([("add", 1)], [("set", 1)])
    assert is_plain(part, schema, 0, fitting) == (is_whole and is_one_chunk and not problems)
