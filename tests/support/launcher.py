"""Runs Python programs in forks of one process that has imported once what takes seconds to import.

Every process that trains imports torch and this library, and some TorchRec: three to six seconds of CPU time. A test
that is not about the start of an interpreter forks its programs from a launcher instead. Each is still a process of
its own: it has its own arguments, folder and environment, runs as ``__main__`` in fresh globals, and ends as an
interpreter ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(REPOSITORY / part) for part in ("", "gpu", "tools"))
"""The PYTHONPATH with which another process imports this copy of the library."""


@dataclass(frozen=True, slots=True)
class Program:
    """The arguments of an interpreter, ``-c CODE ...`` or ``FILE ...``, and what its environment has beside."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Server:
    """``python -m MODULE ARGUMENTS``, which answers each line of JSON with a line of JSON; close it, which ends it."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": PATHS},
        )  # fmt: skip

    def ask(self, **job: Any) -> Any:
        """Return the answer to one job. Blocks until it is there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; what it started has ended already.

        It does not wait for the process to see that the commands end: forks of this process, as data loaders make
        them, keep the pipe of the commands open.
        """
        self._process.kill()
        self._process.communicate()


class Launcher(Server):
    """A process that has imported ``modules``."""

    def __init__(self, *modules: str) -> None:
        super().__init__("tests.support.launcher", *modules)

    def run(
        self, *programs: Program, folder: str | Path, timeout_s: float = 200.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run programs at once in a folder, and wait until all have ended. One that is out of time is killed."""
        with tempfile.TemporaryDirectory() as outputs:
            return self._run(programs, folder, Path(outputs), timeout_s)

    @contextmanager
    def running(self, program: Program, *, folder: str | Path) -> Iterator[Running]:
        """Run a program in a folder while the context is open, and kill it then; meanwhile no other can be run."""
        with tempfile.TemporaryDirectory() as outputs, ThreadPoolExecutor(1) as waiting:
            ended = waiting.submit(self._run, [program], folder, Path(outputs), 200.0)
            running = Running(Path(outputs), ended)
            try:
                yield running
            finally:
                running.kill()
                ended.result()

    def _run(
        self, programs: Sequence[Program], folder: str | Path, outputs: Path, timeout_s: float
    ) -> list[subprocess.CompletedProcess[str]]:
        started = [asdict(program) for program in programs]
        codes = self.ask(folder=str(folder), outputs=str(outputs), timeout_s=timeout_s, programs=started)
        return [
            subprocess.CompletedProcess(
                program.arguments, code, *((outputs / f"{number}.{name}").read_text() for name in ("out", "err"))
            )
            for number, (program, code) in enumerate(zip(programs, codes, strict=True))
        ]


class Running:
    """A program that a launcher runs."""

    def __init__(self, outputs: Path, ended: Future[list[subprocess.CompletedProcess[str]]]) -> None:
        self._outputs, self._ended = outputs, ended

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self._ended.done()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._text("out")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; if it has just been started, wait for it."""
        while not (pid := self._text("pid")):
            assert not self.has_ended
            time.sleep(0.001)
        os.kill(int(pid), number)

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                self.send(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code, minus the signal that ended it."""
        (ended,) = self._ended.result()
        return ended.returncode

    def _text(self, name: str) -> str:
        path = self._outputs / f"0.{name}"
        return path.read_text() if path.exists() else ""


def _serve(commands: Iterable[str]) -> dict[str, Any] | None:
    """Run the programs of each command. Returns a program in its own fork, and None once there are no more commands."""
    for line in commands:
        job = json.loads(line)
        children = []
        for number, program in enumerate(job["programs"]):
            child = os.fork()
            if child == 0:
                for descriptor, name in ((1, "out"), (2, "err")):
                    file = os.open(Path(job["outputs"], f"{number}.{name}"), os.O_WRONLY | os.O_CREAT)
                    os.dup2(file, descriptor)
                    os.close(file)
                return {"folder": job["folder"], **program}
            Path(job["outputs"], f"{number}.pid").write_text(str(child))
            children.append(child)
        print(json.dumps(_wait(children, time.monotonic() + job["timeout_s"])), flush=True)  # noqa: T201
    return None


def _wait(children: list[int], deadline: float) -> list[int]:
    """Return the exit codes of processes, minus the signal for those that one ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def _run(program: dict[str, Any]) -> None:
    """Be the interpreter of a program."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(program["folder"])
    os.environ.update(program["environment"])
    first, *arguments = program["arguments"]
    if first == "-W":
        warnings.simplefilter(arguments[0])  # type: ignore[arg-type]
        _, first, *arguments = arguments
    sys.path.insert(0, program["folder"])
    if first == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)  # noqa: S102 - as `python -c` does
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def import_for_forks(modules: Iterable[str]) -> None:
    """Import what forks of this process need. They end as interpreters do, but for what has been imported here.

    To take apart torch and all that was imported takes 0.4 s of CPU time, and a fork that does it copies the memory.
    """
    kept: dict[str, types.ModuleType] = {}

    def keep() -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for name in kept:
            sys.modules.pop(name, None)

    atexit.register(keep)  # ahead of what modules register: it runs behind all of that
    with warnings.catch_warnings():  # TorchRec and fbgemm warn while they are imported
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()  # a fork would not have the others
    kept.update((name, module) for name, module in sys.modules.items() if name not in ("builtins", "sys", "__main__"))
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # behind the end of the interpreter: no destructors of torch's libraries
    # A program that ends collects garbage, and would write to all objects of the launcher: 0.9 s of CPU with torch.
    gc.freeze()


def main(modules: Sequence[str]) -> None:
    import_for_forks(modules)
    program = _serve(sys.stdin)
    if program is not None:
        _run(program)


if __name__ == "__main__":
    main(sys.argv[1:])
