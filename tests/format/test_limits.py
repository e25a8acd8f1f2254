"""Documents have a limit: no reader takes more memory for one, whatever lies in its place, and no writer puts more."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from cnr_store import (
    BadInput,
    CnrStoreError,
    CompactionPolicy,
    CorruptStore,
    RetentionPolicy,
    Store,
    compact,
    maintain,
    read_status,
    repair_store,
    verify_store,
)
from cnr_store.errors import CorruptObject, CorruptRecord
from cnr_store.format import layout, limits
from cnr_store.format.documents import pack, sha256
from cnr_store.format.limits import (
    MAX_LISTS_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_OBJECT_BYTES,
    MAX_RECORD_BYTES,
    MAX_SMALL_BYTES,
)
from cnr_store.format.manifest import decode_manifest
from cnr_store.log import sent_record
from cnr_store.log.leases import put_cursor, read_leases, take_lease
from cnr_store.relay import Relay
from cnr_store.segment import writer as segment_writer
from cnr_store.storage.local import LocalStorage
from tests.support.documents import document_of
from tests.support.snapshot_bytes import bytes_of
from tests.tools.sample_store import build_store

HUGE = 3 << 30


class BoundedStorage(LocalStorage):
    """Local files; remembers the most bytes that one read took, and refuses a read without an end."""

    largest = 0

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        assert stop is not None, f"{key} was read without a limit"
        data = super()._read(key, start, stop)
        self.largest = max(self.largest, len(data or b""))
        return data

    def _read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        self.largest = max(self.largest, sum(map(len, buffers)))
        return super()._read_into(key, start, buffers)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The store of `build_store`, with a side object, holds and the notes that maintenance leaves."""
    path = tmp_path / "store"
    with build_store(path) as store:
        for number in range(10):  # more than a record holds: from here on they stand in a side object
            store.tag(f"{number}{'x' * 1000}", 3)
        compact(store, policy=CompactionPolicy(max_chain=2))
        maintain(store, retention=RetentionPolicy())
        store.lease(ttl_s=3600)
        store.register_cursor("c", 4, ttl_s=3600)
    return path


def opened(root: Path, *, threads: int = 1) -> tuple[Store, BoundedStorage]:
    storage = BoundedStorage(str(root), fsync=False)
    return Store.open_on(storage, threads=threads), storage


def blow_up(root: Path, key: str) -> None:
    """Make a sparse file of an object: it takes no room, and 3 GiB to read."""
    with (root / key).open("r+b") as file:
        file.truncate(HUGE)


def one_of(root: Path, pattern: str) -> str:
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))[-1]


def use(root: Path) -> list[CnrStoreError]:
    """What reading, watching, checking and maintaining a store of which something is wrong raises."""
    raised: list[CnrStoreError] = []
    store, storage = opened(root)

    def maintained() -> None:
        error = maintain(store, retention=RetentionPolicy(), compaction=CompactionPolicy(max_chain=1)).error
        if error is not None:
            raise error

    with store, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for act in (
            lambda: bytes_of(store.snapshot()),
            lambda: read_status(store),
            maintained,
            lambda: store.lease(ttl_s=5).release(),
            lambda: store.cursors(),
            lambda: Relay(store, LocalStorage(str(root.with_name("relay")), fsync=False)).advance(),
        ):
            try:
                act()
            except CnrStoreError as error:
                raised.append(error)
        raised += [CnrStoreError(problem.message, path=problem.path) for problem in verify_store(store).problems]
    assert storage.largest <= MAX_MANIFEST_BYTES + 1
    return raised


def test_a_sound_store_is_used_without_a_read_that_has_no_end(root: Path) -> None:
    assert use(root) == []


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("zarr.json", MAX_SMALL_BYTES),
        ("hint/latest.json", MAX_SMALL_BYTES),
        ("commits/*4.json", MAX_RECORD_BYTES),
        ("commits/*.json", MAX_RECORD_BYTES),
        ("state/*.json", MAX_LISTS_BYTES),
        ("data/*/_segment.json.zst", MAX_MANIFEST_BYTES),
        ("leases/readers/*.json", MAX_SMALL_BYTES),
        ("leases/cursors/*.json", MAX_SMALL_BYTES),
    ],
)
def test_a_document_of_3_gib_is_named_and_not_loaded(root: Path, pattern: str, limit: int) -> None:
    key = one_of(root, pattern)
    blow_up(root, key)

    raised = use(root)

    assert key in {error.path for error in raised}
    with pytest.raises(CorruptObject, match="more than") as found:
        LocalStorage(str(root)).read_document(key, limit)
    assert (found.value.path, found.value.expected, found.value.found) == (key, limit, limit + 1)


@pytest.mark.parametrize("key", ["hint/maintenance.json", "leases/compact.json"])
def test_an_advisory_note_of_3_gib_costs_nothing(root: Path, key: str) -> None:
    assert (root / key).is_file()
    blow_up(root, key)

    assert use(root) == []


def test_an_identity_of_3_gib_is_refused(root: Path) -> None:
    blow_up(root, layout.IDENTITY)

    with pytest.raises(CorruptObject, match=r"cnr\.json"):
        opened(root)


