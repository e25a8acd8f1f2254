"""The site of the docs is built without a warning, has every public name, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cnr_store
import cnr_store.training
from tests.support.pages import DOCS, python_blocks

EXAMPLE_COLUMNS = 88  # what a laptop's window shows beside the site's menus (docs/site.css)
ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_and_has_every_public_name(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    for module in (cnr_store, cnr_store.training):
        page = (tmp_path / "api" / f"{module.__name__.split('.')[-1]}.html").read_text()
        anchors = set(re.findall(r'id="([\w.]+)"', page))
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= anchors
    assert "Store" in (tmp_path / "search" / "search_index.json").read_text()
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    loaded = {
        url for page in pages for url in re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css))"', page.read_text())
    }
    assert loaded == set()


def test_no_example_scrolls_sideways() -> None:
    wide = [
        f"{page.name}: {line}"
        for page in sorted(DOCS.glob("*.md"))
        for block in python_blocks(page)
        for line in block.splitlines()
        if len(line) > EXAMPLE_COLUMNS
    ]

    assert wide == []
