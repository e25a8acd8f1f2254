"""compact, gc, maintain: their output, their changes, and their exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cnr_store import Store, TableOptions
from cnr_store.maintenance.compaction.lease import LeasePlace, new_lease
from tests.support.snapshot_bytes import bytes_of
from tests.tools.cli_runner import Outcome, cnr
from tests.tools.sample_store import flip, object_files

AT_ONCE = ("--grace", "0", "--orphan-age", "0", "--force")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Versions: 2 is a baseline, 3 to 10 are deltas; a branch from version 4."""
    random = np.random.default_rng(7)
    values = random.normal(size=(400, 8)).astype(np.float32)
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as store:
        with store.writer() as writer:
            with writer.begin(step=0) as txn:
                txn.write_table("user", values)
            for step in range(1, 9):
                rows = np.sort(random.choice(400, 30, replace=False))
                values[rows] += 0.1
                with writer.begin(step=step) as txn:
                    txn.write_rows("user", rows, values[rows])
        store.fork("trial", 4).close()
    return tmp_path / "store"


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in object_files(root)}


def state(root: Path) -> dict[str, bytes]:
    with Store.open(str(root)) as store:
        return bytes_of(store.snapshot())


def spoil(root: Path) -> None:
    chunk = next(root.glob("data/*9-*/*add-0.codes/c.0.0"))
    chunk.write_bytes(flip(chunk.read_bytes()))


def assert_ends_with(done: Outcome, code: int) -> None:
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.err


def test_compact_runs_until_there_is_nothing_to_do_and_changes_no_state(root: Path) -> None:
    before = state(root)

    done = cnr("compact", root, "--max-chain", 2, "--json")

    assert_ends_with(done, 0)
    compactions = done.document["compactions"]
    assert [one["outcome"] for one in compactions[:-1]] == ["committed"] * (len(compactions) - 1)
    assert compactions[-1]["outcome"] == done.document["outcome"] == "nothing"
    assert compactions[-1]["chain_after"] <= 2
    assert done.document["bytes_in"] > done.document["bytes_out"] > 0
    assert state(root) == before
    assert "nothing to compact" in cnr("compact", root, "--max-chain", 2).out


def test_compact_of_a_branch_leaves_the_stores_own_log(root: Path) -> None:
    before = cnr("log", root, "--json").document

    done = cnr("compact", root, "--branch", "trial", "--max-chain", 1, "--json")

    assert (done.code, done.document["branch"]) == (0, "trial")
    assert len(cnr("show", root, "--branch", "trial", "--json").document["chain"]) == 1
    assert cnr("log", root, "--json").document == before


def test_compact_dry_run_says_what_and_why_and_changes_nothing(root: Path) -> None:
    before = contents(root)

    plain = cnr("compact", root, "--max-chain", 2, "--dry-run")
    as_json = cnr("compact", root, "--max-chain", 2, "--dry-run", "--json").document

    assert_ends_with(plain, 0)
    assert re.search(r"would compact \d+ segments, .*; about [\d.]+ [KM]iB", plain.out)
    assert as_json["compactions"][0]["reason"] in plain.out
    assert as_json["outcome"] == "planned"
    assert contents(root) == before


def test_compact_without_time_ends_with_nine(root: Path) -> None:
    done = cnr("compact", root, "--max-chain", 2, "--budget", "0")

    assert_ends_with(done, 9)
    assert cnr("log", root, "--json").document["records"][0]["kind"] == "fork"


def test_compact_leaves_work_that_is_under_way_alone_unless_forced(root: Path) -> None:
    with Store.open(str(root), fsync=False) as store:
        head = store.head().record
        lease = new_lease([entry.seg for entry in head.chain], head.v, "0" * 64, "another:1")
        LeasePlace(store.storage, store.internals.log).put(lease, 600.0)

    busy = cnr("compact", root, "--max-chain", 2)
    forced = cnr("compact", root, "--max-chain", 2, "--force")

    assert_ends_with(busy, 5)
    assert re.search(r"another:1 is compacting it; its lease ends in (600|5\d\d) s", busy.out)
    assert_ends_with(forced, 0)


def test_a_dry_run_of_gc_explains_and_changes_nothing(root: Path) -> None:
    cnr("compact", root, "--max-chain", 1)
    before = contents(root)

    plain = cnr("gc", root, "--keep-last", 1, "--dry-run")
    as_json = cnr("gc", root, "--keep-last", 1, "--dry-run", "--json").document

    assert_ends_with(plain, 0)
    assert contents(root) == before
    assert as_json["is_dry_run"] is True
    stays = {item["version"]: item["stays"] for item in as_json["versions"] if item["branch"] is None}
    assert stays[4] is True
    assert stays[5] is False
    named = [item for item in as_json["segments"] if item["state"] == "marked"]
    assert len(named) == as_json["marked"] > 0
    assert all(item["size_bytes"] > 0 for item in named)
    assert "branch 'trial' begins here" in plain.out
    assert "no rule keeps it" in plain.out
    assert named[0]["name"] in plain.out
    assert "this was a dry run: nothing was changed" in plain.out


