"""`cnr repair`: its output, its changes, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cli_runner import cnr
from tests.tools.sample_store import flip, object_files


def tear_newest(root: Path) -> None:
    record = root / "commits" / f"{6:020d}.json"
    record.write_bytes(record.read_bytes()[:50])


def spoil_last_delta(root: Path) -> None:
    chunk = next(root.glob("data/*4-*/*delete-0.rows/c.0.0"))
    chunk.write_bytes(flip(chunk.read_bytes()))


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in object_files(root)}


def test_a_sound_store_has_nothing_to_repair(root: Path) -> None:
    before = contents(root)

    dry, wet = cnr("repair", root, "--dry-run"), cnr("repair", root, "--json")

    assert (dry.code, wet.code) == (0, 0)
    assert "nothing to repair" in dry.out
    assert (wet.document["actions"], wet.document["remaining"], wet.document["target"]) == ([], [], 6)
    assert contents(root) == before


@pytest.mark.parametrize("damage", [tear_newest, spoil_last_delta])
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(root: Path, damage: object) -> None:
    assert callable(damage)
    damage(root)
    before = contents(root)

    done = cnr("repair", root, "--dry-run")

    assert done.code == 1
    assert "would: " in done.out
    assert "this was a dry run: nothing was changed" in done.out
    assert contents(root) == before


def test_a_folder_in_place_of_a_zarr_document_is_no_failure_of_the_disk(root: Path) -> None:
    """It ended with 7, "Directory not empty"; a dry run promised to write the document."""
    (root / "zarr.json").unlink()
    (root / "zarr.json").mkdir()
    (root / "zarr.json" / "file").write_text("x")
    before = contents(root)

    done, dry, found = cnr("repair", root), cnr("repair", root, "--dry-run"), cnr("verify", root)

    assert (done.code, dry.code, found.code) == (6, 6, 1)
    assert done.err == dry.err
    assert "zarr.json is a folder with other files, in place of an object; move it away" in done.err
    assert "zarr.json is a folder with other files" in found.out
    assert contents(root) == before
    (root / "zarr.json").rename(root.parent / "away")
    assert cnr("repair", root).code == 0


def test_a_torn_newest_record_is_superseded_and_the_store_verifies(root: Path) -> None:
    tear_newest(root)

    done = cnr("repair", root, "--json")

    assert done.code == 0
    assert [item["kind"] for item in done.document["actions"]][:1] == ["supersede"]
    assert done.document["torn"] == [6]
    assert cnr("verify", root, "--deep").code == 0
    assert cnr("show", root, "--json").document["step"] == 40
    assert cnr("repair", root).code == 0


@pytest.mark.filterwarnings("ignore:commit record 6 cannot be parsed.*serving version 5:RuntimeWarning")
def test_version_before_a_torn_record_is_shown(root: Path) -> None:
    """A regression: it warned that version 5 is served, and then showed nothing."""
    tear_newest(root)

    shown = cnr("show", root, "--json")

    assert (shown.code, shown.document["version"]) == (0, 5)


def test_a_store_goes_on_before_a_spoilt_delta_and_names_what_is_lost(root: Path) -> None:
    spoil_last_delta(root)

    done = cnr("repair", root)

    assert "rollback" in done.out
    assert done.code == 0
    assert "lost: version 6 (step 40) is newer, but damaged" in done.out
    assert "problems that remain" in done.out
    assert cnr("show", root, "--json").document["step"] == 30
    assert cnr("verify", root).code == 0


def test_a_store_without_a_whole_version_ends_with_one(root: Path) -> None:
    for manifest in root.glob("data/*/_segment.json.zst"):
        manifest.unlink()

    done = cnr("repair", root)

    assert done.code == 1
    assert "no version is undamaged" in done.out
