"""Opening, creating and reading around a damaged head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, RetentionPolicy, StorageFailure, Store, TableOptions, collect_garbage
from cnr_store.errors import CorruptRecord, NotAStore, StoreExists, UnsafeBackend
from cnr_store.format.layout import commit_key
from cnr_store.storage import open_storage, storage_from_filesystem
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path / "store"))
    with made.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    return made


def test_a_folder_without_identity_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(NotAStore):
        Store.open(str(tmp_path))


def test_a_second_create_is_refused(store: Store) -> None:
    with pytest.raises(StoreExists):
        Store.create(store.url)


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.DISK_FULL, FaultKind.DELAYED_PUT])
def test_a_creation_that_the_storage_refused_made_no_store_and_says_so(kind: FaultKind) -> None:
    files = IsolatedMemoryFileSystem()
    calm = FaultyFileSystem(files.fork())
    Store.create_on(storage_from_filesystem(calm, "/root"))
    at = next(call.index for call in calm.calls if (call.operation, call.path) == ("create", "/root/cnr.json"))

    with pytest.raises(StorageFailure, match=r"creating cnr\.json .* failed .* no store was created"):
        Store.create_on(storage_from_filesystem(FaultyFileSystem(files, fault=Fault(kind, at)), "/root"))

    Store.create_on(storage_from_filesystem(files, "/root"))


def test_readers_serve_the_version_before_a_torn_record_and_writers_refuse(store: Store) -> None:
    torn = store.latest_version() + 1
    store.storage.put(commit_key(torn), b'{"v":')

    with pytest.warns(RuntimeWarning, match=f"serving version {torn - 1}"):
        snapshot = store.snapshot()

    assert snapshot.version == torn - 1
    assert snapshot.table("t").read().sum() == 8
    with pytest.raises(CorruptRecord):
        store.writer()


def test_open_beside_a_creation_under_way_finds_its_first_record(store: Store) -> None:
    storage = open_storage(store.url)
    read = storage.read

    def too_early(key: str, **part: int) -> bytes | None:
        """Position 0 is written just after the first look at it."""
        if key == commit_key(0):
            del storage.read  # type: ignore[method-assign]
            return None
        return read(key, **part)

    storage.read = too_early  # type: ignore[method-assign,assignment]

    assert Store.open_on(storage).latest_version() == store.latest_version()


@pytest.mark.parametrize("is_unsafe", [True, False])
def test_a_store_is_written_in_the_way_it_was_created_for(tmp_path: Path, is_unsafe: bool) -> None:
    """Otherwise writers with and without exclusive creates would write at the same time."""
    with Store.create(str(tmp_path), unsafe_single_writer=is_unsafe) as store:
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", np.ones((4, 2), np.float32))
        head = store.head()
    with Store.open(str(tmp_path), unsafe_single_writer=not is_unsafe) as other:
        for write in (
            other.writer,
            lambda: other.tag("good", 2),
            lambda: other.set_channel("serving", 2),
            lambda: other.rollback(2),
            lambda: other.fork("trial", 2),
        ):
            with pytest.raises(UnsafeBackend, match="unsafe_single_writer"):
                write()

        assert other.head() == head
        assert other.snapshot().table("t").read().sum() == 8


@pytest.mark.parametrize("wrong", ["3", 1.5, True, [1]])
@pytest.mark.parametrize(
    "use",
    [
        lambda store, wrong: store.snapshot(wrong),
        lambda store, wrong: store.snapshot(step=wrong),
        lambda store, wrong: store.record(wrong),
        lambda store, wrong: store.tag("a", wrong),
        lambda store, wrong: store.set_channel("a", wrong),
        lambda store, wrong: store.fork("a", wrong),
        lambda store, wrong: store.rollback(wrong),
        lambda store, wrong: store.lease(wrong),
        lambda store, wrong: store.register_cursor("a", wrong),
    ],
)
def test_a_version_that_is_no_whole_number_is_a_bad_input(
    store: Store, use: Callable[[Store, Any], object], wrong: object
) -> None:
    with pytest.raises(BadInput, match=r"a (version|step) must be a whole number; found"):
        use(store, wrong)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.snapshot(tag=["a"]),
        lambda store: store.snapshot(channel=["a"]),
        lambda store: store.tag(3),
        lambda store: store.untag(["a"]),
        lambda store: store.set_channel(3),
        lambda store: store.drop_channel(["a"]),
        lambda store: store.fork(3),
    ],
)
def test_a_name_that_is_no_text_is_a_bad_input(store: Store, use: Callable[[Any], object]) -> None:
    with pytest.raises(BadInput, match=r"a (tag|channel|branch) must be a string; found"):
        use(store)


def test_steps_are_those_of_live_checkpoints(store: Store) -> None:
    with store.writer() as writer:
        writer.restore()
        for step in (10, 20):
            with writer.begin(step) as txn:
                txn.write_rows("t", np.array([1]), np.full((1, 2), step, np.float32))
    store.tag("first", store.snapshot(step=1).version)

    assert store.steps() == [1, 10, 20]

    collect_garbage(store, policy=RetentionPolicy(keep_last=1), grace_s=0, force=True)
    assert store.steps() == [1, 20]
    assert [store.snapshot(step=step).step for step in store.steps()] == [1, 20]


def test_an_empty_store_has_no_steps(tmp_path: Path) -> None:
    assert Store.create(str(tmp_path / "empty")).steps() == []


def test_a_closed_store_says_so(store: Store) -> None:
    """A regression: "RuntimeError: cannot schedule new futures after shutdown", and small tables were still read."""
    with store:
        table = store.snapshot().table("t")

    for use in (table.read, store.snapshot, store.writer, lambda: store.tag("release")):
        with pytest.raises(BadInput, match=r"is closed: open the store again"):
            use()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "full"}, "kind must be one of 'baseline', 'delta'; found 'full'"),
        ({"base": "basline"}, "base must be one of 'head', 'baseline'; found 'basline'"),
        ({"step": 2**53}, "step must be a whole number from 0 to"),
        ({"step": 1.5}, "step must be a whole number"),
    ],
)
def test_a_save_of_no_known_kind_is_refused_before_it_begins(tmp_path: Path, wrong: Any, message: str) -> None:
    """A regression: an unknown kind was an IndexError in an empty store, an unknown base was taken as the head."""
    with Store.create(tmp_path / "store") as store, store.writer() as writer:
        with pytest.raises(BadInput, match=message):
            writer.begin(**{"step": 1} | wrong)

        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))


def test_the_name_of_a_writer_is_a_text(store: Store) -> None:
    """A regression: a number was said to be a torn record, with the advice to verify the store."""
    with pytest.raises(BadInput, match="run_id must be a string; found 5"):
        store.writer(run_id=5)  # type: ignore[arg-type]
    with store.writer(run_id="nightly"):
        assert store.head().record.writer.run_id == "nightly"
