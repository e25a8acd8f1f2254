"""How many files a row passes on its way into a store (docs/architecture.md)."""

from __future__ import annotations

from pathlib import Path

from tests.support.walk import walk_of_a_row

MOST_FILES = 51


def test_a_row_passes_few_files_and_no_call_returns_upward(tmp_path: Path) -> None:
    walk = walk_of_a_row(f"file://{tmp_path}/store")

    assert len(walk.files) <= MOST_FILES
    assert walk.returns == []
    assert list(walk.files)[-1] == "cnr_store/storage/local.py"
