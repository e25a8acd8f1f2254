"""The examples of the README and of docs/gpu.md run as they stand; a second run of the first continues it.

The README's ways to attach a manager are parts of a training of the reader's own: tests/training/test_readme_attach.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"


def example_of(section: str) -> str:
    """The only Python of a section of the README."""
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return str(example)


def printed_by(example: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ten_lines_run_continue_and_are_served(tmp_path: Path) -> None:
    training, serving = example_of("Ten lines"), example_of("Serve it")

    for _ in range(2):
        assert printed_by(training, tmp_path) == ["(2, 32)"]
    # The beginning, a fence and five saves: the second run has nothing to train, and so writes nothing.
    assert len(list((tmp_path / "ten-lines-store" / "commits").iterdir())) == 7

    assert printed_by(example_of("Evaluate it"), tmp_path) == ["step 50 (100000, 32)"]

    served, *changed = printed_by(serving, tmp_path)

    assert served == "(2, 32) of step 50"
    assert [line.split()[-1] for line in changed] == ["20", "30", "40", "50"]
    assert len(serving.splitlines()) <= 10


def test_the_readme_leads_to_every_page_of_the_docs() -> None:
    linked = set(re.findall(r"\(docs/(\w+\.md)", README.read_text()))

    assert linked == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: str(page.name))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    broken = []
    for path, heading in links:
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings_of(target)):
            broken.append(f"{path}#{heading}")

    assert broken == []


def headings_of(page: Path) -> set[str]:
    """What links call the headings of a page: small letters, blanks as hyphens, no other marks."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_collectors_alone_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "gpu.md").read_text(), flags=re.DOTALL)

    assert printed_by(example, tmp_path) == ["torch.Size([2, 16])"]


def test_the_readme_starts_with_the_two_commands() -> None:
    first = README.read_text().split("##")[0]

    assert first.index("make demo") < first.index("make test")
