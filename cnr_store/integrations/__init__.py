"""Adapters for other libraries, one module each. Importing this package loads none of these libraries."""

from __future__ import annotations

__all__: list[str] = []
