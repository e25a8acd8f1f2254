"""The examples in docstrings of the library run as they stand."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.support.rooms import LIBRARY, sources

WITH_EXAMPLES = [
    ".".join(file.relative_to(LIBRARY.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sources(LIBRARY)
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_in_many_modules() -> None:
    assert len(WITH_EXAMPLES) > 40
