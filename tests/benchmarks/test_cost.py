import json
from dataclasses import replace

import bench_cost
import chains
import harness
import pytest
import torch
from drifting import DIM
from models import equal_tables
from peers import FULL_PEERS, Bound, Cnr, assert_same
from places import behind_link, local_disk
from trainee import Trainee

pytestmark = pytest.mark.filterwarnings("default")  # those of the peers are theirs

ROWS = 2048


@pytest.fixture
def place(tmp_path):
    return local_disk(tmp_path)


@pytest.mark.parametrize("make", FULL_PEERS)
def test_a_peer_loads_the_state_of_the_moment_of_its_save(make, place):
    trainee = Trainee(ROWS)
    peer = make()
    peer.open(place, trainee)
    expected = trainee.copy()

    wait = peer.save()
    trainee.touch(0.5)
    trainee.forget()
    if wait is not None:
        wait()
    peer.load()

    assert_same(expected, trainee.tensors)
    assert peer.size_bytes > 0.5 * trainee.size_bytes
    peer.close()
    assert place.size_bytes(place.root) == 0


@pytest.mark.parametrize("bits", [2, 4, 8, None])
def test_a_restored_state_is_that_of_the_moment_of_its_save_within_bounds(bits, place):
    trainee = Trainee(ROWS)
    store = Cnr(bits)
    store.open(place, trainee)
    store.save()()
    store.touch(0.1)
    expected = trainee.copy()

    wait = store.save()
    trainee.touch(0.5)
    trainee.forget()
    wait()
    store.load()

    bounds = store.bounds()
    slots = {name for name in trainee.tensors if name.startswith("optimizer.tables.")}
    assert bounds.keys() == set(trainee.table_names) | slots
    if bits is None:
        assert set(bounds.values()) == {Bound()}
    else:
        assert all(0 < bounds[name].absolute < 0.2 and bounds[name].relative == 0 for name in trainee.table_names)
        assert all(bounds[name] == Bound(relative=2.0**-5) for name in slots)
    assert_same(expected, trainee.tensors, bounds)
    assert len(store.chain_bytes()) == 2
    store.close()


def test_a_difference_is_seen_wherever_it_is():
    trainee = Trainee(ROWS)
    expected = trainee.copy()
    bounds = dict.fromkeys(trainee.table_names, Bound(absolute=0.01))
    bounds |= {name: Bound(relative=2.0**-5) for name in trainee.tensors if name.startswith("optimizer.tables.")}
    for name, tensor in trainee.tensors.items():
        tensor.flatten()[-1:].add_(0.5) if tensor.dim() else tensor.add_(0.5)
        with pytest.raises(SystemExit, match=name):
            assert_same(expected, trainee.tensors, bounds)
        trainee.start_again()
    assert_same(expected, trainee.tensors)


def test_what_is_touched_is_the_share_that_was_asked_for_and_marked():
    trainee = Trainee(ROWS)
    before = trainee.copy()
    touched = trainee.touch(0.25)
    for name in trainee.table_names:
        moved = (trainee.tensors[name] != before[name]).any(dim=1).nonzero().flatten()
        assert torch.equal(moved, touched[name])
        assert len(moved) == ROWS // 4 // 4
    trainee.start_again()
    assert all(torch.equal(one, two) for one, two in zip(trainee.touch(0.25).values(), touched.values(), strict=True))


def test_the_report_adds_up(place, tmp_path, capsys):
    report = harness.Report("cost")
    size = replace(bench_cost.QUICK, model=equal_tables(ROWS, DIM), qualities=(8,))
    costs = bench_cost.measure_peers(report, place, Trainee(ROWS), size)

    assert set(costs.saves) >= {peer.name for peer in FULL_PEERS} | {"cnr_store, 8-bit, 10% touched"}
    for kept in [*costs.saves.values(), *costs.loads.values()]:
        for cost in kept:
            assert 0 < cost.stall_s <= cost.done_s
            assert 0 <= cost.stall_cpu_s <= cost.cpu_s
            assert cost.size_bytes > 0
    sizes = {name: kept[0].size_bytes for name, kept in costs.saves.items()}
    assert sizes["cnr_store, 8-bit, 1% touched"] < sizes["cnr_store, 8-bit, 25% touched"] < sizes["torch.save"]
    report.finish(str(tmp_path / "cost.json"))
    document = json.loads((tmp_path / "cost.json").read_text())
    saves, loads = document["tables"]
    assert [row[0] for row in saves["rows"]] == list(costs.saves)
    assert [row[0] for row in loads["rows"]] == list(costs.loads)
    assert len(document["plots"]) == 2
    assert "local disk, 8-bit, 10 % touched, bytes / torch.save" in capsys.readouterr().out


def test_compaction_between_deltas_changes_no_bit_and_shortens_the_chain(place, capsys):
    report = harness.Report("chains")
    found = chains.measure(report, place, Trainee(ROWS), (1, chains.COMPACT_EVERY), 1)

    assert {(chain.kind, chain.deltas) for chain in found} == {
        (kind, deltas)
        for kind in (chains.WRITTEN, chains.COMPACTED, chains.ONE_SEGMENT)
        for deltas in (1, chains.COMPACT_EVERY)
    }  # fmt: skip
    segments = {(row[1], row[0]): row[2] for row in report.tables[0].rows}
    assert segments[chains.WRITTEN, chains.COMPACT_EVERY] == 1 + chains.COMPACT_EVERY
    assert segments[chains.COMPACTED, chains.COMPACT_EVERY] < 1 + chains.COMPACT_EVERY
    assert segments[chains.ONE_SEGMENT, chains.COMPACT_EVERY] == 1
    megabytes = {(row[1], row[0]): row[3] for row in report.tables[0].rows}
    assert megabytes[chains.ONE_SEGMENT, chains.COMPACT_EVERY] < megabytes[chains.WRITTEN, chains.COMPACT_EVERY]
    assert report.plots[0].series.keys() == {chains.WRITTEN, chains.COMPACTED, chains.ONE_SEGMENT}


@pytest.mark.servers
def test_every_peer_saves_to_and_loads_from_an_object_store_behind_a_link(seaweed, s3_bucket, tmp_path):
    trainee = Trainee(ROWS)
    with behind_link(seaweed, s3_bucket, tmp_path, 1.0) as place:
        costs = bench_cost.Costs(trainee.size_bytes)
        for make in FULL_PEERS:
            bench_cost.run_full_peer(make, place, trainee, costs)
        bench_cost.run_store(lambda: Cnr(8), place, trainee, costs, (0.1,))

        assert all(kept[0].size_bytes > 0 for kept in costs.saves.values())
        assert place.size_bytes(place.root) == 0
