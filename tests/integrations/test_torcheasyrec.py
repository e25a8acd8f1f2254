"""Dumps of TorchEasyRec: files of the layout that its source states, imported and read back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cnr_store import BadInput, NotFound, Snapshot, Store, TableOptions, verify_store
from cnr_store.errors import BadRowIds, DoesNotApply
from cnr_store.integrations.torcheasyrec import import_dump, plan_dump
from tests.support.torcheasyrec_dump import Chunk, decoded, rows_of, write_dump
from tests.tools.cli_runner import cnr

Rows = Mapping[int, npt.NDArray[np.float32]]
USER, ITEM = "model.ebc.embedding_bags.user", "model.ec.embeddings.item"
EXACT = TableOptions.exact()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as made:
        yield made


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "delta_embedding_dump"


def assert_rows(snapshot: Snapshot, table: str, expected: Rows) -> None:
    keys, arrays = snapshot.table(table).read_all()
    assert keys.tolist() == sorted(expected)
    assert (arrays["values"].view(np.int32) == np.array([expected[key] for key in keys.tolist()]).view(np.int32)).all()


def trained(dump: Path, **kind: Any) -> dict[int, dict[str, dict[int, Any]]]:
    """Write three steps of two tables on two ranks; returns each step's state."""
    user = rows_of(1, [-(2**63), -5, 0, 7, 2**63 - 1], 4)
    item = rows_of(2, range(40), 6)
    low, high = ({key: row for key, row in item.items() if (key < 20) == is_low} for is_low in (True, False))
    write_dump(dump, 900, [[Chunk(USER, user), Chunk(ITEM, low)], [Chunk(ITEM, high)]], **kind)
    changed = rows_of(3, [0, 7, 11], 4)
    write_dump(dump, 1000, [[Chunk(USER, changed, evicted=[-5])], []], **kind)
    back = rows_of(4, [-5], 4)
    new = rows_of(5, [3, 39, 1000], 6)
    write_dump(dump, 1100, [[Chunk(USER, back, evicted=[11, 12])], [Chunk(ITEM, new)]], **kind)
    second = {key: row for key, row in (user | changed).items() if key != -5}
    third = {key: row for key, row in (second | back).items() if key != 11}
    return {
        900: {USER: user, ITEM: item},
        1000: {USER: second, ITEM: item},
        1100: {USER: third, ITEM: item | new},
    }


@pytest.mark.parametrize("as_bytes", [False, True])
def test_each_step_of_a_dump_becomes_a_version_with_its_exact_state(store: Store, dump: Path, as_bytes: bool) -> None:
    states = trained(dump, as_bytes=as_bytes)

    report = import_dump(store, dump, options=EXACT)

    assert report.steps == (900, 1000, 1100)
    assert (report.rows, report.evicted, report.tables) == (45 + 3 + 4, 3, (USER, ITEM))
    for version, step in zip(report.versions, report.steps, strict=True):
        record = store.record(version)
        assert (record.step, record.kind) == (step, "baseline" if step == 900 else "delta")
        for table, rows in states[step].items():
            assert_rows(store.snapshot(version), table, {k: decoded(v) for k, v in rows.items()} if as_bytes else rows)
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_rows_of_eight_bits_are_stored_as_differences_within_their_error(store: Store, dump: Path) -> None:
    states = trained(dump)

    import_dump(store, dump, options=TableOptions(max_error=0.001))

    snapshot = store.snapshot()
    keys, arrays = snapshot.table(ITEM).read_all()
    assert np.abs(arrays["values"] - [states[1100][ITEM][key] for key in keys.tolist()]).max() <= 0.001
    assert snapshot.manifests[-1].tables.keys() == {USER, ITEM}
    assert any(part.add for part in snapshot.manifests[-1].parts_of[ITEM])


def test_an_import_that_is_run_again_brings_the_steps_after_the_newest(store: Store, dump: Path) -> None:
    write_dump(dump, 5, [[Chunk(USER, rows_of(1, [1, 2], 4))]])
    first = import_dump(store, dump, options=EXACT)
    again = import_dump(store, dump, options=EXACT)
    write_dump(dump, 10, [[Chunk(USER, rows_of(2, [2, 3], 4))]])

    third = import_dump(store, dump, options=EXACT)

    assert (first.steps, again.steps, third.steps) == ((5,), (), (10,))
    assert (first.skipped, again.skipped, third.skipped) == ((), (5,), (5,))
    assert_rows(store.snapshot(), USER, rows_of(1, [1, 2], 4) | rows_of(2, [2, 3], 4))


