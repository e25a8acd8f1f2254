"""relay: its text output, its JSON and its exit codes; and every command line of docs/relay.md."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import Store
from tests.support.snapshot_bytes import bytes_of
from tests.tools.cli_runner import cnr
from tests.tools.sample_store import build_store

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "relay.md").read_text()
PROGRAM = str(Path(sys.executable).with_name("cnr"))


def save(root: Path, step: int) -> int:
    with Store.open(str(root), fsync=False) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(step=step) as txn:
            txn.write_rows(
                "user",
                np.arange(5),
                np.full((5, 8), step / 100, np.float32),
                slots={"momentum1": np.ones(5, np.float32)},
            )
    assert txn.version is not None
    return txn.version


def test_one_look_copies_what_is_new_and_says_so(root: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    first = cnr("relay", root, near, "--once", "--json")
    version = save(root, 50)
    second = cnr("relay", root, near, "--once")
    third = cnr("relay", root, near, "--once", "--json")

    assert [outcome.code for outcome in (first, second, third)] == [0, 0, 0]
    assert first.document["segments"] == 4
    assert first.document["url"] == str(root)
    assert f"version {version}" in second.out
    assert "1 segment," in second.out
    assert (third.document["versions"], third.document["version"]) == (0, version)
    assert bytes_of(Store.open(str(near)).snapshot()) == bytes_of(Store.open(str(root)).snapshot())
    assert cnr("verify", near, "--all", "--deep").code == 0
    assert cnr("log", near).code == 0


def test_what_is_asked_for_is_done(root: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    cnr(
        "relay", root, near, "--once", "--start", 2, "--keep-last", 1, "--grace", 0, "--bandwidth", "1GiB",
        "--keep-within", "1s", "--threads", 3,
    )  # fmt: skip
    everything = tmp_path / "everything"
    cnr("relay", root, everything, "--once", "--start", 2, "--keep-last", 1, "--grace", "0s", "--no-trim")

    assert Store.open(str(near)).relay.first == 2  # type: ignore[union-attr]
    assert (near / "relay" / "trims.json").is_file()
    assert not (everything / "relay").exists()


def test_a_store_without_versions_is_waited_for(tmp_path: Path) -> None:
    cnr("init", tmp_path / "s")

    outcome = cnr("relay", tmp_path / "s", tmp_path / "near", "--once")

    assert (outcome.code, outcome.out) == (0, "nothing was saved yet\n")
    assert not (tmp_path / "near").exists()


def test_a_branch_has_a_relay_of_its_own(root: Path, tmp_path: Path) -> None:
    with Store.open(str(root)) as store, store.fork("trial") as branch:
        branch.set_channel("serving", 0)

    assert cnr("relay", root, tmp_path / "near", "--branch", "trial", "--once").code == 0
    assert Store.open(str(tmp_path / "near")).channels() == {"serving": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--news", "redis://localhost/0", "--listen", "a"], 4, "--once"),
        (["--watch"], 4, "--once"),
        (["--listen", "a"], 4, "--news"),
        (["--every", "5"], 4, "--every takes a time"),
        (["--every", "0"], 4, "--every must be a time above 0"),
        (["--start", "99"], 3, "no version 99 yet"),
        (["--keep-last", "0"], 4, "keep_last must be a whole number"),
        (["--target-option", "x"], 4, "must be KEY=VALUE"),
        (["--branch", "x"], 3, "no branch"),
    ],
)
def test_what_cannot_be_done_is_refused(
    root: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    outcome = cnr("relay", root, tmp_path / "near", "--once", *arguments)

    assert outcome.code == code
    assert message in outcome.err


def test_nobody_writes_to_a_relay(root: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    cnr("relay", root, near, "--once")

    for command in (["gc"], ["gc", "--dry-run"], ["compact"], ["maintain"], ["tag", "x"], ["fork", "x"], ["repair"]):
        outcome = cnr(command[0], near, *command[1:])
        assert (outcome.code, "relay" in outcome.err) == (8, True), command
    assert cnr("relay", root, root, "--once").code == 4


def test_it_goes_on_until_it_is_killed_and_another_goes_on_behind_it(root: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    command = [PROGRAM, "relay", str(root), str(near), "--every", "0.05s", "--json"]
    for step in (50, 60):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if step == 50:
                    first = json.loads(process.stdout.readline())
                    assert first["version"] == first["source_version"]
                version = save(root, step)
                seen: dict[str, Any] = {"version": 0}
                while seen["version"] < version:
                    seen = json.loads(process.stdout.readline())
            finally:
                process.send_signal(signal.SIGKILL)

        assert Store.open(str(near)).latest_version() == version


def reports(command: list[str]) -> tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, map(json.loads, process.stdout)


def test_a_watch_of_the_source_is_sooner_than_the_next_poll(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("watchdog")
    command = [PROGRAM, "relay", str(root), str(tmp_path / "near"), "--every", "1h", "--watch", "--json"]
    process, copied = reports(command)
    with process:
        try:
            next(copied)
            version = save(root, 50)  # the watch was there before the first round

            assert any(report["version"] == version for report in copied)
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.servers
def test_news_go_through_the_command_from_the_training_to_the_servers(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    from cnr_store.integrations.redis import RedisNews
    from tests.support.servers import running_redis

    told = threading.Event()
    with running_redis(tmp_path) as server, RedisNews.connect(server.url, "far") as far:
        command = [PROGRAM, "relay", str(root), str(tmp_path / "near"), "--every", "1h", "--json", "--news", server.url]
        process, copied = reports([*command, "--listen", "far", "--announce", "near"])
        with process, RedisNews.connect(server.url, "near") as near:
            try:
                next(copied)
                near.listen(told.set)
                assert told.wait(20)  # the answer to the subscription
                told.clear()
                version = save(root, 50)
                far.announce(version)

                assert any(report["version"] == version for report in copied)
                assert told.wait(20)
            finally:
                process.send_signal(signal.SIGKILL)


def test_the_documents_commands_and_snippets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_store(tmp_path / "runs" / "run-7").close()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", DOCS, flags=re.DOTALL | re.MULTILINE)

    assert [language for language, _ in blocks] == ["sh", "python", "python"]
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "docs/relay.md", "exec"), {})  # noqa: S102  the documentation's own text
        for line in text.splitlines() if language == "sh" else ():
            assert cnr(*shlex.split(line)[1:]).code == 0
    assert "(400, 8)" in capsys.readouterr().out
    options = set(re.findall(r"--[a-z-]+", DOCS)) - {"--storage-option"}
    text = cnr("relay", "--help").out
    assert not [option for option in options if option not in text]
