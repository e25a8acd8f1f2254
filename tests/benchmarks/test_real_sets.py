"""Files of public data sets become logs in time order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from real_sets import DATA_FOLDER, SETS, read_criteo, read_movielens, read_pairs, without_unused_rows
from run_config import demo_config

from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import evaluate, make_optimizers, train_step


def test_ratings_are_sorted_by_time_and_four_is_a_click(tmp_path: Path) -> None:
    path = tmp_path / "x.inter"
    path.write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n9\t1\t3\t300\n2\t1\t5\t100\n9\t7\t4\t200\n"
    )

    log = read_movielens(path)

    assert log.names == ["user_id", "item_id"]
    assert log.table_rows == [2, 2]
    assert log.ids.tolist() == [[0, 0], [1, 1], [1, 0]]
    assert log.labels.tolist() == [1, 1, 0]
    assert log.dense.shape == (3, 0)


def test_ids_of_criteo_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    lines = [[0, *[3] * 13, 5, 0, *[1] * 24], [1, *[-2] * 13, 2, 64_260, *[1] * 24]]
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))

    log = read_criteo(path)

    assert log.table_rows[:3] == [6, 64_261, 2]
    assert log.ids[:, :2].tolist() == [[5, 0], [2, 64_260]]
    assert log.labels.tolist() == [0, 1]
    np.testing.assert_allclose(log.dense[:, 0], np.log1p([3, 0]).astype(np.float32))


def test_pairs_are_read_in_each_users_order(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("7 1\n7 2\n7 3\n9 3\n9 1\n")

    log = read_pairs(path)

    users, items = log.ids[0::2].T
    assert items[users == 0].tolist() == [0, 1, 2]
    assert items[users == 1].tolist() == [2, 0]
    assert log.labels.tolist() == [1.0, 0.0] * 5
    assert np.array_equal(log.ids[0::2, 0], log.ids[1::2, 0])


def test_rows_that_never_occur_are_left_out() -> None:
    ids = np.asarray([[5, 0], [9, 0], [5, 3]], np.int64)
    log = ClickLog(ids, np.zeros((3, 0), np.float32), np.zeros(3, np.float32), [10, 4], ["a", "b"])

    found = without_unused_rows(log)

    assert found.ids.tolist() == [[0, 0], [1, 0], [0, 1]]
    assert found.table_rows == [2, 2]


@pytest.mark.parametrize("one", SETS[:2], ids=lambda one: one.name)
def test_real_clicks_can_be_learned(one) -> None:
    if not (DATA_FOLDER / one.file).is_file():
        pytest.skip(f"the data file {one.file} is not there")
    past, future = split_by_time(one.read(DATA_FOLDER / one.file))
    config = replace(demo_config(), traffic=None, batch_size=max(len(past) // 360, 16))
    model = SmallDLRM(config.model_config(past))
    optimizers = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)

    for batch in TimeOrderedBatches(past, config.batch_size, max_batches=360):
        train_step(model, optimizers, batch)

    assert evaluate(model, future).auc > 0.69
