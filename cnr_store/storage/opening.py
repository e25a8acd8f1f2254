"""Open the `Storage` of a URL, or of the caller's file system object."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cnr_store.errors import BadInput, MissingDependency, UnsafeBackend
from cnr_store.storage.base import Storage, StorageRecipe
from cnr_store.storage.failures import storage_failure
from cnr_store.storage.local import LocalStorage
from cnr_store.storage.redaction import Secrets, redact_url
from cnr_store.storage.remote import (
    AzureStorage,
    GcsStorage,
    HttpStorage,
    MemoryStorage,
    OtherStorage,
    RemoteStorage,
    S3Storage,
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_LOCAL = frozenset({"file", "local"})
_CACHING = frozenset({"simplecache", "filecache", "blockcache", "cached"})
_PACKAGES = {"http": "aiohttp", "https": "aiohttp"}


class _Driver(NamedTuple):
    """A package that creates objects exclusively, the extra of this library that installs it, and its protocols."""

    package: str
    extra: str
    protocols: frozenset[str]
    storage: type[RemoteStorage]


_DRIVERS = (
    _Driver("s3fs", "s3", frozenset({"s3", "s3a"}), S3Storage),
    _Driver("gcsfs", "gcs", frozenset({"gs", "gcs"}), GcsStorage),
    _Driver("adlfs", "azure", frozenset({"abfs", "az", "abfss", "adl"}), AzureStorage),
)
_EXTRAS = {protocol: driver.extra for driver in _DRIVERS for protocol in driver.protocols}


def open_storage(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
    unsafe_single_writer: bool = False,
) -> Storage:
    """Return the storage at a path or URL. No request, nothing is created; `Storage.probe` checks it.

    Parameters
    ----------
    url
        A local path, or a URL: ``file://``, ``memory://``, ``s3://``, ``gs://``, ``abfs://``, ...; ``http://`` and
        ``https://`` are for readers only.
    storage_options
        Passed to the fsspec driver unchanged; their values never appear in a message, log or record.
    fsync
        Local only: make every object durable before it gets its name. False is for tests and scratch data.
    unsafe_single_writer
        Accept a backend without an exclusive create: a create then checks for existence and writes. Two concurrent
        writers lose acknowledged commits.

    Raises
    ------
    BadInput
        The protocol is unknown, the URL names no bucket or is mistyped (``s3:/bucket``, ``file://tmp/x``), or options
        were given for a local path.
    MissingDependency
        The driver is not installed; the message names the extra.
    UnsafeBackend
        The backend cannot create exclusively (or is a cache) and ``unsafe_single_writer`` does not apply.
    StorageFailure
        The driver refused the options.
    """
    place = os.fspath(url)
    match = _SCHEME.match(place)
    scheme = match.group(1).lower() if match else "file"
    _check_address(place, scheme, match)
    place = scheme + place[match.end(1) :] if match else place  # fsspec knows protocols in lower case only
    options = dict(storage_options or {})
    if scheme in _CACHING:
        raise _caching(redact_url(place))
    storage: Storage
    if scheme in _LOCAL:
        if options:
            raise BadInput(f"storage_options do not apply to the local path {redact_url(place)}; leave them out")
        storage = LocalStorage(
            place[match.end() :] if match else place, fsync=fsync, unsafe_single_writer=unsafe_single_writer
        )
        place = storage.url  # a relative path differs in a process with another working directory
    else:
        secrets = Secrets(options, place)
        fs, root = _connect(place, scheme, options, secrets)
        storage = _storage(fs, root, url=redact_url(place), secrets=secrets, unsafe_single_writer=unsafe_single_writer)
    if not isinstance(storage, MemoryStorage):
        storage.recipe = StorageRecipe(place, dict(storage_options or {}), fsync, unsafe_single_writer)
    return storage


def _check_address(place: str, scheme: str, match: re.Match[str] | None) -> None:
    """Raise `BadInput` for a mistyped URL: with ``s3:/bucket/x`` a checkpoint would go to a local folder."""
    known = {*_EXTRAS, *_PACKAGES}
    if match is None:
        before, colon, _ = place.partition(":")
        if colon and before.lower() in known | _LOCAL:
            raise BadInput(
                f"{redact_url(place)} is no URL, which begins with {before.lower()}://; for a local folder of this "
                f"name write ./ before it",
                found=before,
            )
    elif scheme in known and place[match.end() :][:1] in ("", "/"):
        what = "host" if scheme in _PACKAGES else "container" if _EXTRAS.get(scheme) == "azure" else "bucket"
        raise BadInput(f"{redact_url(place)} names no {what}: {scheme}://{what.upper()}/PATH", found=redact_url(place))
    elif scheme in _LOCAL and place[match.end() :][:1] != "/":
        path = place[match.end() :]
        raise BadInput(
            f"{place} has no absolute path: write {scheme}:///{path}, or {path or 'PATH'} alone for a path from the "
            "working directory",
            found=place,
        )


def reopen_storage(recipe: StorageRecipe) -> Storage:
    """Open the storage of a recipe in this process; see `open_storage`."""
    return open_storage(
        recipe.place,
        storage_options=recipe.storage_options,
        fsync=recipe.fsync,
        unsafe_single_writer=recipe.unsafe_single_writer,
    )


def storage_from_filesystem(fs: fsspec.AbstractFileSystem, root: str, *, unsafe_single_writer: bool = False) -> Storage:
    """Return the storage at ``root`` of a file system object; its class decides the exclusive create.

    A class may declare ``cnr_exclusive_create = True`` if its ``pipe_file(path, data, mode="create")`` is exclusive and
    raises FileExistsError for the loser; `cnr_store.testing.contract.StorageContract` checks it.

    Raises
    ------
    UnsafeBackend
        The class is a cache, or is not known to create exclusively.
    """
    if type(fs) is LocalFileSystem:
        return LocalStorage(root, unsafe_single_writer=unsafe_single_writer)
    protocols = _protocols(fs)
    url = redact_url(f"{protocols[0]}://{root.lstrip('/')}")
    secrets = Secrets(getattr(fs, "storage_options", None))
    return _storage(fs, root, url=url, secrets=secrets, unsafe_single_writer=unsafe_single_writer)


def _connect(url: str, scheme: str, options: dict[str, Any], secrets: Secrets) -> tuple[fsspec.AbstractFileSystem, str]:
    if scheme in _EXTRAS:
        # No cached listings: a listing must not be older than its request. No cached instances: they would keep the
        # options for the life of the process, and share one client between callers with different options.
        options = {"use_listings_cache": False, "skip_instance_cache": True, **options}
    shown = redact_url(url)
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        wanted = f"cnr-store[{_EXTRAS[scheme]}]" if scheme in _EXTRAS else _PACKAGES.get(scheme)
        command = f'pip install "{wanted}"' if wanted else f"install the fsspec driver for {scheme}://"
        raise MissingDependency(
            f"{shown} needs a package that is not installed; {command}", found=scheme
        ) from secrets.without(error)
    except Exception as error:  # noqa: BLE001 - drivers raise whatever their SDK does
        if scheme not in fsspec.available_protocols():
            raise BadInput(
                f"no driver is known for the protocol {scheme!r} of {shown}", found=scheme
            ) from secrets.without(error)
        raise storage_failure(error, action="opening", url=shown, key=None, secrets=secrets) from secrets.without(error)
    return fs, str(root)


def _storage(
    fs: fsspec.AbstractFileSystem, root: str, *, url: str, secrets: Secrets, unsafe_single_writer: bool
) -> Storage:
    if _CACHING.intersection(_protocols(fs)):
        raise _caching(url)
    kind = _known_kind(fs)
    if kind is not None or unsafe_single_writer:
        return (kind or OtherStorage)(fs, root, url=url, secrets=secrets, is_exclusive=not unsafe_single_writer)
    raise UnsafeBackend(
        f"{type(fs).__name__} ({url}) is not known to create an object exclusively; use a local path, s3, "
        "gcs or azure, declare cnr_exclusive_create on its class, or pass unsafe_single_writer=True if "
        "nobody else ever writes",
        found=type(fs).__name__,
    )


def _known_kind(fs: fsspec.AbstractFileSystem) -> type[RemoteStorage] | None:
    """Return the class for a file system that is known to create exclusively, else None."""
    if getattr(type(fs), "cnr_exclusive_create", False) is True:
        return OtherStorage
    if isinstance(fs, MemoryFileSystem):
        return MemoryStorage
    if type(fs).__module__ == "fsspec.implementations.http":
        return HttpStorage
    package = type(fs).__module__.partition(".")[0]
    for driver in _DRIVERS:
        # Check protocol and package: another driver that registers "s3" may behave differently.
        if package == driver.package and driver.protocols.intersection(_protocols(fs)):
            return driver.storage
    return None


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _caching(url: str) -> UnsafeBackend:
    return UnsafeBackend(
        f"{url} is a caching wrapper: it may answer with a log position that another writer has taken since; "
        "open the URL behind it",
        found="caching wrapper",
    )
