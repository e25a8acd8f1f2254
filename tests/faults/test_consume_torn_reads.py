"""Readers in threads and in other processes while versions are applied at full speed: no batch mixes two versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.lookups import ViewSource
from cnr_store.serving.rows.shared_memory import SharedMemory
from tests.faults.shared_tables_program import LEAST_VERSIONS, Counts, counted, first_tables, publish

REPOSITORY = Path(__file__).resolve().parents[2]
THREADS, PROCESSES = 4, 2


def reader_process(folder: Path, lookups: int, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.shared_tables_program", "reader", str(folder), str(lookups), str(seed)],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> dict[str, int]:
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        found: dict[str, int] = json.loads(process.stdout.readline())
    return found


def torn_reads(folder: Path, total: int) -> list[dict[str, int]]:
    """Publish until all readers have looked up, ``total`` lookups together; return what each of them counted."""
    each = total // (THREADS + PROCESSES)
    memory = SharedMemory(folder)
    publisher = memory.publisher(min_view_s=0.0)
    publisher.publish(1, 1, dict(first_tables(1, memory)), {"version": np.full(4, 1)})
    processes = [reader_process(folder, each, seed) for seed in range(PROCESSES)]
    # Two threads read as the owner does, two as another process would.
    sources: list[ViewSource] = [publisher, publisher, AttachedTables(folder), AttachedTables(folder)]
    counts = [Counts(source, 10 + seed) for seed, source in enumerate(sources)]
    threads = [threading.Thread(target=one.look_often, args=(each,)) for one in counts]
    for thread in threads:
        thread.start()
    version = 1
    while any(thread.is_alive() for thread in threads) or any(one.poll() is None for one in processes):
        publish(publisher, memory, version + 1, version)
        version += 1
    answers = [answer(process) for process in processes]
    for thread in threads:
        thread.join()
    publisher.merge()
    assert len(list(memory.path.glob("view-*"))) == 1
    publisher.close()
    memory.close()
    return [*answers, *map(counted, counts)]


def check_torn_reads(folder: Path, total: int) -> list[dict[str, int]]:
    found = torn_reads(folder, total)

    assert sum(one["done"] for one in found) >= total - THREADS - PROCESSES
    assert [one["mixed"] for one in found] == [0] * (THREADS + PROCESSES)
    assert [one["went_back"] for one in found] == [0] * (THREADS + PROCESSES)
    # The race was on: each reader saw versions come, and some views were merged away under lookups.
    assert min(one["versions"] for one in found) >= LEAST_VERSIONS
    assert sum(one["retries"] for one in found) > 0
    return found


def test_no_batch_mixes_versions(tmp_path: Path) -> None:
    check_torn_reads(tmp_path, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_batch_in_a_million_mixes_versions(tmp_path: Path) -> None:
    found = check_torn_reads(tmp_path, 1_000_000)

    print(json.dumps(found))  # noqa: T201 - the count goes into the notes of a release
