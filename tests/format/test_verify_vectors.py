"""`verify_store` on the published stores: the sound ones have no problems, and each damaged one has its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cnr_store import Store, verify_store
from format_spec import vectors

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "negative" / "vectors.json").read_text())

REFUSED = {"major_of_zero", "newer_major", "not_a_store"}
"""`Store.open` raises for these, so there is nothing that could be checked."""

NO_DAMAGE = {"unknown_writer_feature"}
"""Every reader can read it."""

OTHER_KINDS = {"hole_in_the_log": "missing_object"}
"""A reader meets this as part of another error than the one that names the object."""


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir() if (path / "store").is_dir()))
def test_golden_store_is_sound(case: str) -> None:
    with Store.open(str(GOLDEN / case / "store"), threads=1) as store:
        report = verify_store(store, all_versions=True, deep=True, threads=1)

    assert report.problems == ()


@pytest.mark.parametrize("name", sorted(VECTORS.keys() - REFUSED))
def test_damage_of_every_vector_is_found(name: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / VECTORS[name]["store"] / "store", root)
    vectors.apply(root, VECTORS[name]["patch"])

    with Store.open(str(root), threads=1) as store:
        report = verify_store(store, all_versions=True, deep=True, threads=1)

    hurting = {problem.kind for problem in report.problems if problem.versions}
    if name in NO_DAMAGE:
        assert report.problems == ()
    else:
        assert OTHER_KINDS.get(name, VECTORS[name]["kind"]) in hurting
