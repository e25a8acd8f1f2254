"""changes: what it counts, prints and writes, where the next run continues, and its exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from cnr_store import Store
from tests.tools.cli_runner import cnr

PROGRAM = str(Path(sys.executable).with_name("cnr"))


def save(root: Path, step: int) -> None:
    with Store.open(str(root)) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(step=step) as txn:
            txn.write_rows("half/item", np.arange(5), np.full((5, 4), step, np.float16))


def test_changed_rows_are_counted_by_version_and_table(root: Path) -> None:
    document = cnr("changes", root, "--since", 2, "--json").document
    plain = cnr("changes", root, "--since", 2)

    counts = [(item["version"], item["step"], item["table"], item["upserts"]) for item in document["changes"]]
    assert counts == [(3, 20, "user", 50), (4, 30, "user", 50), (5, 40, "user", 5)]
    assert document["cursor"] == 6
    assert "up to version 6" in plain.out
    assert "user" in plain.out


def test_without_a_version_the_newest_one_comes_whole(root: Path) -> None:
    counts = [(item["table"], item["upserts"]) for item in cnr("changes", root, "--json").document["changes"]]

    assert counts == [("half/item", 90), ("user", 400)]
    assert cnr("changes", root, "--table", "user", "--json").document["changes"][0]["table"] == "user"


def test_rows_are_printed_as_json_lines_and_what_json_cannot_say_is_null(root: Path) -> None:
    rows = [json.loads(line) for line in cnr("changes", root, "--since", 4, "--slots", "--to", "-").out.splitlines()]

    assert [(row["row_id"], row["op"]) for row in rows] == [(row, "upsert") for row in (3, 4, 7, 9, 200)]
    assert rows[0]["values"] == [0.0] * 8
    assert rows[2]["values"] == [None] * 8
    assert rows[2]["slot_momentum1"] > 0


@pytest.mark.parametrize("kind", ["parquet", "ipc"])
def test_files_are_added_to_by_the_next_run(root: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "out"
    first = cnr("changes", root, "--to", f"{kind}:{folder}", "--json").document
    save(root, 50)
    second = cnr("changes", root, "--to", f"{kind}:{folder}", "--json").document
    third = cnr("changes", root, "--to", f"{kind}:{folder}", "--json").document

    assert [document["files"] for document in (first, second, third)] == [2, 1, 0]
    assert [(item["table"], item["upserts"]) for item in second["changes"]] == [("half/item", 5)]
    newest = sorted((folder / "half%2Fitem").iterdir())[-1]
    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(newest).read()
    else:
        table = pa.ipc.open_file(newest).read_all()
    assert table["row_id"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["values"].type == pa.list_(pa.float16(), 4)


def test_what_cannot_be_meant_is_refused(root: Path, tmp_path: Path) -> None:
    assert cnr("changes", root, "--to", "csv:x").code == 4
    assert cnr("changes", root, "--to", "parquet:").code == 4
    assert cnr("changes", root, "--since", 99).code == 3
    assert cnr("changes", root, "--table", "nobody").code == 3
    assert cnr("changes", tmp_path / "nothing").code == 3

    folder = tmp_path / "out"
    assert cnr("changes", root, "--to", f"parquet:{folder}").code == 0
    assert cnr("changes", root, "--to", f"ipc:{folder}").code == 4
    assert cnr("changes", root, "--since", 3, "--to", f"parquet:{folder}").code == 4


def test_a_registered_consumer_is_listed_where_it_stands(root: Path) -> None:
    cnr("changes", root, "--since", 3, "--cursor", "lake")

    (cursor,) = cnr("cursors", root, "--json").document["cursors"]
    assert (cursor["cursor"], cursor["version"]) == ("lake", 6)


def test_following_tells_each_version_as_it_lands_until_it_is_interrupted(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cnr("changes", root, "--to", f"parquet:{folder}")
    command = [PROGRAM, "changes", str(root), "--follow", "--every", "0.05s", "--json", "--to", f"parquet:{folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        try:
            save(root, 50)
            told = json.loads(follower.stdout.readline())
            save(root, 60)
            again = json.loads(follower.stdout.readline())
            follower.send_signal(signal.SIGINT)
            follower.communicate(timeout=60)
        finally:
            follower.kill()  # where the signal is ignored, as below a shell's background job, it would follow for ever

    assert (told["step"], told["table"], told["upserts"]) == (50, "half/item", 5)
    assert again["step"] == 60
    assert follower.returncode == 130
    assert not [path for path in folder.rglob("*") if path.suffix == ".part"]
    assert cnr("changes", root, "--to", f"parquet:{folder}", "--json").document["files"] == 0
