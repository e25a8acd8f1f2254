"""A machine whose clock is wrong is told so; a log that such a machine has stamped is read, kept and put right."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cnr_store import RetentionPolicy, Store, TableOptions, collect_garbage, maintain, repair_store, verify_store
from cnr_store.errors import WrongClock
from cnr_store.format.layout import commit_key
from cnr_store.log import clock
from cnr_store.log.clock import MAX_SKEW_MS, read_store_clock, wall_ms
from cnr_store.relay import Relay
from cnr_store.write.writer import Writer

YEARS_MS = 10 * 365 * 86_400_000


class Machine:
    """Whose clock is some time ahead of that which stamps objects."""

    ahead_ms = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.ahead_ms * 1_000_000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(clock, "time", made)
    yield made
    made.ahead_ms = 0


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As records were stamped before anybody compared clocks."""
    monkeypatch.setattr("cnr_store.log.sent_record.check_clock", lambda *_, **__: None)


@pytest.fixture
def store(tmp_path: Path, machine: Machine) -> Store:
    """In memory, where objects have times of their own."""
    made = Store.create(f"memory://{tmp_path}")
    with made.writer() as writer:
        save(writer, 1)
    return made


def save(writer: Writer, step: int) -> int:
    with writer.begin(step, kind="baseline") as txn:
        txn.write_table("t", np.full((4, 2), step, np.float32), options=TableOptions(scale=1.0))
    return writer.head.record.v


def contents(store: Store) -> dict[str, bytes | None]:
    return {stat.key: store.storage.read(stat.key) for stat in store.storage.list_objects("")}


WRITES: dict[str, Callable[[Store], object]] = {
    "writer": Store.writer,
    "tag": lambda store: store.tag("now"),
    "fork": lambda store: store.fork("trial"),
    "rollback": lambda store: store.rollback(0),
    "create": lambda store: Store.create(f"{store.url}/other"),
}


@pytest.mark.parametrize("use", WRITES)
def test_a_clock_far_ahead_of_the_stores_stamps_nothing(store: Store, machine: Machine, use: str) -> None:
    """Its record made every later time so: nothing expired by its age any more."""
    machine.ahead_ms = YEARS_MS
    before = contents(store)

    with pytest.raises(WrongClock) as refused:
        WRITES[use](store)

    assert refused.value.found - refused.value.expected == pytest.approx(YEARS_MS, abs=60_000)
    for part in (clock.text_of(refused.value.expected), clock.text_of(refused.value.found)[:16], "3600 s", "NTP"):
        assert part in refused.value.message
    assert contents(store) == before


def test_a_clock_that_jumps_in_a_training_loses_the_save_alone(store: Store, machine: Machine) -> None:
    with store.writer() as writer:
        writer.restore()
        machine.ahead_ms = YEARS_MS
        with pytest.raises(WrongClock):
            save(writer, 2)
        machine.ahead_ms = 0

        save(writer, 2)

    assert store.snapshot().step == 2


def test_a_clock_that_is_a_little_ahead_or_far_behind_goes_on(store: Store, machine: Machine) -> None:
    machine.ahead_ms = MAX_SKEW_MS // 2
    ahead = store.tag("ahead")
    machine.ahead_ms = -YEARS_MS
    behind = store.tag("behind")

    assert store.record(behind).ts_ms == store.record(ahead).ts_ms + 1


def test_a_store_that_rested_for_years_is_written(tmp_path: Path, machine: Machine) -> None:
    machine.ahead_ms = -YEARS_MS
    rested = Store.create(f"memory://{tmp_path}/rested")
    machine.ahead_ms = 0

    with rested.writer() as writer:
        save(writer, 1)

    assert rested.head().record.ts_ms - rested.record(0).ts_ms == pytest.approx(YEARS_MS, abs=60_000)


def test_the_clock_of_the_store_is_looked_at_after_a_rest_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int | None] = []
    monkeypatch.setattr(clock, "read_store_clock", lambda storage: looks.append(read_store_clock(storage)))

    with store.writer() as writer:
        save(writer, 2)

    assert looks == []


