"""One process of a demonstration: ``python -m cnr_store_tools.demo.worker`` with its task as the argument.

A task is JSON. Its ``module`` names the module whose ``play`` runs it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

from cnr_store import CnrStoreError

ORPHANED = 3
"""Exit code of a process whose parent has ended."""


class Channel:
    """Writes events to standard output as JSON lines, and reads orders from standard input; thread-safe.

    When the parent ends, the pipes close, and this process exits immediately.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._order: dict[str, Any] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, event: str, **facts: Any) -> None:
        """Write one event."""
        line = json.dumps({"event": event, **facts}) + "\n"
        with self._lock:
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except BrokenPipeError:
                os._exit(ORPHANED)

    def order(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the newest order; wait at most ``timeout_s`` for the first one, then return None."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None, timeout_s)
            return self._order

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._order = json.loads(line)
                self._changed.notify_all()
        os._exit(ORPHANED)


def main() -> int:
    """Run the task in the first argument; return the exit code."""
    task = json.loads(sys.argv[1])
    channel = Channel()

    def end(failed: threading.ExceptHookArgs) -> None:
        """End the process when one of its threads fails."""
        channel.report("failed", kind=failed.exc_type.__name__, message=str(failed.exc_value))
        os._exit(1)

    threading.excepthook = end
    try:
        importlib.import_module(task["module"]).play(task, channel)
    except CnrStoreError as error:
        channel.report("failed", kind=error.kind, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