def test_replace_begins_with_a_baseline_of_the_dump_alone(store: Store, dump: Path) -> None:
    with store.writer() as writer, writer.begin(50) as txn:
        txn.write_table("old", np.ones((3, 2), np.float32), options=EXACT)
        txn.write_table(USER, np.ones((3, 2), np.float32), options=EXACT)
    write_dump(dump, 5, [[Chunk(USER, rows_of(1, [1, 2], 4))]])

    report = import_dump(store, dump, options=EXACT, replace=True)

    assert report.steps == (5,)
    assert store.snapshot().tables.keys() == {USER}
    assert_rows(store.snapshot(), USER, rows_of(1, [1, 2], 4))


def test_replicas_of_a_row_that_agree_are_one_row(store: Store, dump: Path) -> None:
    rows = rows_of(1, [1, 2, 3], 4)
    write_dump(dump, 5, [[Chunk(USER, {1: rows[1], 2: rows[2]})], [Chunk(USER, {2: rows[2], 3: rows[3]})]])

    import_dump(store, dump, options=EXACT)

    assert_rows(store.snapshot(), USER, rows)


def test_a_row_that_is_not_finite_is_stored_exactly(store: Store, dump: Path) -> None:
    rows = rows_of(1, [1, 2, 3], 4)
    write_dump(dump, 5, [[Chunk(USER, rows)]])
    later = {2: np.array([1, np.nan, np.inf, -1], np.float32)}
    write_dump(dump, 6, [[Chunk(USER, later)]])

    import_dump(store, dump, options=EXACT)

    assert_rows(store.snapshot(), USER, rows | later)


