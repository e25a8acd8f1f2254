"""A push only wakes a loader's poll earlier; the poll decides what is served."""

from __future__ import annotations

from cnr_store.serving import Candidate, Loader, LoaderOptions
from tests.serving.loaders import Training, until

RARELY = LoaderOptions(poll_interval_s=1e6)


def polled_once(loader: Loader) -> None:
    """Start it, and let its first poll pass, after which it rests for days."""
    loader.start()
    until(loader, lambda: loader.metrics().polls == 1)


def test_a_woken_loader_serves_what_its_next_poll_would(training: Training) -> None:
    with Loader(training.store, options=RARELY) as loader:
        training.store.announce_to(lambda _: loader.wake())
        polled_once(loader)

        version = training.save()

        until(loader, lambda: loader.version == version)
        assert training.value(loader) == training.step


def test_a_version_that_is_announced_during_a_poll_gets_one_after_it(training: Training) -> None:
    versions: list[int] = []

    def validate(candidate: Candidate) -> bool:
        if not versions and candidate.version > first:
            versions.append(training.save())
            loader.wake()
        return True

    first = training.store.latest_version()
    with Loader(training.store, options=LoaderOptions(poll_interval_s=1e6, validate=validate)) as loader:
        polled_once(loader)
        training.save()
        loader.wake()

        until(loader, lambda: bool(versions) and loader.version == versions[0])


def test_a_loader_that_is_woken_for_nothing_stays_where_it_is(training: Training) -> None:
    with Loader(training.store, options=RARELY) as loader:
        polled_once(loader)
        before = loader.version

        loader.wake()

        until(loader, lambda: loader.metrics().polls == 2)
        assert (loader.version, loader.metrics().errors) == (before, 0)


def test_a_loader_without_a_thread_and_a_closed_one_take_a_call(training: Training) -> None:
    with Loader(training.store, options=RARELY) as loader:
        loader.wake()
        assert loader.metrics().polls == 0
        loader.start()
        until(loader, lambda: loader.metrics().polls == 1)
    loader.wake()  # a message that was under way
