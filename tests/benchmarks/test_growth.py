import json
import sys
from pathlib import Path

import bench_growth
import harness
import numpy as np
import pytest
from counting import CountingStorage
from growing import DIM, Growing, TiledRows, shared_saves

from tests.support.launcher import Program


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_fit_finds_the_power(power):
    sizes = [10, 100, 1000]
    assert bench_growth.exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


def test_nothing_is_fitted_to_what_has_no_logarithm():
    assert np.isnan(bench_growth.exponent([1, 10], [0.0, 1.0]))


def test_tiled_rows_slice_like_the_array_that_they_stand_for():
    tiled = TiledRows(200_000)
    ids = np.array([0, 65_535, 65_536, 199_999])
    assert tiled.shape == (200_000, DIM)
    assert tiled[65_530:65_540].shape == (10, DIM)
    assert np.array_equal(tiled[ids][1:3], tiled[65_535:65_537])
    assert np.array_equal(tiled[ids][0], tiled[ids][2])


def test_requests_and_objects_of_a_save_do_not_grow_with_the_versions(tmp_path):
    young, old = (Growing(CountingStorage(str(tmp_path / name)), 1, 2_000, touched=50) for name in ("young", "old"))
    old.grow_to(70, 3)
    young.grow_to(1, 3)
    for store in (young, old):
        store.commit()
    assert sum(old.counts.values()) == sum(young.counts.values())
    assert old.objects_of_last() == young.objects_of_last() <= bench_growth.budget()
    assert old.requests_of_poll() == 1
    for store in (young, old):
        store.close()


def test_each_writer_adds_its_own_objects_to_a_save(tmp_path):
    one, two = (shared_saves(tmp_path, writers, 4_000, 400, 2) for writers in (1, 2))
    assert len(one.seconds) == len(two.seconds) == 2
    assert two.objects - one.objects == one.objects - 1, "its own arrays, and a receipt; the segment has one Zarr group"


def test_a_small_run_prints_every_section(launcher, tmp_path, monkeypatch, capsys):
    def in_forked_process(script, function, **options):
        program = Program([harness.__file__, script, function, json.dumps(options)])
        (done,) = launcher.run(program, folder=Path(script).parent)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(harness, "in_fresh_process", in_forked_process)
    target = tmp_path / "growth.json"
    sizes = "--sizes 20000 40000 --versions 2 4 --tables 1 3 --writers 1 2 --rows 2000 --touched 1000 --repeats 1"
    monkeypatch.setattr(bench_growth, "PLACED_TABLES", 3)
    arguments = [*sizes.split(), "--places", "disk,free", "--folder", str(tmp_path), "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["bench_growth.py", *arguments])
    bench_growth.main()
    document = json.loads(target.read_text())
    assert [table["title"] for table in document["tables"]] == [f"by {name}" for name in bench_growth.SECTIONS]
    assert [plot["name"] for plot in document["plots"]] == [name for name in bench_growth.SECTIONS if name != "places"]
    assert "requests of a poll" in capsys.readouterr().out
