"""Local files that are no objects of a store: what is wrong with them is an error of the library that names them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cnr_store import BadInput, CnrStoreError, NotFound, StorageFailure, Store, export_snapshot, import_tensors
from cnr_store.changes import changes, recorded_cursor, write_ipc, write_parquet
from cnr_store.changes.recording import RECORDING
from cnr_store.integrations.torch_file import load_torch_file
from cnr_store.transfer.exporting import ExportFormat
from cnr_store.transfer.safetensors_file import open_safetensors
from tests.support.memory import store_in_memory
from tests.tools.sample_store import build_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with build_store(tmp_path / "store") as store:
        yield store


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """As on a full disk: no file of this process may grow beyond; it needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def a_folder(path: Path) -> None:
    path.mkdir()


def a_file(path: Path) -> None:
    path.write_bytes(b"something else")


def a_link(path: Path) -> None:
    foreign = path.parents[1] / "foreign"
    (foreign / "r0").mkdir(parents=True)
    (foreign / "mine").write_bytes(b"mine")
    (foreign / f"{99:020d}-00000.parquet").write_bytes(b"mine too")
    path.symlink_to(foreign)


def a_link_to_a_file(path: Path) -> None:
    a_link(path)
    path.unlink()
    path.symlink_to(path.parents[1] / "foreign" / "mine")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (RECORDING, a_folder),
        (RECORDING, a_link_to_a_file),
        (f"{RECORDING}.part", a_folder),
        (f"{RECORDING}.part", a_link_to_a_file),
        ("__lock", a_folder),
        ("__lock", a_link_to_a_file),
        ("user", a_file),
        ("user", a_link),
    ],
)
def test_a_recording_that_cannot_be_written_says_where(
    store: Store, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "changes"
    folder.mkdir()
    damage(folder / name)
    before = everything_in(tmp_path / "foreign")

    with pytest.raises(StorageFailure, match="cannot be"):
        write_parquet(changes(store, 0), folder)

    assert everything_in(tmp_path / "foreign") == before


def test_what_a_killed_recording_left_is_not_looked_for_behind_links(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "changes"
    write_parquet(changes(store, 0), folder)
    a_link(folder / "linked")
    before = everything_in(tmp_path / "foreign")

    assert write_parquet(changes(store, recorded_cursor(folder)), folder).versions == 0

    assert everything_in(tmp_path / "foreign") == before


@pytest.mark.parametrize("write", [write_parquet, write_ipc])
@pytest.mark.parametrize("size_bytes", [0, 1, 300, 2000])
def test_a_recording_on_a_full_disk_leaves_nothing_and_goes_on(
    store: Store, tmp_path: Path, write: Any, size_bytes: int
) -> None:
    folder = tmp_path / "changes"
    with files_of_at_most(size_bytes), pytest.raises(StorageFailure):
        write(changes(store, 0), folder)

    assert [path for path in folder.glob("*/*") if path.is_file()] == []
    report = write(changes(store, recorded_cursor(folder) or 0), folder)
    assert report.cursor.version == store.latest_version()


def test_a_recording_of_3_gib_is_not_loaded(tmp_path: Path) -> None:
    with (tmp_path / RECORDING).open("wb") as file:
        file.truncate(3 << 30)

    with pytest.raises(BadInput, match="use another folder"):
        recorded_cursor(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "parquet", "npy"])
@pytest.mark.parametrize("size_bytes", [0, 100, 2000])
def test_an_export_on_a_full_disk_leaves_nothing(store: Store, tmp_path: Path, form: Any, size_bytes: int) -> None:
    target = tmp_path / "out" / "export"

    with files_of_at_most(size_bytes), pytest.raises(StorageFailure, match="cannot be written") as failed:
        export_snapshot(store.snapshot(version=4), target, format=form)

    assert failed.value.path is not None
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("form", ["safetensors", "parquet", "npy"])
def test_an_export_over_a_link_replaces_the_link(store: Store, tmp_path: Path, form: Any) -> None:
    first = export_snapshot(store.snapshot(version=4), tmp_path / "first", format=form)
    before = everything_in(tmp_path / "first") or (tmp_path / "first").read_bytes()
    (tmp_path / "latest").symlink_to(tmp_path / "first")

    second = export_snapshot(store.snapshot(version=4), tmp_path / "latest", format=form, overwrite=True)

    assert second.size_bytes == first.size_bytes
    assert not (tmp_path / "latest").is_symlink()
    assert (everything_in(tmp_path / "first") or (tmp_path / "first").read_bytes()) == before


@pytest.mark.parametrize(
    ("path", "form", "kind"),
    [
        ("file/export", "npy", StorageFailure),
        ("file/export", "safetensors", StorageFailure),
        ("n" * 300, "parquet", StorageFailure),
        ("", "npy", BadInput),
        ("export", "csv", BadInput),
    ],
)
def test_a_place_where_no_export_can_be_is_named(
    store: Store,
    tmp_path: Path,
    path: str,
    form: Any,
    kind: type[CnrStoreError],
) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(kind):
        export_snapshot(store.snapshot(version=4), tmp_path / path if path else "", format=form)


@pytest.mark.parametrize("read", [open_safetensors, load_torch_file])
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    (tmp_path / "file").write_bytes(b"")

    for path in (tmp_path, tmp_path / "file" / "x", tmp_path / "absent", tmp_path / "file", tmp_path / ("n" * 300)):
        with pytest.raises((NotFound, StorageFailure, BadInput)) as failed:
            read(path)
        assert failed.value.path == str(path)


def test_an_import_that_finds_no_room_for_its_mirror_says_so(store: Store, tmp_path: Path) -> None:
    export_snapshot(store.snapshot(version=4), tmp_path / "file.safetensors")
    with store_in_memory() as target:
        with files_of_at_most(0), pytest.raises(StorageFailure, match="mirror"):
            import_tensors(target, tmp_path / "file.safetensors")

        assert not target.head().record.chain


def test_a_root_that_is_no_path_is_refused() -> None:
    with pytest.raises(BadInput, match="NUL"):
        Store.open("a\0b")


@pytest.mark.parametrize("name", ["out\udcff", "a\0b"])
def test_a_target_that_is_no_text_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    """Parquet, and names that no file system takes, ended in an error of pyarrow or of Python."""
    forms: list[ExportFormat] = ["safetensors", "npy", "parquet"]
    for form in forms:
        with pytest.raises(BadInput, match=r"is not valid Unicode|it holds a NUL"):
            export_snapshot(store.snapshot(), tmp_path / name, format=form)
    for write in (write_parquet, write_ipc):
        with changes(store) as stream, pytest.raises(BadInput, match=r"is not valid Unicode|it holds a NUL"):
            write(stream, tmp_path / name)

    assert [path.name for path in tmp_path.iterdir()] == ["store"]
