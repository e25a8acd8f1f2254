"""The store that most tests of the command read and change, and processes that run the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program
from tests.tools.cli_runner import RunCode
from tests.tools.sample_store import build_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_store(tmp_path / "store").close()
    return tmp_path / "store"


@pytest.fixture(scope="session")
def commands() -> Iterator[Launcher]:
    """Runs programs in forks of a process that has imported the command, without torch."""
    with closing(Launcher("cnr_store_tools.cli")) as started:
        yield started


@pytest.fixture
def run_code(commands: Launcher, tmp_path: Path) -> RunCode:
    return lambda code: commands.run(Program(["-c", code]), folder=tmp_path)[0]
