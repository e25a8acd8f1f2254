"""Computes figures and problems of the serving soak from its events and the log. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cnr_store_tools.demo.processes import Event, WorkerProcess
from tests.serving.soak.maintaining import POLICY

TRAINER, MAINTENANCE, ONLINE = "trainer", "maintenance", "online training"
INFERENCE = ("inference 1", "inference 2")
NAMES = (TRAINER, MAINTENANCE, *INFERENCE, ONLINE)
"""The processes, in the order in which they are started and listed."""

MAX_EXAMPLES = 3
"""Maximum number of listed tears per process and kind."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options; ``python -m tests.serving.soak --help`` explains each."""

    store: str = "./soak-store"
    seconds: float = 60.0
    seed: int = 0
    kills: int = 10
    rows: int = 100_000


@dataclass(frozen=True, slots=True)
class LoggedVersion:
    """The fields of a commit record that the figures need."""

    version: int
    kind: str
    step: int

    @property
    def is_saved(self) -> bool:
        """Whether the trainer saved it."""
        return self.kind in ("baseline", "delta")


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process over all its lives; ``crashes`` has the reason of each life that ended by itself."""

    name: str
    starts: int
    kills: int
    crashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The comparison of a consumer's whole copy with the last snapshot, bit for bit."""

    name: str
    version: int
    rows: int
    different_rows: int


@dataclass(frozen=True, slots=True)
class ServeReport:
    """The result of a serving soak.

    Attributes
    ----------
    figures
        Counts by name: ``lost`` are acknowledged saves that the log or a restore did not have, ``torn`` lookups whose
        rows had another version than reported, ``resumes`` starts of the online training from its copy and cursor.
    copies
        Each consumer's whole copy at the end.
    problems
        One line each; empty if there are none.
    """

    options: ServeOptions
    last_version: int
    figures: Mapping[str, int]
    processes: tuple[ProcessReport, ...]
    copies: tuple[CopyReport, ...]
    problems: tuple[str, ...]


def make_report(
    options: ServeOptions,
    log: Sequence[LoggedVersion],
    processes: Mapping[str, WorkerProcess],
    last_version: int = -1,
) -> ServeReport:
    """Return all figures and problems."""
    served = [processes[name] for name in INFERENCE]
    saved = [one for one in log if one.is_saved]
    compared = [facts for process in served for facts in process.facts_of("compared")]
    copies = tuple(
        CopyReport(name, facts["version"], facts["rows"], facts["different"])
        for name in (*INFERENCE, ONLINE)
        for facts in processes[name].facts_of("finished")[-1:]
    )
    figures = {
        "versions": len(saved),
        "steps": max((one.step for one in saved), default=0),
        "compactions": sum(one.kind == "compact" for one in log),
        "deleted_bytes": sum(facts["deleted_bytes"] for facts in processes[MAINTENANCE].facts_of("maintained")),
        "lost": lost_saves(saved, processes[TRAINER].events),
        "lookups": sum(counted(process, "lookups") for process in served),
        "torn": sum(len(process.facts_of("torn")) for process in served),
        "compared_rows": sum(facts["rows"] for facts in compared),
        "different_rows": sum(facts["different"] for facts in compared),
        "learned_rows": sum(facts["rows"] for facts in processes[ONLINE].facts_of("moved")),
        "resumes": sum(facts["how"] == "cursor" for facts in processes[ONLINE].facts_of("opened")),
    }
    return ServeReport(
        options, last_version, figures,
        tuple(ProcessReport(one.name, one.starts, one.kills, tuple(one.crashes)) for one in processes.values()),
        copies, tuple(find_problems(options, figures, processes, copies, last_version)),
    )  # fmt: skip


def counted(process: WorkerProcess, count: str) -> int:
    """Return the sum of a count over all lives; the last tick of a life has its total."""
    last = {event.life: event.facts[count] for event in process.events if event.name == "tick"}
    return sum(last.values())


def lost_saves(saved: Sequence[LoggedVersion], events: Iterable[Event]) -> int:
    """Return how many acknowledged saves are not in the log, or were not in a later restore of the trainer."""
    in_log = {(one.version, one.step) for one in saved}
    acknowledged, lost = -1, 0
    for event in events:
        if event.name == "saved":
            acknowledged = max(acknowledged, event.facts["step"])
            lost += (event.facts["version"], event.facts["step"]) not in in_log
        elif event.name == "restored":
            lost += event.facts["step"] < acknowledged
    return lost


def find_problems(
    options: ServeOptions,
    figures: Mapping[str, int],
    processes: Mapping[str, WorkerProcess],
    copies: Sequence[CopyReport],
    last_version: int,
) -> list[str]:
    """Return the problems, one line each: torn, lost or different data, crashes, and processes without progress."""
    found = [f"{name} ended by itself: {reason}" for name in processes for reason in processes[name].crashes]
    for name in INFERENCE:
        for event, what in (("torn", "torn"), ("went_back", "an older version than before")):
            for facts in processes[name].facts_of(event)[:MAX_EXAMPLES]:
                found.append(f"{name}, version {facts['version']}: {facts.get('found', what)}")
        if not counted(processes[name], "lookups"):
            found.append(f"{name} served no lookup")
        if not processes[name].facts_of("applied"):
            found.append(f"{name} never updated to another version")
    if figures["torn"]:
        found.append(f"{figures['torn']} of {figures['lookups']} lookups are torn")
    if figures["different_rows"]:
        found.append(
            f"{figures['different_rows']} of {figures['compared_rows']} rows differ from their version's snapshot"
        )
    if figures["lost"]:
        found.append(f"{figures['lost']} acknowledged saves are lost")
    if figures["versions"] < 2:
        found.append(f"only {figures['versions']} versions were saved")
    if not figures["compactions"] and figures["versions"] > 2 * POLICY.max_chain:
        found.append(f"{figures['versions']} versions were saved, but nothing was compacted")
    if not figures["learned_rows"]:
        found.append("the change stream gave no row")
    errors = (facts["error"] for facts in processes[MAINTENANCE].facts_of("maintained"))
    found += [f"maintenance: {error}" for error in errors if error is not None]
    compared = {copy.name for copy in copies}
    found += [f"{name} did not compare its copy at the end" for name in (*INFERENCE, ONLINE) if name not in compared]
    for copy in copies:
        if copy.version < last_version:
            found.append(f"{copy.name} reached version {copy.version} of {last_version}")
        if copy.different_rows:
            found.append(f"{copy.name}: {copy.different_rows} of {copy.rows} rows differ from the last snapshot")
    kills = sum(process.kills for process in processes.values())
    if kills < options.kills:
        found.append(f"only {kills} of {options.kills} kills were carried out")
    return found
