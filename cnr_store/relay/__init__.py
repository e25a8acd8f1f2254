"""Copies the newest versions of a store to a place near their readers (spec, section 7.11).

It also plans what is placed where: shards on relays (`assigning`), users of a federated training on edges
(`class_balance`). Never commits a version of its own and never changes the source. Open `relay` first.
"""

from __future__ import annotations

from cnr_store.relay.assigning import assign_shards
from cnr_store.relay.class_balance import assign_users
from cnr_store.relay.relay import Relay
from cnr_store.relay.report import RelayReport

__all__ = ["Relay", "RelayReport", "assign_shards", "assign_users"]
