"""A save says what it is: message, metrics, metadata and git commit; the best saves are found and kept by a metric."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cnr_store import BadInput, KeepBest, RetentionPolicy, Store, collect_garbage
from cnr_store.errors import VersionNotFound
from cnr_store.format.notes import checked_notes, metrics_of
from cnr_store.runtime.git_commit import git_commit
from cnr_store.training import CheckpointManager, SavePolicy, SaveReport
from tests.tools.cli_runner import cnr
from tests.training.runs import Training

LOSSES = [0.5, 0.2, 0.4, 0.2, 0.7]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    training = Training("sgd")
    policy = SavePolicy(git=False)
    with CheckpointManager(
        str(tmp_path / "run"), model=training.model, optimizer=training.optimizers, save_policy=policy
    ) as manager:
        for number, loss in enumerate(LOSSES):
            training.train(number)
            manager.step()
            manager.save(message=f"epoch {number}", metrics={"loss": loss, "auc": 1 - loss}, metadata={"lr": [0.1]})
        training.train(9)
        manager.step()
        manager.save()
    return tmp_path / "run"


def test_a_save_records_its_notes_and_the_command_prints_them(root: Path) -> None:
    with Store.open(str(root)) as store:
        (newest, before) = store.log(limit=2)

    assert newest.user.keys() == {"timing"}
    assert {name: value for name, value in before.user.items() if name != "timing"} == {
        "message": "epoch 4", "metrics": {"loss": 0.7, "auc": 1 - 0.7}, "metadata": {"lr": [0.1]},
    }  # fmt: skip
    assert cnr("log", root).out.count("epoch 4, auc 0.3, loss 0.7") == 1
    assert "saved with: epoch 4, auc 0.3, loss 0.7" in cnr("show", root, "--step", "5").out


def test_a_save_records_how_long_the_training_waited(tmp_path: Path) -> None:
    training = Training("sgd")
    reports: list[SaveReport] = []
    with CheckpointManager(
        str(tmp_path / "run"), model=training.model, optimizer=training.optimizers,
        save_policy=SavePolicy(on_save=reports.append),
    ) as manager:  # fmt: skip
        for number in range(3):
            training.train(number)
            manager.step()
            manager.save()
        manager.wait_until_finished()
        timings = [manager.store.record(report.version).user["timing"] for report in reports]

    assert len(timings) == 3
    for report, timing in zip(reports, timings, strict=True):
        assert timing["encode_s"] == pytest.approx(report.encode_s, abs=1e-6)
        assert 0 < timing["stall_s"] <= report.stall_s + 1e-6


def test_the_best_version_is_found_by_a_metric(root: Path) -> None:
    with Store.open(str(root)) as store:
        assert store.best("auc").step == 4  # of equal values the newer
        assert store.best("loss", best="smallest").step == 4
        assert store.best("loss").step == 5
        with pytest.raises(VersionNotFound, match=r"'accuracy'; the metrics are \['auc', 'loss'\]"):
            store.best("accuracy")
        with pytest.raises(BadInput):
            store.best("auc", best="newest")  # type: ignore[arg-type]


def test_retention_keeps_the_best_saves(root: Path) -> None:
    policy = RetentionPolicy(keep_last=1, keep_best=KeepBest("loss", 3, "smallest"))
    with Store.open(str(root)) as store:
        collect_garbage(store, policy=policy, grace_s=0, force=True)
        assert store.steps() == [2, 3, 4, 6]
        assert store.best("loss").step == 3
    assert cnr("gc", root, "--keep-last", "1", "--keep-best", "auc:1", "--grace", "0", "--force").code == 0
    with Store.open(str(root)) as store:
        assert store.steps() == [4, 6]
    assert cnr("gc", root, "--keep-best", "auc").code == 4


def test_a_collection_by_a_metric_that_no_save_has_keeps_all(root: Path) -> None:
    """With a mistyped name the best versions expired; then it was an error, also in cron before the first such save."""
    for command in ("gc", "maintain"):
        for option in ([], ["--dry-run"]):
            rule = ("--keep-last", "1", "--keep-best", "acu:1")
            done = cnr(command, root, *rule, "--grace", "0", "--force", *option)

            assert done.code == 0
            assert "warning: keep_best is by the metric 'acu', which no live version has" in done.out
            assert "they have 'auc', 'loss'. All checkpoints are kept" in done.out
    with Store.open(str(root)) as store:
        assert store.steps() == [1, 2, 3, 4, 5, 6]
    assert "warning" not in cnr("gc", root, "--keep-best", "acu:1").out  # nothing expires


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"message": "x" * 1025}, "1025 bytes"),
        ({"metrics": {"a": float("nan")}}, "finite"),
        ({"metrics": {"a": "much"}}, "number"),
        ({"metrics": {"": 1.0}}, "name"),
        ({"metrics": {str(n): 1.0 for n in range(65)}}, "65 names"),
        ({"metadata": {"a": "x" * 8192}}, "bytes"),
        ({"metadata": {"a": object()}}, "JSON"),
    ],
)
def test_notes_that_a_record_cannot_have_are_refused(given: dict[str, Any], named: str) -> None:
    notes = {"message": None, "metrics": None, "metadata": None, **given}

    with pytest.raises(BadInput, match=named):
        checked_notes(**notes)


def test_metrics_of_a_foreign_record_are_taken_as_far_as_they_are_numbers(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    with store.writer() as writer:
        txn = writer.begin(step=1)
        version = txn.commit(user={"metrics": {"a": 1, "b": "x", "c": None, "d": [2]}})
        assert metrics_of(store.record(version)) == {"a": 1.0}
        version = writer.begin(step=2).commit(user={"metrics": 7})
    assert metrics_of(store.record(version)) == {}


def test_the_git_commit_is_read_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        command = ["git", "-C", str(tmp_path / "code"), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "code" / "deep").mkdir(parents=True)
    assert git_commit(tmp_path / "code") in (None, git_commit(tmp_path))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    head = git("rev-parse", "HEAD")
    monkeypatch.setattr(subprocess, "Popen", None)

    assert git_commit(tmp_path / "code" / "deep") == head
    monkeypatch.undo()
    git("pack-refs", "--all")
    git("worktree", "add", "-q", str(tmp_path / "tree"))
    assert git_commit(tmp_path / "code") == git_commit(tmp_path / "tree") == head
    git("checkout", "-q", "--detach")
    assert git_commit(tmp_path / "code") == head
    (tmp_path / "code" / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert git_commit(tmp_path / "code") is None


def test_a_save_has_the_git_commit_unless_it_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.training.saver.git_commit", lambda: "a" * 40)
    found = []
    for name, policy in (("on", SavePolicy()), ("off", SavePolicy(git=False))):
        training = Training("sgd")
        with CheckpointManager(
            str(tmp_path / name), model=training.model, optimizer=training.optimizers, save_policy=policy
        ) as manager:
            manager.step()
            manager.save()
            found.append(manager.store.head().record.user.get("git"))

    assert found == ["a" * 40, None]