def test_gc_deletes_after_the_grace_and_keeps_every_state_that_stays(root: Path) -> None:
    cnr("compact", root, "--max-chain", 1)
    before = state(root)

    done = cnr("gc", root, "--keep-last", 1, *AT_ONCE, "--json")

    assert_ends_with(done, 0)
    assert done.document["outcome"] == "collected"
    assert done.document["deleted_segments"] == len(
        [item for item in done.document["segments"] if item["state"] == "deleted"]
    )
    assert done.document["deleted_bytes"] > 0
    assert state(root) == before
    assert cnr("verify", root, "--all", "--deep").code == 0
    assert cnr("show", root, "--version", 6).code == 3
    assert cnr("gc", root, "--keep-last", 1, *AT_ONCE, "--json").document["outcome"] == "clean"


def test_gc_gives_up_now_and_deletes_later(root: Path) -> None:
    cnr("compact", root, "--max-chain", 1)
    folders = sorted((root / "data").iterdir())

    done = cnr("gc", root, "--keep-last", 1)

    assert_ends_with(done, 0)
    assert sorted((root / "data").iterdir()) == folders
    waiting = [
        item for item in cnr("gc", root, "--dry-run", "--json").document["segments"] if item["state"] == "waiting"
    ]
    assert waiting
    assert all(item["size_bytes"] > 0 for item in waiting)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--keep-last", "3"), {2, 8, 9, 10, 11}),
        (("--keep-last", "1", "--keep-every", "4"), {2, 5, 9, 10, 11}),
        (("--keep-last", "1", "--keep-within", "1h"), set(range(12))),
    ],
)
def test_gc_keeps_what_its_options_say(root: Path, options: tuple[str, ...], kept: set[int]) -> None:
    cnr("tag", root, "first", "--version", 2)
    cnr("drop-branch", root, "trial")

    found = cnr("gc", root, *options, "--dry-run", "--json").document["versions"]

    stays = {item["version"] for item in found if item["branch"] is None and item["stays"]}
    assert {version for version in stays if version < 12} == kept


def test_maintain_compacts_expires_deletes_and_then_has_nothing_to_do(root: Path) -> None:
    before = state(root)

    first = cnr("maintain", root, "--max-chain", 2, "--keep-last", 1, *AT_ONCE, "--budget", "30m", "--json")
    second = cnr("maintain", root, "--max-chain", 2, "--keep-last", 1, *AT_ONCE, "--budget", "30m", "--json")

    assert_ends_with(first, 0)
    stages = first.document["stages"]
    assert [(item["stage"], item["branch"], item["outcome"]) for item in stages] == [
        ("compact", None, "done"), ("compact", "trial", "done"), ("collect", None, "done"),
    ]  # fmt: skip
    assert first.document["outcome"] == "done"
    assert first.document["rewritten_bytes"] > 0
    assert first.document["deleted_bytes"] > 0
    assert stages[2]["collection"]["expired"] > 0
    assert {item["state"] for item in stages[2]["collection"]["segments"]} == {"deleted"}
    assert (second.code, second.document["rewritten_bytes"], second.document["deleted_bytes"]) == (0, 0, 0)
    assert state(root) == before
    assert cnr("verify", root, "--all", "--deep").code == 0


def test_maintain_for_people_has_a_line_for_each_part_and_the_sum(root: Path) -> None:
    done = cnr("maintain", root, "--max-chain", 2)

    assert "compacted" in done.out
    assert "nothing to compact" not in done.out
    assert cnr("maintain", root, "--max-chain", 2).out.count("nothing to compact") == 2  # the log, the branch
    lines = done.out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "compact", "compact branch trial", "collect", str(root),
    ]  # fmt: skip
    assert "rewritten" in lines[-1]
    assert done.err == ""


def test_maintain_dry_run_changes_nothing(root: Path) -> None:
    before = contents(root)

    done = cnr("maintain", root, "--max-chain", 2, "--keep-last", 1, "--dry-run")

    assert_ends_with(done, 0)
    assert "would compact" in done.out
    assert "would expire" in done.out
    assert contents(root) == before


def test_maintain_that_the_budget_ends_says_so_by_its_code(root: Path) -> None:
    done = cnr("maintain", root, "--max-chain", 2, "--budget", "0", "--json")

    assert_ends_with(done, 9)
    assert done.document["outcome"] == "stopped"


def test_maintain_of_a_damaged_store_deletes_nothing_and_exits_as_corrupt(root: Path) -> None:
    spoil(root)
    folders = sorted((root / "data").iterdir())

    plain = cnr("maintain", root, "--max-chain", 2, "--keep-last", 1, *AT_ONCE)
    as_json = cnr("maintain", root, "--max-chain", 2, "--keep-last", 1, *AT_ONCE, "--json")

    assert (plain.code, as_json.code) == (6, 6)
    assert plain.err.startswith("error: compact: ")
    assert plain.err.count("\n") == 1
    assert "nothing is deleted from a store with corrupt data" in plain.out
    assert as_json.err == ""
    assert [item["outcome"] for item in as_json.document["stages"]] == ["failed", "done", "skipped"]
    assert as_json.document["stages"][0]["error"]["kind"] == "corrupt_object"
    assert set(folders) <= set((root / "data").iterdir())


