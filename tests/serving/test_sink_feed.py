"""A feed gives its sink whole versions only, whatever is published or fails during a push."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.errors import BadInput, Fenced, NonFiniteValues, StorageFailure
from cnr_store.serving.sinks import PushResult, SinkFeed, SinkState, SinkTable
from tests.serving.feeding import DIM, Died, Sink, Source, connected, filled, filled_source, state


def test_the_first_push_is_full_and_later_ones_carry_what_changed() -> None:
    source, feed, sink = filled()

    first = feed.push()
    source.publish({"dense": {3: 30.0, 4: None}, "hashed": {5: None, 9: 1.0}})
    second = feed.push()

    assert first == PushResult(state(0), 32, 0, is_full=True)
    assert second == PushResult(state(1), 2, 2, is_full=False)
    assert feed.push() is None
    assert sink.rows == source.history[1]


def test_nothing_is_pushed_before_the_source_shows_something() -> None:
    source = Source()
    feed, sink = connected(source)
    assert feed.push() is None
    source.publish({"dense": {1: 1.0}})
    assert feed.push() == PushResult(state(0), 1, 0, is_full=True)
    assert sink.rows["dense"] == {1: 1.0}


def test_a_sink_that_lagged_gets_the_newest_version_and_each_row_once() -> None:
    source, feed, sink = filled()
    feed.push()
    for version in range(1, 60):
        source.publish({"dense": {1: float(version), version % 30: float(version)}})

    result = feed.push()

    assert result is not None
    assert (result.state.version, result.is_full) == (59, False)
    assert result.rows == 30
    assert sink.rows == source.history[59]


def test_a_version_without_changed_rows_moves_the_sink() -> None:
    source, feed, sink = filled()
    feed.push()
    source.publish({})
    assert feed.push() == PushResult(state(1), 0, 0, is_full=False)
    assert sink.state == state(1)


def test_a_rollback_is_pushed_like_any_version() -> None:
    source, feed, sink = filled()
    source.publish({"dense": {3: 30.0}, "hashed": {9: 1.0}})
    feed.push()
    source.show(0)
    assert feed.push() == PushResult(state(0), 1, 1, is_full=False)
    assert sink.rows == source.history[0]


@pytest.mark.parametrize("tells_changes", [True, False])
def test_a_restarted_feed_goes_on_from_what_the_sink_has(tells_changes: bool) -> None:
    source, feed, sink = filled()
    feed.push()
    source.publish({"dense": {3: 30.0}})
    source.feeds.clear()
    source.tells_changes = tells_changes

    again = SinkFeed(source, sink)
    result = again.push()

    assert result == PushResult(state(1), 1 if tells_changes else 32, 0, is_full=not tells_changes)
    assert SinkFeed(source, sink).push() is None


@pytest.mark.parametrize("version_of_sink", [0, 1])
def test_what_was_told_before_the_sink_was_opened_makes_no_full_push(version_of_sink: int) -> None:
    source = filled_source()
    source.publish({"dense": {3: 30.0}})
    feed, sink = connected(source)
    sink.state, sink.rows = state(version_of_sink), source.history[version_of_sink]

    source.show(1, says_which=False)
    feed.push()
    source.publish({"dense": {4: 1.0}})

    assert feed.push() == PushResult(state(2), 1, 0, is_full=False)
    assert feed.metrics().full_pushes == 0


@pytest.mark.parametrize(
    "other", [state(0, "another"), SinkState("store", "branch", 0, 0), SinkState("store", "", 0, 0, "rows 0 to 9")]
)
def test_a_sink_of_another_store_branch_or_choice_of_rows_gets_everything(other: SinkState) -> None:
    _, feed, sink = filled()
    sink.state, sink.rows = other, {"dense": {29: 5.0, 77: 1.0}}

    assert feed.push() == PushResult(state(0), 32, 0, is_full=True)


def test_unknown_changes_and_other_tables_are_full_pushes() -> None:
    source, feed, _ = filled()
    feed.push()
    source.publish({"dense": {1: 7.0}})
    source.show(1, says_which=False)
    unknown = feed.push()
    source.tables["more"] = SinkTable(DIM, None)
    source.publish({"more": {1: 1.0}})
    more = feed.push()

    assert unknown is not None
    assert more is not None
    assert unknown.is_full
    assert more == PushResult(state(2), 33, 0, is_full=True)


def test_versions_published_during_a_full_push_are_in_it() -> None:
    source, feed, _ = filled(chunk_rows=4)
    for k in range(1, 6):
        source.before_reads.append(
            lambda k=k: source.publish({"dense": {0: 100.0 + k, 29 - k: None}, "hashed": {k: 1.0}})
        )  # type: ignore[misc]

    result = feed.push()

    assert result is not None
    assert (result.state, result.is_full) == (state(5), True)


def test_tables_that_change_during_a_push_begin_it_anew() -> None:
    source, feed, sink = filled(chunk_rows=4)

    def more() -> None:
        source.tables["more"] = SinkTable(DIM, None)
        source.publish({"more": {1: 1.0}})

    source.before_reads += [lambda: None, more]

    result = feed.push()

    assert result == PushResult(state(1), 33, 0, is_full=True)
    assert sink.log.count("begin full") == 2


def test_a_large_change_goes_in_chunks_and_what_is_left_at_once() -> None:
    source, feed, _ = filled(chunk_rows=4, max_rows_at_once=10)
    feed.push()
    source.publish({"dense": dict.fromkeys(range(25), 2.0)})
    for k in range(5):
        source.before_reads.append(partial(source.publish, {"dense": {k: 3.0 + k}}))

    result = feed.push()

    assert result is not None
    assert (result.state.version, result.is_full) == (6, False)
    assert result.rows <= 25 + 5


def test_a_failed_push_loses_no_row_and_stays_a_delta() -> None:
    source, feed, sink = filled()
    feed.push()
    source.tells_changes = False
    for k, when in enumerate(["before", "after", "before", "after"]):
        source.publish({"dense": {k: -1.0}})
        sink.fails = {sink.calls + 2: (when, StorageFailure("away"))}
        with pytest.raises(StorageFailure, match="away"):
            feed.push()
    result = feed.push()

    assert result is not None
    assert not result.is_full
    assert result.rows == 4
    assert feed.metrics().failures == 4
    assert feed.metrics().error is None


def filled_with_a_lost_reply(full: bool) -> tuple[Source, SinkFeed, Sink]:
    """A feed whose last push (full or delta) was committed, but whose reply was lost."""
    source, feed, sink = filled()
    if not full:
        feed.push()
        source.publish({"dense": {1: 5.0}})
    sink.fails = {sink.calls + (5 if full else 3): ("after", StorageFailure("reply lost"))}
    with pytest.raises(StorageFailure):
        feed.push()
    return source, feed, sink


@pytest.mark.parametrize("full", [True, False])
def test_a_commit_whose_reply_was_lost_counts(full: bool) -> None:
    source, feed, sink = filled_with_a_lost_reply(full)

    lost = list(sink.log)
    assert feed.push() is None

    assert lost[-1] == "commit"
    assert sink.log[len(lost) :] == ["open"]
    source.publish({"dense": {2: 6.0}})
    assert feed.push() == PushResult(state(source.shown), 1, 0, is_full=False)


@pytest.mark.parametrize("full", [True, False])
def test_after_a_lost_reply_only_what_came_later_is_sent(full: bool) -> None:
    source, feed, _ = filled_with_a_lost_reply(full)
    source.tells_changes = False
    source.publish({"dense": {2: 6.0}})

    assert feed.push() == PushResult(state(source.shown), 1, 0, is_full=False)


def test_a_full_push_that_fails_is_a_full_push_again() -> None:
    source, feed, sink = filled()
    feed.push()
    source.publish({"dense": {1: 5.0, 2: 6.0}})
    source.show(0)
    feed.push()
    source.show(1, says_which=False)
    sink.fails = {sink.calls + 2: ("before", StorageFailure("away"))}
    with pytest.raises(StorageFailure):
        feed.push()

    assert feed.push() == PushResult(state(1), 32, 0, is_full=True)


def test_a_fenced_feed_pushes_no_more() -> None:
    _, feed, sink = filled()
    sink.fails = {2: ("before", Fenced("taken over"))}
    for _ in range(2):
        with pytest.raises(Fenced):
            feed.push()
    assert sink.log == ["open", "begin full"]
    assert feed.metrics().is_fenced
    feed.start()
    feed.stop()


@pytest.mark.parametrize("loses", ["all", "newest"])
def test_an_idle_feed_finds_out_that_its_sink_lost_rows(loses: str) -> None:
    source, feed, sink = filled(check_interval_s=0.01)
    feed.push()
    source.publish({"dense": {1: 5.0}})
    feed.push()
    begin, commit = sink.begin, sink.commit
    is_back, lost = threading.Event(), state(1)

    def begin_on_what_is_known(tables: Mapping[str, SinkTable], *, full: bool) -> None:
        if not full and not sink.log[-1].startswith("open") and sink.state != lost:
            raise StorageFailure("restored from an older copy")
        begin(tables, full=full)

    def commit_and_tell(to: SinkState) -> None:
        commit(to)
        is_back.set()

    sink.begin, sink.commit = begin_on_what_is_known, commit_and_tell  # type: ignore[method-assign]
    sink.rows, sink.state = ({}, None) if loses == "all" else (source.history[0], state(0))
    feed.start()
    assert is_back.wait(60)
    feed.stop()

    assert (sink.state, sink.rows) == (state(1), source.history[1])
    assert feed.metrics().full_pushes == (2 if loses == "all" else 1)


def test_an_idle_feed_that_was_taken_over_ends() -> None:
    feed, sink = connected(filled_source(), check_interval_s=0.01)
    feed.push()
    sink.fails = {sink.calls + 3: ("before", Fenced("taken over"))}
    feed.start()
    thread = feed._thread
    assert thread is not None
    thread._thread.join(60)
    assert not thread.is_running
    assert feed.metrics().is_fenced
    assert sink.log[2 + 2 :] == ["commit", "begin", "begin", "begin"]


def test_a_sink_that_is_away_costs_bounded_memory_and_gets_everything() -> None:
    source, feed, sink = filled(max_waiting_keys=100)
    feed.push()
    most = 0
    for version in range(1, 200):  # keys come and go, and none of them comes twice
        keys = range(10 * version, 10 * version + 10)
        source.publish({"hashed": {**dict.fromkeys(keys, 1.0), **dict.fromkeys([key - 10 for key in keys])}})
        most = max(most, feed._due.count("hashed"))

    assert most <= 100
    result = feed.push()
    assert result is not None
    assert result.is_full
    assert sink.rows == source.history[199]


def test_an_error_of_a_foreign_sink_is_a_storage_failure_without_its_text() -> None:
    _, feed, sink = filled()
    sink.fails = {2: ("before", Died("password=hunter2"))}
    with pytest.raises(StorageFailure, match="Died") as caught:
        feed.push()
    assert "hunter2" not in str(caught.value)
    assert feed.push() is not None


def test_a_source_that_never_tells_is_an_error_not_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.serving.sinks.sink_feed._NOTICE_TIMEOUT_S", 0.01)
    source, feed, sink = filled()
    feed.push()
    source.publish({"dense": {1: 5.0}})
    source.feeds.clear()
    source.publish({"dense": {2: 5.0}})

    with pytest.raises(StorageFailure, match="notice"):
        feed.push()
    assert sink.state == state(0)


def test_metrics_tell_what_is_behind_and_why() -> None:
    source, feed, sink = filled()
    empty = feed.metrics()
    feed.push()
    done = feed.metrics()
    source.publish({"dense": {1: 5.0}})
    sink.fails = {sink.calls + 2: ("before", NonFiniteValues("row 1"))}
    with pytest.raises(NonFiniteValues):
        feed.push()
    failed = feed.metrics()

    assert (empty.version, empty.pushes, empty.staleness_s) == (None, 0, 0.0)
    assert (done.version, done.published_version, done.full_pushes, done.rows, done.staleness_s) == (0, 0, 1, 32, 0.0)
    assert (failed.version, failed.published_version) == (0, 1)
    assert isinstance(failed.error, NonFiniteValues)
    assert failed.staleness_s > 0


def test_sizes_below_one_row_are_refused() -> None:
    with pytest.raises(BadInput):
        connected(Source(), chunk_rows=0)
    with pytest.raises(BadInput):
        connected(Source(), check_interval_s=0)


changes = st.dictionaries(
    st.sampled_from(["dense", "hashed"]),
    st.dictionaries(st.integers(0, 29), st.none() | st.integers(1, 99).map(float), max_size=6),
    max_size=2,
)


steps = st.one_of(
    st.tuples(st.just("publish"), changes),
    st.tuples(st.just("show"), st.integers(0, 30)),
    st.tuples(st.just("unknown"), st.integers(0, 30)),
    st.tuples(st.just("later"), changes),
    st.tuples(st.just("fail"), st.tuples(st.integers(1, 8), st.sampled_from(["before", "after"]))),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("empty"), st.none()),
    st.tuples(st.just("push"), st.none()),
)


@given(st.lists(steps, max_size=30), st.sampled_from([(4, 1), (4, 8), (1000, 1000)]))
def test_after_any_life_each_commit_was_one_version_whole(
    life: list[tuple[str, object]], sizes: tuple[int, int]
) -> None:
    # `Sink.commit` compares all rows with the version that it is told.
    source, feed, sink = filled(chunk_rows=sizes[0], max_rows_at_once=sizes[1])
    for step, what in life:
        if step == "publish":
            source.publish(what)  # type: ignore[arg-type]  # the strategies above say which is which
        elif step in ("show", "unknown"):
            version = int(what) % (source.newest + 1)  # type: ignore[call-overload]
            if version != source.shown:
                source.show(version, says_which=step == "show")
        elif step == "later":
            source.before_reads.append(partial(source.publish, what))  # type: ignore[arg-type]
        elif step == "fail":
            after, when = what  # type: ignore[misc]
            sink.fails[sink.calls + after] = (when, StorageFailure("away"))
        elif step == "restart":
            source.tells_changes = bool(what)
            source.feeds.clear()
            feed = SinkFeed(source, sink, chunk_rows=sizes[0], max_rows_at_once=sizes[1])
            source.feeds.append(feed)
        elif step == "empty":
            sink.rows, sink.state = {}, None
            feed._is_open = False  # a sink that lost its rows fails, and is opened again
        else:
            try_push(feed)
    sink.fails.clear()
    while source.before_reads:
        source.publish({"dense": {0: 1.0 + source.newest}})
        feed.push()
    feed.push()

    assert sink.state == state(source.shown)
    assert sink.rows == source.history[source.shown]


def try_push(feed: SinkFeed) -> None:
    try:
        feed.push()
    except StorageFailure:
        return


def test_threads_keep_sinks_whole_while_versions_come_as_fast_as_they_can() -> None:
    # One sink fails at every fifth call, one belongs to somebody else: neither holds up the third.
    source = filled_source()
    feeds = [connected(source, chunk_rows=8, max_rows_at_once=16) for _ in range(3)]
    (_, failing), (_, foreign), (good_feed, good) = feeds
    failing.fails = {call: ("after" if call % 10 else "before", StorageFailure("away")) for call in range(5, 500, 5)}
    foreign.fails = {call: ("before", Died()) for call in range(1, 10_000)}
    caught_up = threading.Event()
    commit = good.commit

    def noting(to: SinkState) -> None:
        commit(to)
        if to.version >= 300:
            caught_up.set()

    good.commit = noting  # type: ignore[method-assign]
    for feed, _ in feeds:
        feed.start()
        feed.start()
    rng = np.random.default_rng(0)
    for version in range(1, 301):
        changed = {int(i): float(version) for i in rng.integers(0, 30, 4)}
        source.publish({"dense": changed, "hashed": {int(rng.integers(50)): 1.0, int(rng.integers(50)): None}})

    assert caught_up.wait(60)
    for feed, _ in feeds:
        feed.stop()
    assert good.rows == source.history[300]
    assert good_feed.metrics().failures == 0
    assert feeds[1][0].metrics().failures > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed ")]


def test_a_failure_of_a_sink_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """A regression: only `metrics` had it, so the log of a server whose cache had stopped said nothing."""
    source, feed, sink = filled()
    caplog.set_level(logging.INFO, "cnr_store.serving")
    for version in range(1, 3):
        sink.fails = {sink.calls + call: ("before", StorageFailure("away")) for call in range(1, 4)}
        for _ in range(3):
            with pytest.raises(StorageFailure):
                feed.push()
        sink.fails.clear()
        feed.push()
        source.publish({"dense": {1: float(version)}})

    assert [record.getMessage() for record in caplog.records] == 2 * [
        "model: StorageFailure: away",
        "model: all is well again",
    ]
