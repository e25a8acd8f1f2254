"""Kills a training during a save, and checks that the save was incomplete.

The process is first stopped (SIGSTOP), so that it writes nothing while the store is inspected. It is killed only if a
segment has objects and no manifest, because then no commit record can reference it. Otherwise the process continues.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from cnr_store import Store
from cnr_store_tools.demo.processes import WorkerProcess

MANIFEST = "_segment.json.zst"
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class KilledSave:
    """The incomplete save of a killed training: its segment, and the segment's objects and bytes.

    ``committed_step`` is the step of the newest commit record at that time.
    """

    segment: str
    objects: int
    size_bytes: int
    committed_step: int


def kill_during_save(store: Store, process: WorkerProcess, *, after_commits: int) -> KilledSave | None:
    """Kill ``process`` with SIGKILL during a save, after it has committed ``after_commits`` checkpoints. Blocks.

    Returns
    -------
    KilledSave or None
        None if the process ended before it could be killed during a save.
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
        # Half of the objects of the last save; less after each save that finished first.
        enough = max(1, _count(store, entry.record.chain[-1].seg) >> (1 + commits - after_commits))
        begun = set(store.storage.list_folders("data")) - known
        if not begun:
            time.sleep(POLL_S)
        for segment in begun:
            if _is_half_written(store, segment, enough):
                process.popen.send_signal(signal.SIGSTOP)
                # Its threads stop one by one: until the last has, an object can still appear.
                os.waitid(os.P_PID, process.popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
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
    assert all(item.seg != segment for item in record.chain)  # without a manifest it cannot be committed
    return KilledSave(segment, len(objects), sum(found.size_bytes for found in objects), record.step)
