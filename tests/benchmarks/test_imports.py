"""Benchmarks run by hand: each can be imported, so that a name that moved is noticed where it moves."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(file.stem for file in Path(__file__).parent.glob("bench_*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_benchmark_imports_is_there(name: str) -> None:
    """The benchmark of serving took a name from a module that no longer had it."""
    assert importlib.import_module(name).__doc__
    assert len(SCRIPTS) > 15
