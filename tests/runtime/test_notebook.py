"""Reports in a notebook: a table of their fields, and each list of records as one more, every text escaped."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from cnr_store import GcReport, Store, collect_garbage, copy_store, verify_store
from cnr_store.maintenance.gc.report import VersionReport
from cnr_store.runtime.notebook import ShownReport


def cells(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(<td>.*?)</tr>", html)
    return [re.findall(r"<td>(.*?)</td>", row) for row in rows]


@pytest.mark.parametrize("module", ["cnr_store", "cnr_store.training", "cnr_store.relay", "cnr_store.changes"])
def test_every_public_report_shows_itself(module: str) -> None:
    public = importlib.import_module(module)
    reports = [getattr(public, name) for name in public.__all__ if re.search(r"(Report|StoreStatus)$", name)]

    assert reports
    assert [one for one in reports if not issubclass(one, ShownReport)] == []


def test_reports_of_a_store_are_tables_of_their_fields(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "a"), fsync=False, threads=1) as store:
        with store.writer() as writer, writer.begin(step=1) as txn:
            txn.write_table("user", np.ones((4, 2), np.float32))
        (tmp_path / "a" / "hint" / "latest.json").unlink()

        copied = copy_store(store, tmp_path / "b", fsync=False)._repr_html_()
        verified = verify_store(store)
        collected = collect_garbage(store, dry_run=True)._repr_html_()

    assert ["states", "1"] in cells(copied)
    assert ["url", str(tmp_path / "a")] in cells(verified._repr_html_())
    assert ["", "2", "True", "the head&#x27;s state"] in cells(collected)


def test_texts_are_escaped_and_long_lists_cut() -> None:
    versions = tuple(VersionReport(None, version, version > 3, "<b>") for version in range(50))
    report = GcReport("memory://x", is_dry_run=True, outcome="planned", versions=versions, segments=())

    html = report._repr_html_()

    assert "<b>" not in html
    assert "versions, the first 20<" in html
    assert cells(html)[-1] == ["", "19", "True", "&lt;b&gt;"]
    assert ["versions", "50"] in cells(html)
