"""Writes a change stream to files, Parquet or Arrow IPC, for query engines; the next run continues them.

The files of a version get their final names when all of them are complete, and the cursor is written after that. So the
files of all versions up to the cursor exist. The next run removes what a killed run left, so that no version is missing
or there twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from cnr_store.changes.arrow import OPERATIONS
from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.stream import ChangeStream, VersionChanges
from cnr_store.errors import BadInput, Conflict, StorageFailure
from cnr_store.format.documents import canonical_json, loads
from cnr_store.format.layout import encode_name
from cnr_store.format.limits import MAX_LISTS_BYTES
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.local_files import (
    failing_at,
    lock_file,
    open_file,
    read_at_most,
    sync_path,
    write_whole,
)
from cnr_store.runtime.notebook import ShownReport
from cnr_store.storage.local import check_path

RECORDING = "__recording.json"
"""No table's folder is called so: names that begin with two underscores are encoded."""

MAX_FILE_BYTES = 256 * 1024 * 1024
RecordingFormat = Literal["parquet", "ipc"]
_SUFFIXES: dict[RecordingFormat, str] = {"parquet": ".parquet", "ipc": ".arrow"}
_FILE = re.compile(r"([0-9]{20})-[0-9]{5,}\.(parquet|arrow)(\.part)?")


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """``__recording.json``: the source of a folder's changes, and their last version (None: none yet).

    ``tables`` None is all tables. A run with others is refused, because it would leave gaps.
    """

    format: RecordingFormat
    store: str
    branch: str
    version: int | None = None
    tables: tuple[str, ...] | None = None
    slots: bool = False

    @property
    def cursor(self) -> ChangeCursor | None:
        """Where to continue."""
        if self.version is None:
            return None
        return ChangeCursor(store=self.store, branch=self.branch, version=self.version)


_DECODER = msgspec.json.Decoder(Recording)


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """A version whose files are complete.

    Attributes
    ----------
    upserts, deletes
        Table to rows; tables without a change are in neither.
    files
        The files, in the order of their tables.
    """

    version: int
    step: int
    upserts: dict[str, int]
    deletes: dict[str, int]
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class RecordingReport(ShownReport):
    """What one run added.

    Attributes
    ----------
    cursor
        Where the next run continues; None if the store was empty.
    """

    versions: int
    rows: int
    files: int
    size_bytes: int
    cursor: ChangeCursor | None


def recorded_cursor(folder: str | os.PathLike[str]) -> ChangeCursor | None:
    """Return the position up to which a folder has changes, for ``changes(store, since=...)``; None if it has none.

    Raises
    ------
    BadInput
        Its record of this is damaged.
    AccessDenied, StorageFailure
        It cannot be read.
    """
    recording = _read(Path(folder))
    return None if recording is None else recording.cursor


def write_parquet(
    stream: ChangeStream,
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_version: Callable[[RecordedVersion], None] | None = None,
) -> RecordingReport:
    """Write a stream as Parquet files, ``<folder>/<table>/<version>-<part>.parquet``, until it ends. Blocks.

    Parameters
    ----------
    stream
        One that begins where the folder ends: ``changes(store, since=recorded_cursor(folder))``.
    folder
        Made if it is not there. One sub-folder per table, its name encoded as a path; a version has no file in those
        of tables that it does not change.
    max_file_bytes
        A version's rows go to the next part at about so many bytes in memory.
    on_version
        Called when a version's files are there.

    Raises
    ------
    BadInput
        The folder has changes of another store, of other tables, in another format, or up to another version.
    Conflict
        Another process is writing there.
    CursorExpired, CorruptStore, AccessDenied, StorageFailure
        Of the store or of the folder. Nothing of the version under way is left; a next run continues.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from cnr_store import Store
    >>> from cnr_store.changes import changes
    >>> store = Store.create("memory://doctest-recording")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.zeros((4, 2), np.float32))
    >>> folder = tempfile.mkdtemp()
    >>> for _ in range(2):
    ...     report = write_parquet(changes(store, since=recorded_cursor(folder)), folder)
    ...     report.versions, report.rows, report.cursor.version
    (1, 4, 2)
    (0, 0, 2)
    """
    return _write(stream, Path(folder), "parquet", max_file_bytes, on_version)