@pytest.mark.parametrize("ahead_ms", [YEARS_MS, -YEARS_MS])
def test_nothing_is_collected_by_a_clock_that_is_not_the_stores(store: Store, machine: Machine, ahead_ms: int) -> None:
    """Leases had ended and graces were over; or what was given up was deleted at once by the next machine."""
    store.lease()
    machine.ahead_ms = ahead_ms
    before = contents(store)

    with pytest.raises(WrongClock):
        collect_garbage(store, dry_run=False)
    report = maintain(store)

    assert (report.outcome, type(report.error)) == ("failed", WrongClock)
    found = contents(store)
    found.pop("hint/maintenance.json")
    assert found == before


def test_a_relay_deletes_nothing_by_a_clock_that_is_not_its_targets(
    store: Store, machine: Machine, tmp_path: Path
) -> None:
    relay = Relay(store, f"memory://{tmp_path}-near", policy=RetentionPolicy(keep_last=1), grace_s=3600)
    relay.advance()
    with store.writer() as writer:
        save(writer, 2)
    relay.advance()
    machine.ahead_ms = YEARS_MS

    report = relay.advance()

    assert "this machine's clock" in (report.problem or "")
    assert report.trimmed_segments == 0
    machine.ahead_ms = 2 * MAX_SKEW_MS // 3
    assert relay.advance().problem is None


@pytest.fixture
def stamped(store: Store, machine: Machine, unchecked: None) -> Store:
    """Steps 2 and 3 were stamped ten years ahead, and 4 a millisecond behind them; versions 4, 5 and 7."""
    machine.ahead_ms = YEARS_MS
    with store.writer() as writer:
        for step in (2, 3):
            save(writer, step)
    machine.ahead_ms = 0
    with store.writer() as writer:
        save(writer, 4)
    return store


def at(store: Store, ts_ms: int) -> int:
    return store.snapshot(time=dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=ts_ms)).version


def test_a_log_that_was_stamped_ahead_is_read_and_written_and_named(stamped: Store) -> None:
    assert stamped.snapshot().step == 4
    assert stamped.head().record.ts_ms > wall_ms() + YEARS_MS - 60_000
    assert at(stamped, stamped.record(2).ts_ms) == 2
    (problem,) = verify_store(stamped).problems
    assert (problem.kind, problem.path, problem.versions) == ("wrong_clock", commit_key(7), ())
    assert verify_store(stamped).restorable


def test_a_repair_sets_the_time_right_and_needs_the_right_clock(stamped: Store, machine: Machine) -> None:
    planned = repair_store(stamped, dry_run=True)
    assert [action.kind for action in planned.actions] == ["time"]
    machine.ahead_ms = -YEARS_MS
    with pytest.raises(WrongClock):
        repair_store(stamped, dry_run=False)
    machine.ahead_ms = 0

    done = repair_store(stamped, dry_run=False)

    assert ([action.version for action in done.actions], done.remaining) == ([8], ())
    assert abs(stamped.head().record.ts_ms - wall_ms()) < 60_000
    assert (stamped.snapshot().step, stamped.head().record.target) == (4, 7)
    assert verify_store(stamped).is_sound
    assert repair_store(stamped, dry_run=True).actions == ()


def test_a_repair_of_other_damage_sets_the_time_right_too(stamped: Store) -> None:
    stamped.storage.put(commit_key(8), b'{"v":')

    report = repair_store(stamped, dry_run=False)

    assert [action.kind for action in report.actions] == ["supersede"]
    assert abs(stamped.head().record.ts_ms - wall_ms()) < 60_000
    assert verify_store(stamped).is_sound


def test_by_time_no_version_counts_as_younger_than_a_later_one(stamped: Store) -> None:
    repair_store(stamped, dry_run=False)
    with stamped.writer() as writer:
        save(writer, 5)
    times = [stamped.record(version).ts_ms for version in range(stamped.latest_version() + 1)]

    assert [at(stamped, times[version]) for version in (1, 2, 8, 9, 10)] == [1, 2, 8, 9, 10]
    assert at(stamped, times[8] - 2) == 2, "what was stamped ahead came with the record that set the time right"


def test_versions_that_were_stamped_ahead_expire(stamped: Store) -> None:
    repair_store(stamped, dry_run=False)
    with stamped.writer() as writer:
        save(writer, 5)
    later_ms = wall_ms() + 86_400_000

    report = collect_garbage(
        stamped, policy=RetentionPolicy(keep_last=1, keep_within_s=3600), dry_run=False, clock_ms=lambda: later_ms
    )

    assert {version.version for version in report.versions if version.stays} == {10}
