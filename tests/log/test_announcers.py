"""What a log tells of its records: when they are durable, not before, and whatever becomes of the telling."""

from __future__ import annotations

from pathlib import Path

import pytest

from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_init
from cnr_store.storage import local, open_storage
from tests.log.logs import (
    STORE,
    WRITER,
    append_delta,
    append_fence,
    append_tag,
    calm,
    open_log,
    unresolved_log,
    with_versions,
)
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.recording_os import RecordingOs


def test_every_record_is_told_and_can_be_read_then(inner: IsolatedMemoryFileSystem) -> None:
    log = open_log(calm(inner))
    told: list[tuple[int, int]] = []
    log.announcers.add(lambda version: told.append((version, open_log(calm(inner)).latest().record.v)))

    head = log.append_first(draft_init(WRITER))
    head = append_delta(log, head, 1)
    append_tag(log, head, "best")

    assert told == [(0, 0), (1, 1), (2, 2)]


def test_a_record_is_told_only_after_its_folder_was_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommitLog(open_storage(tmp_path), STORE)
    head = log.append_first(draft_init(WRITER))
    shim = RecordingOs(tmp_path)
    monkeypatch.setattr(local, "os", shim)
    log.announcers.add(lambda _: shim.calls.append(("told", "")))

    append_delta(log, head, 1)

    visible, told = shim.calls.index(("link", "commits/" + "1".zfill(20) + ".json")), shim.calls.index(("told", ""))
    assert ("fsync", "commits") in shim.calls[visible:told]


def test_a_watched_hint_is_renamed_only_after_the_record_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(open_storage(tmp_path), STORE)
    head = log.append_first(draft_init(WRITER))
    shim = RecordingOs(tmp_path)
    monkeypatch.setattr(local, "os", shim)

    append_delta(log, head, 1)

    visible = shim.calls.index(("link", "commits/" + "1".zfill(20) + ".json"))
    assert ("fsync", "commits") in shim.calls[visible : shim.calls.index(("replace", "hint/latest.json"))]


@pytest.mark.parametrize("stands", [True, False])
def test_an_unknown_record_is_told_if_it_is_found_to_stand(inner: IsolatedMemoryFileSystem, stands: bool) -> None:
    head = with_versions(inner, 3)
    log, fs = unresolved_log(inner, head)
    told: list[int] = []
    log.announcers.add(told.append)
    if stands:
        fs.deliver_delayed()
    else:
        append_fence(open_log(calm(inner)), head)

    log.resolve()

    assert told == ([3] if stands else [])


def test_an_error_of_the_telling_changes_nothing_of_the_append(
    inner: IsolatedMemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(version: int) -> None:
        raise RuntimeError(f"nobody hears of {version}")

    log = open_log(calm(inner))
    told: list[int] = []
    log.announcers.add(fail)
    log.announcers.add(told.append)

    head = log.append_first(draft_init(WRITER))

    assert (told, log.unresolved) == ([0], None)
    assert append_delta(log, head, 1).record.v == 1
    assert "nobody hears of 0" in caplog.text


def test_an_interrupt_while_it_is_told_leaves_the_outcome_to_be_resolved(inner: IsolatedMemoryFileSystem) -> None:
    def interrupt(version: int) -> None:
        raise KeyboardInterrupt

    head = with_versions(inner, 1)
    log = open_log(calm(inner))
    log.announcers.add(interrupt)

    with pytest.raises(KeyboardInterrupt):
        append_delta(log, head, 1)

    sent = log.unresolved_entry
    assert sent is not None
    assert open_log(calm(inner)).latest().record.v == sent.record.v
