"""The size suite counts every byte on disk once, and its planners and its grown table keep what they promise."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import bench_size
import harness
import numpy as np
import pytest
import real_sets
from bench_size import LongRun
from dlrm_trace import Interval, trace_config, train
from measured_store import KINDS, MeasuredStore, affine, lattice, total_by_kind
from run_config import RunConfig
from size_encodings import Measured, print_equal_quality
from size_shares import Stretch, grown, stretches

from cnr_store.maintenance.compaction import CompactionPolicy
from cnr_store_tools.demo.traffic import generate_clicks


def tiny() -> RunConfig:
    """Six intervals of a few steps on tables of some hundred rows."""
    config = bench_size.configure(60, seed=3, quick=True)
    assert config.traffic is not None
    traffic = replace(config.traffic, table_rows=(600, 50), num_samples=1200)
    return replace(config, traffic=traffic, batch_size=16, steps=60, save_every=10)


@pytest.fixture(scope="module")
def intervals() -> list[Interval]:
    return list(train(tiny()))


def test_the_same_trace_comes_out_again_bit_for_bit(intervals: list[Interval]) -> None:
    again = list(train(tiny()))

    for one, other in zip(intervals, again, strict=True):
        for name in one.tables:
            np.testing.assert_array_equal(one.tables[name], other.tables[name])
            np.testing.assert_array_equal(one.touched[name], other.touched[name])


def test_a_trace_touches_exactly_the_rows_that_it_changes(intervals: list[Interval]) -> None:
    for before, after in pairwise(intervals):
        for name, slots in after.slots.items():
            changed = np.flatnonzero(slots != before.slots[name])
            assert set(changed) <= set(after.touched[name])
            assert after.touched[name].size > 0


@pytest.mark.parametrize("policy", ["baseline", "one_shot", "intermittent", "consecutive"])
def test_a_store_holds_what_the_disk_holds_and_gives_back_the_run(
    tmp_path: Path, intervals: list[Interval], policy: str
) -> None:
    store = MeasuredStore(tmp_path / "store", lattice(8), policy, rescale_at=(4,))  # type: ignore[arg-type]

    for interval in intervals:
        store.save(interval)

    length, blocks = harness.disk_bytes(store.folder)
    kept = store.store.head().record.chain
    assert store.savings[-1].held_bytes == length - len(kept) * store.savings[-1].dense_bytes
    assert store.savings[-1].held_du == blocks
    assert store.error(intervals[-1]) < 1e-5
    assert [saving.kind for saving in store.savings][3] == "baseline"


def test_without_a_collection_all_that_was_written_is_held(tmp_path: Path, intervals: list[Interval]) -> None:
    store = MeasuredStore(tmp_path / "store", affine(4), is_collected=False)

    for interval in intervals:
        store.save(interval)

    written = total_by_kind(store.savings)
    dense = sum(saving.dense_bytes for saving in store.savings)
    assert sum(written.values()) - written["record"] + dense == harness.disk_bytes(store.folder / "data")[0]
    assert set(written) == set(KINDS)
    assert {kind for kind in KINDS if not written[kind]} == {"receipt"}  # one writer, no compaction


def test_compaction_frees_bytes_and_counts_what_it_wrote(tmp_path: Path, intervals: list[Interval]) -> None:
    plain = MeasuredStore(tmp_path / "plain", lattice(4))
    compacted = MeasuredStore(tmp_path / "compacted", lattice(4), compaction=CompactionPolicy(max_chain=2))

    for interval in intervals:
        plain.save(interval)
        compacted.save(interval)

    assert sum(saving.compacted_bytes for saving in compacted.savings) > 0
    assert compacted.savings[-1].total > plain.savings[-1].total
    assert compacted.savings[-1].held_bytes < plain.savings[-1].held_bytes
    assert compacted.error(intervals[-1]) == plain.error(intervals[-1])


def test_lattice_at_equal_error_is_no_coarser_than_affine_rows(tmp_path: Path, intervals: list[Interval]) -> None:
    stores = [MeasuredStore(tmp_path / one.name, one) for one in (lattice(4), affine(4))]

    for store in stores:
        store.save(intervals[-1])

    ratio = stores[0].error(intervals[-1]) / stores[1].error(intervals[-1])
    assert 0.9 < ratio < 1.02


def test_a_grown_table_has_the_drift_of_the_trace(intervals: list[Interval]) -> None:
    before, after = intervals[-2:]

    first, second = grown(before, after, 20_000, seed=1)

    rows = second.touched["grown"]
    moved = np.any(first.tables["grown"] != second.tables["grown"], axis=1)
    assert set(np.flatnonzero(moved)) <= set(rows)
    assert rows.size / 20_000 == pytest.approx(after.num_touched / after.num_rows, abs=0.02)
    drift = np.square(second.tables["grown"] - first.tables["grown"]).sum() / 20_000
    wanted = sum(float(np.square(after.tables[n] - before.tables[n]).sum()) for n in after.tables) / after.num_rows
    assert drift == pytest.approx(wanted, rel=0.2)


def test_stretches_follow_each_other() -> None:
    plan = stretches(100, 3)

    steps = [step for stretch in plan for step in stretch.save_at]
    assert steps == sorted(set(steps))
    assert all(len(stretch.save_at) == 4 for stretch in plan)


def test_equal_quality_compares_the_bytes_of_the_pairs_given(tmp_path: Path, intervals: list[Interval]) -> None:
    stores = [MeasuredStore(tmp_path / one.name, one, is_collected=False) for one in (affine(8), lattice(4))]
    for store in stores:
        store.save(intervals[-1])
    measured = {store.encoding.name: Measured(store.savings, 1.0, 1.0) for store in stores}
    report = harness.Report("equal quality")

    print_equal_quality(report, measured, [("affine 8 greedy", "lattice 4")])

    assert report.lines[0].value == stores[1].savings[0].total / stores[0].savings[0].total
    assert report.lines[0].goal == 0.5
    assert report.tables[0].rows[0][:2] == ("affine 8 greedy", stores[0].savings[0].total)


def test_the_suite_measures_a_run_and_shares_and_writes_its_json(tmp_path: Path) -> None:
    config = replace(tiny(), save_every=5)
    run = LongRun(tmp_path / "run", 6, quick=True)
    plan = [Stretch(25, (35, 40)), Stretch(1, (41, 42))]
    report = harness.Report("size")

    encodings = [affine(4), lattice(4)]
    bench_size.measure_trace(report, tmp_path, config, run, plan, encodings=encodings, grown_rows=500)
    report.finish(str(tmp_path / "size.json"))

    document = json.loads((tmp_path / "size.json").read_text())
    titles = [table["title"] for table in document["tables"]]
    assert [title.split()[0].rstrip(",:") for title in titles] == ["Policies", "Bytes", "Encodings", "trace", "grown"]
    assert len(document["plots"]) == 3
    assert all(line["met"] in (True, False) for line in document["lines"] if line["goal"] is not None)
    assert any("fp32 full / delta" in line["name"] and line["goal"] == 50.0 for line in document["lines"])


def test_a_set_that_is_missing_is_left_out_aloud(tmp_path: Path) -> None:
    report = harness.Report("size")

    bench_size.measure_sets(report, tmp_path, tmp_path, quick=False)

    assert len(report.notes) == len(real_sets.SETS)
    assert all("left out" in note for note in report.notes)


def test_payload_leaves_out_documents(tmp_path: Path, intervals: list[Interval]) -> None:
    store = MeasuredStore(tmp_path / "store", affine(4), is_collected=False)
    for interval in intervals[:2]:
        store.save(interval)

    measured = Measured(store.savings, 1.0, 1.0)

    documents = sum(total_by_kind(store.savings)[kind] for kind in ("metadata", "receipt", "record"))
    assert measured.payload + documents == measured.total
    assert 0 < measured.delta_payload < measured.payload


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
