"""Processes that are started, killed and started again, and what they tell in all their lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from cnr_store import CnrStoreError

State = Literal["down", "starting", "ready", "finished"]

_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Heard:
    """One event that a process told: in which of its lives (0 is the first), its name and its facts."""

    life: int
    event: str
    facts: Mapping[str, Any]


class Supervised:
    """One process by its name, over all its lives. End it with `stop` whatever happens.

    Not thread-safe: one thread starts, kills and stops; what is told is collected by threads of its own.
    """

    def __init__(self, name: str, order: Mapping[str, Any]) -> None:
        self.name = name
        self.heard: list[Heard] = []
        self.starts = self.kills = 0
        self.crashes: list[str] = []
        self.ready_s: list[float] = []
        self._started_s = 0.0
        self._order = dict(order)
        self._news = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._errors: IO[str] | None = None

    @property
    def state(self) -> State:
        """What the present life is at."""
        if self._process is None:
            return "down"
        told = {heard.event for heard in self._life()}
        return "finished" if "finished" in told else "ready" if "ready" in told else "starting"

    def start(self) -> None:
        """Begin a new life; returns at once."""
        assert self._process is None
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - lives as long as the process; see `_bury`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cnr_store_tools.serve_demo.worker", json.dumps(self._order)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            # This process may have found the package by other means than an installation.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        self.starts += 1
        self._started_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(self._process, self.starts - 1), daemon=True)
        self._reader.start()

    def kill(self) -> bool:
        """Kill the process with SIGKILL and keep its last words; False if it had ended by itself before."""
        if self._process is None or self.has_ended():
            return False
        self._process.kill()
        self._bury()
        self.kills += 1
        return True

    def has_ended(self) -> bool:
        """Whether the present life ended by itself; if not as it should, that is kept as a crash."""
        if self._process is None or self._process.poll() is None:
            return False
        code = self._process.returncode
        if self._reader is not None:
            self._reader.join()
        if code != 0 or self.state != "finished":
            self.crashes.append(self._last_words(code))
        self._bury()
        return True

    def send(self, **order: Any) -> None:
        """Give the process an order; one that is down does not hear it."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended: `has_ended` says so and why.

    def wait_for(self, event: str, timeout_s: float, on_news: Callable[[], object] = lambda: None) -> Mapping[str, Any]:
        """Return the facts of an event of the present life, once it is there; blocks.

        ``on_news`` is called now and then meanwhile.

        Raises
        ------
        CnrStoreError
            The process ended without it, or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self._news:
                self._news.wait(0.2)
            found = next((heard for heard in self._life() if heard.event == event), None)
            if found is not None:
                return found.facts
            if self.has_ended():
                raise CnrStoreError(f"process {self.name!r} ended: {self.crashes[-1] if self.crashes else 'too early'}")
            on_news()
        raise CnrStoreError(f"process {self.name!r} is not {event!r} after {timeout_s:.0f} s")

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End the process, by force if it is not gone after ``grace_s``. A second call is harmless."""
        if self._process is None:
            return
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._bury()

    def _life(self) -> list[Heard]:
        return [heard for heard in list(self.heard) if heard.life == self.starts - 1]

    def _read(self, process: subprocess.Popen[str], life: int) -> None:
        assert process.stdout is not None  # it is a pipe
        for line in process.stdout:
            if line.endswith("}\n"):  # a killed process may leave half a line
                facts = json.loads(line)
                with self._news:
                    event = facts.pop("event")
                    if event == "ready":
                        self.ready_s.append(time.monotonic() - self._started_s)
                    self.heard.append(Heard(life, event, facts))
                    self._news.notify_all()

    def _last_words(self, code: int) -> str:
        failed = next((heard for heard in self._life() if heard.event == "failed"), None)
        if failed is not None:
            return f"{failed.facts['kind']}: {failed.facts['message']}"
        assert self._errors is not None
        self._errors.seek(0)
        return f"code {code}: " + " | ".join(self._errors.read().splitlines()[-_LAST_LINES:])

    def _bury(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.wait()
        if self._reader is not None:
            self._reader.join()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
