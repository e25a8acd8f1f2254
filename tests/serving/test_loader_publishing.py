"""When a version becomes visible, who may refuse it, and what a loader leaves in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cnr_store import BadInput, VersionRefused
from cnr_store.serving import Candidate, Loader, LoaderOptions
from tests.serving.loaders import ROWS, Flaky, Training, caught_up
from tests.support.loader_checks import check_is_snapshot


def test_staged_versions_wait_for_apply_and_become_one(training: Training) -> None:
    first = training.save((1, 2))
    with Loader(training.open(), publish="apply") as loader:
        assert loader.apply() == first
        second = training.save((2, 3))
        poll = loader.poll()
        assert (poll.version, poll.staged, poll.is_updated) == (first, second, True)
        third = training.save((3, 4))
        assert loader.poll().staged == third
        assert loader.staleness_s >= 0
        assert loader.lookup("user", [1, 2, 3, 4])[:, 0].tolist() == [1, 1, 0, 0]
        assert loader.apply() == third
        assert loader.lookup("user", [1, 2, 3, 4])[:, 0].tolist() == [1, 2, 3, 3]
        check_is_snapshot(loader, training.store.snapshot(third))
        assert loader.metrics().staged is None
        training.save()
        loader.poll()
        loader.pin()
        assert loader.apply() == third


def test_apply_does_not_wait_for_a_poll(training: Training, fs: Flaky) -> None:
    with Loader(training.open(fs), publish="apply") as loader:
        second = training.save()
        loader.poll()
        training.save()
        is_reading, may_go_on = threading.Event(), threading.Event()

        def on_call(call: Any) -> None:
            if "data/" in call.path:
                is_reading.set()
                assert may_go_on.wait(60)

        fs._on_call = on_call
        poll = threading.Thread(target=loader.poll)
        poll.start()
        assert is_reading.wait(60)
        assert loader.apply() == second
        may_go_on.set()
        poll.join()
        loader.apply()
        check_is_snapshot(loader, training.store.snapshot())


def test_a_refused_version_is_passed_over_and_not_asked_about_again(training: Training) -> None:
    asked: list[tuple[int, int | None]] = []

    def validate(candidate: Candidate) -> bool:
        asked.append((candidate.version, candidate.serving))
        return bool(candidate.lookup("user", [1])[0, 0] != 2)

    first = training.save()
    with Loader(training.open(), options=LoaderOptions(validate=validate)) as loader:
        refused = training.save()
        poll = loader.poll()
        assert isinstance(poll.error, VersionRefused)
        assert poll.error.version == refused
        assert (loader.version, training.value(loader)) == (first, 1)
        training.store.tag("same")
        training.merge()
        assert isinstance(loader.poll().error, VersionRefused)
        assert asked == [(first, None), (refused, first)]
        assert loader.metrics().refused == 1
        assert loader.staleness_s > 0
        newer = training.save()
        caught_up(loader, training.store)
        assert asked[2:] == [(newer, first)]
        with pytest.raises(VersionRefused):
            loader.rollback(refused)
        assert loader.version == newer


def test_a_refused_rollback_does_not_bring_a_refused_version_back(training: Training) -> None:
    allowed = True
    first = training.save()
    with Loader(training.open(), options=LoaderOptions(validate=lambda _: allowed)) as loader:
        second = training.save()
        loader.poll()
        allowed = False
        training.save()
        assert isinstance(loader.poll().error, VersionRefused)
        with pytest.raises(VersionRefused):
            loader.rollback(first)
        allowed = True
        assert isinstance(loader.poll().error, VersionRefused)  # it was not asked about again
        assert loader.version == second
        loader.pin(first)
        assert loader.version == first


def test_a_check_that_raises_refuses_and_its_error_is_the_cause(training: Training) -> None:
    def broken(candidate: Candidate) -> None:
        if candidate.serving is not None:
            raise RuntimeError("no")

    with Loader(training.open(), options=LoaderOptions(validate=broken)) as loader:
        training.save()
        error = loader.poll().error
        assert isinstance(error, VersionRefused)
        assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(VersionRefused):
        Loader(training.open(), options=LoaderOptions(validate=lambda _: False))


@pytest.mark.parametrize("publish", ["poll", "apply"])
def test_a_check_that_calls_its_loader_shows_nobody_the_version(training: Training, publish: Any) -> None:
    """Regression: `apply` in ``validate`` published the version under validation; then `poll` raised ValueError."""
    calls: list[Callable[[], Any]] = []

    def validate(candidate: Candidate) -> bool:
        for call in calls:
            call()
        return candidate.step != 1

    with Loader(training.open(), publish=publish, options=LoaderOptions(validate=validate)) as loader:
        before = loader.version
        training.save()
        calls = [loader.apply]
        assert isinstance(loader.poll().error, VersionRefused)
        assert loader.version == before
        assert training.value(loader) == 0
        for call in (loader.poll, loader.close, loader.pin, lambda: loader.rollback(0), loader.start):
            training.save()
            calls = [call]
            error = loader.poll().error
            assert error is not None
            assert isinstance(error.__cause__, BadInput)
            assert loader.version == before
        calls = []
        training.save()
        assert loader.poll().error is None
        loader.apply()
        check_is_snapshot(loader, training.store.snapshot())


def test_a_candidate_is_read_before_anybody_is_served_it(training: Training) -> None:
    seen: list[tuple[Any, ...]] = []

    def warm_up(candidate: Candidate) -> None:
        rows = candidate.lookup_many({"user": [1]}, dense=["w"])
        seen.append((candidate.version, candidate.step, rows.rows["user"][0, 0], len(candidate.row_ids("item"))))
        assert set(candidate.tables) == {"user", "item"}
        assert set(candidate.dense) == {"w"}

    first = training.save()
    with Loader(training.open(), options=LoaderOptions(warm_up=warm_up)) as loader:
        training.save()
        loader.poll()
        assert seen == [(first, 1, 1, ROWS)]
    with Loader(training.open(), options=LoaderOptions(warm_up=warm_up, warm_up_each=True)) as loader:
        third = training.save()
        loader.poll()
        assert seen[-1] == (third, 3, 3, ROWS)


def test_a_cursor_goes_along_and_keeps_what_is_needed(training: Training) -> None:
    training.save()
    with Loader(training.open(), options=LoaderOptions(cursor="server")) as loader:
        assert training.store.cursors()["server"].version == loader.version
        version = training.save()
        loader.poll()
        assert training.store.cursors()["server"].version == version == loader.metrics().cursor_version
    with pytest.raises(BadInput):
        Loader(training.open(), options=LoaderOptions(cursor="no\nname"))


class NotToBeWritten(Flaky):
    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        raise PermissionError(path)


def test_a_store_that_may_not_be_written_is_served_all_the_same(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    files = NotToBeWritten(training.files)
    with Loader(training.open(files), options=LoaderOptions(cursor="server")) as loader:
        for _ in range(3):
            training.save()
            caught_up(loader, training.store)
        assert loader.metrics().cursor_version is None
        before = len(files.calls)
        loader.poll()
        assert len(files.calls) == before + 1  # it is not tried again as long as nothing is new
    assert training.store.cursors() == {}
    assert sum("cursor" in record.message for record in caplog.records) == 1


def test_leases_end_with_the_load(training: Training, fs: Flaky) -> None:
    with Loader(training.open(fs)) as loader:
        training.full()
        loader.poll()
    assert sum("leases/readers" in path for path in fs.paths("write")) == 2
    assert not training.files.find("/root/leases/readers")
