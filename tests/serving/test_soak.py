"""The serving soak: processes that follow one store while they are killed, and the problems that it would report."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import BadInput, CnrStoreError, Store
from cnr_store.errors import StoreExists
from cnr_store_tools.demo import processes as demo_processes
from cnr_store_tools.demo.processes import Event, WorkerProcess
from cnr_store_tools.output import emit
from tests.serving.soak import report as figures
from tests.serving.soak.__main__ import report_parts
from tests.serving.soak.report import (
    INFERENCE,
    MAINTENANCE,
    NAMES,
    ONLINE,
    TRAINER,
    LoggedVersion,
    ServeOptions,
    ServeReport,
)
from tests.serving.soak.run import plan_kills, run_soak
from tests.serving.soak.witness import GARBLED, MAX_STEP, read_steps, witness_row
from tests.support.forks import forked_interpreters

DIM = 16


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    rooms = (f"tests.serving.soak.{name}" for name in ("saving", "maintaining", "inferring", "learning"))
    with forked_interpreters(demo_processes, "tests.support.warm_training", *rooms):
        yield


# ---- whole runs


def checked(report: ServeReport) -> ServeReport:
    """Check what holds for every demonstration in which all is well."""
    assert report.problems == ()
    assert sum(one.kills for one in report.processes) == report.options.kills
    assert all(one.starts == one.kills + 1 and not one.crashes for one in report.processes)
    assert report.figures["lookups"] > 0
    assert [report.figures[name] for name in ("torn", "different_rows", "lost")] == [0, 0, 0]
    assert {one.name for one in report.copies} == {*INFERENCE, ONLINE}
    with Store.open(report.options.store) as store:
        assert store.latest_version() == report.last_version
        assert store.head().record.step == report.figures["steps"]
    return report


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_short_demonstration_with_kills_tears_and_loses_nothing(tmp_path: Path) -> None:
    before = children()

    report = checked(run_soak(ServeOptions(store=str(tmp_path / "store"), seconds=4, kills=3, rows=5_000, seed=3)))

    assert report.figures["versions"] >= 2
    assert report.figures["learned_rows"] > 0
    assert children() == before


@pytest.mark.soak
@pytest.mark.usefixtures("forks")
def test_a_minute_in_which_every_process_is_killed_more_than_once(tmp_path: Path) -> None:
    report = checked(run_soak(ServeOptions(store=str(tmp_path / "store"), seconds=60, kills=12)))

    assert report.figures["compactions"] > 3
    assert min(report.figures[name] for name in ("deleted_bytes", "resumes", "compared_rows")) > 0


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


# ---- options


def test_invalid_options_are_refused_before_a_store_is_made(tmp_path: Path) -> None:
    options = ServeOptions(store=str(tmp_path / "store"))

    for bad in (replace(options, seconds=0), replace(options, kills=-1), replace(options, rows=10)):
        with pytest.raises(BadInput):
            run_soak(bad)

    assert not (tmp_path / "store").exists()


def test_a_store_that_no_demonstration_left_is_not_replaced(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "store")).close()

    with pytest.raises(StoreExists, match="--force"):
        run_soak(ServeOptions(store=str(tmp_path / "store")))


# ---- the plan of kills


@given(st.integers(0, 40), st.integers(0, 2**31), st.floats(1, 1000))
def test_kills_are_spread_evenly_over_processes_and_lie_inside_the_run(kills: int, seed: int, seconds: float) -> None:
    plan = plan_kills(kills=kills, seconds=seconds, seed=seed)

    counts = Counter(name for _, name in plan)
    times = [at_s for at_s, _ in plan]
    assert len(plan) == kills
    assert times == sorted(times)
    assert all(0 < at_s < seconds for at_s in times)
    assert max(counts.values(), default=0) - min((counts[name] for name in NAMES), default=0) <= 1
    assert plan == plan_kills(kills=kills, seconds=seconds, seed=seed)


# ---- witness rows


@given(st.integers(0, MAX_STEP), st.integers(5, 40))
def test_a_witness_gives_its_step_after_any_rounding(step: int, dim: int) -> None:
    row = witness_row(step, dim)
    noise = np.random.default_rng(step).uniform(-0.004, 0.004, dim).astype(np.float32)

    assert read_steps((row + noise)[None]).tolist() == [step]


@given(st.integers(0, MAX_STEP), st.integers(0, MAX_STEP), st.integers(1, DIM - 1))
def test_a_row_of_two_steps_never_passes_for_either(one: int, other: int, cut: int) -> None:
    mixed = np.concatenate([witness_row(one, DIM)[:cut], witness_row(other, DIM)[cut:]])

    found = read_steps(mixed[None])[0]

    same = [np.array_equal(mixed, witness_row(step, DIM)) for step in (one, other)]
    assert (found in (one, other)) == any(same)


def test_a_value_that_is_no_digit_is_garbled() -> None:
    rows = np.stack([witness_row(9, DIM)] * 4)
    rows[0, 3] += 0.5 / 32
    rows[1, 3] = math.nan
    rows[2, 3] = 16 / 32

    with np.errstate(invalid="ignore"):
        assert read_steps(rows).tolist() == [GARBLED, GARBLED, GARBLED, 9]


# ---- processes


MAINTAINING = "tests.serving.soak.maintaining"


def maintenance(name: str, store: Path) -> WorkerProcess:
    return WorkerProcess(name, {"module": MAINTAINING, "store": str(store)})


def test_an_event_just_before_the_end_of_a_process_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = WorkerProcess("brief", {})
    process.starts = 1

    def has_ended() -> bool:
        """Between two looks the process reports its event and ends."""
        process.events.append(Event(0, "finished", {"step": 3}))
        return True

    monkeypatch.setattr(process, "has_ended", has_ended)

    assert process.wait_for("finished", 60) == {"step": 3}


@pytest.mark.usefixtures("forks")
def test_a_kill_is_not_counted_as_a_crash(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "store")).close()
    process = maintenance("killed", tmp_path / "store")

    process.start()
    process.wait_for("ready", 60)
    assert process.kill()
    assert process.state == "down"
    process.start()
    process.wait_for("ready", 60)
    process.send(do="finish")
    process.wait_for("finished", 60)
    process.stop(grace_s=60)

    assert (process.starts, process.kills, process.crashes) == (2, 1, [])
    assert {event.life for event in process.events} == {0, 1}
    assert not process.kill()


@pytest.mark.usefixtures("forks")
def test_a_failed_process_reports_its_error(tmp_path: Path) -> None:
    process = maintenance("lost", tmp_path / "nothing")

    process.start()
    with pytest.raises(CnrStoreError, match="not_a_store"):
        process.wait_for("ready", 60)

    assert len(process.crashes) == 1
    process.stop()


def test_a_process_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "store")).close()
    program = (
        "import sys, time\n"
        "from cnr_store_tools.demo.processes import WorkerProcess\n"
        f"process = WorkerProcess('orphan', {{'module': {MAINTAINING!r}, 'store': {str(tmp_path / 'store')!r}}})\n"
        "process.start()\n"
        "process.wait_for('ready', 60)\n"
        "print(process.popen.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert starter.stdout is not None
    orphan = psutil.Process(int(starter.stdout.readline()))

    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()

    gone, _ = psutil.wait_procs([orphan], timeout=60)
    assert gone == [orphan]


# ---- figures and problems


LOG = (
    LoggedVersion(2, "baseline", 0),
    LoggedVersion(3, "delta", 10),
    LoggedVersion(4, "compact", 10),
    LoggedVersion(5, "delta", 20),
    LoggedVersion(6, "delta", 30),
)
SAVED = [one for one in LOG if one.is_saved]


def saved(version: int, step: int, life: int = 0) -> Event:
    return Event(life, "saved", {"version": version, "step": step})


@pytest.mark.parametrize(
    ("events_given", "lost"),
    [
        ([saved(3, 10), saved(5, 20)], 0),
        ([saved(3, 10), Event(1, "restored", {"version": 3, "step": 10}), saved(5, 20, 1)], 0),
        ([saved(3, 10), Event(1, "restored", {"version": 2, "step": 0})], 1),
        ([saved(3, 10), saved(7, 40)], 1),
        ([saved(3, 11)], 1),
    ],
)
def test_an_acknowledged_save_that_is_not_in_the_log_is_lost(events_given: list[Event], lost: int) -> None:
    assert figures.lost_saves(SAVED, events_given) == lost


def good_events() -> dict[str, list[Event]]:
    """The events of processes without a problem."""
    served = [
        Event(0, "ready", {"version": 2}), Event(0, "tick", {"lookups": 10, "version": 3}),
        Event(0, "applied", {"version": 3}), Event(0, "compared", {"rows": 9, "different": 0}),
        Event(0, "finished", {"version": 6, "rows": 40, "different": 0}),
    ]  # fmt: skip
    return {
        TRAINER: [saved(2, 0), saved(3, 10), saved(5, 20), saved(6, 30)],
        MAINTENANCE: [Event(0, "maintained", {"deleted_bytes": 7, "error": None})],
        INFERENCE[0]: list(served), INFERENCE[1]: list(served),
        ONLINE: [
            Event(0, "opened", {"how": "snapshot", "version": 2}),
            Event(0, "moved", {"version": 3, "rows": 8}),
            Event(0, "finished", {"version": 6, "rows": 40, "different": 0}),
        ],
    }  # fmt: skip


def report_of(events: dict[str, list[Event]], crashed: str | None = None) -> ServeReport:
    """The report of given events, as the soak would make it."""
    processes = {name: WorkerProcess(name, {}) for name in NAMES}
    for name, process in processes.items():
        process.events = events[name]
        process.starts, process.kills = 2, 1
    if crashed is not None:
        processes[crashed].crashes.append("code 1")
    return figures.make_report(ServeOptions(kills=5), LOG, processes, last_version=6)


def test_events_without_a_problem_give_none() -> None:
    report = report_of(good_events())

    assert report.problems == ()
    assert [report.figures[name] for name in ("versions", "compactions", "steps", "lookups")] == [4, 1, 30, 20]


def test_counts_of_a_life_that_was_killed_are_kept() -> None:
    process = WorkerProcess("inference 1", {})
    process.events = [Event(life, "tick", {"lookups": count}) for life, count in ((0, 3), (0, 8), (1, 2), (1, 5))]

    assert figures.counted(process, "lookups") == 13


def change(events: dict[str, list[Event]], name: str, event: str, **facts: object) -> None:
    events[name] = [
        Event(one.life, event, {**one.facts, **facts}) if one.name == event else one for one in events[name]
    ]


def test_each_problem_is_reported() -> None:
    cases: list[tuple[str, dict[str, list[Event]]]] = []

    def broken(words: str) -> dict[str, list[Event]]:
        cases.append((words, good_events()))
        return cases[-1][1]

    broken("of 20 lookups are torn")[INFERENCE[1]].append(Event(0, "torn", {"version": 5, "found": "x"}))
    torn = Event(0, "torn", {"version": 5, "found": "shows steps [1, 2]"})
    broken("shows steps [1, 2]")[INFERENCE[0]].append(torn)
    broken("shows steps [1, 2]")[INFERENCE[0]].append(Event(0, "torn", {"version": 5, "found": "shows steps [1, 2]"}))
    broken("an older version than before")[INFERENCE[0]].append(Event(0, "went_back", {"version": 2}))
    change(broken("rows differ from their version's snapshot"), INFERENCE[0], "compared", different=1)
    change(broken("3 of 40 rows differ from the last snapshot"), ONLINE, "finished", different=3)
    change(broken("reached version 5 of 6"), INFERENCE[0], "finished", version=5)
    broken("did not compare its copy")[ONLINE].pop()
    change(broken("served no lookup"), INFERENCE[0], "tick", lookups=0)
    change(broken("the change stream gave no row"), ONLINE, "moved", rows=0)
    change(broken("maintenance: disk full"), MAINTENANCE, "maintained", error="disk full")
    broken("acknowledged saves are lost")[TRAINER].append(saved(9, 90))

    for words, events in cases:
        assert any(words in problem for problem in report_of(events).problems), words
    assert "trainer ended by itself: code 1" in report_of(good_events(), crashed=TRAINER).problems


def test_the_printed_report_has_figures_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(report_of(good_events()), problems=("something is [odd]",))

    emit({}, report_parts(report), as_json=False)

    text = capsys.readouterr().out
    assert all(words in text for words in ("lookups", "20", "something is [odd]", "trainer", "online training"))
