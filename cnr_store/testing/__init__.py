"""Parts for testing a backend or a program against the store; needs pytest.

::

    class TestMyBackend(StorageContract):
        def make_storage(self) -> Storage:
            return storage_from_filesystem(MyFileSystem(), "bucket/root")
"""

from __future__ import annotations

from cnr_store.testing.contract import StorageContract

__all__ = ["StorageContract"]
