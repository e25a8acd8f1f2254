"""fork, branches, drop-branch, channel and `--branch`: their text output, and their JSON."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store
from tests.tools.cli_runner import cnr


def save_on_branch(root: Path, name: str, step: int) -> None:
    with Store.open(str(root), fsync=False, branch=name) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(step=step) as txn:
            txn.write_rows("half/item", np.arange(3), np.full((3, 4), step, np.float16))


def test_fork_begins_with_the_version_asked_for(root: Path) -> None:
    done = cnr("fork", root, "trial", "--version", 4, "--json")

    assert (done.code, done.err) == (0, "")
    assert (done.document["branch"], done.document["version"], done.document["expires_ms"]) == ("trial", 4, None)
    shown = cnr("show", root, "--branch", "trial", "--json").document
    assert (shown["branch"], shown["version"], shown["step"]) == ("trial", 0, 30)


def test_fork_with_an_end_says_when_that_is(root: Path) -> None:
    before = dt.datetime.now(dt.UTC).timestamp() * 1000

    done = cnr("fork", root, "trial", "--expires", "30d", "--json")

    days = (done.document["expires_ms"] - before) / 86_400_000
    assert 30 <= days < 30.1
    assert "until 2" in done.document["message"]


def test_commands_on_a_branch_read_and_change_that_branch_alone(root: Path, tmp_path: Path) -> None:
    cnr("fork", root, "trial")
    save_on_branch(root, "trial", step=77)

    cnr("tag", root, "best", "--branch", "trial")
    cnr("channel", root, "live", "--branch", "trial")
    log = cnr("log", root, "--branch", "trial", "--json").document

    assert [item["kind"] for item in log["records"]] == ["channel", "tag", "delta", "fence", "fork"]
    assert log["records"][2]["tags"] == ["best"]
    assert log["records"][-1]["name"] == "trial"
    assert cnr("show", root, "--tag", "best").code == 3
    assert cnr("show", root, "--tag", "best", "--branch", "trial", "--json").document["step"] == 77
    assert cnr("rollback", root, 0, "--branch", "trial", "--json").document["step"] == 40
    assert cnr("show", root, "--json").document["step"] == 40
    out = tmp_path / "out.safetensors"
    assert cnr("export", root, out, "--branch", "trial", "--version", 2, "--table", "half*").code == 0
    assert cnr("verify", root, "--branch", "trial", "--deep").code == 0


def test_log_of_the_store_names_the_branch_and_what_points_at_each_version(root: Path) -> None:
    cnr("channel", root, "serving", "--version", 3)
    cnr("fork", root, "trial", "--version", 4)

    as_json = cnr("log", root, "--json").document["records"]
    plain = cnr("log", root)

    by_version = {item["version"]: item for item in as_json}
    assert (by_version[8]["kind"], by_version[8]["name"], by_version[8]["target"]) == ("fork", "trial", 4)
    assert (by_version[3]["tags"], by_version[3]["channels"]) == (["good"], ["serving"])
    assert "trial -> 4" in plain.out
    assert "good, serving" in plain.out


def test_branches_are_listed_with_their_heads_and_ends(root: Path) -> None:
    cnr("fork", root, "trial", "--version", 4)
    cnr("fork", root, "quick", "--expires", "12h")
    save_on_branch(root, "trial", step=77)

    listed = cnr("branches", root, "--json").document["branches"]
    plain = cnr("branches", root)

    assert [item["branch"] for item in listed] == ["quick", "trial"]
    assert (listed[0]["version"], listed[0]["head"]) == (7, {"version": 0, "step": 40})
    assert listed[0]["expires_ms"] is not None
    assert (listed[1]["version"], listed[1]["head"], listed[1]["expires_ms"]) == (4, {"version": 2, "step": 77}, None)
    assert "quick" in plain.out
    assert "never" in plain.out


def test_a_store_without_branches_says_so(root: Path) -> None:
    assert "has no branches" in cnr("branches", root).out
    assert cnr("branches", root, "--json").document["branches"] == []


def test_a_dropped_branch_is_gone_and_its_name_is_free(root: Path) -> None:
    cnr("fork", root, "trial")

    assert cnr("drop-branch", root, "trial").code == 0

    assert cnr("show", root, "--branch", "trial").code == 3
    assert cnr("branches", root, "--json").document["branches"] == []
    assert cnr("fork", root, "trial").code == 0


def test_a_channel_moves_and_keeps_its_name(root: Path) -> None:
    first = cnr("channel", root, "serving", "--version", 3, "--json")
    second = cnr("channel", root, "serving", "--json")

    assert (first.document["target"], second.document["target"]) == (3, 7)
    assert cnr("show", root, "--channel", "serving", "--json").document["version"] == 7
    assert "channels: serving" in cnr("show", root, "--version", 7).out


def test_a_removed_channel_is_gone(root: Path) -> None:
    cnr("channel", root, "serving")

    done = cnr("channel", root, "serving", "--drop")

    assert (done.code, done.out) == (0, "removed channel serving (record 8)\n")
    assert cnr("show", root, "--channel", "serving").code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("fork", "{root}", "taken"), 5, "branch_exists"),
        (("fork", "{root}", "new", "--version", "99"), 3, "version_not_found"),
        (("fork", "{root}", "new", "--expires", "30"), 4, "bad_input"),
        (("fork", "{root}", "new", "--expires", "0"), 4, "bad_input"),
        (("fork", "{root}", "a\nb"), 4, "bad_name"),
        (("drop-branch", "{root}", "none"), 3, "branch_not_found"),
        (("log", "{root}", "--branch", "none"), 3, "branch_not_found"),
        (("channel", "{root}", "good"), 5, "tag_exists"),
        (("channel", "{root}", "none", "--drop"), 3, "channel_not_found"),
        (("channel", "{root}", "c", "--drop", "--version", "3"), 4, "bad_input"),
        (("channel", "{root}", "c", "--version", "99"), 3, "version_not_found"),
        (("show", "{root}", "--channel", "none"), 3, "channel_not_found"),
        (("show", "{root}", "--channel", "c", "--tag", "good"), 4, "bad_input"),
    ],
)
def test_refusals_have_their_code_and_leave_no_record(
    root: Path, arguments: tuple[str, ...], code: int, kind: str
) -> None:
    cnr("fork", root, "taken")
    before = cnr("log", root, "--json").document

    done = cnr(*(text.format(root=root) for text in arguments), "--json")

    assert done.code == code
    assert done.document["error"]["kind"] == kind
    assert cnr("log", root, "--json").document == before