def write_ipc(
    stream: ChangeStream,
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_version: Callable[[RecordedVersion], None] | None = None,
) -> RecordingReport:
    """Write a stream as Arrow IPC files, which can be mapped into memory; everything else as `write_parquet`."""
    return _write(stream, Path(folder), "ipc", max_file_bytes, on_version)


class _Sink(Protocol):
    def write_batch(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


def _write(
    stream: ChangeStream,
    folder: Path,
    kind: RecordingFormat,
    max_file_bytes: int,
    on_version: Callable[[RecordedVersion], None] | None,
) -> RecordingReport:
    checked_count("max_file_bytes", max_file_bytes, least=1)
    check_path(folder)
    with _failing_at(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; changes are written to a folder", path=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        recording = _begin(stream, folder, kind)
        versions = rows = files = size_bytes = 0
        for changes in stream.versions():
            recorded = _write_version(changes, folder, kind, max_file_bytes)
            recording = _put(folder, msgspec.structs.replace(recording, version=changes.version))
            versions += 1
            rows += sum(recorded.upserts.values()) + sum(recorded.deletes.values())
            files += len(recorded.files)
            with _failing_at(folder):
                size_bytes += sum(path.stat().st_size for path in recorded.files)
            if on_version is not None:
                on_version(recorded)
        if stream.cursor is not None and stream.cursor != recording.cursor:
            _put(folder, msgspec.structs.replace(recording, version=stream.cursor.version))
    return RecordingReport(versions, rows, files, size_bytes, stream.cursor)


def _begin(stream: ChangeStream, folder: Path, kind: RecordingFormat) -> Recording:
    """Check that the stream continues where the folder ends, and remove what a killed run left."""
    own = Recording(
        format=kind, store=stream.store.uuid, branch=stream.store.internals.branch_uuid,
        version=None if stream.cursor is None else stream.cursor.version,
        tables=stream.tables, slots=stream.has_slots,
    )  # fmt: skip
    found = _read(folder)
    left = _recorded_files(folder)
    if found is None:
        if left:
            raise BadInput(f"{folder} holds changes, but no {RECORDING}, which names their source; use another folder")
        return _put(folder, own)
    if (found.tables, found.slots) != (own.tables, own.slots):
        raise BadInput(
            f"{folder} holds {_contents(found)}, and the stream would add {_contents(own)}: versions of some would be "
            "missing without a sign of it; pass the same tables= and slots=, or use another folder",
            path=str(folder), expected=_contents(found), found=_contents(own),
        )  # fmt: skip
    if found != own:
        raise BadInput(
            f"{folder} holds {found.format} of store {found.store} (branch {found.branch or 'none'}) up to version "
            f"{found.version}, and the stream would add {own.format} of store {own.store} (branch "
            f"{own.branch or 'none'}) after version {own.version}; pass since=recorded_cursor(folder), or use another "
            "folder",
            path=str(folder), expected=found.version, found=own.version,
        )  # fmt: skip
    for path in left:
        if path.suffix == ".part" or found.version is None or int(path.name[:20]) > found.version:
            with _failing_at(path):
                path.unlink()
    return found


def _recorded_files(folder: Path) -> list[Path]:
    """The files of versions, complete or not, in the folders of tables; links are none of them, and not followed."""
    with _failing_at(folder):
        tables = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        return [path for table in tables for path in table.iterdir() if _FILE.fullmatch(path.name)]


def _contents(recording: Recording) -> str:
    tables = "all tables" if recording.tables is None else f"tables {list(recording.tables)}"
    return f"{tables} {'with' if recording.slots else 'without'} slots"


def _write_version(
    changes: VersionChanges, folder: Path, kind: RecordingFormat, max_file_bytes: int
) -> RecordedVersion:
    """Write a version's files; they have their names when this returns, and are gone if it raises."""
    upserts: dict[str, int] = {}
    deletes: dict[str, int] = {}
    files = _Files(folder, kind, changes.version, max_file_bytes)
    with _failing_at(folder), files:
        for batch in changes.batches:
            table = batch["table"][0].as_py()
            files.write(table, batch)
            deleted = batch["op"].indices.to_numpy().sum()  # type: ignore[attr-defined, unused-ignore]
            for counts, count in ((upserts, batch.num_rows - deleted), (deletes, deleted)):
                if count:
                    counts[table] = counts.get(table, 0) + int(count)
    return RecordedVersion(changes.version, changes.step, upserts, deletes, tuple(files.names))


assert OPERATIONS.index("delete") == 1  # what the counting above takes for granted


class _Files:
    """The files of one version, one open at a time: the batches of a table come together."""

    def __init__(self, folder: Path, kind: RecordingFormat, version: int, max_file_bytes: int) -> None:
        self.names: list[Path] = []
        self._folder, self._kind, self._version, self._max_file_bytes = folder, kind, version, max_file_bytes
        self._table: str | None = None
        self._part = self._size_bytes = 0
        self._sink: _Sink | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            # A full disk refuses the end of the file as well: what went wrong first is reported, and nothing is left.
            with contextlib.suppress(OSError, pa.ArrowException):
                self._close()
            self._remove()
            return
        try:
            self._close()
        except BaseException:
            self._remove()
            raise
        for name in self.names:
            sync_path(_part(name))
        for name in self.names:
            _part(name).rename(name)
        for parent in {name.parent for name in self.names}:
            sync_path(parent)

    def _remove(self) -> None:
        for name in self.names:
            _part(name).unlink(missing_ok=True)

    def write(self, table: str, batch: pa.RecordBatch) -> None:
        """Put a batch into the table's file, or into its next part."""
        if table != self._table or self._size_bytes >= self._max_file_bytes:
            self._close()
            self._part = self._part + 1 if table == self._table else 0
            self._table, self._size_bytes = table, 0
            parent = self._folder / encode_name(table)
            parent.mkdir(exist_ok=True)
            if parent.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(parent))
            name = parent / f"{self._version:020d}-{self._part:05d}{_SUFFIXES[self._kind]}"
            self.names.append(name)
            self._sink = _open_sink(self._kind, _part(name), batch.schema)
        assert self._sink is not None
        self._sink.write_batch(batch)
        self._size_bytes += batch.nbytes

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


def _open_sink(kind: RecordingFormat, path: Path, schema: pa.Schema) -> _Sink:
    sink: Any = (
        pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") if kind == "parquet" else _IpcSink(path, schema)
    )
    return sink  # type: ignore[no-any-return]


class _IpcSink:
    """An IPC file; its writer leaves the file open."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pyarrow.ipc.new_file(self._file, schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()
        self._file.close()


def _part(name: Path) -> Path:
    return name.with_name(f"{name.name}.part")


def _read(folder: Path) -> Recording | None:
    path = folder / RECORDING
    with failing_at(path, "read"):
        try:
            data = read_at_most(path, MAX_LISTS_BYTES)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise BadInput(f"{folder} is a file; changes are written to a folder", path=str(folder)) from error
    try:
        return loads(data, _DECODER)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}; use another folder", path=str(path)) from error


def _put(folder: Path, recording: Recording) -> Recording:
    path = folder / RECORDING
    part = _part(path)
    with _failing_at(path):
        write_whole(part, canonical_json(recording))
        sync_path(part)
        part.replace(path)
        sync_path(folder)
    return recording


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes, and other threads, out of the folder; the lock ends with its holder, whatever kills it."""
    path = folder / "__lock"
    with _failing_at(path):
        lock = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            lock_file(lock)
        except BlockingIOError:
            raise Conflict(f"another process writes changes to {folder}; stop it, or use another folder") from None
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _failing_at(path: Path) -> Iterator[None]:
    """Turn errors of the system or of pyarrow about files into errors of this library."""
    with failing_at(path, "written"):
        try:
            yield
        except pa.ArrowException as error:
            if isinstance(error, OSError):
                raise
            raise StorageFailure(f"{path} cannot be written: {error}", path=str(path)) from error
