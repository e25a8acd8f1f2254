"""Object stores and other fsspec file systems: one class per way of creating an object exclusively.

Reads always use `cat_file`, which is one request: open files, `exists` and listings may use caches. Options are kept
inside the file system object; this module never formats them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import fsspec
from fsspec.asyn import AsyncFileSystem

from cnr_store.errors import AccessDenied, ReadOnlyStore, StorageFailure, UnsafeBackend
from cnr_store.storage.base import Buffer, CreateOutcome, ObjectStat, Storage, is_key
from cnr_store.storage.failures import create_outcome, is_absent, is_denied, is_past_end, storage_failure
from cnr_store.storage.redaction import Secrets

_T = TypeVar("_T")
_RAISE: Any = object()
_DELETE_THREADS = 16
_TIME_FIELDS = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")

# All memory file systems of a process share one dict, so they share one lock.
_MEMORY_LOCK = threading.Lock()


class RemoteStorage(Storage):
    """Objects below ``root`` of an fsspec file system whose ``pipe_file(mode="create")`` is exclusive.

    If it is not, ``is_exclusive`` is False and the caller guarantees that no other process writes.
    """

    read_options: ClassVar[dict[str, Any]] = {}
    is_remote: ClassVar[bool] = True

    def __init__(
        self,
        fs: fsspec.AbstractFileSystem,
        root: str,
        *,
        url: str,
        secrets: Secrets,
        is_exclusive: bool = True,
    ) -> None:
        super().__init__(url, is_exclusive=is_exclusive)
        self._driver = fs
        self._process = os.getpid()
        self._root = root.rstrip("/")
        self._secrets = secrets

    @property
    def _fs(self) -> fsspec.AbstractFileSystem:
        """The driver, made anew in a forked process: there the connections and the thread of the other one are dead."""
        if self._process != os.getpid():
            if isinstance(self._driver, AsyncFileSystem):
                # Kept, because its finalizer would close connections that the other process still uses.
                self._inherited = self._driver
                options = {"skip_instance_cache": True, **self._driver.storage_options, "loop": None}
                self._driver = type(self._driver)(*self._driver.storage_args, **options)
            self._process = os.getpid()
        return self._driver

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        limits = {} if start == 0 and stop is None else {"start": start, "end": stop}

        def read() -> bytes:
            return bytes(self._fs.cat_file(self._path(key), **limits, **self.read_options))

        return self._ask("reading", key, read, absent=None, past_end=b"")

    def _put(self, key: str, data: Sequence[Buffer]) -> None:
        only = data[0] if len(data) == 1 else None
        content = only if isinstance(only, bytes) else b"".join(data)
        self._ask("writing", key, lambda: self._pipe(key, content))

    def _pipe(self, key: str, data: bytes, **options: Any) -> None:
        self._fs.pipe_file(self._path(key), data, **options)

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        try:
            if self.is_exclusive:
                self._pipe_new(key, data)
            elif self._read(key, 0, 1) is None:  # correct only with a single writer
                self._pipe(key, data)
            else:
                return CreateOutcome.EXISTS, None
        except (UnsafeBackend, AccessDenied):
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - likewise, sorted by class
            cause = self._secrets.without(error)
            if is_denied(error):
                raise self._failure(error, "creating", key) from cause
            return create_outcome(error), cause
        return CreateOutcome.CREATED, None

    def _pipe_new(self, key: str, data: bytes) -> None:
        self._pipe(key, data, mode="create")

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        start = f"{folder}/" if folder else ""
        for name, info in self._found(folder).items():
            key = self._key_of(name)
            # Some tools mark an empty folder by an object "name/"; drivers may list an object below itself.
            if info.get("type") == "file" and not name.endswith("/") and key.startswith(start) and is_key(key):
                yield ObjectStat(key, int(info["size"] or 0), _modified_ms(info))

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        def find() -> dict[str, dict[str, Any]]:
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder), detail=True)
            return found if isinstance(found, dict) else {}  # adlfs returns [path] if the path is an object

        return self._ask("listing", folder, find, absent={})

    def _list_folders(self, folder: str) -> list[str]:
        def ls() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._path(folder), detail=True))

        entries = self._ask("listing", folder, ls, absent=[])
        keys = (self._key_of(entry["name"]) for entry in entries if entry.get("type") == "directory")
        start = f"{folder}/" if folder else ""
        names = {key[len(start) :] for key in keys if key.startswith(start)}
        return sorted(name for name in names if "/" not in name and is_key(name))

    def _delete(self, keys: list[str]) -> None:
        if len(keys) <= 1:
            for key in keys:
                self._delete_one(key)
            return
        # One request per object: the bulk calls of fsspec drivers ignore errors of single objects.
        with ThreadPoolExecutor(min(_DELETE_THREADS, len(keys)), thread_name_prefix="cnr-delete") as pool:
            for _ in pool.map(self._delete_one, keys):
                pass

    def _delete_one(self, key: str) -> None:
        self._ask("deleting", key, lambda: self._fs.rm_file(self._path(key)), absent=None)

    def _ask(
        self,
        action: str,
        key: str,
        call: Callable[[], _T],
        *,
        absent: _T | Any = _RAISE,
        past_end: Any = _RAISE,
    ) -> _T | Any:
        """Return the result of ``call``, or the given value for an absent object or a range past its end."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - drivers raise whatever their SDK does
            if past_end is not _RAISE and is_past_end(error):
                return past_end
            if absent is not _RAISE and is_absent(error):
                return absent
            raise self._failure(error, action, key) from self._secrets.without(error)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _key_of(self, name: str) -> str:
        root = self._root.strip("/")
        return name.strip("/").removeprefix(f"{root}/" if root else "")

    def _failure(self, error: BaseException, action: str, key: str) -> StorageFailure:
        return storage_failure(error, action=action, url=self.url, key=key, secrets=self._secrets)


