"""From URLs and file systems to storages: which are refused, and that no option ever shows."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cnr_store.errors import AccessDenied, BadInput, CnrStoreError, StorageFailure, UnsafeBackend
from cnr_store.storage import CreateOutcome, Storage, open_storage, reopen_storage, storage_from_filesystem
from cnr_store.storage.redaction import RedactedCause, Secrets, redact_url
from cnr_store.storage.remote import AzureStorage, GcsStorage, MemoryStorage, S3Storage

SECRET = "mark3r-s3cret/+=value"


class PrivateMemory(MemoryFileSystem):
    """Memory of its own, so that tests cannot meet."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(global_store=False, **options)


class IgnoresTheMode(PrivateMemory):
    """Overwrites without an error, as zonal GCS buckets and some S3 servers do."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


class RefusesButOverwrites(PrivateMemory):
    """The worst case: the loser gets an error, and its bytes are stored."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        existed = self.exists(path)
        super().pipe_file(path, value, mode="overwrite")
        if mode == "create" and existed:
            raise FileExistsError(path)


class KnowsNoMode(PrivateMemory):
    """An older driver: an unexpected argument for every create."""

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if options:
            raise TypeError("unexpected keyword argument 'mode'")
        super().pipe_file(path, value)


class SaysThatItWon(PrivateMemory):
    """Keeps an existing object, and reports success."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode != "create" or not self.exists(path):
            super().pipe_file(path, value)


class KeepsListings(PrivateMemory):
    """Answers listings from a cache until the cache is cleared."""

    protocol = "keepslistings"
    cnr_exclusive_create = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def find(self, path: str, **options: Any) -> Any:
        return self.kept.setdefault(f"find {path}", super().find(path, **options))

    def ls(self, path: str, **options: Any) -> Any:
        return self.kept.setdefault(f"ls {path}", super().ls(path, **options))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()


class SlowCheck(PrivateMemory):
    """Leaves other threads time between the check and the assignment."""

    def exists(self, path: str, **options: Any) -> bool:
        found = super().exists(path, **options)
        time.sleep(0.01)
        return bool(found)


class LosesReplies(PrivateMemory):
    """Every create works and then fails, as when a proxy drops the answer."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode=mode)
        if mode == "create":
            raise ConnectionResetError("reply lost")


class Declared(MemoryFileSystem):
    """A third-party driver that declares an exclusive create."""

    protocol = "declared"
    cachable = False
    cnr_exclusive_create = True


class Undeclared(fsspec.AbstractFileSystem):
    """A third-party driver that promises nothing; keeps objects in a private memory."""

    protocol = "undeclared"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = PrivateMemory()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return bytes(self.inner.cat_file(path, start=start, end=end))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.inner.pipe_file(path, value)

    def rm_file(self, path: str) -> None:
        self.inner.rm_file(path)


class Broken(PrivateMemory):
    """Fails with a chosen error wherever a backend can."""

    protocol = "broken"
    cnr_exclusive_create = True

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def _fail(self, *args: Any, **options: Any) -> Any:
        raise self.error

    cat_file = pipe_file = rm_file = find = ls = _fail


@pytest.mark.parametrize("kind", [IgnoresTheMode, RefusesButOverwrites, SaysThatItWon, KnowsNoMode])
def test_the_probe_refuses_a_backend_that_ignores_the_condition(kind: type[PrivateMemory]) -> None:
    fs = kind()

    with pytest.raises((UnsafeBackend, StorageFailure)) as caught:
        storage_from_filesystem(fs, "/root").probe()

    assert isinstance(caught.value, UnsafeBackend) is (kind is not KnowsNoMode)
    assert fs.store == {}


def test_the_probe_reads_back_when_replies_are_lost() -> None:
    storage = storage_from_filesystem(LosesReplies(), "/root")

    storage.probe()

    assert storage.create("a", b"x") is CreateOutcome.UNKNOWN
    assert storage.create("a", b"x") is CreateOutcome.EXISTS


def test_memory_decides_a_race_between_check_and_assignment() -> None:
    fs = SlowCheck()
    clients = [storage_from_filesystem(fs, "/root") for _ in range(8)]

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda client: client.create("commits/0.json", b"record"), clients))

    assert outcomes.count(CreateOutcome.CREATED) == 1
    assert outcomes.count(CreateOutcome.EXISTS) == 7


