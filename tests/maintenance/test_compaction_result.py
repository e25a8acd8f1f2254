"""The manifest of a compaction is written only if every task has a receipt with what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cnr_store import CorruptStore
from cnr_store.maintenance.compaction import compact_run, tasks
from cnr_store.maintenance.compaction.result import put_manifest
from tests.support.compacted import Training
from tests.support.memory import store_in_memory

RUN = (0, 3)
Change = Callable[..., Any]


def without_a_task(storage: Any, job: Any, planned: Any, done: Any, manifests: Any) -> Any:
    return put_manifest(storage, job, planned, [one for one in done if one.index != 1], manifests)


def without_the_rest(storage: Any, job: Any, planned: Any, done: Any, manifests: Any) -> Any:
    return put_manifest(storage, job, planned, [one for one in done if one.index < len(planned)], manifests)


def with_tasks_of_another_plan(storage: Any, job: Any, planned: Any, done: Any, manifests: Any) -> Any:
    return put_manifest(storage, job, planned[::-1], done, manifests)


def of_another_compaction(storage: Any, job: Any, planned: Any, done: Any, manifests: Any) -> Any:
    return put_manifest(storage, replace(job, base=job.base + 1), planned, done, manifests)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_a_task, "has receipts"),
        (without_the_rest, "has receipts"),
        (with_tasks_of_another_plan, "of a compaction has parts"),
        (of_another_compaction, "has the fields"),
    ],
)
def test_what_is_not_the_plan_is_not_committed(monkeypatch: pytest.MonkeyPatch, change: Change, says: str) -> None:
    monkeypatch.setattr(tasks, "PIECE_BYTES", 1)  # each table is a task
    store = store_in_memory()
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        for _ in range(2):
            training.delta(writer)
    before = store.head()
    monkeypatch.setattr("cnr_store.maintenance.compaction.run.put_manifest", change)

    with pytest.raises(CorruptStore, match=says):
        compact_run(store, run=RUN)

    assert store.head().digest == before.digest
    monkeypatch.undo()
    monkeypatch.setattr(tasks, "PIECE_BYTES", 1)
    report = compact_run(store, run=RUN)
    assert report.outcome == "committed"
    assert report.tasks > 1
    training.check()
