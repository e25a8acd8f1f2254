"""What the site takes from outside docs/: specification, decisions and changelog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SPEC = REPOSITORY / "format_spec"


def on_files(files: Any, config: Any) -> Any:
    """Add pages: copies of files of the repository, and a list of the decisions."""
    from mkdocs.structure.files import File

    pages = {
        str(path.relative_to(REPOSITORY)): path.read_text()
        for path in sorted(SPEC.glob("*.md"))
    }
    decisions = sorted((SPEC / "decisions").glob("*.md"))
    pages |= {str(path.relative_to(REPOSITORY)): path.read_text() for path in decisions}
    lines = [
        f"- [{path.read_text().splitlines()[0].removeprefix('# ')}]({path.name})"
        for path in decisions
    ]
    pages["format_spec/decisions/index.md"] = "\n".join(["# Decisions", "", *lines, ""])
    pages["changelog.md"] = (REPOSITORY / "CHANGELOG.md").read_text()
    for address, text in pages.items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between docs/ and format_spec/ lead to the pages of the site."""
    depth = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(
        "](../format_spec/decisions/)", f"]({depth}format_spec/decisions/index.md)"
    )
    return markdown.replace("](../format_spec/", f"]({depth}format_spec/").replace(
        "](../docs/", f"]({depth}"
    )
