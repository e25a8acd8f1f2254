"""Training processes and what they say: one JSON document per line of their standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from cnr_store import BadInput, CnrStoreError, NotFound

_ERROR_LINES = 5


class Child:
    """One training process; its events are read as they come. End it with `stop` whatever happens."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - lives as long as the process; see `stop`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cnr_store_tools.demo.trainer", json.dumps(order)],
            stdout=subprocess.PIPE, stderr=self._errors, text=True,
            # This process may have found the package by other means than an installation.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, event: str) -> dict[str, Any]:
        """Return the event, once it is there; blocks.

        Raises
        ------
        CnrStoreError
            The process ended without it.
        """
        with self._news:
            self._news.wait_for(lambda: self.find(event) is not None or not self._reader.is_alive())
        if self.find(event) is None:
            self._reader.join()
        found = self.find(event)
        if found is None:
            raise self._failure()
        return found

    def find(self, event: str) -> dict[str, Any] | None:
        """Return the first event of that name so far."""
        return next((one for one in self.events if one["event"] == event), None)

    def stop(self) -> None:
        """Kill the process if it still runs, and wait for its last words. A second call is harmless."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None  # it is a pipe
        for line in self.process.stdout:
            # A killed process may leave half a line.
            event = json.loads(line) if line.endswith("}\n") else None
            if event is not None:
                with self._news:
                    self.events.append(event)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _failure(self) -> CnrStoreError:
        failed = self.find("failed")
        if failed is not None:
            known = {"bad_input": BadInput, "not_found": NotFound}
            return known.get(failed["kind"], CnrStoreError)(failed["message"])
        code = self.process.wait()
        self._errors.seek(0)
        last = " | ".join(self._errors.read().splitlines()[-_ERROR_LINES:])
        return CnrStoreError(f"the training process ended with code {code}: {last}")
