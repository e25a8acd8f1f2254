"""A store in a folder that the operating system watches: a loader and a relay look when something was committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("watchdog")

from cnr_store import BadInput, Store
from cnr_store.errors import StorageFailure
from cnr_store.integrations.folder_watch import FolderWatch
from cnr_store.relay import Relay
from cnr_store.serving import Loader, LoaderOptions
from tests.serving.loaders import until

RARELY = LoaderOptions(poll_interval_s=1e6)
ROWS = np.arange(3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "store"), fsync=False) as made:
        save(made, 1)
        yield made


def save(store: Store, value: int) -> int:
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        with writer.begin(value) as txn:
            if store.snapshot().is_empty:
                txn.write_table("user", np.full((50, 4), value, np.float32))
            else:
                txn.write_rows("user", ROWS, np.full((3, 4), value, np.float32))
        assert txn.version is not None
        return txn.version


def has_polled(loader: Loader) -> None:
    loader.start()
    until(loader, lambda: loader.metrics().polls == 1)


def test_a_commit_by_another_process_of_the_machine_is_served(store: Store) -> None:
    with Loader(store.url, options=RARELY) as loader, FolderWatch(loader.store, loader.wake):
        has_polled(loader)

        version = save(store, 2)

        until(loader, lambda: loader.version == version)
        assert (loader.lookup("user", ROWS) == 2).all()


def test_the_commits_of_a_branch_are_those_that_count(store: Store) -> None:
    with store.fork("trial") as branch, Loader(store.url, branch="trial", options=RARELY) as loader:
        woken = threading.Event()

        def wake() -> None:
            woken.set()
            loader.wake()

        with FolderWatch(loader.store, wake):
            has_polled(loader)
            save(store, 2)
            assert not woken.is_set()

            version = save(branch, 3)

            until(loader, lambda: loader.version == version)
            assert (loader.lookup("user", ROWS) == 3).all()


def test_news_pass_a_relay_from_watch_to_watch(store: Store, tmp_path: Path) -> None:
    relay = Relay(store, tmp_path / "near")
    relay.advance()
    thread = threading.Thread(target=relay.run, kwargs={"poll_interval_s": 1e6})
    with (
        FolderWatch(store, relay.wake),
        Loader(tmp_path / "near", options=RARELY) as loader,
        FolderWatch(loader.store, loader.wake),
    ):
        thread.start()
        try:
            has_polled(loader)

            version = save(store, 2)

            until(loader, lambda: loader.version == version)
        finally:
            relay.stop()
            thread.join()


def test_a_closed_watch_wakes_nobody(store: Store) -> None:
    woken: list[None] = []
    watch = FolderWatch(store, lambda: woken.append(None))
    watch.close()
    watch.close()

    save(store, 2)

    assert woken == []


def test_only_a_local_folder_can_be_watched() -> None:
    with Store.create("memory://not-watched") as store, pytest.raises(BadInput, match="local folder"):
        FolderWatch(store, lambda: None)


def test_a_folder_that_is_gone_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "moved")

    with pytest.raises(StorageFailure, match="hint cannot be watched") as refused:
        FolderWatch(store, lambda: None)

    assert refused.value.path == str(tmp_path / "store" / "hint")
