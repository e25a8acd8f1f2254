"""The cache of compiled kernels, filled by several processes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from cnr_store.encodings import affine_kernels, kernels, packing, row_kernels
from cnr_store.runtime import jit, key_index
from cnr_store.serving.rows import board, fused_kernels, gather, joined_lookups, rounding
from cnr_store.serving.update import adding, joined_deltas

SOURCE = """
def plus_one(x, out):
    for i in range(len(x)):
        out[i] = x[i] + 1
"""
NAME = "a_kernel_of_these_tests"
MODULES = (
    adding, affine_kernels, board, fused_kernels, gather, joined_deltas, joined_lookups, kernels, key_index, packing,
    rounding, row_kernels,
)  # fmt: skip

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


def test_processes_compiling_at_once_never_load_another_signatures_code(tmp_path: Path) -> None:
    """int32 rows went through code for float32, and arrays with gaps through code for arrays without."""
    assert race(tmp_path, jit.njit()) == [1.0, 2.0, 3.0]


def test_the_race_is_one_that_numbered_files_lose(tmp_path: Path) -> None:
    assert race(tmp_path, numbers_files) != [1.0, 2.0, 3.0]


def test_what_was_compiled_is_loaded_by_the_next_process(tmp_path: Path) -> None:
    run(a_process(tmp_path, jit.njit()), np.int32)
    run(a_process(tmp_path, jit.njit()), np.float32)
    later = a_process(tmp_path, jit.njit())

    assert run(later, np.int32) == run(later, np.float32) == [1.0, 2.0, 3.0]
    assert sum(later.stats.cache_hits.values()) == 2
    assert not later.stats.cache_misses


def test_code_of_another_source_is_never_loaded(tmp_path: Path) -> None:
    run(a_process(tmp_path, jit.njit()), np.int32)
    (tmp_path / "kernel.py").write_text(SOURCE.replace("+ 1", "+ 10"))

    assert run(a_process(tmp_path, jit.njit()), np.int32) == [10.0, 11.0, 12.0]


def files_of(folder: Path, kernel: Any) -> list[str]:
    return sorted(file.name for file in Path(kernel._cache.cache_path).glob("*.nbc"))


def test_code_of_an_older_source_does_not_stay_on_disk(tmp_path: Path) -> None:
    run(a_process(tmp_path, jit.njit()), np.int32)
    run(a_process(tmp_path, jit.njit()), np.float32)
    for number in range(3):
        (tmp_path / "kernel.py").write_text(SOURCE + f"# {number}")
        last = a_process(tmp_path, jit.njit())
        run(last, np.int32)
        run(last, np.float32)

    assert len(files_of(tmp_path, last)) == 2


def test_code_that_another_process_removed_is_compiled_again(tmp_path: Path) -> None:
    kernel = a_process(tmp_path, jit.njit())
    run(kernel, np.int32)
    (Path(kernel._cache.cache_path) / files_of(tmp_path, kernel)[0]).unlink()

    assert run(a_process(tmp_path, jit.njit()), np.int32) == [1.0, 2.0, 3.0]
    later = a_process(tmp_path, jit.njit())
    assert run(later, np.int32) == [1.0, 2.0, 3.0]
    assert sum(later.stats.cache_hits.values()) == 1


def test_code_of_other_options_is_never_loaded(tmp_path: Path) -> None:
    run(a_process(tmp_path, jit.njit(error_model="numpy")), np.int32)

    other = a_process(tmp_path, jit.njit())
    run(other, np.int32)

    assert not other.stats.cache_hits


def test_a_set_of_options_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(SOURCE)
    code = (
        "import kernel, numpy as np; from cnr_store.runtime.jit import njit; x = np.zeros(1);"
        "compiled = njit(fastmath={'nnan', 'ninf', 'nsz', 'arcp'})(kernel.plus_one); compiled(x, x);"
        "print(sum(compiled.stats.cache_hits.values()))"
    )

    def hits(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert [hits(seed) for seed in (1, 2, 3)] == ["0", "1", "1"]


@pytest.mark.parametrize("way", ["a number", "a kernel"])
def test_code_with_an_older_constant_or_kernel_is_never_loaded(tmp_path: Path, way: str) -> None:
    """numba looks at the source of the kernel alone: a constant that changed in another file kept its old value."""
    (tmp_path / "kernel.py").write_text(SOURCE.replace("+ 1", "+ STEP" if way == "a number" else "+ STEP()"))

    def with_step(size: int) -> Compile:
        (tmp_path / "step.py").write_text(f"def step():\n    return {size}\n")
        spec = importlib.util.spec_from_file_location("a_step_of_these_tests", tmp_path / "step.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        called = jit.njit()(module.step)

        def compile_(function: Callable[..., Any]) -> Any:
            vars(sys.modules[NAME])["STEP"] = size if way == "a number" else called
            return jit.njit()(function)

        return compile_

    assert run(a_process(tmp_path, with_step(1)), np.int32) == [1.0, 2.0, 3.0]
    assert run(a_process(tmp_path, with_step(10)), np.int32) == [10.0, 11.0, 12.0]


def test_the_cache_of_another_numba_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are private: kernels of a numba that has others are compiled by every process, and it is said."""
    monkeypatch.setattr(jit, "_METHODS", (*jit._METHODS, "_a_method_of_another_numba"))

    with pytest.warns(RuntimeWarning, match="compiles the kernels"):
        kernel = a_process(tmp_path, jit.njit())

    assert run(kernel, np.int32) == [1.0, 2.0, 3.0]
    assert not list(tmp_path.glob("**/*.nbc"))


