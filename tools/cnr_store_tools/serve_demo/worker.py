"""One process of ``cnr serve-demo``: ``python -m cnr_store_tools.serve_demo.worker`` with its order as the argument."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading

from cnr_store import CnrStoreError
from cnr_store_tools.serve_demo.channel import Channel

ROLES = ("saving", "maintaining", "inferring", "learning")


def main() -> int:
    """Play the role that the first argument names; returns the exit code."""
    order = json.loads(sys.argv[1])
    assert order["role"] in ROLES
    channel = Channel()

    def end(failed: threading.ExceptHookArgs) -> None:
        """A thread that fails takes the process with it: without it the others would prove nothing."""
        channel.tell("failed", kind=failed.exc_type.__name__, message=str(failed.exc_value))
        os._exit(1)

    threading.excepthook = end
    try:
        # Only the roles that train load torch.
        importlib.import_module(f"cnr_store_tools.serve_demo.{order['role']}").play(order, channel)
    except CnrStoreError as error:
        channel.tell("failed", kind=error.kind, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
