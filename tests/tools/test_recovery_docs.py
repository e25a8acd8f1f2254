"""docs/recovery.md: each case of its table, with the commands that it gives."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cnr_store import CorruptStore, Store, verify_store
from cnr_store.format.documents import sha256
from cnr_store.format.layout import COMMITS, commit_key
from tests.support.pages import DOCS, python_blocks, run_example
from tests.support.snapshot_bytes import bytes_of
from tests.tools.cli_runner import cnr
from tests.tools.sample_store import build_store

PAGE = DOCS / "recovery.md"
BEFORE, PUT_BACK, COPY = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.usefixtures("folder")


def run(block: str, **names: str) -> None:
    """Run the command lines of a block; each ends with exit code 0."""
    for line in block.splitlines():
        words = [re.sub(r"OBJECT", names.get("OBJECT", "OBJECT"), word) for word in shlex.split(line, comments=True)]
        if words[0] == "cnr":
            outcome = cnr(*words[1:])
            assert outcome.code == 0, (line, outcome.err, outcome.out)
        else:
            subprocess.run(words, check=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a relay and a copy, made by the commands of the page."""
    monkeypatch.chdir(tmp_path)
    build_store(Path("run-7")).close()
    run(BEFORE)


def state(url: str, version: int | None = None) -> dict[str, str]:
    """The digests of everything that a version has."""
    with Store.open(url) as store:
        return {name: sha256(data) for name, data in bytes_of(store.snapshot(version)).items()}


def save(url: str, step: int) -> None:
    with Store.open(url, fsync=False) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(step=step) as txn:
            slots = {"momentum1": np.ones(2, np.float32)}
            txn.write_rows("user", np.arange(2), np.full((2, 8), 0.5, np.float32), slots=slots)


def test_the_page_is_about_these_losses() -> None:
    lost = re.findall(r"^\| ([a-z][^|]*) \|", PAGE.read_text(), flags=re.MULTILINE)

    assert len(lost) == 8  # the heading of the table, and the losses that begin with a word


KILLED = """
import os, sys
import numpy as np
from cnr_store import Store
with Store.open("run-7", fsync=False) as store, store.writer() as writer:
    writer.restore()
    with writer.begin(step=50) as txn:
        txn.put_scalars({"epoch": 9})
        os.kill(os.getpid(), 9)
"""


def test_a_dead_writer_leaves_what_was_committed() -> None:
    before = state("run-7")

    died = subprocess.run([sys.executable, "-c", KILLED], check=False)

    assert died.returncode == -9
    assert state("run-7") == before
    save("run-7", 60)
    with Store.open("run-7") as store:
        assert (store.snapshot().step, store.head().record.kind) == (60, "delta")


def test_a_torn_newest_record_is_repaired() -> None:
    before = state("run-7")
    with Store.open("run-7") as store:
        newest = Path("run-7") / commit_key(store.latest_version())
    newest.write_bytes(newest.read_bytes()[:-9])

    assert cnr("repair", "run-7").code == 0
    assert state("run-7") == before
    save("run-7", 60)


@pytest.mark.parametrize("what", ["newest record", "record", "chunk", "missing object"])
def test_an_object_is_put_back_from_the_relay(what: str) -> None:
    for step in (50, 60):
        save("run-7", step)
    run(BEFORE.splitlines()[0])
    before = state("run-7")
    with Store.open("run-7") as store:
        version, segment = store.latest_version(), store.head().record.chain[1].seg
    chunk = next(Path("run-7/data", segment).rglob("c.*"))
    path = {
        "newest record": Path("run-7", commit_key(version)), "record": Path("run-7", commit_key(version - 1))
    }.get(what, chunk)  # fmt: skip
    if what == "chunk":
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    else:
        path.unlink()
    found = cnr("verify", "run-7", "--all")
    assert found.code == 1
    if what in ("chunk", "missing object"):
        assert path.name in found.out

    run(PUT_BACK, OBJECT=path.relative_to("run-7").as_posix())

    assert state("run-7") == before
    save("run-7", 70)


