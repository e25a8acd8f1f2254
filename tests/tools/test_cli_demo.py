"""What `cnr demo` refuses before it trains anything; the demonstration itself is tested apart."""

from __future__ import annotations

from pathlib import Path

from cnr_store_tools import documents
from tests.tools.cli_runner import cnr


def test_demo_refuses_contradictory_precision(tmp_path: Path) -> None:
    assert cnr("demo", "--store", tmp_path / "s", "--exact", "--bits", 4).code == 4
    assert cnr("demo", "--store", tmp_path / "s", "--bits", 5).code == 4
    assert cnr("demo", "--store", tmp_path / "s", "--policy", "sometimes").code == 2
    assert cnr("demo", "--store", tmp_path / "s", "--steps", 0).code == 2
    assert not (tmp_path / "s").exists()


def test_demo_help_names_its_options() -> None:
    done = cnr("demo", "--help")

    assert done.code == 0
    for option in ("--data", "--store", "--exact", "--bits", "--policy", "--steps", "--force", "--json"):
        assert option in done.out


def test_values_that_json_cannot_hold_become_null() -> None:
    assert documents._plain({"auc": float("nan"), "path": Path("a/b"), "list": (1, float("inf"))}) == {
        "auc": None, "path": "a/b", "list": [1, None],
    }  # fmt: skip
