"""Other libraries, each in a module of its own: importing this package loads none of them."""

from __future__ import annotations

from cnr_store.integrations.state_dict import StateDict, load_state_dict

__all__ = ["StateDict", "load_state_dict"]
