"""`Store`: opens snapshots and writers; finds and names versions; tags, channels, branches, rollback.

It never encodes rows and never decides when to save. Open `store` first: its methods name the file that does the work.
"""

from __future__ import annotations

from cnr_store.store.store import Store, open_segment

__all__ = ["Store", "open_segment"]
