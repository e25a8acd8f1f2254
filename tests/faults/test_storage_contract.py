"""The backend contract on every backend that runs here: local files, memory, SeaweedFS, Azurite."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cnr_store.storage import Storage, open_storage, storage_from_filesystem
from cnr_store.testing.contract import StorageContract
from tests.support.servers import Place


class TestLocal(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "not made yet" / "root"

    def make_storage(self) -> Storage:
        return open_storage(self.root)


class TestLocalUrlWithoutFsync(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}"

    def make_storage(self) -> Storage:
        return open_storage(self.url, fsync=False)


class TestMemory(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}/root"

    def make_storage(self) -> Storage:
        return open_storage(self.url)


class TestFileSystemObject(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.fs = MemoryFileSystem(global_store=False, skip_instance_cache=True)

    def make_storage(self) -> Storage:
        return storage_from_filesystem(self.fs, "/bucket/root")


@pytest.mark.servers
class TestSeaweedFS(StorageContract):
    rounds = 3  # the server takes about a second for each losing writer or two of a race

    @pytest.fixture(autouse=True)
    def _place(self, s3_place: Place) -> None:
        self.place = s3_place

    def make_storage(self) -> Storage:
        return open_storage(self.place.url, storage_options=self.place.storage_options)


@pytest.mark.servers
# aiohttp's advice to the Azure SDK, which hands it bytes of more than 1 MiB.
@pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")
class TestAzurite(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, azure_place: Place) -> None:
        self.place = azure_place

    def make_storage(self) -> Storage:
        return open_storage(self.place.url, storage_options=self.place.storage_options)