@pytest.mark.parametrize("wrapper", ["simplecache", "filecache", "blockcache"])
def test_caching_wrappers_are_refused_even_for_a_single_writer(wrapper: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeBackend, match="caching wrapper"):
        open_storage(f"{wrapper}::memory://x", unsafe_single_writer=True)

    fs = fsspec.filesystem(wrapper, target_protocol="memory", cache_storage=str(tmp_path))
    with pytest.raises(UnsafeBackend, match="caching wrapper"):
        storage_from_filesystem(fs, "/x", unsafe_single_writer=True)


@pytest.mark.parametrize("fs", [Undeclared(), DirFileSystem("/x", PrivateMemory())], ids=["other", "wrapper"])
def test_an_unknown_file_system_is_refused(fs: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(UnsafeBackend, match="unsafe_single_writer"):
        storage_from_filesystem(fs, "/root")


def test_a_single_writer_may_use_an_unknown_file_system() -> None:
    storage = storage_from_filesystem(Undeclared(), "/root", unsafe_single_writer=True)

    storage.probe()

    assert not storage.is_exclusive
    assert storage.create("a", b"first") is CreateOutcome.CREATED
    assert storage.create("a", b"second") is CreateOutcome.EXISTS
    assert storage.read("a") == b"first"


def test_a_class_may_declare_its_create_exclusive() -> None:
    storage = storage_from_filesystem(Declared(), f"/{uuid.uuid4().hex}")

    storage.probe()

    assert storage.is_exclusive


def test_a_look_alike_of_a_known_protocol_is_not_trusted() -> None:
    class Imposter(Undeclared):
        protocol = "s3"

    with pytest.raises(UnsafeBackend):
        storage_from_filesystem(Imposter(), "bucket")


class ZonalGcs(fsspec.asyn.AsyncFileSystem):
    """What the refusal looks at, and a record of what was sent."""

    cachable = False

    def __init__(self, zonal: bool) -> None:
        super().__init__()
        self.zonal = zonal
        self.sent: list[str] = []
        self.objects: dict[str, bytes] = {}

    async def _is_zonal_bucket(self, bucket: str) -> bool:
        assert bucket == "bucket"
        return self.zonal

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.sent.append(f"{mode} {path}")
        self.objects[path] = value

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    async def _rm_file(self, path: str, **options: Any) -> None:
        del self.objects[path]


@pytest.mark.parametrize("zonal", [True, False])
def test_zonal_buckets_are_refused_before_anything_is_sent(zonal: bool) -> None:
    fs = ZonalGcs(zonal)
    storage = GcsStorage(fs, "bucket/root", url="gs://bucket/root", secrets=Secrets())

    if zonal:
        with pytest.raises(UnsafeBackend, match="zonal"):
            storage.create("a", b"x")
        with pytest.raises(UnsafeBackend, match="zonal"):
            storage.probe()
    else:
        assert storage.create("a", b"x") is CreateOutcome.CREATED

    assert fs.sent == ([] if zonal else ["create bucket/root/a"])


def test_a_single_writer_may_use_a_zonal_bucket() -> None:
    fs = ZonalGcs(zonal=True)
    storage = GcsStorage(fs, "bucket/root", url="gs://bucket/root", secrets=Secrets(), is_exclusive=False)

    storage.probe()

    assert storage.create("a", b"first") is CreateOutcome.CREATED
    assert storage.create("a", b"second") is CreateOutcome.EXISTS
    assert [sent for sent in fs.sent if "_probe" not in sent] == ["overwrite bucket/root/a"]


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("s3://bucket/root", {"key": "k", "secret": SECRET, "endpoint_url": "http://127.0.0.1:9"}, S3Storage),
        ("gs://bucket/root", {"token": "anon"}, GcsStorage),
        ("abfs://bucket/root", {"account_name": "account", "account_key": "c2VjcmV0"}, AzureStorage),
        ("memory://root", {}, MemoryStorage),
    ],
)
def test_each_known_url_gets_its_own_way_of_creating(url: str, options: dict[str, Any], kind: type[Storage]) -> None:
    storage = open_storage(url, storage_options=options)

    assert type(storage) is kind
    assert storage.url == url
    assert storage.is_exclusive
    single = open_storage(url, storage_options=options, unsafe_single_writer=True)
    assert type(single) is kind
    assert not single.is_exclusive


