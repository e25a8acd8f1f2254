"""Kills a training in the middle of a save, and makes sure that it was the middle.

The process is stopped first, so that nothing it does can change while the store is looked at. It is killed only if a
segment has objects and no manifest: then no commit record can name it. Else the process goes on.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from cnr_store import Store
from cnr_store_tools.demo.processes import WorkerProcess

MANIFEST = "_segment.json.zst"
POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class KilledSave:
    """The unfinished save of a training that was killed: its segment and what that held, and the newest commit.

    ``committed_step`` is the step of the newest commit record at that time.
    """

    segment: str
    objects: int
    size_bytes: int
    committed_step: int


def kill_during_save(store: Store, process: WorkerProcess, *, after_commits: int) -> KilledSave | None:
    """Kill ``process`` with SIGKILL while a save is half written, once it has committed so many checkpoints. Blocks.

    Returns
    -------
    KilledSave or None
        None if the process ended before it could be caught in a save.
    """
    entry = store.head()
    commits = 0
    known: set[str] = set()
    while process.popen is not None and process.popen.poll() is None:
        following = store.poll(entry)
        if following is not None:
            entry = following
            if entry.record.kind in ("baseline", "delta"):
                commits += 1
                known.add(entry.record.chain[-1].seg)
            continue
        if commits < after_commits:
            time.sleep(POLL_S)
            continue
        # Half of what the save before had; less after each save that got away.
        enough = max(1, _count(store, entry.record.chain[-1].seg) >> (1 + commits - after_commits))
        for segment in set(store.storage.list_folders("data")) - known:
            if _is_half_written(store, segment, enough):
                process.popen.send_signal(signal.SIGSTOP)
                if _is_half_written(store, segment, enough) and store.poll(entry) is None:
                    process.kill()
                    return _evidence(store, segment)
                process.popen.send_signal(signal.SIGCONT)
    return None


def _is_half_written(store: Store, segment: str, enough: int) -> bool:
    paths = [found.key for found in store.storage.list_objects(f"data/{segment}")]
    return len(paths) >= enough and not any(path.endswith(f"/{MANIFEST}") for path in paths)


def _count(store: Store, segment: str) -> int:
    return sum(1 for _ in store.storage.list_objects(f"data/{segment}"))


def _evidence(store: Store, segment: str) -> KilledSave:
    objects = list(store.storage.list_objects(f"data/{segment}"))
    record = store.head().record
    assert all(item.seg != segment for item in record.chain)  # it has no manifest, so nobody can have committed it
    return KilledSave(segment, len(objects), sum(found.size_bytes for found in objects), record.step)
