import argparse
from dataclasses import replace
from pathlib import Path

import bench_models
import harness
import many_tables
import models
import pytest
import suites
import torch
from many_tables import Side
from peers import Cnr, assert_same
from places import local_disk
from trainee import Trainee

from format_spec.reader.compare import compare


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


def test_a_quick_run_has_smaller_models_than_were_asked_for():
    parser = harness.arguments(None, rows=0, repeats=1)
    models.add_model_option(parser, others=("trace",))

    quick, whole = (
        parser.parse_args(["--model", "mlperf/adam", "--divided-by", "4", *flags]) for flags in (["--quick"], [])
    )

    assert models.chosen_models(quick)[0].tables[0] == (400, 128)
    assert models.chosen_models(whole)[0].tables[0] == (100_000, 128)
    assert parser.parse_args(["--model", "trace"]).model == ["trace"]


@pytest.mark.parametrize("suite", suites.SUITES, ids=lambda suite: suite.name)
def test_a_suite_takes_models_or_says_why_not(suite):
    text = (Path(suites.__file__).parent / suite.script).read_text()

    assert ("add_model_option(parser" in text) != bool(suite.no_model)


@pytest.mark.parametrize("tables", [13, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", models.MODELS)
def test_the_independent_reader_agrees_on_a_store_of_every_preset(name, tables, tmp_path):
    model = models.named_model(name, 100_000)
    model = replace(model, tables=model.tables[:: max(1, len(model.tables) // tables)])
    store = Cnr(4)
    store.open(local_disk(tmp_path), Trainee(model))
    for _ in range(2):
        store.save()()
        store.touch(0.3)
    store.leave()

    values_and_slots = 3 if model.optimizer == "adam" else 2
    assert compare(store.url) >= 2 * values_and_slots * len(model.tables)


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


def test_work_on_models_is_reported_beside_one_table_of_their_size(tmp_path):
    report = harness.Report("work")
    works = {
        "read": (Side.nothing, Side.read),
        "restore": (Side.nothing, Side.restore),
        "apply": (Side.stand_at_baseline, Side.apply),
        "look up": (Side.nothing, Side.look_up),
        "compact": (Side.copy, Side.compact),
        "load": (Side.compact_whole, Side.load),
    }
    small = models.BenchModel("small", ((50, 8), (200, 16)), "adam")

    many_tables.measure(report, tmp_path, small, works, deltas=2, share=0.1, bits=8, repeats=1)

    assert [line.name for line in report.lines] == [f"small: {name} / of one table" for name in works]


def test_saves_of_models_are_reported_beside_one_table_of_their_size(tmp_path, capsys):
    torch.set_num_threads(1)
    model = models.BenchModel("small", ((50, 8), (200, 16)))
    both = [model, model.in_one_table()]
    report = harness.Report("models")

    found = bench_models.measure(local_disk(tmp_path), both, 8, 1)
    bench_models.report_models(report, local_disk(tmp_path), both, 8, found)

    assert [line.name.partition(",")[0] for line in report.lines] == ["small"] * 5
    assert min(found["small"].objects) > 0
    assert "small, in one table" in capsys.readouterr().out