@pytest.mark.parametrize(
    "names",
    [lambda storage: [stat.key[5:6] for stat in storage.list_objects("data")], lambda s: s.list_folders("data")],
    ids=["objects", "folders"],
)
def test_no_listing_is_older_than_its_request(names: Callable[[Storage], list[str]]) -> None:
    storage = storage_from_filesystem(KeepsListings(), "/root")
    storage.put("data/a/x", b"x")
    assert names(storage) == ["a"]

    storage.put("data/b/y", b"y")

    assert names(storage) == ["a", "b"]


@pytest.mark.parametrize("url", ["s3://bucket/root", "gs://bucket/root"])
def test_drivers_share_no_client_and_keep_no_listings(url: str) -> None:
    options = {"token": "anon"} if url.startswith("gs") else {"key": "k", "secret": SECRET}
    one, other = (open_storage(url, storage_options=options)._fs for _ in range(2))  # type: ignore[attr-defined]

    assert one is not other
    assert not one.dircache.use_listings_cache


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [("s3fs", "s3://b/r", "s3"), ("gcsfs", "gs://b/r", "gcs"), ("adlfs", "abfs://b/r", "azure")],
)
def test_a_missing_driver_names_the_extra_to_install(package: str, url: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from cnr_store.errors import MissingDependency
from cnr_store.storage import open_storage
try:
    open_storage({url!r}, storage_options={{"secret": {SECRET!r}}})
except MissingDependency as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert f'pip install "cnr-store[{extra}]"' in found
    assert SECRET not in found


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://", "names no bucket: s3://BUCKET/PATH"),
        ("s3:///run-7", "names no bucket"),
        ("gs://", "names no bucket"),
        ("abfs://", "names no container"),
        ("http://", "names no host"),
        ("s3:/bucket/run-7", "is no URL, which begins with s3://"),
        ("S3:bucket/run-7", "is no URL, which begins with s3://"),
        ("file:/data/run-7", "is no URL, which begins with file://"),
        ("file://data/run-7", "write file:///data/run-7, or data/run-7 alone"),
        ("file://", "has no absolute path"),
    ],
)
def test_a_mistyped_url_is_bad_input(place: str, said: str) -> None:
    """A regression: of s3:/bucket/x checkpoints went to a local folder, and s3:// gave the driver's error."""
    with pytest.raises(BadInput, match=said):
        open_storage(place)


def test_a_protocol_in_capitals_is_the_protocol(tmp_path: Path) -> None:
    assert open_storage(f"FILE://{tmp_path}").url == str(tmp_path)
    assert isinstance(open_storage("MEMORY://x"), MemoryStorage)


def test_a_folder_with_a_colon_can_be_named() -> None:
    assert open_storage("./s3:/run-7").url.endswith("/s3:/run-7")
    assert open_storage("run:7").url.endswith("/run:7")


def test_an_unknown_protocol_is_bad_input() -> None:
    with pytest.raises(BadInput, match="nosuchprotocol"):
        open_storage("nosuchprotocol://x")


def everything_said(error: BaseException) -> str:
    """All that a log, a traceback or a record could show of an error."""
    details = error.details() if isinstance(error, CnrStoreError) else {}
    shown = [str(error), repr(error), repr(details), *traceback.format_exception(error)]
    return "\n".join(shown)


CALLS: dict[str, Callable[[Storage], Any]] = {
    "read": lambda storage: storage.read("a"),
    "put": lambda storage: storage.put("a", b"x"),
    "list_objects": lambda storage: list(storage.list_objects("data")),
    "list_folders": lambda storage: storage.list_folders("data"),
    "delete": lambda storage: storage.delete(["a", "b"]),
    "probe": lambda storage: storage.probe(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError("no"), AccessDenied), (RuntimeError("no"), StorageFailure), (TimeoutError(), StorageFailure)],
    ids=["denied", "unknown type", "timeout"],
)
def test_every_backend_error_becomes_ours_with_its_cause(
    error: BaseException, kind: type[StorageFailure], call: Callable[[Storage], Any]
) -> None:
    storage = storage_from_filesystem(Broken(error), "/root")

    with pytest.raises(kind) as caught:
        call(storage)

    assert type(caught.value) is kind
    assert caught.value.__cause__ is error


