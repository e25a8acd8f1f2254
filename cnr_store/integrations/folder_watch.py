"""Hears of commits in a local folder from the operating system (inotify on Linux), by watchdog.

```python
with Loader("run-7") as loader, FolderWatch(loader.store, loader.wake):
    loader.start()
```

Needs watchdog; importing this module without it raises `MissingDependency`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cnr_store.errors import BadInput, MissingDependency, StorageFailure
from cnr_store.format.layout import hint_key
from cnr_store.runtime.closing import Closing
from cnr_store.storage.local import LocalStorage
from cnr_store.store import Store

try:
    from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer
except ImportError as error:
    raise MissingDependency('watching a folder needs watchdog; pip install "cnr-store[watch]"') from error

__all__ = ["FolderWatch"]


class FolderWatch(Closing):
    """Calls ``wake()`` after each commit to a store, branch or relay in a local folder, on threads of its own.

    It watches the hint, which a writer or a relay writes when its record is durable. Where the system tells nothing,
    as of files that another machine wrote (NFS), it does nothing, and the poll interval stays.

    Parameters
    ----------
    store
        In a folder of this machine.
    wake
        `Loader.wake`, `Relay.wake` or another function that returns at once.

    Raises
    ------
    BadInput
        The store is in no local folder.
    StorageFailure
        The folder cannot be watched: it does not exist, or the system's limit on watches is reached.
    """

    def __init__(self, store: Store, wake: Callable[[], object]) -> None:
        storage = store.storage
        if not isinstance(storage, LocalStorage):
            raise BadInput(f"only a store in a local folder can be watched, found {store.url}", found=store.url)
        folder, name = os.path.split(os.path.join(storage.root, hint_key(store.internals.log.prefix)))  # noqa: PTH118
        self._observer = Observer()
        try:
            # A rename is `moved`, or `created` if the system tells of its two halves apart.
            self._observer.schedule(_Renames(name, wake), folder, event_filter=[FileMovedEvent, FileCreatedEvent])
            self._observer.start()
        except OSError as error:
            self._observer.stop()
            raise StorageFailure(
                f"the folder {folder} cannot be watched ({error.strerror}); without a watch the poll interval counts",
                path=folder, found=type(error).__name__,
            ) from error  # fmt: skip

    def close(self) -> None:
        """End the threads; blocks until they have ended. Idempotent."""
        self._observer.stop()
        self._observer.join()


class _Renames(FileSystemEventHandler):
    def __init__(self, name: str, wake: Callable[[], object]) -> None:
        self._name, self._wake = name, wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Wake if something was renamed to the watched name."""
        if os.path.basename(os.fsdecode(event.dest_path or event.src_path)) == self._name:  # noqa: PTH119
            self._wake()