@pytest.mark.parametrize("key", [layout.RELAY, layout.RELAY_TRIMS, layout.IDENTITY, layout.HINT])
def test_a_document_of_a_relay_of_3_gib_is_not_loaded(root: Path, tmp_path: Path, key: str) -> None:
    store, _ = opened(root)
    near = tmp_path / "near"
    with store:
        Relay(store, str(near), policy=RetentionPolicy(keep_last=1)).advance()
        (near / "relay").mkdir(exist_ok=True)
        (near / key).touch()
        blow_up(near, key)
        storage = BoundedStorage(str(near), fsync=False)
        relay = Relay(store, storage)

        if key == layout.HINT:
            assert relay.advance().problem is None
        else:
            with pytest.raises(CorruptObject) as found:
                relay.advance()
            assert found.value.path == key
    assert storage.largest <= MAX_LISTS_BYTES + 1


def test_a_torn_record_of_3_gib_is_superseded_by_its_digest(root: Path, tmp_path: Path) -> None:
    torn = int(Path(one_of(root, "commits/*.json")).stem) + 1
    key = layout.commit_key(torn)
    (root / key).write_bytes((root / layout.commit_key(torn - 1)).read_bytes())
    blow_up(root, key)
    store, storage = opened(root)
    with store:
        with pytest.raises(CorruptRecord, match="more than 65536 bytes"):
            store.head()

        repair_store(store, dry_run=False)

        with (root / key).open("rb") as file:
            digest = sha256(file.read(MAX_RECORD_BYTES + 1))
        superseded = store.head().record.supersedes
        assert superseded is not None
        assert superseded.torn == (digest,)
        assert verify_store(store, deep=True).problems == ()
        near = tmp_path / "near"
        for relay in (Relay(store, str(near), start=torn - 1), Relay(store, str(near))):
            assert relay.advance().version == torn + 1
    assert storage.largest <= MAX_MANIFEST_BYTES + 1
    assert (near / key).stat().st_size == MAX_RECORD_BYTES + 1
    with Store.open(str(near)) as copy:
        assert copy.head().record.supersedes == superseded


def test_no_line_of_the_library_reads_an_object_without_an_end() -> None:
    library = Path(limits.__file__).parents[1]
    calls = [
        (path, call)
        for path in library.rglob("*.py")
        if path.parent.name not in ("storage", "testing")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and re.fullmatch(r".*\b(storage|_storage|_target)\.read", ast.unparse(call.func))
    ]

    assert len(calls) > 5
    endless = [(path, call) for path, call in calls if "stop" not in {one.arg for one in call.keywords}]
    assert [f"{path.name}:{call.lineno}" for path, call in endless] == []


def test_a_holder_too_long_for_a_lease_is_refused(root: Path) -> None:
    store, _ = opened(root)
    with store:
        before = read_leases(store.storage)
        with pytest.raises(BadInput, match="at most 65536"):
            take_lease(store.storage, store.internals.log, 4, ttl_s=60, holder="h" * MAX_SMALL_BYTES)
        with pytest.raises(BadInput, match="at most 65536"):
            put_cursor(store.storage, store.internals.log, "d", 4, ttl_s=60, holder="h" * MAX_SMALL_BYTES)

        assert read_leases(store.storage) == before
        assert "d" not in store.cursors()


def test_lists_too_long_for_readers_are_refused_when_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_record, "MAX_LISTS_BYTES", 12_000)
    store, _ = opened(root)
    with store:
        for name in "abc":  # what a record and a second side object may hold beside the first one
            store.tag(name * 1000, 3)
        before = store.head()

        with pytest.raises(BadInput, match="at most 12000"):
            store.tag("d" * 1000, 3)

        assert store.head() == before


@pytest.mark.parametrize(
    ("path", "limit"),
    [("dense.float64/c.0", 124), ("dense.float64/zarr.json", MAX_OBJECT_BYTES), ("document-0", MAX_OBJECT_BYTES)],
)
def test_an_object_larger_than_any_chunk_is_refused_by_its_inventory(root: Path, path: str, limit: int) -> None:
    store, storage = opened(root)
    with store:
        chain = store.record(4).chain
        key = layout.segment_key(chain[0].seg, layout.MANIFEST)
        manifest = decode_manifest((root / key).read_bytes(), key)
    listed = [next(entry for entry in manifest.objects if path in entry.path)]
    for size, is_refused in ((limit, False), (limit + 1, True)):
        objects = tuple(
            msgspec.structs.replace(entry, size=size) if entry in listed else entry for entry in manifest.objects
        )
        data = pack(document_of(msgspec.structs.replace(manifest, objects=objects)))

        with pytest.raises(CorruptStore, match=r"expected 124|<= 268435456") if is_refused else nullcontext():
            decode_manifest(data, key)
    assert storage.largest <= MAX_LISTS_BYTES


def test_a_manifest_too_large_for_readers_is_refused_when_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = opened(root)
    with store, store.writer() as writer:
        writer.restore()
        monkeypatch.setattr(segment_writer, "MAX_MANIFEST_BYTES", 100)
        before = store.head()

        with pytest.raises(BadInput, match=r"_segment\.json\.zst"), writer.begin(step=50) as txn:
            txn.put_scalars({"epoch": 2})

        assert store.head() == before