def test_create_raises_only_when_access_is_denied() -> None:
    with pytest.raises(AccessDenied):
        storage_from_filesystem(Broken(PermissionError("no")), "/root").create("a", b"x")

    assert storage_from_filesystem(Broken(OSError("?")), "/root").create("a", b"x") is CreateOutcome.UNKNOWN


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_error_repeats_an_option(call: Callable[[Storage], Any], caplog: pytest.LogCaptureFixture) -> None:
    class Chatty(Broken):
        protocol = "chatty"

    inner = ValueError(f"bad token {SECRET}")
    outer = RuntimeError("wrapped")
    outer.__cause__ = inner
    fs = Chatty(outer)
    fs.storage_options = {"secret": SECRET, "client_kwargs": {"headers": [SECRET]}}
    storage = storage_from_filesystem(fs, "/root")

    with caplog.at_level(logging.DEBUG, "cnr_store"), pytest.raises(StorageFailure) as caught:
        call(storage)
    storage.create("a", b"x")

    assert isinstance(caught.value.__cause__, RedactedCause)
    assert "RuntimeError" in str(caught.value.__cause__)
    assert SECRET not in everything_said(caught.value) + caplog.text + repr(storage) + storage.url


def test_no_message_of_a_real_driver_repeats_an_option() -> None:
    storage = open_storage(
        "s3://bucket/root",
        storage_options={
            "key": "KEY" + SECRET,
            "secret": SECRET,
            "endpoint_url": f"http://user:{SECRET.replace('/', '')}@127.0.0.1:9",
            "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
        },
    )
    storage._fs.retries = 1  # type: ignore[attr-defined]

    with pytest.raises(StorageFailure) as caught:
        storage.read("a")

    said = everything_said(caught.value) + repr(storage) + storage.url
    assert SECRET not in said
    assert SECRET.replace("/", "") not in said


def test_options_that_the_driver_refuses_are_not_repeated() -> None:
    with pytest.raises(StorageFailure) as caught:
        open_storage("abfs://container/root", storage_options={"connection_string": SECRET})

    assert SECRET not in everything_said(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/root", "s3://bucket/root"),
        (f"ftp://user:{SECRET}@host/path", "ftp://***@host/path"),
        ("ftp://user:p@ss@host/path", "ftp://***@host/path"),
        (f"https://host/path?sig={SECRET}", "https://host/path?***"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("/local/what?ever:x@y", "/local/what?ever:x@y"),
    ],
)
def test_credentials_in_a_url_are_masked(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_refused_url_is_shown_without_its_credentials() -> None:
    for url in [f"ftp://user:{SECRET}@127.0.0.1:9/x", f"simplecache::ftp://user:{SECRET}@host/x"]:
        with pytest.raises(StorageFailure) as caught:
            open_storage(url)

        assert SECRET not in everything_said(caught.value), url


def test_a_recipe_opens_the_same_place_elsewhere_and_shows_no_option(caplog: pytest.LogCaptureFixture) -> None:
    options = {"key": "KEY" + SECRET, "secret": SECRET, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    url = f"s3://user:{SECRET.replace('/', '')}@bucket/root"
    with caplog.at_level(logging.DEBUG):
        storage = open_storage(url, storage_options=options)
        assert storage.recipe is not None
        sent = pickle.loads(pickle.dumps(storage.recipe))
        again = reopen_storage(sent)

    said = f"{storage.recipe!r}{storage.recipe}{sent!r}{storage!r}{again!r}{caplog.text}"
    assert SECRET not in said
    assert SECRET.replace("/", "") not in said
    assert (type(again), again.url) == (S3Storage, storage.url)
    assert again._fs.storage_options == storage._fs.storage_options  # type: ignore[attr-defined]


def test_a_local_folders_recipe_does_not_depend_on_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("here/store", fsync=False)
    storage.put("a", b"x")
    monkeypatch.chdir("/")

    assert storage.recipe is not None
    again = reopen_storage(storage.recipe)

    assert again.read("a") == b"x"
    assert again.fsync is False  # type: ignore[attr-defined]


def test_what_lives_in_this_process_has_no_recipe() -> None:
    given = storage_from_filesystem(PrivateMemory(), "/root")

    assert (given.recipe, open_storage("memory://x").recipe) == (None, None)