@pytest.mark.parametrize("left", [0, 20])
def test_the_identity_is_put_back_from_the_relay(left: int) -> None:
    before = state("run-7")
    identity = Path("run-7/cnr.json")
    kept = identity.read_bytes()[:left]
    identity.unlink()
    if kept:
        identity.write_bytes(kept)

    for command in ("log", "verify", "repair"):
        failed = cnr(command, "run-7")
        assert failed.code == (6 if kept else 3)
        assert "restore it from a backup, or from a relay" in failed.err
        assert "cnr verify" not in failed.err

    run(PUT_BACK, OBJECT="cnr.json")

    assert state("run-7") == before
    save("run-7", 70)


def test_maintenance_goes_on_behind_a_lost_record_that_was_expired() -> None:
    for step in (50, 60):
        save("run-7", step)
    with Store.open("run-7") as store:
        version = store.latest_version()
    Path("run-7", commit_key(version - 1)).unlink()

    assert cnr("maintain", "run-7").code == 6
    assert cnr("gc", "run-7", "--despite-damage").code == 0
    assert cnr("maintain", "run-7").code == 0
    found = cnr("verify", "run-7", "--all")
    assert (found.code, f"commits/{version - 1:020d}.json" in found.out) == (1, True)
    assert (cnr("log", "run-7").code, cnr("copy", "run-7", "other", "--all").code) == (6, 6)


def test_a_lost_record_of_a_relay_is_put_back_from_the_source() -> None:
    for step in (50, 60):
        save("run-7", step)
    run(BEFORE.splitlines()[0])
    with Store.open("near/run-7") as relay:
        key = commit_key(relay.latest_version() - 1)
    Path("near/run-7", key).unlink()

    assert cnr("verify", "near/run-7", "--all").code == 1
    shutil.copy(Path("run-7", key), Path("near/run-7", key))
    assert cnr("verify", "near/run-7", "--all").code == 0


def test_a_damaged_chunk_is_repaired_without_a_relay() -> None:
    before = state("run-7", 3)
    with Store.open("run-7") as store:
        segment = store.head().record.chain[-1].seg
    for path in Path("run-7/data", segment).rglob("c.*"):
        path.write_bytes(b"")

    with pytest.raises(CorruptStore):
        state("run-7")
    assert cnr("repair", "run-7").code == 0
    assert cnr("show", "run-7").code == 0
    assert state("run-7", 3) == before
    with Store.open("run-7") as store:
        assert store.snapshot().step == 30


@pytest.mark.parametrize("lost", [COMMITS, ""])
def test_a_store_of_the_relay_replaces_a_lost_one(lost: str) -> None:
    before = state("run-7")
    shutil.rmtree(Path("run-7", lost))
    with pytest.raises(Exception, match="run-7"):
        state("run-7")

    run(COPY)

    assert state("restored/run-7") == before
    (example,) = python_blocks(PAGE)
    run_example(example, {})
    save("restored/run-7", 60)
    with Store.open("restored/run-7") as store:
        assert store.head().record.kind == "delta"


def test_a_copy_replaces_a_lost_region() -> None:
    before = [state("run-7", version) for version in (2, 3, 4, 5)]
    shutil.rmtree("run-7")
    shutil.rmtree("near")

    assert [state("backup/run-7", version) for version in (1, 2, 3, 4)] == before
    save("backup/run-7", 60)
    with Store.open("backup/run-7") as store:
        assert (store.head().record.kind, store.tags()) == ("delta", {"good": 2})
        assert verify_store(store, all_versions=True).problems == ()


def test_a_record_in_the_middle_costs_no_version() -> None:
    before = state("run-7", 5)
    Path("run-7", commit_key(2)).unlink()

    assert cnr("copy", "run-7", "restored/run-7", "--version", "5", "--json").document["states"] == 1
    assert state("restored/run-7") == before
