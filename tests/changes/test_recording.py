"""Change streams recorded to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from cnr_store import BadInput, Conflict, StorageFailure, Store
from cnr_store.changes import ChangeCursor, catch_up, changes, recorded_cursor, write_ipc, write_parquet
from tests.changes.streams import EXACT, begin, save
from tests.support.change_copy import ChangeCopy, content_of


def rows_of(folder: Path) -> ChangeCopy:
    """What the Parquet files replay to, by version."""
    copy = ChangeCopy()
    for path in sorted(folder.glob("*/*.parquet"), key=lambda path: path.name):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            copy.apply(batch)
    return copy


def test_a_recording_killed_anywhere_goes_on_without_gap_or_repetition(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    save(store, [1, 5], [2], lambda txn: txn.write_table("u", np.ones((2, 3), np.float32), options=EXACT))
    whole = tmp_path / "whole"
    report = write_parquet(changes(store), whole, max_file_bytes=1)
    assert report.cursor == recorded_cursor(whole) == ChangeCursor.at(store, store.latest_version())

    rename = Path.rename
    for dies_at in range(12):
        folder = tmp_path / f"killed-{dies_at}"
        left = [dies_at]

        def dying(path: Path, target: Path, left: list[int] = left) -> Path:
            if left[0] == 0:
                raise OSError("killed")
            left[0] -= 1
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", dying)
        try:
            write_parquet(changes(store, recorded_cursor(folder)), folder, max_file_bytes=1)
        except StorageFailure:
            pass
        monkeypatch.setattr(Path, "rename", rename)
        save(store, [3])
        write_parquet(changes(store, recorded_cursor(folder)), folder)

        assert rows_of(folder).tables == content_of(store.snapshot(), slots=False)
        assert not list(folder.rglob("*.part"))
        again = write_parquet(changes(store, recorded_cursor(folder)), folder)
        assert (again.versions, again.files) == (0, 0)


def test_a_recording_whose_stream_is_closed_within_a_version_has_all_of_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    stream = changes(store, max_batch_rows=3, follow=True)
    write = pyarrow.parquet.ParquetWriter.write_batch

    def closing(writer: Any, batch: pa.RecordBatch) -> None:
        stream.close()
        write(writer, batch)

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_batch", closing)
    report = write_parquet(stream, tmp_path)

    assert (report.versions, report.rows) == (1, 8)
    assert report.cursor == recorded_cursor(tmp_path) == ChangeCursor.at(store, store.latest_version())
    assert rows_of(tmp_path).tables == content_of(store.snapshot(), slots=False)


def test_folders_of_something_else_are_refused(store: Store, tmp_path: Path) -> None:
    first = begin(store)
    save(store, [1])
    folder = tmp_path / "out"
    write_parquet(changes(store), folder)

    with pytest.raises(BadInput, match="recorded_cursor"):
        write_parquet(changes(store), folder)
    with pytest.raises(BadInput, match="recorded_cursor"):
        write_parquet(changes(store, first), folder)
    with pytest.raises(BadInput, match="ipc"):
        write_ipc(changes(store, recorded_cursor(folder)), folder)
    (folder / "__recording.json").unlink()
    with pytest.raises(BadInput, match="another folder"):
        write_parquet(changes(store), folder)
    (folder / "__recording.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        recorded_cursor(folder)


def test_a_recording_goes_on_with_the_tables_and_slots_that_it_has(store: Store, tmp_path: Path) -> None:
    begin(store)
    save(store, [1], [], lambda txn: txn.write_table("u", np.ones((2, 3), np.float32), options=EXACT))
    write_parquet(changes(store, tables=["t"]), tmp_path)
    save(store, [2])

    for others in ({}, {"tables": ["t", "u"]}, {"tables": ["t"], "slots": True}):
        stream = changes(store, recorded_cursor(tmp_path), **others)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="tables"):
            write_parquet(stream, tmp_path)
    assert write_parquet(changes(store, recorded_cursor(tmp_path), tables=("t",)), tmp_path).rows == 1


@pytest.mark.parametrize(
    "held", [5, np.float32(1), (np.asarray([1.5]), np.ones((1, 4))), (np.asarray([[1]]), np.ones((1, 4)))]
)
def test_what_cannot_be_a_copy_is_refused(store: Store, held: Any) -> None:
    begin(store)

    with pytest.raises(BadInput, match="copy of table 't'"):
        list(catch_up(store, {"t": held}))


def test_a_copy_without_an_end_is_refused(store: Store) -> None:
    begin(store)

    with pytest.raises(BadInput, match="no end"):
        list(catch_up(store, {"t": lambda start, stop: np.zeros((stop - start, 3), np.float32)}))


def test_a_full_disk_leaves_nothing_of_the_version_and_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)

    def full(*_arguments: Any) -> None:
        raise OSError("no space left")

    close = pyarrow.parquet.ParquetWriter.close

    def still_full(writer: Any) -> None:
        close(writer)
        raise OSError("nor for the end of the file")

    for call in ("write_batch", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(pyarrow.parquet.ParquetWriter, "close", still_full)
            if call == "write_batch":
                patch.setattr(pyarrow.parquet.ParquetWriter, "write_batch", full)
            with pytest.raises(StorageFailure, match="no space" if call == "write_batch" else "nor for"):
                write_parquet(changes(store), tmp_path)
        assert not list(tmp_path.glob("*/*"))
    write_parquet(changes(store), tmp_path)
    assert rows_of(tmp_path).tables == content_of(store.snapshot(), slots=False)


def test_two_recordings_of_one_folder_do_not_mix(store: Store, tmp_path: Path) -> None:
    begin(store)
    folder = tmp_path / "out"
    stream = changes(store)

    def meanwhile(_recorded: Any) -> None:
        with pytest.raises(Conflict, match="another process"):
            write_parquet(changes(store, recorded_cursor(folder)), folder)

    assert write_parquet(stream, folder, on_version=meanwhile).versions == 1


def test_ipc_files_can_be_mapped(store: Store, tmp_path: Path) -> None:
    begin(store)
    write_ipc(changes(store), tmp_path)

    (path,) = tmp_path.glob("t/*.arrow")
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        assert table["row_id"].to_pylist() == list(range(8))
        del table
