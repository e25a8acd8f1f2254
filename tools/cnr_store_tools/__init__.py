"""The ``cnr`` command: arguments in, one library call, tables out.

Parsing and printing live only here, and nothing else does: what a command decides or changes is in
`cnr_store`, through its public names, so that a program can do whatever the command can.
"""

from __future__ import annotations

__all__: list[str] = []
