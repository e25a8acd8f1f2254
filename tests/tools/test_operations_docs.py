"""Every command line, manifest and snippet of docs/operations.md runs unchanged."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cnr_store import Store, TableOptions
from cnr_store_tools.metrics import HEAD_GAUGES, MAINTENANCE_GAUGES
from tests.support.launcher import Launcher, Program
from tests.tools.cli_runner import cnr

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
PROGRAM = str(Path(sys.executable).with_name("cnr"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def command_lines(block: str) -> list[list[str]]:
    """The arguments after ``cnr`` of each line."""
    words = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(line[0] == "cnr" for line in words if line)
    return [line[1:] for line in words if line]


def cron_lines(text: str) -> list[list[str]]:
    """Schedule and command of each line that is not a comment."""
    lines = [line for block in blocks(text, "crontab") for line in block.splitlines() if not line.startswith("#")]
    return [line.split(maxsplit=5) for line in lines]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a baseline and twelve deltas, with a cursor, which has the names of the docs."""
    root = tmp_path_factory.mktemp("docs") / "run-7"
    random = np.random.default_rng(3)
    values = random.normal(size=(300, 8)).astype(np.float32)
    with Store.create(str(root), fsync=False, threads=2) as store:
        with store.writer() as writer:
            with writer.begin(step=0) as txn:
                txn.write_table("user", values, options=TableOptions(bits=4))
            for step in range(1, 13):
                rows = np.sort(random.choice(300, 40, replace=False))
                values[rows] += 0.1
                with writer.begin(step=step) as txn:
                    txn.write_rows("user", rows, values[rows])
        store.register_cursor("eu", store.latest_version())
    return root


@pytest.fixture
def place(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory for the docs, with a copy of the store."""
    shutil.copytree(sample, tmp_path / "run-7")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks(OPERATIONS, "sh"))
def test_commands_run(place: Path, block: str) -> None:
    lines = command_lines(block)
    assert lines

    for line in lines:
        if "--listen" in line:
            assert_serves(line)
            continue
        done = cnr(*line)
        assert (done.code, done.err) == (0, ""), (line, done)
        assert done.out

    assert cnr("verify", "run-7", "--all", "--deep").code == 0


def assert_serves(line: list[str]) -> None:
    """Use any free port, because the port of the docs may be in use."""
    at = line.index("--listen") + 1
    host, _, port = line[at].rpartition(":")
    assert port.isdigit()
    process = subprocess.Popen(
        [PROGRAM, *line[:at], f"{host}:0", *line[at + 1 :]], stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stderr is not None
    try:
        address = process.stderr.readline().strip().removeprefix("serving ")
        with urllib.request.urlopen(address, timeout=60) as reply:
            assert b"cnr_up" in reply.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("block", blocks(OPERATIONS, "python"))
def test_snippets_run(launcher: Launcher, place: Path, block: str) -> None:
    (done,) = launcher.run(Program(["-c", block]), folder=Path.cwd())

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", cron_lines(OPERATIONS), ids=lambda line: line[5][:60])
def test_crontab_lines_run_by_a_shell(place: Path, line: list[str]) -> None:
    *schedule, command = line
    assert len(schedule) == 5
    assert all(re.fullmatch(r"\*|\d{1,2}", field) for field in schedule)
    assert "%" not in command  # cron makes a line break of it
    local = re.sub(r"/var/lib/node_exporter/", f"{place}/", command)
    local = re.sub(r"(/opt/cnr/bin/)?\bcnr(?= maintain)", PROGRAM, local)
    local = re.sub(r"(/data|s3://bucket)/run-\d", str(place / "run-7"), local)

    done = subprocess.run(
        local, shell=True, capture_output=True, text=True, check=False, env={"HOME": os.environ["HOME"]}
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with Store.open(str(place / "run-7")) as store:
        assert len(store.head().record.chain) == 1
    if "--metrics-file" in command:
        assert len(list(place.glob("*.prom"))) == 1


def test_the_manifest_is_a_cron_job_whose_command_runs(place: Path) -> None:
    (manifest,) = (yaml.safe_load(block) for block in blocks(OPERATIONS, "yaml"))

    job = manifest["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    command: list[Any] = container["command"]
    done = cnr(*[str(word).replace("s3://bucket/", "") for word in command[1:]])

    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "CronJob")
    assert len(manifest["spec"]["schedule"].split()) == 5
    assert manifest["spec"]["concurrencyPolicy"] == "Forbid"
    assert pod["restartPolicy"] == "Never"
    assert all(isinstance(word, str) for word in command)
    assert command[:2] == ["cnr", "maintain"]
    assert job["activeDeadlineSeconds"] > 30 * 60
    assert command[command.index("--budget") + 1] == "30m"
    assert done.code == 0
    assert done.document["outcome"] == "done"


def test_every_metric_is_in_the_table_and_no_other() -> None:
    table = OPERATIONS.split("## Metrics")[1]
    named = set(re.findall(r"`(cnr_\w+)`", "\n".join(line for line in table.splitlines() if line.startswith("| `"))))

    assert named == {*HEAD_GAUGES, *MAINTENANCE_GAUGES, "cnr_up", "cnr_segments", "cnr_maintenance_outcome"}


def test_the_list_of_commands_has_every_command_and_those_of_the_docs() -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)", (ROOT / "docs" / "command.md").read_text(), flags=re.MULTILINE))
    used = {line[0] for block in blocks(OPERATIONS, "sh") for line in command_lines(block)}

    assert used <= listed
    known = set(re.findall(r"^\s+([a-z][a-z-]*)  ", cnr("--help").out, flags=re.MULTILINE)) - {"h"}
    assert known <= listed, f"give {known - listed} a line in docs/command.md"
