"""Files of clicks become logs in time order, or are refused with the reason."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click_columns import row_numbers, table_names
from click_files import read_click_log, read_criteo, read_inter, read_parquet
from real_sets import DATA_FOLDER
from run_config import demo_config

from cnr_store.errors import BadInput, NotFound
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import evaluate, make_optimizers, train_step


def _real(name: str) -> Path:
    path = DATA_FOLDER / name
    if not path.is_file():
        pytest.skip(f"the data file {name} is not there")
    return path


INTER = (
    "user_id:token\titem_id:token\trating:float\ttimestamp:float\tprice:float\ttags:token_seq\n"
    "u9\ti1\t3\t300\t1.5\ta b\n"
    "u2\ti1\t5\t100\t\ta\n"
    "u9\ti7\t4\t200\t2.5\t\n"
    "u2\ti7\t1\t200\t0.5\tb\n"
)


def test_inter_is_sorted_by_time_and_rated_four_is_a_click(tmp_path: Path) -> None:
    path = tmp_path / "x.inter"
    path.write_text(INTER)

    log = read_inter(path)

    assert log.names == ["user_id", "item_id"]
    assert log.table_rows == [2, 2]
    np.testing.assert_array_equal(log.ids, [[0, 0], [1, 1], [0, 1], [1, 0]])
    np.testing.assert_array_equal(log.labels, [1, 1, 0, 0])
    np.testing.assert_array_equal(log.dense, [[0.0], [2.5], [0.5], [1.5]])


def test_inter_prefers_a_label_column_and_keeps_file_order_without_time(tmp_path: Path) -> None:
    path = tmp_path / "x.inter"
    path.write_text("label:float\tuser_id:token\trating:float\n0\tb\t5\n1\ta\t1\n")

    log = read_inter(path)

    np.testing.assert_array_equal(log.labels, [0, 1])
    np.testing.assert_array_equal(log.ids, [[0], [1]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user_id\titem_id\n1\t2\n", "RecBole header"),
        ("user_id:token\trating:number\n1\t2\n", "RecBole header"),
        ("user_id:token\titem_id:token\n1\t2\n", "neither a label nor a rating"),
        ("user_id:token\tuser_id:token\n1\t2\n", "names a column twice"),
        ("user_id:token\trating:float\n1\tgood\n", "not a number"),
        ("user_id:token\trating:float\n1\t\n", "1 blanks"),
        ("user_id:token\trating:float\n1\tnan\n", "NaN or infinite"),
        ("user_id:token\trating:float\n1\t2\t3\n", "cannot be read"),
        ("user_id:token\trating:float\n", "no samples|cannot be read"),
        ("rating:float\n3\n", "no id column"),
    ],
)
def test_inter_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.inter"
    path.write_text(text)

    with pytest.raises(BadInput, match=message):
        read_inter(path)


def _criteo_line(label: int, integers: list[str], categories: list[str], delimiter: str) -> str:
    return delimiter.join([str(label), *integers, *categories]) + "\n"


def test_raw_criteo_keeps_blanks_as_values_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(
        _criteo_line(1, ["1", "", "-2"] + ["0"] * 10, ["68fd1e64", ""] + ["a0"] * 24, "\t")
        + _criteo_line(0, ["", "7", "3"] + ["0"] * 10, ["05db9164", "be589b51"] + ["a0"] * 24, "\t")
        + _criteo_line(0, ["2", "", "3"] + ["0"] * 10, ["68fd1e64", ""] + ["a0"] * 24, "\t")
    )

    log = read_click_log(path)

    np.testing.assert_array_equal(log.labels, [1, 0, 0])
    np.testing.assert_array_equal(log.ids[:, :3], [[0, 0, 0], [1, 1, 0], [0, 0, 0]])
    assert log.table_rows == [2, 2] + [1] * 24
    np.testing.assert_allclose(log.dense[:, :3], np.log1p([[1, 0, 0], [0, 7, 3], [2, 0, 3]]).astype(np.float32))


@pytest.mark.parametrize("compressed", [False, True])
def test_encoded_criteo_uses_its_ids_as_rows(tmp_path: Path, compressed: bool) -> None:
    text = _criteo_line(0, ["3"] * 13, ["5", "0"] + ["1"] * 24, ",")
    text += _criteo_line(1, ["0"] * 13, ["2", "64260"] + ["1"] * 24, ",")
    path = tmp_path / ("x.csv.gz" if compressed else "x.csv")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())

    log = read_click_log(path)

    assert log.table_rows[:3] == [6, 64_261, 2]
    np.testing.assert_array_equal(log.ids[:, :2], [[5, 0], [2, 64_260]])
    assert log.names[0] == "c1"
    assert len(log.names) == 26


def test_criteo_stops_at_max_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(_criteo_line(1, ["1"] * 13, ["1"] * 26, ",") * 9)

    assert len(read_criteo(path, max_samples=4)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 commas and 0 tabs"),
        (b"1,2,3\n", "2 commas"),
        (b"1" + b",1" * 39 + b"\n1,2\n", "cannot be read"),
        (b"yes" + b",1" * 39 + b"\n", "the label"),
        (b"1,x" + b",1" * 38 + b"\n", "'i1'"),
    ],
)
def test_criteo_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)

    with pytest.raises(BadInput, match=message):
        read_criteo(path)


def test_criteo_gz_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(b"1" + b",1" * 39 + b"\n")

    with pytest.raises(BadInput, match="cannot be read"):
        read_click_log(path)


@pytest.mark.parametrize("huge", [10**12, 2**40, -1])
def test_hostile_id_does_not_decide_the_size_of_a_table(huge: int) -> None:
    rows, num_rows = row_numbers(pa.array([3, huge, 3]), direct=True)

    assert num_rows == 2
    np.testing.assert_array_equal(rows, [0, 1, 0])


def test_parquet_columns_are_chosen_by_type_and_sorted_by_time(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table(
            {
                "user.id": pa.array([7, 3, 7], pa.int64()),
                "city": pa.array(["b", "a", "b"]).dictionary_encode(),
                "age": pa.array([1.5, None, 2.5], pa.float32()),
                "label": pa.array([True, False, False]),
                "timestamp": pa.array([30, 10, 20], pa.timestamp("s")),
            }
        ),
        path,
    )

    log = read_click_log(path)

    assert log.names == ["user_id", "city"]
    assert log.table_rows == [8, 2]
    np.testing.assert_array_equal(log.ids, [[3, 0], [7, 1], [7, 1]])
    np.testing.assert_array_equal(log.labels, [0, 0, 1])
    np.testing.assert_array_equal(log.dense[:, 0], [0.0, 2.5, 1.5])


def test_parquet_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 0], "b": [5, 6], "c": [1, 1], "d": [2, 4]}), path, row_group_size=1)

    log = read_parquet(path, label="a", id_columns=["b"], dense_columns=["d"])

    assert log.names == ["b"]
    np.testing.assert_array_equal(log.dense, [[2.0], [4.0]])


def test_parquet_dictionaries_of_different_row_groups_are_unified(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    schema = pa.schema([("k", pa.dictionary(pa.int32(), pa.string())), ("label", pa.int8())])
    with pq.ParquetWriter(path, schema) as writer:
        for words in (["x", "y"], ["y", "z"]):
            keys = pa.array(words).dictionary_encode()
            writer.write_table(pa.table([keys, pa.array([0, 1], pa.int8())], schema=schema))

    np.testing.assert_array_equal(read_parquet(path).ids[:, 0], [0, 1, 1, 2])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"a": [1]}), "no column"),
        (pa.table({"label": [1.0]}), "no id column"),
        (pa.table({"label": ["x"], "a": [1]}), "not a number"),
        (pa.table({"label": [1], "a": [1], "timestamp": pa.array([None], pa.int64())}), "1 nulls"),
        (pa.table({"label": [1], "a": [1], "f": [float("inf")]}), "NaN or infinite"),
    ],
)
def test_parquet_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, table: pa.Table, message: str) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table, path)

    with pytest.raises(BadInput, match=message):
        read_parquet(path)


def test_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"label,a\n1,2\n")

    with pytest.raises(BadInput, match="not a Parquet file"):
        read_click_log(path)


def test_unknown_suffix_and_missing_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x.xlsx").write_bytes(b"")

    with pytest.raises(BadInput, match="by its name"):
        read_click_log(tmp_path / "x.xlsx")
    with pytest.raises(NotFound, match="no data file"):
        read_click_log(tmp_path / "y.csv")


def test_table_names_have_no_dots_and_stay_unique() -> None:
    assert table_names(["a.b", "a_b", "a b", ""]) == ["a_b", "a_b_2", "a_b_3", "column"]


def test_movielens_is_read_in_time_order() -> None:
    path = _real("ml-100k.inter")
    raw = np.loadtxt(path, skiprows=1, dtype=np.int64)
    raw = raw[np.argsort(raw[:, 3], kind="stable")]

    log = read_click_log(path)

    assert log.table_rows == [943, 1_682]
    np.testing.assert_array_equal(log.labels, raw[:, 2] >= 4)
    for column in range(2):
        _, first = np.unique(raw[:, column], return_index=True)
        by_appearance = raw[np.sort(first), column]
        np.testing.assert_array_equal(by_appearance[log.ids[:, column]], raw[:, column])


def test_criteo_sample_is_read_with_its_ids_as_they_are() -> None:
    path = _real("criteo_kaggle_tiny_train.csv")
    raw = np.loadtxt(path, delimiter=",", dtype=np.int64)

    log = read_click_log(path)

    np.testing.assert_array_equal(log.ids, raw[:, 14:])
    np.testing.assert_array_equal(log.labels, raw[:, 0])
    np.testing.assert_allclose(log.dense, np.log1p(raw[:, 1:14]).astype(np.float32))
    assert max(log.table_rows) == 64_261


@pytest.mark.parametrize("name", ["ml-100k.inter", "criteo_kaggle_tiny_train.csv"])
def test_real_clicks_can_be_learned(name: str) -> None:
    past, future = split_by_time(read_click_log(_real(name)))
    config = replace(demo_config(), traffic=None, batch_size=max(len(past) // 360, 16))
    model = SmallDLRM(config.model_config(past))
    optimizers = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)

    for batch in TimeOrderedBatches(past, config.batch_size, max_batches=360):
        train_step(model, optimizers, batch)

    assert evaluate(model, future).auc > 0.69
