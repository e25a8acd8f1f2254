"""Adapters for other libraries, one module each. Importing this package loads none of these libraries."""

from __future__ import annotations

from cnr_store.integrations.state_dict import StateDict, load_state_dict

__all__ = ["StateDict", "load_state_dict"]
