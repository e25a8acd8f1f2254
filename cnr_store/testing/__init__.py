"""Parts for testing a backend, or a program, against the store. Each module is imported by itself.

``contract`` holds the backend contract and needs pytest::

    from cnr_store.testing.contract import StorageContract

    class TestMyBackend(StorageContract):
        def make_storage(self) -> Storage:
            return storage_from_filesystem(MyFileSystem(), "bucket/root")
"""

from __future__ import annotations

# Nothing here: the other modules must import where pytest is not installed.
__all__: list[str] = []
