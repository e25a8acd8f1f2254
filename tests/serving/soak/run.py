"""The serving soak: starts all processes on one store, kills and restarts them, and compares copies."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cnr_store import BadInput, CnrStoreError, Store
from cnr_store_tools.demo.processes import WorkerProcess
from cnr_store_tools.demo.run import make_store
from tests.serving.soak.report import (
    INFERENCE,
    MAINTENANCE,
    NAMES,
    ONLINE,
    TRAINER,
    LoggedVersion,
    ServeOptions,
    ServeReport,
    make_report,
)

READY_S = 180.0
FINISH_S = 180.0
"""Timeouts in seconds, generous for a busy machine."""

POLL_INTERVAL_S = 0.5
"""The default of the loader."""

TICK_S = 0.1
REPORT_EVERY_S = 5.0
MAX_CRASHES = 5
"""Maximum number of times that a process may end by itself."""

LONG_RUN_S = 30.0
MIN_ROWS = 1_000
FIRST_KILL, LAST_KILL = 0.05, 0.85
"""The part of the run with kills. A process that is killed at the end could not show its recovery."""

MODULES = {
    TRAINER: "saving", MAINTENANCE: "maintaining", INFERENCE[0]: "inferring", INFERENCE[1]: "inferring",
    ONLINE: "learning",
}  # fmt: skip

PrintLine = Callable[[str], None]


def plan_kills(*, kills: int, seconds: float, seed: int) -> list[tuple[float, str]]:
    """Return times in seconds, ascending, and names of the kills; counts per process differ by at most 1.

    >>> plan = plan_kills(kills=5, seconds=10.0, seed=7)
    >>> sorted(name for _, name in plan) == sorted(NAMES), all(0 < at_s < 10 for at_s, _ in plan)
    (True, True)
    """
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(FIRST_KILL * seconds, LAST_KILL * seconds, kills)).tolist()
    order: list[str] = []
    while len(order) < kills:
        order += [NAMES[index] for index in random.permutation(len(NAMES))]
    return list(zip(times, order[:kills], strict=True))


def run_soak(options: ServeOptions, print_line: PrintLine = lambda _: None) -> ServeReport:
    """Run the soak and return its result; blocks for ``seconds`` plus start and end.

    Parameters
    ----------
    print_line
        Called with a line of text at each kill, and every few seconds with the state of the run.

    Raises
    ------
    BadInput
        Invalid options.
    StoreExists
        There is a store that is not from a demonstration.
    CnrStoreError
        A process did not become ready, or ended by itself too often.
    """
    if not options.seconds > 0 or options.kills < 0 or options.rows < MIN_ROWS:
        raise BadInput(
            f"expected more than 0 seconds, 0 or more kills and at least {MIN_ROWS} rows; found {options.seconds}, "
            f"{options.kills} and {options.rows}"
        )
    with (
        make_store(options.store, force=False) as store,
        tempfile.TemporaryDirectory(prefix="cnr-soak-") as folder,
    ):
        return _Soak(options, store, print_line, folder).run()


class _Soak:
    """One run: its processes, and the log as it was last read."""

    def __init__(self, options: ServeOptions, store: Store, print_line: PrintLine, folder: str) -> None:
        self._options, self._store, self._print_line = options, store, print_line
        self._processes = {name: WorkerProcess(name, _task(options, name, folder)) for name in NAMES}
        self._entry = store.head()
        self._log: list[LoggedVersion] = []

    def run(self) -> ServeReport:
        try:
            self._start_all()
            self._run_and_kill()
            last_version = self._finish()
        finally:
            for process in self._processes.values():
                process.stop()
        self._read_log()
        return make_report(self._options, self._log, self._processes, last_version)

    def _start_all(self) -> None:
        """Start all processes, the trainer first, because the others need a version."""
        self._print_line("starting")
        for group in ((TRAINER,), tuple(name for name in NAMES if name != TRAINER)):
            for name in group:
                self._processes[name].start()
            for name in group:
                self._processes[name].wait_for("ready", READY_S)
        for name in INFERENCE:
            # The first delta on a machine compiles code for seconds.
            self._processes[name].wait_for("applied", READY_S)

    def _run_and_kill(self) -> None:
        options, report_at_s, started = self._options, 0.0, time.monotonic()
        kills = plan_kills(kills=options.kills, seconds=options.seconds, seed=options.seed)
        while (elapsed_s := time.monotonic() - started) < options.seconds or kills:
            while kills and kills[0][0] <= elapsed_s:
                process = self._processes[kills.pop(0)[1]]
                if process.kill():
                    self._print_line(f"{elapsed_s:.1f} s: {process.name} killed, started again")
                    process.start()
            self._restart_ended()
            if elapsed_s >= report_at_s:
                self._read_log()
                found = make_report(options, self._log, self._processes).figures
                shown = ", ".join(f"{found[name]:,} {name}" for name in ("versions", "compactions", "lookups", "torn"))
                self._print_line(f"{elapsed_s:.0f} of {options.seconds:.0f} s: {shown}")
                report_at_s = elapsed_s + REPORT_EVERY_S
            time.sleep(TICK_S)

    def _restart_ended(self) -> None:
        for process in self._processes.values():
            if process.has_ended():
                self._print_line(f"{process.name} ended by itself: {process.crashes[-1:]}")
                if len(process.crashes) > MAX_CRASHES:
                    raise CnrStoreError(f"{process.name} ended by itself too often: {process.crashes[-1]}")
                process.start()

    def _finish(self) -> int:
        """End the trainer (after a last save) and maintenance; then every consumer loads that version and compares."""
        self._print_line("finishing")
        for name in (TRAINER, MAINTENANCE):
            self._end(name)
        last_version = self._store.latest_version()
        for name in (*INFERENCE, ONLINE):
            self._end(name, version=last_version)
        return last_version

    def _end(self, name: str, **order: Any) -> None:
        """Order a process to finish and wait for it. If it ends by itself, record a crash instead of raising."""
        process = self._processes[name]
        try:
            if process.state == "starting":
                process.wait_for("ready", READY_S)
            process.send(do="finish", **order)
            process.wait_for("finished", FINISH_S)
        except CnrStoreError as error:
            self._print_line(str(error))
        process.stop(grace_s=FINISH_S if process.state == "finished" else 0.0)

    def _read_log(self) -> None:
        while (entry := self._store.poll(self._entry)) is not None:
            self._entry = entry
            record = entry.record
            self._log.append(LoggedVersion(record.v, record.kind, record.step))


def _task(options: ServeOptions, name: str, folder: str) -> Mapping[str, Any]:
    # Short runs save more often, so that there are versions to follow, and look up less, so that the others get on.
    save_every_s, pause_s = (1.0, 0.001) if options.seconds >= LONG_RUN_S else (0.4, 0.01)
    return {
        "module": f"tests.serving.soak.{MODULES[name]}", "store": options.store, "rows": options.rows,
        "seed": options.seed, "index": NAMES.index(name), "save_every_s": save_every_s, "pause_s": pause_s,
        "poll_interval_s": POLL_INTERVAL_S, "folder": folder,
        "shared": str(Path(folder, "shared")) if name == INFERENCE[1] else None,
    }  # fmt: skip
