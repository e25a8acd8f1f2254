"""The serving demonstration: start everything on one store, kill and restart, stop, and compare what is left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from cnr_store import BadInput, CnrStoreError, Store
from cnr_store_tools.demo.records import DemoOptions
from cnr_store_tools.demo.run import make_store
from cnr_store_tools.serve_demo import tally
from cnr_store_tools.serve_demo.records import (
    INFERENCE,
    MAINTENANCE,
    MIN_ROWS,
    NAMES,
    ONLINE,
    TRAINER,
    ProcessReport,
    Progress,
    ServeOptions,
    ServeReport,
)
from cnr_store_tools.serve_demo.schedule import plan_kills
from cnr_store_tools.serve_demo.supervised import Supervised
from cnr_store_tools.serve_demo.tally import Commit

READY_S = 180.0
FINISH_S = 180.0
"""Most seconds for what takes a few on a machine that does nothing else."""

POLL_INTERVAL_S = 0.5
"""The default of the loader, said here because it is part of what publish-to-served means."""

TICK_S = 0.1
WATCH_S = 0.5
MAX_CRASHES = 5
"""A process that ends by itself so often would do so for ever."""

ROLES = {
    TRAINER: "saving", MAINTENANCE: "maintaining", INFERENCE[0]: "inferring", INFERENCE[1]: "inferring",
    ONLINE: "learning",
}  # fmt: skip

Watch = Callable[[Progress], None]


def run_serve_demo(options: ServeOptions, watch: Watch = lambda _: None) -> ServeReport:
    """Carry out the demonstration and return what it found; blocks for ``seconds`` and what starting and ending takes.

    Parameters
    ----------
    watch
        Called about twice a second with how things stand.

    Raises
    ------
    BadInput
        Numbers that make no demonstration.
    StoreExists
        There is a store that no demonstration left, and ``force`` is not set.
    CnrStoreError
        A process never got ready.
    """
    if not options.seconds > 0 or options.kills < 0 or options.rows < MIN_ROWS:
        raise BadInput(
            f"expected more than 0 seconds, 0 or more kills and at least {MIN_ROWS} rows; found {options.seconds}, "
            f"{options.kills} and {options.rows}"
        )
    with (
        make_store(DemoOptions(store=options.store, force=options.force)) as store,
        tempfile.TemporaryDirectory(prefix="cnr-serve-demo-") as folder,
    ):
        return _Demonstration(options, store, watch, folder).run()


class _Demonstration:
    """One run: its processes, what of the log is known, and what there is to tell."""

    def __init__(self, options: ServeOptions, store: Store, watch: Watch, folder: str) -> None:
        self._options, self._store, self._watch = options, store, watch
        self._processes = {name: Supervised(name, _order(options, name, folder)) for name in NAMES}
        self._entry = store.head()
        self._commits: list[Commit] = []
        self._segments: set[str] = set()
        self._news: list[str] = []
        self._started, self._started_ms = time.monotonic(), 0.0
        self._watched = 0.0
        self._phase: Literal["starting", "running", "finishing"] = "starting"

    def run(self) -> ServeReport:
        try:
            self._start_all()
            self._run_and_kill()
            last_version = self._finish()
        finally:
            for process in self._processes.values():
                process.stop()
        self._read_log()
        return self._report(last_version)

    def _start_all(self) -> None:
        """The trainer first: the others need a version to begin with."""
        for group in ((TRAINER,), tuple(name for name in NAMES if name != TRAINER)):
            for name in group:
                self._processes[name].start()
            for name in group:
                self._processes[name].wait_for("ready", READY_S, self._tell)
        for name in INFERENCE:
            # The very first delta on a machine compiles code for seconds.
            self._processes[name].wait_for("applied", READY_S, self._tell)
        self._started, self._started_ms = time.monotonic(), time.time() * 1000
        self._phase = "running"

    def _run_and_kill(self) -> None:
        options = self._options
        kills = list(plan_kills(NAMES, kills=options.kills, seconds=options.seconds, seed=options.seed))
        while (elapsed_s := time.monotonic() - self._started) < options.seconds:
            while kills and kills[0].at_s <= elapsed_s:
                process = self._processes[kills[0].name]
                if process.kill():
                    self._news.append(f"{elapsed_s:.1f} s: {kills[0].name} killed, started again")
                    process.start()
                kills.pop(0)
            self._restart_ended()
            self._tell()
            time.sleep(TICK_S)

    def _restart_ended(self) -> None:
        for process in self._processes.values():
            if process.has_ended():
                self._news.append(f"{process.name} ended by itself: {process.crashes[-1:]}")
                if len(process.crashes) > MAX_CRASHES:
                    raise CnrStoreError(f"{process.name} ends by itself again and again: {process.crashes[-1]}")
                process.start()

    def _finish(self) -> int:
        """Let the trainer save once more, end maintenance, and have every consumer reach that version and compare."""
        self._phase = "finishing"
        for name in (TRAINER, MAINTENANCE):
            self._end(name)
        last_version = self._store.latest_version()
        for name in (*INFERENCE, ONLINE):
            self._end(name, version=last_version)
        return last_version

    def _end(self, name: str, **order: Any) -> None:
        """Order a process to finish and wait for it; one that ends by itself instead is a crash, not an exception."""
        process = self._processes[name]
        try:
            if process.state == "starting":
                process.wait_for("ready", READY_S, self._tell)
            process.send(do="finish", **order)
            process.wait_for("finished", FINISH_S, self._tell)
        except CnrStoreError as error:
            self._news.append(str(error))
        process.stop(grace_s=FINISH_S if process.state == "finished" else 0.0)

    def _read_log(self) -> None:
        while (entry := self._store.poll(self._entry)) is not None:
            self._entry = entry
            record = entry.record
            size_bytes = sum(item.bytes for item in record.chain if item.seg not in self._segments)
            self._segments.update(item.seg for item in record.chain)
            self._commits.append(Commit(record.v, record.kind, record.step, record.ts_ms, size_bytes))

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._watched < WATCH_S:
            return
        self._watched = now
        self._read_log()
        told = {name: list(process.heard) for name, process in self._processes.items()}
        serving = tally.tally_serving(self._commits, told, self._started_ms)
        self._watch(
            Progress(
                phase=self._phase, elapsed_s=now - self._started, seconds=self._options.seconds,
                states=tuple((name, process.state) for name, process in self._processes.items()),
                versions=sum(one.is_saved for one in self._commits),
                folds=sum(one.kind == "compact" for one in self._commits), lookups=serving.lookups,
                torn=serving.torn, retries=serving.retries,
                served=tuple((name, tally.served_version(told[name])) for name in INFERENCE),
                publish_to_served_s=serving.publish_to_served_s, apply_s=serving.apply_s,
                learned_rows=tally.tally_learning(told[ONLINE]).rows, news=tuple(self._news),
            )
        )  # fmt: skip

    def _report(self, last_version: int) -> ServeReport:
        told = {name: process.heard for name, process in self._processes.items()}
        processes = tuple(
            ProcessReport(
                process.name, process.starts, process.kills, len(process.crashes), tally.spread_of(process.ready_s)
            )
            for process in self._processes.values()
        )
        saving = tally.tally_saving(self._commits, told)
        serving = tally.tally_serving(self._commits, told, self._started_ms)
        learning = tally.tally_learning(told[ONLINE])
        finals = tally.final_copies(told)
        problems = tally.find_problems(
            told, processes, {name: process.crashes for name, process in self._processes.items()}, saving, serving,
            learning, finals, last_version, self._options.kills,
        )  # fmt: skip
        return ServeReport(
            options=self._options, seconds=time.monotonic() - self._started, last_version=last_version,
            processes=processes, saving=saving, serving=serving, learning=learning, finals=finals, problems=problems,
        )  # fmt: skip


def _order(options: ServeOptions, name: str, folder: str) -> Mapping[str, Any]:
    return {
        "role": ROLES[name], "store": options.store, "rows": options.rows, "seed": options.seed,
        "index": NAMES.index(name), "save_every_s": options.save_every_s, "poll_interval_s": POLL_INTERVAL_S,
        "folder": folder, "shared": str(Path(folder, "shared")) if name == INFERENCE[1] else None,
    }  # fmt: skip
