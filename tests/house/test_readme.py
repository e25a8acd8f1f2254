"""The examples of the README and of docs/gpu.md run as they stand; a second run of the first continues it.

The other pages' examples have tests beside the room that they are about.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program
from tests.support.pages import DOCS, python_blocks

README = DOCS.parent / "README.md"


def printed_by(launcher: Launcher, example: str, folder: Path) -> list[str]:
    (done,) = launcher.run(Program(["-c", example]), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ten_lines_run_continue_and_are_served(launcher: Launcher, tmp_path: Path) -> None:
    """The first run is a fresh interpreter: nothing that an example needs is there because a launcher imported it."""
    training, serving = python_blocks(README)

    fresh = subprocess.run([sys.executable, "-c", training], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert fresh.returncode == 0, fresh.stderr
    start, saves = fresh.stdout.splitlines()
    assert (start, saves.count("delta")) == ("start", 4)
    assert printed_by(launcher, training, tmp_path) == ["continue after step 50", "[]"]
    assert printed_by(launcher, serving, tmp_path) == ["(2, 32) of step 50"]


def test_the_start_page_of_the_site_resumes(launcher: Launcher, tmp_path: Path) -> None:
    (example,) = python_blocks(DOCS / "index.md")

    assert printed_by(launcher, example, tmp_path) == ["start"]
    assert printed_by(launcher, example, tmp_path) == ["continue after step 50"]


def test_the_readme_is_short_and_claims_little() -> None:
    results = re.search(r"^## Measured\n(.*?)^## ", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert results is not None
    rows = [line for line in results[1].splitlines() if line.startswith("| ")]

    assert len(README.read_text().splitlines()) <= 120
    assert 5 <= len(rows) - 1 <= 10
    assert all(row.count("|") == 5 for row in rows), "one claim to a row: what, measured, goal, command"


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


def test_the_collectors_alone_run(launcher: Launcher, tmp_path: Path) -> None:
    (example,) = python_blocks(DOCS / "gpu.md")

    assert printed_by(launcher, example, tmp_path) == ["torch.Size([2, 16])"]


def test_the_readme_starts_with_the_two_commands() -> None:
    first = README.read_text().split("##")[0]

    assert first.index("make demo") < first.index("make test")
