"""One process of ``cnr serve-demo``: ``python -m cnr_store_tools.serve_demo.worker`` with its order as the argument."""

from __future__ import annotations

import importlib
import json
import sys

from cnr_store import CnrStoreError
from cnr_store_tools.serve_demo.channel import Channel

ROLES = ("saving", "maintaining", "inferring", "learning")


def main() -> int:
    """Play the role that the first argument names; returns the exit code."""
    order = json.loads(sys.argv[1])
    assert order["role"] in ROLES
    channel = Channel()
    try:
        # Only the roles that train load torch.
        importlib.import_module(f"cnr_store_tools.serve_demo.{order['role']}").play(order, channel)
    except CnrStoreError as error:
        channel.tell("failed", kind=error.kind, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