def test_batches_are_smaller_than_a_table(store: Store, dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.integrations.torcheasyrec._BATCH_ROWS", 7)
    states = trained(dump)

    import_dump(store, dump, options=EXACT)

    assert_rows(store.snapshot(), ITEM, states[1100][ITEM])


Damage = Callable[[Path], object]


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def one_rank(step: int, **changed: Any) -> Damage:
    return lambda dump: write_dump(dump, step, [[Chunk(USER, rows_of(9, [1], 4))]], **changed)


def of(rank: int) -> str:
    return f"step_1100/delta_embedding_step_1100_rank_{rank}_of_2.parquet"


def with_embeddings(rows: Callable[[list[Any]], list[Any]], element: pa.DataType) -> Damage:
    """Return what rewrites the embeddings of rank 1's file of step 1100."""

    def change(table: pa.Table) -> pa.Table:
        made = pa.array(rows(table.column("embedding").to_pylist()), pa.list_(element))
        return table.set_column(6, "embedding", made)

    return lambda dump: rewritten(dump / of(1), change)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a rank's file is missing": (lambda dump: (dump / of(1)).unlink(), r"step 1100 .* ranks \[1\]"),
    "two world sizes": (one_rank(1100), "step 1100 has files of 1 and of 2 ranks"),
    "two dumps": (lambda d: (d / of(0)).rename(d / "step_1100/x_step_1100_rank_0_of_2.parquet"), "2 dumps"),
    "another file": (lambda dump: pq.write_table(pa.table({"a": [1]}), dump / "a.parquet"), "a.parquet is no file"),
    "another folder": (lambda dump: (dump / "step_1100").rename(dump / "step_1101"), "no file of a dump"),
    "another step inside": (one_rank(1200, global_step=7), "global_step 7, its name says 1200"),
    "another rank inside": (one_rank(1200, rank=3), "rank 3, its name says 0"),
    "another world inside": (one_rank(1200, world_size=8), "world_size 8, its name says 1"),
    "an unknown source": (one_rank(1200, source="pruned"), "pruned"),
    "another width in a file": (
        with_embeddings(lambda rows: [rows[0][:-1], *rows[1:]], pa.float32()),
        r"embeddings of \[5, 6\] elements",
    ),
    "another width than before": (
        lambda dump: write_dump(dump, 1200, [[Chunk(USER, rows_of(9, [1], 5))]]),
        "rows of 5 elements at step 1200, of 4 before",
    ),
    "another width on a rank": (
        lambda dump: write_dump(dump, 1200, [[Chunk(ITEM, rows_of(9, [1], r))] for r in (6, 7)]),
        "rows of 7 elements",
    ),
    "rows that are only a scale": (
        with_embeddings(lambda rows: [[1, 2, 3, 4] for _ in rows], pa.uint8()),
        r"embeddings of \[4\] elements",
    ),
    "a row without an embedding": (
        with_embeddings(lambda rows: [None, *rows[1:]], pa.float32()),
        "a row whose embedding is null",
    ),
    "no column of sources": (
        lambda dump: rewritten(dump / of(1), lambda table: table.drop_columns(["source"])),
        "column source of type None",
    ),
    "a column twice": (  # a KeyError
        lambda dump: rewritten(
            dump / of(1), lambda table: pa.table([*table.columns, table["key_id"]], [*table.column_names, "key_id"])
        ),
        "column key_id of type None",
    ),
    "a second name of a file": (  # its rows were left out
        lambda d: (d / of(1).replace("rank_1", "rank_01")).write_bytes((d / of(1)).read_bytes()),
        "step_1100_rank_01_of_2.parquet is no file of a dump",
    ),
    "no Parquet": (lambda dump: (dump / of(1)).write_bytes(b"PAR1 no"), "cannot be read as Parquet"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_dump_that_is_not_whole_is_refused_before_anything_is_written(store: Store, dump: Path, damage: str) -> None:
    trained(dump)
    make, message = DAMAGES[damage]
    make(dump)
    before = store.latest_version

    with pytest.raises(BadInput, match=message):
        import_dump(store, dump)

    assert store.latest_version == before


def test_two_different_rows_of_a_key_are_refused(store: Store, dump: Path) -> None:
    write_dump(dump, 5, [[Chunk(USER, rows_of(seed, [1, 4], 4))] for seed in (1, 2)])

    with pytest.raises(BadRowIds, match="key 1 of table"):
        import_dump(store, dump)


def test_a_dense_table_of_the_store_is_not_touched(store: Store, dump: Path) -> None:
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table(USER, np.ones((3, 4), np.float32), options=EXACT)
    write_dump(dump, 5, [[Chunk(USER, rows_of(1, [1], 4))]])

    with pytest.raises(DoesNotApply, match="dense keys"):
        import_dump(store, dump)


def test_a_folder_without_files_of_a_dump_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        import_dump(store, tmp_path / "absent")


def test_the_plan_has_steps_in_order_and_files_by_rank() -> None:
    names = [f"step_{step}/d_step_{step}_rank_{rank}_of_11.parquet" for step in (100, 20) for rank in range(11)]

    plan = plan_dump([Path("d_step_7.parquet"), *map(Path, names)])

    assert [(one.step, len(one.files)) for one in plan] == [(7, 1), (20, 11), (100, 11)]
    assert plan[1].files[10].name == "d_step_20_rank_10_of_11.parquet"


def test_the_command_imports_a_dump_and_says_what_it_skipped(tmp_path: Path, dump: Path) -> None:
    states = trained(dump)
    seen = cnr("import", tmp_path / "s", dump, "--create", "--exact")
    again = cnr("import", tmp_path / "s", dump, "--json")

    assert seen.code == again.code == 0
    assert "steps 900 to 1100: 52 rows and 3 evictions of 2 tables" in seen.out
    assert again.document["skipped"] == [900, 1000, 1100]
    with Store.open(str(tmp_path / "s")) as store:
        assert_rows(store.snapshot(), USER, states[1100][USER])
    assert cnr("import", tmp_path / "s", dump, "--step", "3").code == 4


def test_a_dump_with_a_key_twice_leaves_no_store_that_its_import_created(tmp_path: Path, dump: Path) -> None:
    write_dump(dump, 5, [[Chunk(USER, rows_of(1, [1], 4))], [Chunk(USER, rows_of(2, [1], 4))]])

    assert cnr("import", tmp_path / "s", dump, "--create").code == 4
    assert not (tmp_path / "s").exists()
