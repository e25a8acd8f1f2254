"""The examples of docs/changes.md run unchanged and print what the page shows; its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store
from tests.support.launcher import Launcher, Program
from tests.tools.cli_runner import cnr

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "changes.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", DOCS, flags=re.DOTALL)
QUICK, LAKE, TRAINER, ONLINE, PUBLISHED = EXAMPLES


def run(launcher: Launcher, program: str, folder: Path) -> str:
    (done,) = launcher.run(Program(["-W", "error", "-c", program]), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_prints_what_it_says(launcher: Launcher, tmp_path: Path) -> None:
    assert run(launcher, QUICK[0], tmp_path) == QUICK[1]


def test_the_example_of_a_published_store_prints_what_it_says(launcher: Launcher, tmp_path: Path) -> None:
    assert run(launcher, PUBLISHED[0], tmp_path) == PUBLISHED[1]


def test_duckdb_queries_the_files(launcher: Launcher, tmp_path: Path) -> None:
    lines = run(launcher, LAKE[0], tmp_path).splitlines()

    assert lines[:2] == ["5 versions, 5 files", "0 versions, 0 files"]
    counts = re.findall(r"\((\d+), (\d+)\)", lines[2])
    assert [step for step, _ in counts] == ["1", "2", "3", "4", "5"]
    assert all(40 < int(rows) <= 51 for _, rows in counts)
    assert lines[3] == "[(42, 5)]"
    assert lines[4] == "3 rows drifted most, and none stood still: True"


def test_a_second_training_keeps_up_with_the_first(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, (program, _) in {"trainer.py": TRAINER, "online.py": ONLINE}.items():
        assert program.startswith(f"# {name}\n")
    trainer, online = launcher.run(*(Program(["-c", program]) for program, _ in (TRAINER, ONLINE)), folder=tmp_path)

    assert [(one.stderr, one.returncode) for one in (trainer, online)] == [("", 0)] * 2
    found = re.fullmatch(
        r"(\d+) versions, (\d+) rows; loss ([\d.]+) -> ([\d.]+); as the snapshot: True\n", online.stdout
    )
    assert found is not None, online.stdout
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
