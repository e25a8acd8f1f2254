"""``make mutants``: break one safety rule at a time and see whether the tests named for it notice.

Each job works in a copy of the repository in a temporary folder; the working tree is never written to. Tests are run
without any mutation first, once for all entries: one that fails then catches nothing. Exits with 1 if a mutation
survives, does not apply or has tests that do not pass without it; else with 3 if a test ran out of time, which may be
the mutation's doing or a slow machine's: such a test notices the mutation by itself only if it bounds its waits.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import pytest

from tests.mutants.mutations import ROOT, Mutation, read_mutations

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".cache", "build", "dist", "*.egg-info", ".pytest_cache", ".mypy_cache", ".ruff_cache",
    ".hypothesis", ".benchmarks", "demo-store",
)  # fmt: skip

_PRELOADED = (
    "numpy", "numba", "zarr", "pyarrow", "fsspec", "msgspec", "psutil", "xxhash", "jsonschema", "http.server",
    "hypothesis.strategies", "anyio.pytest_plugin", "pytest_timeout", "xdist.plugin", "torch", "torch._dynamo",
)  # fmt: skip
"""Imported once: a run is a fork of this process, so only this library and the tests are imported for each mutation.

Torch, with what its optimizers import, takes 3 s of CPU.
"""

_FOLDERS = ("", "gpu", "tools")
"""What is on the path of imports."""

_PROCESS_TIMEOUT_S = 1200

_NOT_THE_COPY = 99
_USAGE_ERROR = 4
"""pytest's status where a test that it was given is not there."""

_CAUGHT, _SURVIVED, _TIMED_OUT = "caught", "SURVIVED", "TIMED OUT"
_EXIT_TIMED_OUT = 3
_last_stamp_ns = itertools.count(time.time_ns())
_forking = threading.Lock()
"""Held at each fork and each printed line: a fork in which another thread has locked the output can wait forever."""


@dataclass(frozen=True, slots=True)
class _Ended:
    code: int | None  # None: out of time
    output: str


