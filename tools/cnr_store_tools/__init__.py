"""The ``cnr`` command: parses arguments, makes one library call, prints tables.

This package only parses and prints. Commands decide and change nothing themselves: they call public names of
`cnr_store`, so a program can do whatever the command can.
"""

from __future__ import annotations

__all__: list[str] = []
