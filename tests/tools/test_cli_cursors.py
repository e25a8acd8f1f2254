"""cursors, drop-cursor: their text output, and their JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cli_runner import cnr
from tests.tools.sample_store import build_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with build_store(tmp_path / "store") as store:
        store.register_cursor("eu", 3)
        with store.fork("trial") as branch:
            branch.register_cursor("lab", 0, ttl_s=3600)
    return tmp_path / "store"


def test_cursors_are_listed_with_the_head_that_they_follow(root: Path) -> None:
    listed = cnr("cursors", root, "--json").document["cursors"]
    plain = cnr("cursors", root)

    assert [(item["cursor"], item["branch"], item["version"], item["head"]) for item in listed] == [
        ("eu", None, 3, 7), ("lab", "trial", 0, 0),
    ]  # fmt: skip
    assert listed[0]["expires_ms"] is None
    assert listed[1]["expires_ms"] - listed[1]["moved_ms"] == 3_600_000
    assert "trial" in plain.out
    assert "dropped" in plain.out


def test_a_forgotten_cursor_is_gone(root: Path) -> None:
    assert cnr("drop-cursor", root, "eu").code == 0

    assert [item["cursor"] for item in cnr("cursors", root, "--json").document["cursors"]] == ["lab"]
    assert cnr("drop-cursor", root, "eu").code == 3


def test_a_cursor_of_a_branch_that_ended_is_still_listed(root: Path) -> None:
    cnr("drop-branch", root, "trial")

    lab = cnr("cursors", root, "--json").document["cursors"][1]

    assert lab["head"] is None
    assert len(lab["branch"]) == 32


def test_a_store_without_cursors_says_so(tmp_path: Path) -> None:
    cnr("init", tmp_path / "s")

    assert "has no cursors" in cnr("cursors", tmp_path / "s").out
