"""Generated traffic, readers of data files, the split in time and the resumable loader."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadInput, NotFound
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.columns import row_numbers, table_names
from cnr_store_tools.demo.datasets import read_click_log, read_criteo, read_inter, read_parquet
from cnr_store_tools.demo.metrics import auc
from cnr_store_tools.demo.presets import demo_config, file_config, trace_config
from cnr_store_tools.demo.traffic import (
    TrafficConfig,
    drift_popularity,
    generate_clicks,
    plant_teacher,
    zipf_cumulative,
)

REAL_DATA = Path(__file__).parents[2].parent / "shared" / "data"
SMALL = TrafficConfig(table_rows=(2_000, 500), num_samples=40_000, drift_every=2_000, drift_share=0.05)


def _real(name: str) -> Path:
    path = REAL_DATA / name
    if not path.is_file():
        pytest.skip(f"the data file {name} is not there")
    return path


def _log(num_samples: int, num_dense: int = 1) -> ClickLog:
    count = np.arange(num_samples)
    return ClickLog(
        ids=count[:, None].astype(np.int64),
        dense=np.repeat(count[:, None], num_dense, axis=1).astype(np.float32),
        labels=(count % 2).astype(np.float32),
        table_rows=[num_samples],
        names=["t"],
    )


def test_traffic_is_decided_by_its_seed() -> None:
    first, again = generate_clicks(SMALL), generate_clicks(SMALL)
    other = generate_clicks(replace(SMALL, seed=1))

    for name in ("ids", "dense", "labels"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_traffic_ids_stay_inside_their_tables() -> None:
    log = generate_clicks(SMALL)

    assert log.ids.dtype == np.int64
    assert log.dense.dtype == log.labels.dtype == np.float32
    assert (log.ids >= 0).all()
    assert (log.ids < np.array(log.table_rows)).all()
    assert set(np.unique(log.labels)) == {0.0, 1.0}


def test_traffic_popularity_follows_the_zipf_law_between_two_drifts() -> None:
    config = replace(SMALL, num_samples=200_000, drift_every=200_000)

    counts = np.sort(np.bincount(generate_clicks(config).ids[:, 0], minlength=2_000))[::-1]

    expected = np.diff(zipf_cumulative(2_000, config.zipf_exponent), prepend=0.0) * config.num_samples
    np.testing.assert_allclose(counts[:20], expected[:20], rtol=0.1)


def test_traffic_popularity_drifts_and_stands_still_without_drift() -> None:
    def kept_stars(config: TrafficConfig) -> int:
        ids = generate_clicks(config).ids[:, 0]
        early, late = (
            set(np.argsort(np.bincount(part, minlength=2_000))[-20:]) for part in (ids[:8_000], ids[-8_000:])
        )
        return len(early & late)

    assert kept_stars(replace(SMALL, drift_share=0.0)) >= 15
    assert kept_stars(replace(SMALL, drift_share=0.2)) <= 8


def test_drift_keeps_a_permutation_and_moves_the_given_share() -> None:
    order = np.arange(10_000)

    drift_popularity(order, 0.1, np.random.default_rng(0))

    np.testing.assert_array_equal(np.sort(order), np.arange(10_000))
    assert 900 < (order != np.arange(10_000)).sum() <= 1_000


def test_teacher_knows_its_clicks() -> None:
    config = replace(SMALL, num_samples=20_000)
    log = generate_clicks(config)
    teacher = plant_teacher(config, np.random.default_rng(config.seed))

    assert auc(log.labels, teacher.logits(log.ids, log.dense)) > 0.75


def test_teacher_logits_equal_a_naive_sum_over_pairs() -> None:
    config = TrafficConfig(table_rows=(7, 5, 3), num_samples=11, num_dense=2)
    log = generate_clicks(config)
    teacher = plant_teacher(config, np.random.default_rng(9))

    logits = teacher.logits(log.ids, log.dense)

    for sample, row in enumerate(log.ids):
        vectors = [teacher.factors[column][row_id].astype(np.float64) for column, row_id in enumerate(row)]
        expected = config.click_bias + float(log.dense[sample] @ teacher.dense_weights)
        expected += sum(vector[-1] for vector in vectors)
        expected += sum(float(vectors[one][:-1] @ vectors[two][:-1]) for one in range(3) for two in range(one))
        assert logits[sample] == pytest.approx(expected, abs=1e-5)


def test_trace_touches_about_forty_percent_of_rows_per_interval() -> None:
    config = trace_config(steps=300)
    assert config.traffic is not None
    log = generate_clicks(config.traffic)
    interval = config.save_every * config.batch_size

    shares = []
    for start in (0, interval):
        ids = log.ids[start : start + interval]
        touched = sum(np.unique(ids[:, column]).size for column in range(ids.shape[1]))
        shares.append(touched / sum(log.table_rows))

    assert log.table_rows == [200_000, 100_000, 50_000, 20_000, 5_000, 1_000]
    assert shares == pytest.approx([0.395, 0.395], abs=0.015)


@pytest.mark.parametrize("config", [trace_config(), demo_config()], ids=["trace", "demo"])
def test_presets_generate_enough_samples_to_train_on(config: object) -> None:
    assert isinstance(config, type(demo_config()))
    assert config.traffic is not None

    start = config.traffic.num_samples - round(config.traffic.num_samples * config.test_share)

    assert start // config.batch_size >= config.steps


@pytest.mark.parametrize(("samples", "batch_size"), [(100, 16), (8_500, 23), (10**7, 2048)])
def test_file_run_fits_its_batches_to_the_file(samples: int, batch_size: int) -> None:
    config = file_config(samples)

    assert config.batch_size == batch_size
    assert 0 < config.steps * batch_size <= samples
    assert 1 <= config.save_every <= config.steps


def test_split_holds_out_the_last_samples() -> None:
    past, future = split_by_time(_log(100), 0.15)

    np.testing.assert_array_equal(past.ids[:, 0], np.arange(85))
    np.testing.assert_array_equal(future.ids[:, 0], np.arange(85, 100))


def test_split_scales_dense_features_by_the_past_alone() -> None:
    log = _log(100)
    log.dense[85:] = 1e6

    past, future = split_by_time(log, 0.15)

    assert past.dense.mean() == pytest.approx(0.0, abs=1e-6)
    assert past.dense.std() == pytest.approx(1.0, abs=1e-6)
    assert future.dense[0, 0] == pytest.approx((1e6 - 42.0) / np.arange(85).std(), rel=1e-5)


def test_split_leaves_a_constant_feature_at_zero() -> None:
    log = replace(_log(20), dense=np.full((20, 1), 3.0, dtype=np.float32))

    past, future = split_by_time(log)

    assert not past.dense.any()
    assert not future.dense.any()


def test_split_that_would_leave_a_part_empty_is_refused() -> None:
    with pytest.raises(BadInput, match="a part would be empty"):
        split_by_time(_log(2), 0.1)


def test_log_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(BadInput, match="as many dense rows and labels"):
        replace(_log(4), labels=np.zeros(3, dtype=np.float32))


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 10), taken=st.integers(0, 40), data=st.data())
def test_loader_resumed_from_any_state_hands_out_the_same_batches(
    num_samples: int, batch_size: int, taken: int, data: st.DataObject
) -> None:
    if batch_size > num_samples:
        batch_size = num_samples
    log = _log(num_samples)
    whole = [batch.ids[:, 0].tolist() for batch in TimeOrderedBatches(log, batch_size)]
    first = TimeOrderedBatches(log, batch_size)
    taken = min(taken, len(first))
    state, seen = first.state_dict(), []
    for batch in first if taken else ():
        seen.append(batch.ids[:, 0].tolist())
        state = first.state_dict()
        if len(seen) == taken:
            break

    resumed = TimeOrderedBatches(log, batch_size)
    resumed.load_state_dict(state)

    assert seen + [batch.ids[:, 0].tolist() for batch in resumed] == whole
    assert whole == [list(range(k * batch_size, (k + 1) * batch_size)) for k in range(num_samples // batch_size)]


def test_loader_stops_at_max_batches_also_after_a_resume() -> None:
    loader = TimeOrderedBatches(_log(100), 10, max_batches=4)
    state = {**loader.state_dict(), "next_batch": 3}

    loader.load_state_dict(state)

    assert len(loader) == 4
    assert [batch.ids[0, 0].item() for batch in loader] == [30]


@pytest.mark.parametrize("changed", ["batch_size", "num_samples"])
def test_loader_refuses_the_state_of_other_data(changed: str) -> None:
    loader = TimeOrderedBatches(_log(100), 10)

    with pytest.raises(BadInput, match=changed):
        loader.load_state_dict({**loader.state_dict(), changed: 7})


@pytest.mark.parametrize("position", [-1, 11])
def test_loader_refuses_a_position_outside_the_log(position: int) -> None:
    loader = TimeOrderedBatches(_log(100), 10)

    with pytest.raises(BadInput, match="points at batch"):
        loader.load_state_dict({**loader.state_dict(), "next_batch": position})


@pytest.mark.parametrize("batch_size", [0, 101])
def test_loader_without_a_whole_batch_is_refused(batch_size: int) -> None:
    with pytest.raises(BadInput, match="no whole batch"):
        TimeOrderedBatches(_log(100), batch_size)


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