def test_kernels_are_functions_where_numba_is_told_to_compile_nothing() -> None:
    """The library could not be imported."""
    code = "from cnr_store.encodings import row_kernels; print(type(row_kernels.sort_rows).__name__)"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "function"


def test_a_kernel_may_be_sent_to_another_process() -> None:
    """It is compiled there, or comes from the cache."""
    x = np.arange(6, dtype=np.int16).reshape(3, 2)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        moved = processes.submit(sorted_by, row_kernels.sort_rows, x, np.asarray([3, 1, 2], np.int16)).result()

    assert moved.tolist() == [[2, 3], [4, 5], [0, 1]]


def sorted_by(kernel: Any, block: npt.NDArray[np.int16], keys: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    out = np.empty_like(block)
    kernel(block, keys, out)
    return out


def test_where_nothing_can_be_kept_kernels_are_compiled_anew(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, "<nowhere>", "exec"), namespace)  # noqa: S102 - a function without a file

    kernel = jit.njit(nogil=True)(namespace["plus_one"])

    assert run(kernel, np.int32) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_kernel_is_kept_in_a_file_of_its_signature(module: Any) -> None:
    named = vars(module).values()
    by_width = [kernel for one in named if isinstance(one, dict) for kernel in one.values()]
    found = [one for one in (*named, *by_width) if isinstance(one, numba.core.registry.CPUDispatcher)]

    assert found
    for kernel in found:
        assert isinstance(kernel._cache._cache_file, jit._NamedBySignature), kernel


def test_no_module_takes_the_decorator_of_numba_itself() -> None:
    root = Path(jit.__file__).parents[2]
    files = [file for folder in ("cnr_store", "gpu", "tools") for file in (root / folder).rglob("*.py")]
    taken = re.compile(r"numba\.(n?jit|vectorize|guvectorize)\b|from numba import .*\b(n?jit|vectorize|guvectorize)\b")

    found = [file.name for file in files if taken.search(file.read_text())]

    assert len(files) > 100
    assert found == ["jit.py"]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", b"\x80\x05", b"no pickle at all"])
def test_a_cache_that_a_power_loss_cut_is_compiled_anew_and_replaced(tmp_path: Path, ending: str, left: bytes) -> None:
    """It ended every call of the kernel, for good."""
    first = a_process(tmp_path, jit.njit())
    run(first, np.int32)
    for path in index_of(first).parent.glob(f"*.{ending}"):
        path.write_bytes(left)

    assert run(a_process(tmp_path, jit.njit()), np.int32) == [1.0, 2.0, 3.0]

    later = a_process(tmp_path, jit.njit())
    assert run(later, np.int32) == [1.0, 2.0, 3.0]
    assert sum(later.stats.cache_hits.values()) == 1


def test_a_disk_without_room_for_a_kernel_does_not_end_its_call(tmp_path: Path) -> None:
    kernel = a_process(tmp_path, jit.njit())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert run(kernel, np.int32) == [1.0, 2.0, 3.0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert run(a_process(tmp_path, jit.njit()), np.int32) == [1.0, 2.0, 3.0]
