"""Starts, kills and restarts worker processes, and collects the events that they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from cnr_store import CnrStoreError

State = Literal["down", "starting", "ready", "finished"]

LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a process: its life (0 is the first, each restart adds 1), its name and its facts."""

    life: int
    name: str
    facts: Mapping[str, Any]


class WorkerProcess:
    """A named process over all its lives. Always end it with `stop`.

    Not thread-safe: one thread starts, kills and stops; a background thread collects the events.
    """

    def __init__(self, name: str, task: Mapping[str, Any]) -> None:
        self.name = name
        self.events: list[Event] = []
        self.starts = self.kills = 0
        self.crashes: list[str] = []
        self.popen: subprocess.Popen[str] | None = None
        self._task = dict(task)
        self._news = threading.Condition()
        self._reader: threading.Thread | None = None
        self._errors: IO[str] | None = None

    @property
    def state(self) -> State:
        """The state of the current life."""
        if self.popen is None:
            return "down"
        names = {event.name for event in self._life()}
        return "finished" if "finished" in names else "ready" if "ready" in names else "starting"

    def start(self) -> None:
        """Start a new life; does not block."""
        assert self.popen is None
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - lives as long as the process; see `_reap`
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "cnr_store_tools.demo.worker", json.dumps(self._task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            # This process may have found the package by other means than an installation.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        self.starts += 1
        self._reader = threading.Thread(target=self._read, args=(self.popen, self.starts - 1), daemon=True)
        self._reader.start()

    def kill(self) -> bool:
        """Kill the process with SIGKILL and keep its events; return False if it had already ended."""
        if self.popen is None or self.has_ended():
            return False
        self.popen.kill()
        self._reap()
        self.kills += 1
        return True

    def has_ended(self) -> bool:
        """Return whether the current life ended by itself; if it had not finished, record a crash."""
        if self.popen is None or self.popen.poll() is None:
            return False
        code = self.popen.returncode
        if self._reader is not None:
            self._reader.join()
        if code != 0 or self.state != "finished":
            self.crashes.append(self._reason(code))
        self._reap()
        return True

    def send(self, **order: Any) -> None:
        """Send the process an order; do nothing if it is down."""
        if self.popen is None or self.popen.stdin is None:
            return
        try:
            self.popen.stdin.write(json.dumps(order) + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended; `has_ended` reports the reason.

    def wait_for(self, name: str, timeout_s: float) -> Mapping[str, Any]:
        """Wait for an event of the current life and return its facts; blocks.

        Raises
        ------
        CnrStoreError
            The process ended without it, or the timeout is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self._news:
                self._news.wait(0.2)
            has_ended = self.has_ended()  # first, because events before its end count
            found = next((event for event in self._life() if event.name == name), None)
            if found is not None:
                return found.facts
            if has_ended:
                raise CnrStoreError(f"process {self.name!r} ended: {self.crashes[-1] if self.crashes else 'too early'}")
        raise CnrStoreError(f"process {self.name!r} did not report {name!r} within {timeout_s:.0f} s")

    def facts_of(self, name: str) -> list[Mapping[str, Any]]:
        """Return the facts of all events of that name, of all lives, in order."""
        return [event.facts for event in list(self.events) if event.name == name]

    def stop(self, *, grace_s: float = 0.0) -> None:
        """Wait ``grace_s`` for the process to end, then kill it. A second call does nothing."""
        if self.popen is None:
            return
        try:
            self.popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
        self._reap()

    def _life(self) -> list[Event]:
        return [event for event in list(self.events) if event.life == self.starts - 1]

    def _read(self, process: subprocess.Popen[str], life: int) -> None:
        assert process.stdout is not None  # it is a pipe
        for line in process.stdout:
            if line.endswith("}\n"):  # a killed process may leave half a line
                facts = json.loads(line)
                with self._news:
                    self.events.append(Event(life, facts.pop("event"), facts))
                    self._news.notify_all()

    def _reason(self, code: int) -> str:
        failed = next((event for event in self._life() if event.name == "failed"), None)
        if failed is not None:
            return f"{failed.facts['kind']}: {failed.facts['message']}"
        assert self._errors is not None
        self._errors.seek(0)
        return f"code {code}: " + " | ".join(self._errors.read().splitlines()[-LAST_LINES:])

    def _reap(self) -> None:
        process, self.popen = self.popen, None
        if process is None:
            return
        process.wait()
        if self._reader is not None:
            self._reader.join()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
