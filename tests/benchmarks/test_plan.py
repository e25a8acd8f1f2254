import json
import sys
from dataclasses import replace

import bench_plan
import numpy as np
import pytest
from plan_model import POLICIES, Cluster, Rates, Workload, fp32_save, id_bits, objects_of, simulate
from plan_runs import ChangingRows, Run, measure_rates

WORK = Workload(num_rows=24_000, dim=16, tables=2, touched_share=0.25, intervals=8)
RATES = Rates(2.0, 4.0, 8.0, 10.0, 1.1, 2000.0, 100.0, 2000.0, 100.0, 20e6, 100e6, 5.0)


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    return measure_rates(tmp_path_factory.mktemp("rates"), 4, WORK)


@pytest.mark.parametrize("policy", ["baseline", "one_shot", "intermittent", "consecutive"])
def test_the_model_is_what_a_real_run_of_two_writers_is(policy, rates, tmp_path):
    real = Run(tmp_path / "store", policy, WORK, 2, 4).play()
    plan = simulate(policy, WORK, replace(bench_plan.HERE, tables_per_rank=WORK.tables), rates)
    assert [save.kind for save in plan.saves] == [save.decision.kind for save in real]
    assert [save.objects for save in plan.saves] == [save.objects for save in real]
    assert [round(save.rows) for save in plan.saves] == [save.rows for save in real]
    for planned, found in zip(plan.saves[1:], real[1:], strict=True):
        assert planned.size_bytes == pytest.approx(found.size_bytes, rel=0.15)
        assert planned.requests == pytest.approx(found.requests, rel=0.15)


def test_changed_rows_are_as_many_as_the_workload_says():
    made = ChangingRows(WORK)
    seen = np.zeros(WORK.num_rows, np.bool_)
    for intervals in range(1, 7):
        ids = made.step()
        seen[ids] = True
        assert len(ids) == round(WORK.num_rows * WORK.touched_share)
        assert seen.sum() == round(WORK.num_rows * WORK.changed_since(intervals))
        assert np.array_equal(made.changed(), np.flatnonzero(seen))


def test_ids_take_the_entropy_of_a_biased_coin():
    assert id_bits(0.5) == 2.0
    assert id_bits(1.0) == 0.0
    assert id_bits(0.01) == pytest.approx(8.08, abs=0.01)


def test_one_shot_deltas_grow_and_consecutive_ones_do_not():
    cluster = Cluster()
    one_shot, consecutive = (simulate(policy, WORK, cluster, RATES) for policy in ("one_shot", "consecutive"))
    sizes = [save.size_bytes for save in one_shot.saves[1:]]
    assert sizes == sorted(sizes)
    assert len({save.size_bytes for save in consecutive.saves[1:]}) == 1
    assert one_shot.peak_storage_bytes <= sum(save.size_bytes for save in one_shot.saves)


def test_the_predictor_of_the_paper_begins_anew_at_last():
    plan = simulate("intermittent", replace(WORK, num_rows=10**8, intervals=60), Cluster(), RATES)
    assert 2 <= sum(save.kind == "baseline" for save in plan.saves) < 30


def test_compaction_bounds_restores_and_storage_and_costs_the_job_bytes():
    work = replace(WORK, num_rows=10**9, intervals=48)
    plain, compacted = (
        simulate(policy, work, Cluster(), RATES) for policy in ("consecutive", "consecutive + compaction")
    )
    assert compacted.worst_restore_s < plain.worst_restore_s
    assert compacted.peak_storage_bytes < plain.peak_storage_bytes
    assert compacted.job_bytes_per_hour > plain.job_bytes_per_hour == 0
    assert compacted.mean_bytes <= plain.mean_bytes


def test_twice_the_hosts_halve_what_a_link_bounds():
    work = replace(WORK, num_rows=10**10)
    fast = replace(RATES, encode_values_s=1e12)
    clusters = [Cluster(hosts=hosts, put_s=0.0, get_s=0.0) for hosts in (8, 16)]
    seconds = [simulate("baseline", work, cluster, fast).commit_s for cluster in clusters]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_floats_are_as_large_as_they_are():
    assert fp32_save(WORK, Cluster()).size_bytes == WORK.num_rows * (16 * 4 + 4)


def test_a_part_of_several_chunks_has_an_object_for_each():
    cluster = Cluster(ranks=1, hosts=1)
    assert objects_of(100, 16, cluster) == 8
    few, many = objects_of(1e6, 64, cluster), objects_of(2e6, 64, cluster)
    assert many - few == pytest.approx(few - 6, abs=6)


def test_a_small_run_prints_every_policy_for_both_models(tmp_path, monkeypatch):
    target = tmp_path / "plan.json"
    monkeypatch.setattr(
        sys, "argv", ["bench_plan.py", "--rows", "20000", "--folder", str(tmp_path), "--json", str(target)]
    )
    bench_plan.main()
    document = json.loads(target.read_text())
    plans = [table for table in document["tables"] if "GPUs" in table["title"]]
    assert [len(table["rows"]) for table in plans] == [len(POLICIES)] * 4
    assert all(value > 0 for table in plans for row in table["rows"] for value in row[1:4])
