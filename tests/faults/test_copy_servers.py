"""Copies of stores from disk, object stores and a web server to disk and to object stores, killed on the way too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cnr_store import Store, copy_store, verify_store
from cnr_store.errors import NotAStore
from tests.support.launcher import Launcher, Program
from tests.support.servers import Place, web_server
from tests.support.snapshot_bytes import bytes_of
from tests.tools.sample_store import build_store

MINE, THEIRS = (1, 2, 3, 4), (2, 3, 4, 5)
"""The versions of a copy of the sample store, and the versions that it copied."""


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return build_store(tmp_path / "source")


def check(place: Place, source: Store) -> None:
    """Every version of a copy is the source's, bit for bit, and it can be written."""
    with Store.open(place.url, storage_options=place.storage_options) as copy:
        for mine, theirs in zip(MINE, THEIRS, strict=True):
            assert bytes_of(copy.snapshot(mine)) == bytes_of(source.snapshot(theirs))
        assert copy.tags() == {"good": 2}
        assert verify_store(copy, all_versions=True, deep=True).is_sound
        with copy.writer() as writer:
            writer.restore()
            with writer.begin(step=99) as txn:
                txn.put_scalars({"epoch": 9})
        assert copy.head().record.kind == "delta"


@pytest.mark.servers
@pytest.mark.parametrize("backend", ["s3_place", "azure_place"])
def test_a_store_is_copied_from_disk_to_an_object_store(
    backend: str, source: Store, request: pytest.FixtureRequest
) -> None:
    place: Place = request.getfixturevalue(backend)

    copy_store(source, place.url, all_versions=True, storage_options=place.storage_options)

    check(place, source)


@pytest.mark.servers
def test_a_store_is_copied_from_one_cloud_to_another(
    source: Store, s3_place: Place, azure_place: Place, tmp_path: Path
) -> None:
    copy_store(source, s3_place.url, all_versions=True, storage_options=s3_place.storage_options)

    with Store.open(s3_place.url, storage_options=s3_place.storage_options) as there:
        copy_store(there, azure_place.url, all_versions=True, storage_options=azure_place.storage_options)

    with Store.open(azure_place.url, storage_options=azure_place.storage_options) as copy:
        assert [bytes_of(copy.snapshot(version)) for version in MINE] == [
            bytes_of(source.snapshot(version)) for version in THEIRS
        ]


COPIER = """
import json, sys
from cnr_store import Store, copy_store

with Store.open(sys.argv[1]) as store:
    options = json.loads(sys.argv[3])
    copy_store(store, sys.argv[2], all_versions=True, storage_options=options, bytes_per_s=1_000)
"""


@pytest.mark.servers
@pytest.mark.parametrize("backend", ["s3_place", "azure_place"])
def test_a_killed_copy_to_an_object_store_is_continued(
    backend: str, source: Store, launcher: Launcher, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place: Place = request.getfixturevalue(backend)
    copier = Program(["-c", COPIER, source.url, place.url, json.dumps(place.storage_options)])
    with launcher.running(copier, folder=tmp_path):
        wait_for_objects(place)
    with pytest.raises(NotAStore):
        Store.open(place.url, storage_options=place.storage_options)

    report = copy_store(source, place.url, all_versions=True, storage_options=place.storage_options)

    assert report.reused_objects > 0
    check(place, source)


def wait_for_objects(place: Place) -> None:
    """Return when the copy has written some objects of its first segment."""
    deadline = time.monotonic() + 120
    while len(objects_of(place)) < 3:
        assert time.monotonic() < deadline, "the copy has not begun"
        time.sleep(0.05)


def objects_of(place: Place) -> list[Any]:
    import fsspec

    fs, root = fsspec.url_to_fs(place.url, **place.storage_options, skip_instance_cache=True)
    try:
        return [*fs.find(f"{root}/data")]
    except FileNotFoundError:
        return []


def test_a_store_behind_a_web_server_is_copied(source: Store, tmp_path: Path) -> None:
    with web_server(tmp_path) as server, Store.open(f"{server}/source") as there:
        copy_store(there, tmp_path / "copy", all_versions=True, fsync=False)

    check(Place(str(tmp_path / "copy"), {}), source)
