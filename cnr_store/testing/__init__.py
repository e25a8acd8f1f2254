"""Tests for storage backends of your own. Import each module by itself.

``contract`` has the backend contract and needs pytest::

    from cnr_store.testing.contract import StorageContract

    class TestMyBackend(StorageContract):
        def make_storage(self) -> Storage:
            return storage_from_filesystem(MyFileSystem(), "bucket/root")
"""

from __future__ import annotations

# Empty, because this package must import without pytest.
__all__: list[str] = []