class MemoryStorage(RemoteStorage):
    """The process-wide memory file system: its create is a check and an assignment, so a lock is needed."""

    is_remote: ClassVar[bool] = False

    def _pipe_new(self, key: str, data: bytes) -> None:
        with _MEMORY_LOCK:
            super()._pipe_new(key, data)


class S3Storage(RemoteStorage):
    """s3fs: ``If-None-Match: *`` on a single PUT."""

    # With a higher value s3fs first requests the size: two requests, and a race with an overwrite.
    read_options: ClassVar[dict[str, Any]] = {"max_concurrency": 1}


class GcsStorage(RemoteStorage):
    """gcsfs: ``ifGenerationMatch=0``; zonal buckets ignore it and are refused."""

    def _pipe_new(self, key: str, data: bytes) -> None:
        self._refuse_zonal_bucket()
        super()._pipe_new(key, data)

    def _refuse_zonal_bucket(self) -> None:
        is_zonal = getattr(self._fs, "_is_zonal_bucket", None)  # missing if the driver's extension is off
        if is_zonal is None:
            return
        bucket = self._root.strip("/").split("/")[0]
        if fsspec.asyn.sync(self._fs.loop, is_zonal, bucket):  # the driver caches the answer
            raise UnsafeBackend(
                f"{self.url} is in a zonal bucket, which ignores an exclusive create; use a regional bucket, or "
                "unsafe_single_writer=True if nobody else ever writes",
                found="zonal bucket",
            )


class AzureStorage(RemoteStorage):
    """adlfs: a block blob written with ``If-None-Match: *``."""


class HttpStorage(RemoteStorage):
    """A web server, by http:// or https://: for readers only. It has no lists, and need not know byte ranges."""

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        if stop is None:
            whole = super()._read(key, 0, None)
            return None if whole is None else whole[start:]
        data = super()._read(key, start, stop)
        # A server that does not know ranges answers with the whole object.
        return data[start:stop] if data is not None and len(data) > stop - start else data

    def _path(self, key: str) -> str:
        return super()._path(quote(key))

    def _refused(self, action: str, key: str) -> ReadOnlyStore:
        return ReadOnlyStore(
            f"{action} {key or 'the store'!r} in {self.url}: a store behind a web server can only be read, and its "
            "objects cannot be listed; open it by the URL of its storage",
            path=key,
        )

    def _put(self, key: str, data: Sequence[Buffer]) -> None:  # noqa: ARG002
        raise self._refused("writing", key)

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:  # noqa: ARG002
        raise self._refused("creating", key)

    def _delete(self, keys: list[str]) -> None:
        raise self._refused("deleting", keys[0] if keys else "")

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        raise self._refused("listing", folder)

    def _list_folders(self, folder: str) -> list[str]:
        raise self._refused("listing", folder)


class OtherStorage(RemoteStorage):
    """A file system with ``cnr_exclusive_create = True``, or any for a single writer. Creates folders."""

    def _pipe(self, key: str, data: bytes, **options: Any) -> None:
        path = self._path(key)
        try:
            self._fs.pipe_file(path, data, **options)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data, **options)


def _modified_ms(info: dict[str, Any]) -> int | None:
    for field in _TIME_FIELDS:
        value = info.get(field)
        if isinstance(value, dt.datetime):
            return int(value.timestamp() * 1000)
        if isinstance(value, (int, float)):
            return int(value * 1000)
        if isinstance(value, str):
            try:
                return int(dt.datetime.fromisoformat(value).timestamp() * 1000)
            except ValueError:
                continue
    return None
