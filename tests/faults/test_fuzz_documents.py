"""Mutated documents, damaged objects: every door gives right data or an error of the tree, in bounded time and memory.

Cases are chosen by seeds and run in processes of their own (`tests.faults.fuzz_program`, which repeats one of them).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import Launcher, Program

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "format_spec" / "golden" / "negative" / "vectors.json").read_text())
PROGRAM = "tests.faults.fuzz_program"
SOAK_S = 24 * 3600.0
CI_CASES, CI_TRAININGS, SOAK_CASES, SOAK_TRAININGS, PROCESSES = 120, 16, 10_000, 1_000, 2

HOSTILE = (
    "chain_entry_counts_other_rows", "delta_without_a_chain", "dense_array_that_is_not_there", "dense_empty_digest",
    "dense_shape_beyond_its_pack", "dense_shape_of_2_pow_63", "dim_changes", "floor_beyond_the_log",
    "hashed_keys_of_a_dense_table", "hashed_scale_changes", "hostile_base_digest", "hostile_group_path",
    "hostile_state_digest", "negative_epoch", "record_nests_too_deep", "rows_beyond_2_pow_50", "slot_precision_changes",
    "torn_record",
)  # fmt: skip
"""Statements that got past the readers once, or past the doors behind them."""


@dataclass
class Tally:
    """What became of the cases: outcomes of doors by kind of document, and what no outcome may be."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    by_door: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    peak_mib: int = 0

    def take(self, line: dict[str, Any]) -> None:
        if "peak_mib" in line:
            self.peak_mib = max(self.peak_mib, line["peak_mib"])
            return
        self.cases += 1
        kind = f"{line['kind']}, {line['form']}"
        for door, outcome in line["doors"].items():
            self.outcomes[outcome] += 1
            self.by_kind.setdefault(kind, Counter())[outcome] += 1
            self.by_door.setdefault(door, Counter())[outcome] += 1
        is_training = "--training " if "load" in line["doors"] else ""
        again = f"--vectors {line['what']}" if line["kind"] == "vector" else f"--first {line['seed']} --count 1"
        command = f"python -m {PROGRAM} {is_training}{again} --doors {len(line['doors']) - 1} --verbose"
        what = f"{line['sample']}: {line['what']}"
        self.failures += [f"{failure}\n    {what}\n    {command}" for failure in line["failures"]]

    def __str__(self) -> str:
        def rows(counters: dict[str, Counter[str]]) -> list[str]:
            return [
                f"  {name:28} " + ", ".join(f"{kind} {number}" for kind, number in found.most_common())
                for name, found in sorted(counters.items())
            ]

        return "\n".join([
            f"{self.cases} cases, {self.outcomes.total()} outcomes, {len(self.failures)} failures, {self.peak_mib} MiB",
            "  all: " + ", ".join(f"{kind} {number}" for kind, number in self.outcomes.most_common()),
            "by what was changed:", *rows(self.by_kind), "by door:", *rows(self.by_door), *self.failures[:40],
        ])  # fmt: skip


def run(launcher: Launcher, folder: Path, *shares: list[str], timeout_s: float = 250.0) -> Tally:
    """Run the program once for each list of arguments, at the same time."""
    program = str(ROOT / f"{PROGRAM.replace('.', '/')}.py")
    tally = Tally()
    for ended in launcher.run(*(Program([program, *share]) for share in shares), folder=folder, timeout_s=timeout_s):
        begun = None
        for line in ended.stdout.splitlines():
            document = json.loads(line)
            begun = document.get("begins", begun)
            if "begins" not in document:
                tally.take(document)
        if ended.returncode != 0:
            tally.failures.append(f"the process of case {begun} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return tally


def shares_of(cases: int) -> list[list[str]]:
    return [
        ["--first", str(share), "--every", str(PROCESSES), "--count", str(cases // PROCESSES)]
        for share in range(PROCESSES)
    ]


def test_some_mutated_stores_give_right_data_or_an_error_of_the_tree(launcher: Launcher, tmp_path: Path) -> None:
    tally = run(launcher, tmp_path, ["--count", str(CI_CASES)])

    sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == CI_CASES
    assert tally.outcomes["right"] > CI_CASES
    assert tally.outcomes["corrupt_store"] > CI_CASES / 2
    assert {"read", "verify_deep", "repair", "maintain", "compaction", "loader", "changes", "relay", "writer"} <= set(
        tally.by_door
    )


def test_some_damaged_trainings_are_restored_right_or_raise_library_errors(launcher: Launcher, tmp_path: Path) -> None:
    tally = run(launcher, tmp_path, ["--training", "--doors", "2", "--count", str(CI_TRAININGS)])

    assert not tally.failures, str(tally)
    assert tally.cases == CI_TRAININGS


def test_hostile_statements_are_met_at_every_door(launcher: Launcher, tmp_path: Path) -> None:
    tally = run(launcher, tmp_path, ["--doors", "0", "--vectors", *HOSTILE])

    assert not tally.failures, str(tally)
    assert tally.cases == len(HOSTILE)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_negative_vector_is_met_at_every_door(launcher: Launcher, tmp_path: Path) -> None:
    names = sorted(VECTORS)
    shares = [["--doors", "0", "--vectors", *names[share::PROCESSES]] for share in range(PROCESSES)]
    tally = run(launcher, tmp_path, *shares, timeout_s=SOAK_S)

    sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == len(VECTORS)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_10_000_mutated_stores_give_right_data_or_an_error_of_the_tree(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = run(launcher, tmp_path, *shares_of(SOAK_CASES), timeout_s=SOAK_S)

    with capsys.disabled():
        sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == SOAK_CASES


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_damaged_trainings_are_restored_right_or_with_an_error_of_the_tree(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = [["--training", "--doors", "0", *share] for share in shares_of(SOAK_TRAININGS)]
    tally = run(launcher, tmp_path, *shares, timeout_s=SOAK_S)

    with capsys.disabled():
        sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == SOAK_TRAININGS
