"""Programs of a launcher are processes of their own, as if an interpreter had been started for each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program


@pytest.fixture(scope="module")
def plain() -> Iterator[Launcher]:
    with closing(Launcher("fractions")) as started:
        yield started


def test_programs_run_at_once_with_their_own_arguments(plain: Launcher, tmp_path: Path) -> None:
    """Each waits for the file of the other."""
    text = """
import os, pathlib, sys, time
mine, other = sys.argv[1:]
pathlib.Path(mine).write_text(os.environ["SAYS"])
while not (path := pathlib.Path(other)).exists() or not path.read_text():
    time.sleep(0.01)
print(__name__, path.read_text(), "Fraction" in globals())
"""
    (tmp_path / "program.py").write_text(text)
    first = Program(["program.py", "a", "b"], {"SAYS": "one"})
    second = Program(["-c", text, "b", "a"], {"SAYS": "two"})

    ended = plain.run(first, second, folder=tmp_path)

    assert [(one.returncode, one.stdout) for one in ended] == [(0, "__main__ two False\n"), (0, "__main__ one False\n")]


def test_programs_end_as_an_interpreter_ends(plain: Launcher, tmp_path: Path) -> None:
    """With the status that they give, behind the end of their own objects, and with the traceback of an error."""
    ending = "class Last:\n  __del__ = lambda self: print('gone')\nlast = Last()\n"
    ending += "import atexit; atexit.register(print, 'end')"
    codes = ["raise SystemExit(3)", ending, "1 / 0"]
    codes.append("import warnings; warnings.warn('is raised')")
    programs = [Program(["-W", "error", "-c", code]) for code in codes]

    ended = plain.run(*programs, folder=tmp_path)

    assert [one.returncode for one in ended] == [3, 0, 1, 1]
    assert ended[1].stdout == "end\ngone\n"
    assert "ZeroDivisionError" in ended[2].stderr
    assert "UserWarning: is raised" in ended[3].stderr


def test_a_program_that_is_out_of_time_is_killed(plain: Launcher, tmp_path: Path) -> None:
    (ended,) = plain.run(Program(["-c", "import time; time.sleep(600)"]), folder=tmp_path, timeout_s=0.1)

    assert ended.returncode == -signal.SIGKILL


def test_a_launcher_ends_beside_a_fork_that_has_its_pipe() -> None:
    """As the workers of a data loader do, which end some time after it."""
    started = Launcher("fractions")
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
        os._exit(0)

    try:
        started.close()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
