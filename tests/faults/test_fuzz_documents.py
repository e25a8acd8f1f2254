"""Mutated documents, damaged objects: every door gives right data or an error of the tree, in bounded time and memory.

Cases are chosen by seeds and run in processes of their own (`tests.faults.fuzz_program`, which repeats one of them).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "format_spec" / "golden" / "negative" / "vectors.json").read_text())
PROGRAM = "tests.faults.fuzz_program"
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


def run(folder: Path, *shares: list[str]) -> Tally:
    """Run the program once for each list of arguments, at the same time; ``folder`` is for what they print."""
    paths = [str(ROOT), str(ROOT / "gpu"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    tally = Tally()
    with ExitStack() as stack:
        told = [stack.enter_context((folder / f"{number}.jsonl").open("w+")) for number in range(len(shares))]
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, *share], cwd=ROOT, env=environment, stdout=file,
                    stderr=subprocess.DEVNULL,
                )
            )
            for share, file in zip(shares, told, strict=True)
        ]  # fmt: skip
        for process, file in zip(processes, told, strict=True):
            code, begun = process.wait(), None
            file.seek(0)
            for line in file:
                document = json.loads(line)
                begun = document.get("begins", begun)
                if "begins" not in document:
                    tally.take(document)
            if code != 0:
                tally.failures.append(f"the process of case {begun} ended with {code}")
    return tally


def shares_of(cases: int, first: int = 0) -> list[list[str]]:
    return [
        ["--first", str(first + share), "--every", str(PROCESSES), "--count", str(cases // PROCESSES)]
        for share in range(PROCESSES)
    ]


def test_some_mutated_stores_give_right_data_or_an_error_of_the_tree(tmp_path: Path) -> None:
    tally = run(tmp_path, *shares_of(CI_CASES))

    sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == CI_CASES
    assert tally.outcomes["right"] > CI_CASES
    assert tally.outcomes["corrupt_store"] > CI_CASES / 2
    assert {"read", "verify_deep", "repair", "maintain", "compaction", "loader", "changes", "relay", "writer"} <= set(
        tally.by_door
    )


def test_some_damaged_trainings_are_restored_right_or_raise_library_errors(tmp_path: Path) -> None:
    tally = run(tmp_path, ["--training", "--doors", "2", "--count", str(CI_TRAININGS)])

    assert not tally.failures, str(tally)
    assert tally.cases == CI_TRAININGS


def test_hostile_statements_are_met_at_every_door(tmp_path: Path) -> None:
    tally = run(tmp_path, *(["--doors", "0", "--vectors", *HOSTILE[share::PROCESSES]] for share in range(PROCESSES)))

    assert not tally.failures, str(tally)
    assert tally.cases == len(HOSTILE)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_negative_vector_is_met_at_every_door(tmp_path: Path) -> None:
    names = sorted(VECTORS)
    tally = run(tmp_path, *(["--doors", "0", "--vectors", *names[share::PROCESSES]] for share in range(PROCESSES)))

    sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == len(VECTORS)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_10_000_mutated_stores_give_right_data_or_an_error_of_the_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = run(tmp_path, *shares_of(SOAK_CASES))

    with capsys.disabled():
        sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == SOAK_CASES


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_damaged_trainings_are_restored_right_or_with_an_error_of_the_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = run(tmp_path, *(["--training", "--doors", "0", *share] for share in shares_of(SOAK_TRAININGS)))

    with capsys.disabled():
        sys.stdout.write(f"{tally}\n")
    assert not tally.failures, str(tally)
    assert tally.cases == SOAK_TRAININGS
