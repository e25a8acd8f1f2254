"""`verify_store` on the logs of a store: gaps, stray records, and the branches."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Problem, Store, VerifyReport, verify_store
from cnr_store.format.layout import DATA, commit_key
from tests.tools.sample_store import build_store, flip

FAR = 10**12


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample store (versions 0 to 6) and a branch of its head with a delta of its own (0 fork, 1 fence, 2)."""
    root = tmp_path_factory.mktemp("verify") / "store"
    with build_store(root) as store, store.fork("trial") as branch, branch.writer() as writer:
        writer.restore()
        with writer.begin(step=50) as txn:
            txn.delete_rows("user", np.asarray([11]))
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def check(root: Path, branch: str | None = None, **options: bool | int) -> VerifyReport:
    with Store.open(str(root), branch=branch) as store:
        return verify_store(store, **options)  # type: ignore[arg-type]


def short(problem: Problem) -> tuple[str, str, str | None, tuple[int, ...]]:
    return problem.kind, problem.path, problem.branch, problem.versions


def chain(root: Path, branch: str | None = None) -> list[str]:
    with Store.open(str(root), branch=branch) as store:
        return [item.seg for item in store.head().record.chain]


def damage(root: Path, segment: str, objects: str) -> str:
    """Flip a bit of one object of a segment; return its key."""
    chunk = next((root / DATA / segment).glob(objects))
    chunk.write_bytes(flip(chunk.read_bytes()))
    return chunk.relative_to(root).as_posix()


@pytest.mark.parametrize("gone", [range(1, 2), range(2, 5), range(4)])
def test_neighbouring_positions_that_are_gone_are_one_problem(root: Path, gone: range) -> None:
    for version in gone:
        (root / commit_key(version)).unlink()

    (problem,) = check(root, all_versions=True).problems

    assert short(problem) == ("missing_object", commit_key(gone[0]), None, tuple(gone))
    assert all(str(number) in problem.message for number in (gone[0], gone[-1]))


def test_a_stray_record_far_behind_the_log_costs_nothing(root: Path) -> None:
    """Regression: one problem per empty position took minutes, and a gigabyte per million positions."""
    (root / commit_key(FAR)).write_bytes(b"{")

    report = check(root)

    assert [short(problem)[:3] for problem in report.problems] == [
        ("corrupt_record", commit_key(FAR), None), ("missing_object", commit_key(8), None),
    ]  # fmt: skip
    assert f"8 to {FAR - 1}" in report.problems[1].message
    assert report.head == 7


def test_damage_of_a_branch_alone_is_named_with_the_branch(root: Path) -> None:
    """Regression: the store was reported as sound."""
    key = damage(root, chain(root, "trial")[-1], "r*.delete-0.rows/c.0.0")

    report = check(root)

    assert not report.is_sound
    assert short(report.problems[0]) == ("corrupt_object", key, "trial", (2,))
    assert report.restorable, "the store's own versions are whole"
    assert [(other.branch, other.is_read, other.head, other.restorable) for other in report.others] == [
        ("trial", True, 2, (1, 0))
    ]


def test_damage_that_logs_share_hurts_versions_of_each(root: Path) -> None:
    key = damage(root, chain(root)[-1], "r*.delete-0.rows/c.0.0")

    found = {short(problem) for problem in check(root).problems}

    assert found == {("corrupt_object", key, None, (5, 6, 7)), ("corrupt_object", key, "trial", (0, 1, 2))}


def test_a_torn_record_of_a_branch_and_a_lost_log_are_problems(root: Path) -> None:
    (branch,) = (root / "branches").iterdir()
    newest = branch / commit_key(2)
    newest.write_bytes(newest.read_bytes()[:9])

    assert [short(problem)[2:] for problem in check(root).problems] == [("trial", (2,))]
    shutil.rmtree(branch)
    assert [short(problem)[:3] for problem in check(root).problems] == [
        ("corrupt_store", f"branches/{branch.name}/commits/", "trial")
    ]


def test_branches_whose_logs_were_mixed_up_are_problems(root: Path) -> None:
    with Store.open(str(root)) as store:
        store.fork("other").close()
        logs = {pin.name: f"branches/{uuid}/{commit_key(0)}" for uuid, pin in store.head().record.pins.items()}
    (root / logs["other"]).write_bytes((root / logs["trial"]).read_bytes())

    (problem,) = check(root).problems

    assert (problem.path, problem.branch, "mixed with" in problem.message) == (logs["other"], "other", True)


def test_what_logs_share_is_read_once(root: Path) -> None:
    rows: list[int] = []

    with Store.open(str(root)) as store:
        before = verify_store(store, deep=True)
        store.fork("same").close()
        report = verify_store(
            store, deep=True, progress=lambda stage, _, total: rows.append(total) if stage == "states" else None
        )

    assert report.is_sound
    assert [total for total, _ in groupby(rows)] == [490, 0, 490], "`same` is as the store, `trial` is longer"
    assert (report.segments, report.objects, report.size_bytes) == (before.segments, before.objects, before.size_bytes)
    assert [other.branch for other in report.others] == ["same", "trial"]


@pytest.mark.parametrize(("branch", "version"), [("trial", None), (None, 5)])
def test_a_check_of_one_log_reads_the_records_of_the_others_and_says_so(
    root: Path, branch: str | None, version: int | None
) -> None:
    with Store.open(str(root)) as store:
        store.fork("second").close()

    report = check(root, branch) if version is None else check(root, branch, version=version)

    assert report.is_sound
    assert report.branch == branch
    rest = [None, "second"] if branch else ["second", "trial"]
    assert [(other.branch, other.is_read, other.versions) for other in report.others] == [
        (name, False, ()) for name in rest
    ]
    assert report.unreferenced == 0
