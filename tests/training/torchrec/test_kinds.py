"""TorchRec as people run it, on four gloo ranks of two hosts, then on two: saved, left, resumed bit for bit.

What cannot be saved is refused by name, before anything is saved; `docs/torchrec.md` lists both.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program

KINDS = (
    "fused_uvm", "fused_uvm_caching", "grid", "table_row_wise", "table_column_wise", "fp16", "int8", "processed",
    "fused_collection", "sequence", "compiled", "dense",
)  # fmt: skip
"""Names of `kinds.KINDS`, which needs TorchRec to be imported."""
RUNS = [(kind, world) for kind in KINDS for world in (4, 2) if world == 2 or kind not in ("compiled", "dense")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first test waits for all ranks
    pytest.mark.skipif(
        importlib.util.find_spec("torchrec") is None, reason="torchrec and fbgemm-gpu are not installed"
    ),
]


def run_ranks(workers: Launcher, folder: Path, world: int, call: str) -> list[dict[str, str]]:
    """What went wrong on each rank, by name of the check."""
    code = f"import sys, tests.training.torchrec.kinds_worker as worker; worker.{call}"
    ranks = [Program(["-c", code, str(rank), str(folder)]) for rank in range(world)]
    for ended in workers.run(*ranks, folder=folder, timeout_s=500):
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, workers: Launcher) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("kinds")
    return run_ranks(workers, folder, 4, f"main(int(sys.argv[1]), sys.argv[2], {','.join(KINDS)!r})")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory, workers: Launcher) -> list[dict[str, str]]:
    return run_ranks(workers, tmp_path_factory.mktemp("refusals"), 2, "refuse(int(sys.argv[1]), sys.argv[2])")


def check(name: str, reports: list[dict[str, str]]) -> None:
    problems = [report[name] for report in reports if report.get(name)]

    assert not problems, "\n".join(problems)
    assert any(name in report for report in reports), f"not run: {[text for one in reports for text in one.values()]}"


@pytest.mark.parametrize(("kind", "world"), RUNS)
def test_a_kind_is_saved_and_resumed(kind: str, world: int, trainings: list[dict[str, str]]) -> None:
    check(f"{kind} on {world} ranks", trainings)


REFUSALS = (
    "key_value_kernels", "a_uvm_cache_on_a_device", "a_managed_collision_collection", "a_pruned_collection",
    "a_single_embedding_bag", "two_dimensions", "an_unknown_module", "stashed_memory",
    "managed_collision_on_several_ranks",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_saved_is_refused(name: str, refusals: list[dict[str, str]]) -> None:
    check(name, refusals)


@pytest.mark.parametrize(("kind", "lost"), [("fp16", 0), ("table_row_wise", 3)])
def test_survivors_of_a_killed_rank_keep_their_rows(kind: str, lost: int, workers: Launcher, tmp_path: Path) -> None:
    code = "import sys, tests.training.torchrec.survivors as survivors; survivors.main(int(sys.argv[1]), {})"
    calls = [f"{str(tmp_path)!r}, {kind!r}, {lost}, {is_new}" for is_new in (False, True)]
    ranks = [Program(["-c", code.format(calls[0]), str(rank)]) for rank in range(4)]
    ranks.append(Program(["-c", code.format(calls[1]), str(lost)]))

    ended = workers.run(*ranks, folder=tmp_path, timeout_s=240)

    expected = [-9 if rank == lost else 0 for rank in range(4)] + [0]
    assert [one.returncode for one in ended] == expected, "\n".join(one.stdout + one.stderr for one in ended)
    assert (tmp_path / "recovered").exists()


def test_every_kind_and_refusal_is_run(trainings: list[dict[str, str]], refusals: list[dict[str, str]]) -> None:
    assert trainings[0].keys() == {f"{kind} on {world} ranks" for kind, world in RUNS}
    assert refusals[0].keys() == set(REFUSALS)
