import argparse

import bench_models
import harness
import models
import pytest
import torch
from peers import Cnr, assert_same
from places import local_disk
from trainee import Trainee


def test_the_mlperf_model_has_its_26_tables_in_a_hundredth_of_the_rows():
    tables = models.named_model("mlperf/adam").tables

    assert len(tables) == 26
    assert tables[0] == (400_000, 128)
    assert tables[-1] == (3, 128)


@pytest.mark.parametrize("count", [300, 1000])
def test_zipf_tables_have_100_to_1_000_000_rows_and_16_to_128_columns(count):
    tables = models.zipf_tables(count)

    assert len(tables) == count
    assert (min(rows for rows, _ in tables), max(rows for rows, _ in tables)) == (100, 1_000_000)
    assert {dim for _, dim in tables} == {16, 32, 64, 128}
    assert models.zipf_tables(count) == tables


def test_one_table_has_about_as_many_elements():
    model = models.named_model("zipf300/adagrad")

    alone = model.in_one_table()

    assert len(alone.tables) == 1
    assert alone.elements == pytest.approx(model.elements, rel=0.001)
    assert alone.optimizer == model.optimizer


def test_a_model_that_is_no_preset_is_refused():
    with pytest.raises(KeyError, match="zipf300/adam"):
        models.named_model("zipf7/adam")
    parser = argparse.ArgumentParser(exit_on_error=False)
    models.add_model_option(parser)
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--model", "zipf7/adam"])


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "adam"])
def test_a_store_loads_what_was_saved_of_a_model_with_any_optimizer(optimizer, tmp_path):
    trainee = Trainee(models.BenchModel("two", ((60, 8), (300, 16)), optimizer))
    store = Cnr(None)
    store.open(local_disk(tmp_path), trainee)
    store.save()()
    store.touch(0.1)
    expected = trainee.copy()
    store.save()()
    store.leave()
    trainee.forget()

    store.load()

    assert_same(expected, trainee.tensors, store.bounds())
    assert sum(name.startswith("optimizer.tables") for name in trainee.tensors) >= 2
    store.close()


def test_saves_of_models_are_reported_beside_one_table_of_their_size(tmp_path, capsys):
    torch.set_num_threads(1)
    model = models.BenchModel("small", ((50, 8), (200, 16)))
    both = [model, model.in_one_table()]
    report = harness.Report("models")

    found = bench_models.measure(local_disk(tmp_path), both, 8, 1)
    bench_models.report_models(report, both, found)

    assert [line.name.partition(",")[0] for line in report.lines] == ["small"] * 4
    assert min(found["small"].objects) > 0
    assert "small, in one table" in capsys.readouterr().out