class Copy:
    """A copy of the repository for one job; a test in it may take ``timeout_s``."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.root = folder / "tree"
        self._temporary = folder / "t"
        shutil.copytree(ROOT, self.root, ignore=_NOT_COPIED, symlinks=True)

    @contextmanager
    def mutated(self, mutation: Mutation, source: str) -> Iterator[None]:
        """While it is open the mutated source stands in the copy; afterwards, the original and its compiled kernels.

        Files of bytecode and of numba's kernels are good for one time of their source, so each mutation gets its own.
        """
        path = self.root / mutation.file
        kernels = path.parent / "__pycache__"
        path.write_text(source)
        stamp_ns = next(_last_stamp_ns)
        os.utime(path, ns=(stamp_ns, stamp_ns))
        try:
            yield
        finally:
            original = ROOT / mutation.file
            shutil.copy2(original, path)
            shutil.rmtree(kernels, ignore_errors=True)
            if (original.parent / "__pycache__").is_dir():
                shutil.copytree(original.parent / "__pycache__", kernels)

    def run(self, module: str, *arguments: str) -> _Ended:
        """Run pytest in the copy, with the copy's library; ``module`` is imported first. Blocks."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        output = self._temporary / "output"
        with _forking:
            process = os.fork()
        if process == 0:
            self._run_here(output, module, arguments)
        deadline = time.monotonic() + _PROCESS_TIMEOUT_S
        code = None
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            os.killpg(process, signal.SIGKILL)  # also what a killed run has left: servers, ranks
        except ProcessLookupError:
            pass
        if ended == (0, 0):
            os.waitpid(process, 0)
        else:
            code = os.waitstatus_to_exitcode(ended[1])
        return _Ended(code, output.read_text(errors="replace"))

    def _run_here(self, output: Path, module: str, arguments: Sequence[str]) -> NoReturn:
        """In a fork of this process: become one that was started in the copy."""
        code = _NOT_THE_COPY
        try:
            os.setsid()
            file = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(self.root)
            paths = [str(self.root / folder) for folder in _FOLDERS]
            own = {"", *(str(ROOT / folder) for folder in _FOLDERS)}
            sys.path[:] = [*paths, *(path for path in sys.path if path not in own)]
            os.environ.update(
                PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(self._temporary)
            )
            sys.dont_write_bytecode = True
            tempfile.tempdir = None
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            # A mutation that cannot be imported says nothing about the tests, and it must be the copy's own.
            imported = importlib.import_module(module).__file__
            assert Path(str(imported)).is_relative_to(self.root), imported
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--timeout", str(self.timeout_s)]
            options += ["-W", "ignore:Module already imported"]  # some bring plugins
            code = int(pytest.main([*options, *arguments]))
        except BaseException:  # noqa: BLE001 - the parent reads it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _module(file: str) -> str:
    return (
        file.removeprefix("gpu/").removeprefix("tools/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )


def failing_tests(copy: Copy, tests: Iterable[str]) -> set[str]:
    """Return which of these files and node ids have a test that fails, or none that runs, without any mutation."""
    wanted = sorted(set(tests))
    absent: set[str] = set()
    while True:
        ended = copy.run("cnr_store", "-rA", "--tb=short", *(test for test in wanted if test not in absent))
        unknown = re.findall(r"^ERROR: (?:not found: |file or directory not found: )(\S+)", ended.output, re.MULTILINE)
        unknown = [name.removeprefix(f"{copy.root}/") for name in unknown]
        if ended.code != _USAGE_ERROR or absent.issuperset(unknown):
            break
        absent.update(unknown)  # it runs none of the others then
    reports = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", ended.output, re.MULTILINE)
    passed = [name for word, name in reports if word == "PASSED"]
    failed = [name for word, name in reports if word != "PASSED"]
    wrong = {test for test in wanted if _any_of(test, failed) or not _any_of(test, passed)}
    if wrong:
        print(ended.output[-20_000:])
    return wrong


def _any_of(test: str, names: list[str]) -> bool:
    # A parameter may have blanks in it, at which the name in the report was cut above.
    return any(
        name == test or name.startswith((f"{test}::", f"{test}[")) or test.startswith(f"{name} ") for name in names
    )


def outcome(copy: Copy, mutation: Mutation) -> str:
    """Return what became of one mutation."""
    try:
        source = mutation.applied((ROOT / mutation.file).read_text())
    except (ValueError, OSError) as error:
        return f"does not apply: {error}"
    with copy.mutated(mutation, source):
        ended = copy.run(_module(mutation.file), "-x", "--tb=line", *mutation.tests)
    if ended.code is None or re.search(r"Timeout \(>[\d.]+s\) from pytest-timeout|\+ Timeout \+", ended.output):
        return _TIMED_OUT
    if ended.code == 1:
        return _CAUGHT
    if ended.code == 0:
        return _SURVIVED
    return f"pytest ended with {ended.code}: {ended.output[-2000:]}"


def run(mutations: list[Mutation], jobs: int, folder: Path, timeout_s: float) -> list[tuple[Mutation, str]]:
    """Run every mutation against its tests, some at once; print each as it ends."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(jobs):
        (folder / str(number)).mkdir()
        copies.put(Copy(folder / str(number), timeout_s))
    first = copies.get()
    wrong = failing_tests(first, [test for one in mutations for test in one.tests])
    copies.put(first)

    def one(mutation: Mutation) -> tuple[str, float]:
        started = time.monotonic()
        broken = wrong.intersection(mutation.tests)
        if broken:
            return f"tests that do not pass without it: {', '.join(sorted(broken))}", 0.0
        copy = copies.get()
        try:
            return outcome(copy, mutation), time.monotonic() - started
        finally:
            copies.put(copy)

    results = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(one, mutation): mutation for mutation in mutations}
        for future in as_completed(futures):
            word, took_s = future.result()
            mutation = futures[future]
            with _forking:
                print(f"{word:9} {took_s:6.1f} s  {mutation.area}: {mutation.name}", flush=True)
            results.append((mutation, word))
    return results


def _print_table(results: list[tuple[Mutation, str]], equivalents: Counter[str], took_s: float) -> None:
    areas = sorted({mutation.area for mutation, _ in results} | set(equivalents))
    print(
        f"\n{'area':16} {'mutations':>9} {'caught':>7} {'survived':>9} {'timed out':>10} {'other':>6} "
        f"{'equivalent':>11}"
    )
    totals = [0, 0, 0, 0, 0, 0]
    for area in areas:
        words = [word for mutation, word in results if mutation.area == area]
        counted = [words.count(word) for word in (_CAUGHT, _SURVIVED, _TIMED_OUT)]
        row = [len(words), *counted, len(words) - sum(counted), equivalents[area]]
        totals = [total + one for total, one in zip(totals, row, strict=True)]
        print(f"{area:16} {row[0]:9} {row[1]:7} {row[2]:9} {row[3]:10} {row[4]:6} {row[5]:11}")
    print(
        f"{'all':16} {totals[0]:9} {totals[1]:7} {totals[2]:9} {totals[3]:10} {totals[4]:6} {totals[5]:11}"
        f"   {took_s:.0f} s"
    )
    for mutation, word in results:
        if word != _CAUGHT:
            print(f"\n{word}: {mutation.area}: {mutation.name} ({mutation.file})\n  {mutation.why}\n  {mutation.tests}")


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument(
        "--area", action="append", help="only the mutations of this file, without .toml; may be repeated"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="only this mutation; may be repeated")
    parser.add_argument("--tier", choices=("small", "all"), default="all", help="small: those that CI runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many are run at once")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that one test may take")
    parser.add_argument("--lists", type=Path, default=Path(__file__).parent, help="the folder of the lists")
    options = parser.parse_args(arguments)
    entries = read_mutations(options.lists)
    if options.area:
        entries = [one for one in entries if one.area in options.area]
    if options.only:
        entries = [one for one in entries if one.name in options.only]
    if options.tier == "small":
        entries = [one for one in entries if one.is_small]
    mutations = [one for one in entries if not one.is_equivalent]
    if not mutations:
        parser.error("no mutation of this description")
    started = time.monotonic()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # forks do not look at these objects, nor copy their memory, when they collect garbage
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        results = run(mutations, max(1, min(options.jobs, len(mutations))), Path(folder), options.timeout)
    equivalents = Counter(one.area for one in entries if one.is_equivalent)
    _print_table(results, equivalents, time.monotonic() - started)
    words = {word for _, word in results}
    if words - {_CAUGHT, _TIMED_OUT}:
        return 1
    return _EXIT_TIMED_OUT if _TIMED_OUT in words else 0


if __name__ == "__main__":
    sys.exit(main())
