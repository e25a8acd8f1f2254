"""A process's side of the pipes to whoever started it: it tells JSON lines, and takes orders until the pipe closes."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

ORPHANED = 3
"""Exit code of a process whose starter is gone."""


class Channel:
    """Tells events on standard output and hears orders on standard input; thread-safe.

    When the starter ends, however it does, its end of the pipes closes: this process then ends at once, so that nobody
    leaves processes behind.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard = threading.Condition()
        self._orders: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, event: str, **facts: Any) -> None:
        """Tell one event."""
        line = json.dumps({"event": event, **facts}) + "\n"
        with self._lock:
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except BrokenPipeError:
                os._exit(ORPHANED)

    def order(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait for an order at most so long; None if there is none. An order stays until the process ends."""
        with self._heard:
            self._heard.wait_for(lambda: self._orders, timeout_s)
            return self._orders[-1] if self._orders else None

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._heard:
                self._orders.append(json.loads(line))
                self._heard.notify_all()
        os._exit(ORPHANED)
