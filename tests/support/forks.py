"""Processes that are forked, where a test's code starts interpreters by ``subprocess.Popen``.

An interpreter that imports torch and this library takes three to six seconds of CPU time. Here it is a fork of a
process that has imported them, and still a child of the process of the tests, which can wait for it and kill it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.launcher import PATHS, REPOSITORY, import_for_forks

_SPAWNED = ("cnr_store.serving.loader_process", "cnr_store.maintenance.compaction.engines")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans among its descendants become its children
_MOST_BYTES = 1 << 20


@contextmanager
def forked_interpreters(module: Any, *imported: str) -> Iterator[None]:
    """Fork what ``module`` starts by ``subprocess.Popen([python, "-m", NAME, ...])`` from one that has ``imported``."""
    own, other = socket.socketpair()
    with own, pytest.MonkeyPatch.context() as patch:
        forks = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks", str(other.fileno()), *imported],
            pass_fds=[other.fileno()], cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": PATHS},
        )  # fmt: skip
        other.close()

        class Forked(subprocess.Popen[str]):
            """A process of the caller's arguments, environment and pipes."""

            def _execute_child(self, args: Sequence[str], *others: Any) -> None:
                environment, pipes = others[5], others[9:15]
                job = json.dumps({"arguments": args[2:], "environment": environment})
                socket.send_fds(own, [job.encode()], [pipes[0], pipes[3], pipes[5]])
                self.pid = int(own.recv(64))
                self._child_created = True
                self._close_pipe_fds(*pipes)

        patch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
        _adopt_orphans(True)
        try:
            yield
        finally:
            _adopt_orphans(False)
            forks.kill()
            forks.wait()


@contextmanager
def forked_children(module: Any) -> Iterator[None]:
    """Fork what ``module`` spawns by `multiprocessing`, from one server that has imported the library's modules.

    Arguments are pickled and the main module is imported, as where children are spawned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_SPAWNED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda kind: context))
        yield


def _adopt_orphans(adopts: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(adopts), 0, 0, 0)


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each job. Returns a process its job, and None once there are no more jobs."""
    while True:
        data, ends, _, _ = socket.recv_fds(line, _MOST_BYTES, 3)
        if not data:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process:
                os.write(writer, str(process).encode())
                os._exit(0)
            for unused in (line.detach(), reader, writer):
                os.close(unused)
            for number, end in enumerate(ends):
                os.dup2(end, number)
                os.close(end)
            job: dict[str, Any] = json.loads(data)
            return job
        os.waitpid(between, 0)  # now the process is a child of the process of the tests
        line.sendall(os.read(reader, 64))
        for end in (*ends, reader, writer):
            os.close(end)


def main(descriptor: int, imported: Sequence[str]) -> None:
    import_for_forks(imported)
    with closing(socket.socket(fileno=descriptor)) as line:
        job = _serve(line)
    if job is not None:
        os.environ.clear()
        os.environ.update(job["environment"])
        name, *sys.argv[1:] = job["arguments"]
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
