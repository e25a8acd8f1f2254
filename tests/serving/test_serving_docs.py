"""The examples of docs/serving.md run unchanged, on the store of the first; its table has every argument."""

from __future__ import annotations

import inspect
import re
import runpy
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from cnr_store.serving import Loader, LoaderOptions

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
STORE, *BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with the store of the docs, and a folder in memory for this test only."""
    shared = f"/dev/shm/cnr-docs-{uuid.uuid4().hex}"
    monkeypatch.chdir(tmp_path)
    Path("store.py").write_text(STORE)
    runpy.run_path("store.py")["store"].close()
    yield shared
    shutil.rmtree(shared, ignore_errors=True)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_run(place: str, number: int) -> None:
    Path("example.py").write_text(BLOCKS[number].replace("/dev/shm/run-7", place))
    runpy.run_path("example.py")


def test_every_argument_is_in_the_table() -> None:
    section = DOCS.read_text().split("## What is served, and how")[1].split("##")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    options = {one.name for one in fields(LoaderOptions)} - {"warm_up_each"}
    parameters = (options | set(inspect.signature(Loader).parameters)) - {"options", "branch", "storage_options"}

    assert named == parameters
