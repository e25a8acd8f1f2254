"""Progress bars: only on a terminal, bytes and counts in their own units, and no remaining time before it is known."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.sample_store import build_store


def bars(*arguments: object) -> str:
    """The standard error of a command on a terminal, without control codes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from cnr_store_tools.cli import main; main()", *map(str, arguments)]
    try:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
            os.close(theirs)
            written = bytearray()
            try:
                while chunk := os.read(ours, 65536):
                    written += chunk
            except OSError:
                pass  # how Linux tells that the other end was closed
        assert process.returncode == 0, written.decode()
    finally:
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_store(tmp_path / "store").close()
    return tmp_path / "store"


def test_bytes_are_shown_as_bytes_and_counts_as_counts(root: Path) -> None:
    shown = bars("verify", root, "--deep")

    assert re.search(r"objects\s+\S+\s+[\d.]+/[\d.]+ kB", shown)
    assert re.search(r"states\s+\S+\s+\d+/\d+(?!\S* kB)", shown)


@pytest.mark.parametrize("command", ["export", "copy"])
def test_copies_show_bytes_and_no_unknown_time(command: str, root: Path, tmp_path: Path) -> None:
    shown = bars(command, root, tmp_path / "out")

    assert re.search(rf"{command} \S+ [\d.]+/[\d.]+ kB", shown)
    assert "-:--:--" not in shown


def test_a_compaction_shows_the_bytes_that_it_merges(root: Path) -> None:
    shown = bars("compact", root, "--max-chain", 1)

    assert re.search(r"compact \S+ ([\d.]+)/\1 kB", shown)
    assert "-:--:--" not in shown
