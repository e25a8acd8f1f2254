"""Progress bars: only on a terminal, bytes and counts in their own units, and no remaining time before it is known."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Callable
from pathlib import Path
from select import select

import pytest

from tests.support.launcher import Launcher, Program

Bars = Callable[..., str]


@pytest.fixture
def bars(commands: Launcher, tmp_path: Path) -> Bars:
    """Returns the standard error of a command on a terminal, without control codes."""

    def bars(*arguments: object) -> str:
        ours, theirs = pty.openpty()
        code = f"import os, sys; os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR), 2); sys.argv[0] = 'cnr'"
        program = Program(["-c", f"{code}; from cnr_store_tools.cli import main; main()", *map(str, arguments)])
        written = bytearray()
        with commands.running(program, folder=tmp_path) as command:
            while not command.has_ended or select([ours], [], [], 0)[0]:
                if select([ours], [], [], 0.01)[0]:
                    written += os.read(ours, 65536)
            os.close(theirs)
            os.close(ours)
            assert command.wait() == 0, written.decode()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())

    return bars


def test_bytes_are_shown_as_bytes_and_counts_as_counts(bars: Bars, root: Path) -> None:
    shown = bars("verify", root, "--deep")

    assert re.search(r"objects\s+\S+\s+[\d.]+/[\d.]+ kB", shown)
    assert re.search(r"states\s+\S+\s+\d+/\d+(?!\S* kB)", shown)


@pytest.mark.parametrize("command", ["export", "copy"])
def test_copies_show_bytes_and_no_unknown_time(bars: Bars, command: str, root: Path, tmp_path: Path) -> None:
    shown = bars(command, root, tmp_path / "out")

    assert re.search(rf"{command} \S+ [\d.]+/[\d.]+ kB", shown)
    assert "-:--:--" not in shown


def test_a_compaction_shows_the_bytes_that_it_merges(bars: Bars, root: Path) -> None:
    shown = bars("compact", root, "--max-chain", 1)

    assert re.search(r"compact \S+ ([\d.]+)/\1 kB", shown)
    assert "-:--:--" not in shown
