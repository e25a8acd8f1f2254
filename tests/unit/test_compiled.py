"""The cache of compiled kernels, filled by several processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from cnr_store import compiled
from cnr_store.consume.moves import adding
from cnr_store.consume.rows import board, fused_kernels, gather, key_index, rounding
from cnr_store.encodings import affine_kernels, kernels, packing

SOURCE = """
def plus_one(x, out):
    for i in range(len(x)):
        out[i] = x[i] + 1
"""
NAME = "a_kernel_of_these_tests"
MODULES = (adding, affine_kernels, board, fused_kernels, gather, kernels, key_index, packing, rounding)

Compile = Callable[[Callable[..., Any]], Any]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    sys.modules.pop(NAME, None)


def numbers_files(function: Callable[..., Any]) -> Any:
    """What numba itself does: the test of the tests."""
    return numba.njit(cache=True)(function)


def a_process(folder: Path, compile_: Compile) -> Any:
    """The kernel as another process has it: imported anew, nothing compiled yet."""
    file = folder / "kernel.py"
    if not file.exists():
        file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module  # what is loaded looks for its globals there
    spec.loader.exec_module(module)
    return compile_(module.plus_one)


def run(kernel: Any, dtype: type[np.generic]) -> list[float]:
    x = np.arange(3).astype(dtype)
    out = np.zeros_like(x)
    kernel(x, out)
    return [float(value) for value in out]


def index_of(kernel: Any) -> Path:
    return Path(kernel._cache.cache_path) / kernel._cache._cache_file._index_name


def race(folder: Path, compile_: Compile) -> list[float]:
    """Two processes compile two signatures at once: both find no index; the one's code and the other's index are last.

    Returns what a third process computes with the signature that is in the index.
    """
    first, second = a_process(folder, compile_), a_process(folder, compile_)
    run(first, np.int32)
    index = index_of(first)
    written = index.read_bytes()
    index.unlink()
    run(second, np.float32)
    index.write_bytes(written)
    return run(a_process(folder, compile_), np.int32)


def test_processes_that_compile_at_once_never_load_the_code_of_another_signature(tmp_path: Path) -> None:
    """int32 rows went through code for float32, and arrays with gaps through code for arrays without."""
    assert race(tmp_path, compiled.njit()) == [1.0, 2.0, 3.0]


def test_the_race_is_one_that_numbered_files_lose(tmp_path: Path) -> None:
    assert race(tmp_path, numbers_files) != [1.0, 2.0, 3.0]


def test_what_was_compiled_is_loaded_by_the_next_process(tmp_path: Path) -> None:
    run(a_process(tmp_path, compiled.njit()), np.int32)
    run(a_process(tmp_path, compiled.njit()), np.float32)
    later = a_process(tmp_path, compiled.njit())

    assert run(later, np.int32) == run(later, np.float32) == [1.0, 2.0, 3.0]
    assert sum(later.stats.cache_hits.values()) == 2
    assert not later.stats.cache_misses


def test_code_of_another_source_is_never_loaded(tmp_path: Path) -> None:
    run(a_process(tmp_path, compiled.njit()), np.int32)
    (tmp_path / "kernel.py").write_text(SOURCE.replace("+ 1", "+ 10"))

    assert run(a_process(tmp_path, compiled.njit()), np.int32) == [10.0, 11.0, 12.0]


def test_where_nothing_can_be_kept_kernels_are_compiled_anew(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, "<nowhere>", "exec"), namespace)  # noqa: S102 - a function without a file

    kernel = compiled.njit(nogil=True)(namespace["plus_one"])

    assert run(kernel, np.int32) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_kernel_is_kept_in_a_file_of_its_signature(module: Any) -> None:
    found = [one for one in vars(module).values() if isinstance(one, numba.core.registry.CPUDispatcher)]

    assert found
    for kernel in found:
        assert isinstance(kernel._cache._cache_file, compiled._NamedBySignature), kernel
