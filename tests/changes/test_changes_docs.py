"""The examples of docs/changes.md run as they stand and print what they say; its commands are commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store
from tests.tools.cli_runner import cnr

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "changes.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", DOCS, flags=re.DOTALL)
QUICK, LAKE, TRAINER, ONLINE = EXAMPLES


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_prints_what_it_says(tmp_path: Path) -> None:
    assert run(QUICK[0], tmp_path) == QUICK[1]


def test_duckdb_queries_the_files(tmp_path: Path) -> None:
    lines = run(LAKE[0], tmp_path).splitlines()

    assert lines[:2] == ["5 versions, 5 files", "0 versions, 0 files"]
    counts = re.findall(r"\((\d+), (\d+)\)", lines[2])
    assert [step for step, _ in counts] == ["1", "2", "3", "4", "5"]
    assert all(40 < int(rows) <= 51 for _, rows in counts)
    assert lines[3] == "[(42, 5)]"
    assert lines[4] == "3 rows drifted most, and none stood still: True"


def test_a_second_training_keeps_up_with_the_first(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    programs = {}
    for name, (program, _) in {"trainer.py": TRAINER, "online.py": ONLINE}.items():
        assert program.startswith(f"# {name}\n")
        programs[name] = subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    outcomes = {name: (*process.communicate(timeout=200), process.returncode) for name, process in programs.items()}

    assert [outcome[1:] for outcome in outcomes.values()] == [("", 0)] * 2
    found = re.fullmatch(
        r"(\d+) versions, (\d+) rows; loss ([\d.]+) -> ([\d.]+); as the snapshot: True\n", outcomes["online.py"][0]
    )
    assert found is not None, outcomes
    assert 2 <= int(found[1]) <= 21
    assert float(found[4]) < float(found[3])
    assert re.fullmatch(found.re.pattern, ONLINE[1])
    with Store.open(str(tmp_path / "clicks-store")) as store:
        assert store.cursors()["online"].version == store.latest_version()


def test_the_commands_are_commands(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "run-7")) as store, store.writer() as writer, writer.begin(10) as txn:
        txn.write_table("user", np.zeros((3, 2), np.float32))
    help_text = cnr("changes", "--help").out

    options = set(re.findall(r"`(--[a-z]+)|(?<= )(--[a-z]+)", DOCS.split("## From a shell")[1]))
    named = {option for pair in options for option in pair if option}
    assert {"--since", "--follow", "--to", "--table", "--every", "--slots", "--cursor", "--branch", "--json"} <= named
    assert [option for option in named if option not in help_text] == []
    assert cnr("changes", tmp_path / "run-7", "--to", f"parquet:{tmp_path / 'lake'}").code == 0
