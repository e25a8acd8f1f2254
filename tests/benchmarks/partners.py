"""Processes that a benchmark works with while they run: a function of the benchmark in a process of its own.

The function is called as ``function(partner, **options)`` and tells what it has to say with `Told.tell`; the benchmark
reads that with `Partner.hear` and orders with `Partner.say`. When the benchmark ends, however it does, so do they.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Partner:
    """One process, seen from the benchmark; a context manager that ends it."""

    def __init__(self, script: str, function: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, script, function, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Partner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:  # which closes its pipes
            self._process.kill()
            self._reader.join()

    def say(self, **order: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next thing that the process tells; blocks."""
        told = self._heard.get()
        if told is None:
            raise SystemExit(f"a partner of the benchmark ended with code {self._process.wait()}")
        return told

    def hear_all(self) -> list[dict[str, Any]]:
        """Return what it has told since; does not block."""
        found = []
        while True:
            try:
                told = self._heard.get_nowait()
            except queue.Empty:
                return found
            if told is None:
                raise SystemExit(f"a partner of the benchmark ended with code {self._process.wait()}")
            found.append(told)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(json.loads(line))
        self._heard.put(None)


class Told:
    """The benchmark, seen from the process."""

    def __init__(self) -> None:
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **facts: Any) -> None:
        """Say something."""
        print(json.dumps(facts), flush=True)

    def order(self) -> dict[str, Any]:
        """Return the next order; blocks."""
        return self._orders.get()

    @property
    def has_order(self) -> bool:
        """Whether there is an order that was not taken."""
        return not self._orders.empty()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        os._exit(0)


def _play(script: str, function: str, options: str) -> None:
    sys.path.insert(0, str(Path(script).parent))
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    told = Told()
    getattr(module, function)(told, **json.loads(options))
    while True:  # what was told last must be read before the pipe closes; the benchmark ends us
        time.sleep(60)


if __name__ == "__main__":
    _play(*sys.argv[1:4])