def test_maintain_replaces_the_metrics_file_when_it_fails_too(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "cnr.prom"
    spoil(root)

    done = cnr("maintain", root, "--max-chain", 2, "--metrics-file", path)

    families = {family.name: family for family in text_string_to_metric_families(path.read_text())}
    outcome = {sample.labels["outcome"]: sample.value for sample in families["cnr_maintenance_outcome"].samples}
    assert done.code == 6
    assert outcome == {"done": 0, "stopped": 0, "failed": 1}
    assert families["cnr_up"].samples[0].value == 1


def test_a_metrics_file_says_that_the_store_could_not_be_opened(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "cnr.prom"
    cnr("maintain", root, "--metrics-file", path)
    (root / "cnr.json").unlink()

    done = cnr("maintain", root, "--metrics-file", path)

    samples = [one for family in text_string_to_metric_families(path.read_text()) for one in family.samples]
    assert done.code == 3
    assert [(one.name, one.labels, one.value) for one in samples] == [("cnr_up", {"store": str(root)}, 0)]
    assert done.err.count("\n") == 1


def test_a_metrics_file_that_cannot_be_written_does_not_hide_the_run(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "cnr.prom"

    plain = cnr("maintain", root, "--max-chain", 2, "--metrics-file", path)
    as_json = cnr("maintain", root, "--max-chain", 2, "--metrics-file", path, "--json")

    assert (plain.code, as_json.code) == (7, 7)
    assert plain.err.startswith("error: metrics file: ")
    assert "collect: done" in plain.out
    assert as_json.document["outcome"] == "done"
    assert "cnr.prom" in as_json.document["metrics_file_error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("compact", "--max-chain", "0"),
        ("compact", "--fanout", "1"),
        ("compact", "--max-restore-ratio", "1"),
        ("compact", "--bandwidth", "fast"),
        ("compact", "--budget", "30"),
        ("gc", "--keep-last", "0"),
        ("gc", "--keep-every", "0"),
        ("gc", "--keep-within", "a week"),
        ("gc", "--grace", "10s"),
        ("gc", "--orphan-age", "1h"),
        ("maintain", "--grace", "10s"),
        ("maintain", "--orphan-age", "1h"),
        ("maintain", "--budget", "-1s"),
        ("maintain", "--keep-last", "0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_and_nothing_is_done(root: Path, arguments: tuple[str, ...]) -> None:
    before = contents(root)

    done = cnr(arguments[0], root, *arguments[1:])

    assert_ends_with(done, 4)
    assert done.out == ""
    assert contents(root) == before


def test_maintain_of_a_torn_log_does_nothing_and_tells_the_monitor(root: Path, tmp_path: Path) -> None:
    record = max((root / "commits").iterdir())
    record.write_bytes(record.read_bytes()[:50])
    before = contents(root)

    done = cnr("maintain", root, *AT_ONCE, "--metrics-file", tmp_path / "cnr.prom")

    assert_ends_with(done, 6)
    assert done.out == ""
    assert contents(root) == before
    assert 'cnr_up{store="' in (tmp_path / "cnr.prom").read_text()
    families = text_string_to_metric_families((tmp_path / "cnr.prom").read_text())
    assert [(family.name, family.samples[0].value) for family in families] == [("cnr_up", 0)]


def test_maintain_in_its_own_process_compacts_beside_a_writer_that_goes_on(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    random = np.random.default_rng(5)
    values = random.normal(size=(300, 8)).astype(np.float32)
    program = str(Path(sys.executable).with_name("cnr"))
    command = [program, "maintain", url, "--max-chain", "2", "--keep-last", "1", "--json"]
    runs = []

    with Store.create(url, fsync=False, threads=2) as store, store.writer() as writer:
        with writer.begin(step=0) as txn:
            txn.write_table("user", values, options=TableOptions.exact())
        for _ in range(2):
            with (tmp_path / "report.json").open("w") as out:
                running = subprocess.Popen(command, stdout=out)
            while running.poll() is None:
                time.sleep(0.05)
                rows = np.sort(random.choice(300, 30, replace=False))
                values[rows] += 0.1
                with writer.begin(step=store.head().record.step + 1) as txn:
                    txn.write_rows("user", rows, values[rows])
            runs.append((running.returncode, json.loads((tmp_path / "report.json").read_text())))
        kinds = [record.kind for record in store.log()]

    assert [(code, document["outcome"]) for code, document in runs] == [(0, "done")] * 2
    assert "compact" in kinds
    with Store.open(url) as store:
        assert store.snapshot().table("user").read().tobytes() == values.tobytes()
    assert cnr("verify", url, "--all", "--deep").code == 0
