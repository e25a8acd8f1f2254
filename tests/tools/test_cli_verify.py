"""`cnr verify`: its exit codes, its table and its document."""

from __future__ import annotations

from pathlib import Path

from cnr_store import Store, repair_store
from tests.tools.cli_runner import cnr
from tests.tools.sample_store import flip, key_of


def test_sound_store_ends_with_zero(root: Path) -> None:
    plain = cnr("verify", root, "--deep")
    as_json = cnr("verify", root, "--deep", "--json")

    assert plain.code == as_json.code == 0
    assert "no problems found" in plain.out
    assert as_json.document["is_sound"] is True
    assert as_json.document["problems"] == []
    assert as_json.err == ""


def test_damaged_object_ends_with_one_and_is_named(root: Path) -> None:
    chunk = next(root.glob("data/*1-*/*set-0.codes/c.0.0"))
    chunk.write_bytes(flip(chunk.read_bytes()))

    plain = cnr("verify", root)
    as_json = cnr("verify", root, "--json")

    assert plain.code == as_json.code == 1
    compacted = plain.out.replace("\n", "").replace("│", "").replace(" ", "")
    assert "corrupt_object" in plain.out
    assert "2-6" in plain.out
    assert chunk.name in compacted
    problem = as_json.document["problems"][0]
    assert problem["path"] == key_of(root, chunk)
    assert problem["versions"] == [2, 3, 4, 5, 6]
    assert problem["kind"] == "corrupt_object"
    assert "cnr verify" not in problem["message"]


def test_only_the_asked_version_is_read(root: Path) -> None:
    next(root.glob("data/*4-*/_segment.json.zst")).unlink()

    assert cnr("verify", root, "--version", 4).code == 0
    assert cnr("verify", root, "--version", 5).code == 1
    assert cnr("verify", root, "--all").code == 1


def test_torn_newest_record_is_a_problem_not_an_error(root: Path) -> None:
    record = root / "commits" / f"{6:020d}.json"
    record.write_bytes(record.read_bytes()[:50])

    done = cnr("verify", root, "--json")

    assert done.code == 1
    assert [item["path"] for item in done.document["problems"]] == ["commits/00000000000000000006.json"]


def test_what_is_whole_and_what_was_superseded_is_said(root: Path) -> None:
    (root / "commits" / f"{7:020d}.json").write_bytes(b"{")
    torn = cnr("verify", root)
    with Store.open(str(root)) as store:
        repair_store(store, dry_run=False)
    sound, document = cnr("verify", root), cnr("verify", root, "--deep", "--json").document

    assert (torn.code, sound.code) == (1, 0)
    assert "undamaged versions, of those that were read: 2-6" in torn.out
    assert "superseded by a repair: 7" in sound.out.replace("\n", " ")
    assert (document["superseded"], document["restorable"][0], document["unreferenced"]) == ([7], 8, 0)
