"""The commands. Each parses its arguments, calls the library once, and prints a document by `output.emit`."""

from __future__ import annotations

__all__: list[str] = []
