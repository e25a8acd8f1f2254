"""The commands, a few to a module. Each parses, calls the library once, and hands a document to `output.emit`."""

from __future__ import annotations

__all__: list[str] = []
