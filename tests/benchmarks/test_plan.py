import json
import sys
from dataclasses import replace

import bench_plan
import numpy as np
import pytest
from plan_fleet import (
    DocumentReads,
    Prices,
    Serving,
    month_of,
    most_deltas,
    most_full,
    most_saves,
    publish,
    recovery_of,
)  # fmt: skip
from plan_model import (
    POLICIES,
    Cluster,
    FixedCosts,
    Rates,
    Workload,
    fp32_save,
    id_bits,
    objects_of,
    play,
    simulate,
    summed,
)  # fmt: skip
from plan_runs import ChangingRows, FarAway, Run, measure_rates, restored_documents

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


# ---- the fleet


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run of one writer whose versions a relay copies and a loader behind it serves."""
    folder = tmp_path_factory.mktemp("followed")
    far: list[FarAway] = []

    def follow():
        if not far:
            far.append(FarAway(folder / "store", folder / "near"))
        far[0].follow()

    Run(folder / "store", "consecutive", WORK, 1, 4, follow).play()
    far[0].close()
    return far[0]


def planned_deltas(ranks, rates):
    cluster = replace(bench_plan.HERE, ranks=ranks, tables_per_rank=WORK.tables)
    return cluster, list(play("consecutive", WORK, cluster, rates))


def test_a_relay_asks_for_what_the_model_says(followed, rates):
    cluster, moments = planned_deltas(1, rates)
    for moment, (source, near) in zip(moments[1:], followed.relay, strict=True):
        plan = publish(moment.save, WORK, cluster, rates, Serving(replicas=1))
        assert source.counts["get"] == plan.wide_gets
        assert near.counts["put"] + near.counts["create"] == plan.relay_puts
        assert near.counts["get"] + near.counts["list"] == plan.relay_gets
        assert plan.wide_bytes == pytest.approx(source.read_bytes, rel=0.1)


def test_a_loader_asks_for_what_the_model_says(followed, rates):
    cluster, moments = planned_deltas(1, rates)
    for moment, loader in zip(moments[1:], followed.loader, strict=True):
        plan = publish(moment.save, WORK, cluster, rates, Serving(replicas=1))
        assert loader.counts["get"] == plan.loader_gets
        assert plan.direct_bytes == pytest.approx(loader.read_bytes, rel=0.1)


@pytest.mark.parametrize("lost", [{1}, {0, 1}])
def test_replaced_writers_read_what_the_model_says(lost, rates, tmp_path):
    run = Run(tmp_path / "store", "consecutive", WORK, 2, 4)
    run.play()
    cluster, moments = planned_deltas(2, rates)
    found = run.recover(lost)
    plan = recovery_of(
        moments[-1].chain, len(lost), WORK, cluster, rates, documents=DocumentReads(manifests=1, others=0)
    )
    assert sum(one.counts["get"] for one in found) - 1 == plan.gets  # one of them reads the newest record
    manifests = min(one.read_bytes for one in run.recover({1}))
    assert sum(one.read_bytes for one in found) - 2 * manifests == pytest.approx(plan.size_bytes, rel=0.05)


def test_a_rank_reads_documents_as_often_in_a_restore_of_a_training(tmp_path):
    assert restored_documents(tmp_path) == (DocumentReads().manifests, DocumentReads().others)


def test_the_shortest_interval_is_what_its_own_saves_allow():
    cluster, work = Cluster(), replace(WORK, num_rows=10**10)
    found = most_deltas(work, cluster, RATES)
    save = found.save
    assert max(save.stall_s / 0.01, save.commit_s) == pytest.approx(found.interval_s, rel=1e-3)
    slow = most_saves(lambda _: replace(save, stall_s=0.0, commit_s=7.0), 0.01)
    assert (slow.bound, slow.interval_s) == ("commit", pytest.approx(7.0, rel=1e-3))
    waits, copied = (most_full(work, cluster, is_written_at_once=waits).per_hour for waits in (True, False))
    assert waits < copied < found.per_hour


def test_a_stall_has_the_fixed_costs_and_the_messages_of_all_ranks():
    cluster = Cluster(tables_per_rank=3)
    alone = replace(cluster, hop_s=0.0)
    fixed = replace(RATES, fixed=FixedCosts(stall_s=1.0, stall_table_s=0.1, background_s=10.0, background_table_s=2.0))
    plain, with_fixed, silent = (
        simulate("consecutive", WORK, one, rates) for one, rates in ((cluster, RATES), (cluster, fixed), (alone, RATES))
    )
    assert with_fixed.stall_s - plain.stall_s == pytest.approx(1.3)
    assert with_fixed.commit_s == pytest.approx(plain.commit_s, abs=16.1)
    assert with_fixed.commit_s > 16.0
    assert plain.stall_s - silent.stall_s == pytest.approx(10 * 127 * cluster.hop_s)


def test_one_rank_is_back_sooner_than_all_and_peers_relieve_the_store():
    cluster, work = Cluster(load_cores=1e6), replace(WORK, num_rows=10**10)  # the link bounds it
    chain = list(play("consecutive", work, cluster, RATES))[-1].chain
    one, host, whole = (recovery_of(chain, lost, work, cluster, RATES) for lost in (1, 8, cluster.ranks))
    from_peer = recovery_of(chain, 1, work, cluster, RATES, peer_bytes_s=1e12)
    assert one.seconds < host.seconds <= whole.seconds
    assert (host.size_bytes, whole.size_bytes) == pytest.approx((8 * one.size_bytes, 128 * one.size_bytes))
    assert from_peer.gets < one.gets < whole.gets
    assert from_peer.seconds <= one.seconds


def test_a_month_costs_what_its_parts_do():
    work, cluster, serving = replace(WORK, num_rows=10**9), Cluster(), Serving()
    moments = list(play("consecutive + compaction", work, cluster, RATES))
    plan = summed("consecutive + compaction", moments, work, cluster, RATES)
    nothing = Prices(0.0, 0.0, 0.0, 0.0)
    months = {
        name: month_of(plan, moments, work, cluster, RATES, serving, replace(nothing, **{name: 1.0}))
        for name in ("put_1000", "get_1000", "gb_month", "wide_gb")
    }
    assert months["gb_month"].total == months["gb_month"].storage == pytest.approx(4 * plan.peak_storage_bytes / 1e9)
    assert months["wide_gb"].total == months["wide_gb"].wide > 0
    for name in ("put_1000", "get_1000"):
        assert months[name].total == months[name].training + months[name].serving
        assert min(months[name].training, months[name].serving) > 0


def test_a_small_run_prints_every_policy_for_both_models(tmp_path, monkeypatch):
    target = tmp_path / "plan.json"
    options = ["--rows", "20000", "--folder", str(tmp_path), "--json", str(target), "--peer-bytes-s", "2e9"]
    monkeypatch.setattr(sys, "argv", ["bench_plan.py", *options])
    bench_plan.main()
    document = json.loads(target.read_text())
    plans = [table for table in document["tables"] if "a checkpoint every" in table["title"]]
    assert [len(table["rows"]) for table in plans] == [len(POLICIES)] * 4
    pages = document["tables"][-4:]
    assert [len(table["rows"]) for table in pages] == [8, 8, 16, 22]
    goals = {line["name"]: line["met"] for line in document["lines"] if "100 TB" in line["name"]}
    assert list(goals.values()) == [True, True]
    assert all(value > 0 for table in plans for row in table["rows"] for value in row[1:4])
