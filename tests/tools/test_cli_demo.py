"""The arguments that `cnr demo` refuses before it trains; `test_demo` runs the demonstration."""

from __future__ import annotations

from pathlib import Path

from cnr_store import NotFound
from cnr_store_tools.output import to_document
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
    for option in ("--store", "--exact", "--bits", "--policy", "--steps", "--force", "--json"):
        assert option in done.out


def test_values_that_json_cannot_hold_become_null_or_text() -> None:
    report = {"auc": float("nan"), "path": Path("a/b"), "list": (1, float("inf")), "error": NotFound("x", path="p")}

    assert to_document(report) == {
        "auc": None, "path": "a/b", "list": [1, None],
        "error": {"kind": "not_found", "message": "x", "details": {"path": "p"}},
    }  # fmt: skip
