"""Readers in threads and in other processes while versions are applied at full speed: no batch mixes two versions."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.lookups import ViewSource
from cnr_store.serving.rows.shared_memory import SharedMemory
from tests.faults.shared_tables_program import LEAST_VERSIONS, Counts, counted, first_tables, publish
from tests.support.launcher import Launcher, Program

THREADS, PROCESSES = 4, 2


def reader_program(folder: Path, lookups: int, seed: int) -> Program:
    code = f"from tests.faults.shared_tables_program import read; read({str(folder)!r}, {lookups}, {seed})"
    return Program(["-c", code])


def answer(process: subprocess.CompletedProcess[str]) -> dict[str, int]:
    assert process.returncode == 0, process.stderr
    attached, counts = process.stdout.splitlines()
    assert attached == "attached"
    found: dict[str, int] = json.loads(counts)
    return found


def torn_reads(launcher: Launcher, folder: Path, total: int) -> list[dict[str, int]]:
    """Publish until all readers have looked up, ``total`` lookups together; return what each of them counted."""
    each = total // (THREADS + PROCESSES)
    memory = SharedMemory(folder)
    publisher = memory.publisher(min_view_s=0.0)
    publisher.publish(1, 1, dict(first_tables(1, memory)), {"version": np.full(4, 1)})
    readers = [reader_program(folder, each, seed) for seed in range(PROCESSES)]
    # Two threads read as the owner does, two as another process would.
    sources: list[ViewSource] = [publisher, publisher, AttachedTables(folder), AttachedTables(folder)]
    counts = [Counts(source, 10 + seed) for seed, source in enumerate(sources)]
    threads = [threading.Thread(target=one.look_often, args=(each,)) for one in counts]
    for thread in threads:
        thread.start()
    version = 1
    with ThreadPoolExecutor(1) as waiting:
        processes = waiting.submit(launcher.run, *readers, folder=folder, timeout_s=total / 500 + 200)
        while any(thread.is_alive() for thread in threads) or not processes.done():
            publish(publisher, memory, version + 1, version)
            version += 1
    answers = [answer(process) for process in processes.result()]
    for thread in threads:
        thread.join()
    publisher.merge()
    assert len(list(memory.path.glob("view-*"))) == 1
    publisher.close()
    memory.close()
    return [*answers, *map(counted, counts)]


def check_torn_reads(launcher: Launcher, folder: Path, total: int) -> list[dict[str, int]]:
    found = torn_reads(launcher, folder, total)

    assert sum(one["done"] for one in found) >= total - THREADS - PROCESSES
    assert [one["mixed"] for one in found] == [0] * (THREADS + PROCESSES)
    assert [one["went_back"] for one in found] == [0] * (THREADS + PROCESSES)
    # The race was on: each reader saw versions come, and some views were merged away under lookups.
    assert min(one["versions"] for one in found) >= LEAST_VERSIONS
    assert sum(one["retries"] for one in found) > 0
    return found


def test_no_batch_mixes_versions(launcher: Launcher, tmp_path: Path) -> None:
    check_torn_reads(launcher, tmp_path, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_batch_in_a_million_mixes_versions(launcher: Launcher, tmp_path: Path) -> None:
    found = check_torn_reads(launcher, tmp_path, 1_000_000)

    print(json.dumps(found))  # noqa: T201 - the count goes into the notes of a release
