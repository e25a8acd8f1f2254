"""What each source file is for: the first sentence of its docstring, as the page docs/files.md.

``python -m tests.support.files`` writes the page. `tests/house/test_files_page.py` checks that it is up to date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.rooms import GPU, LIBRARY, REPOSITORY, TOOLS, sources

PAGE = REPOSITORY / "docs" / "files.md"
INTRODUCTION = """# Files

What each file is for, in its own words: the first sentence of its docstring. [Architecture](architecture.md) explains
the rooms. This page is written by `python -m tests.support.files`.
"""


@cache
def purpose(file: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line and as Markdown."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].replace("``", "`").split())


def folders() -> Iterator[Path]:
    """The folders that have sources, each with the folders inside it behind it."""
    for root in (TOOLS, LIBRARY, GPU):
        yield from sorted({file.parent for file in sources(root)})


def page() -> str:
    """Return the page: a heading for each folder, and below it a list of its files."""
    lines = [INTRODUCTION]
    for folder in folders():
        files = [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
        lines += [f"## {folder.relative_to(REPOSITORY)}/", purpose(folder / "__init__.py"), ""]
        lines += [*(f"- `{file.name}`: {purpose(file)}" for file in files), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
