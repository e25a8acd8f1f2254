"""The tutorial, typed as it stands: every file of it, in an empty folder, in the order of the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program
from tests.support.pages import DOCS, named_files, python_blocks
from tests.tools.cli_runner import cnr

PAGE = DOCS / "tutorial.md"
FILES = named_files(PAGE)


@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_start_to_end(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def python(*arguments: str) -> list[str]:
        (done,) = launcher.run(Program(arguments), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert python("before.py") == ["18.0 MB"]
    uninterrupted = python("run.py")
    shutil.rmtree(tmp_path / "clicks")
    python("run.py", "180")
    resumed = python("run.py")

    assert uninterrupted[:2] == ["start", uninterrupted[1]]
    assert resumed[0] == "continue after step 150"
    assert [line.split(",")[0] for line in resumed[1:-1]] == [line.split(",")[0] for line in uninterrupted[4:-1]]
    assert python("look.py") == [
        "steps [50, 100, 150, 200, 250, 300]",
        "{'item.weight': (20000, 32), 'user.weight': (50000, 32)}",
        "(2, 32)",
    ]
    assert [cnr(command, "clicks").code for command in ("log", "show")] == [0, 0]
    assert python("evaluate.py") == ["loaded step 300"]
    served = ["step 300 (2, 32) (32, 64)"]
    assert python("serve.py") == served
    assert cnr("maintain", "clicks").code == 0
    assert python("serve.py") == served


def test_every_example_of_the_tutorial_is_a_file_that_runs() -> None:
    assert len(FILES) == len(python_blocks(PAGE))
    assert set(FILES) == {"train.py", "before.py", "run.py", "look.py", "evaluate.py", "serve.py"}
