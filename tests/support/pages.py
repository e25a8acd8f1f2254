"""The examples of a page of the docs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: Path) -> list[str]:
    """Every Python example of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def named_files(page: Path) -> dict[str, str]:
    """The examples whose first line is a comment with the name of a file, by that name."""
    named = {}
    for block in python_blocks(page):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            named[name.group(1)] = block
    return named


def run_example(text: str, given: dict[str, Any]) -> None:
    """Run an example in this process, in the working folder; ``given`` has what it needs, and gets what it makes."""
    path = Path("example.py")
    path.write_text(text)
    given |= runpy.run_path(str(path), init_globals=given)
