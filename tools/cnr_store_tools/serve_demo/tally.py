"""What processes told and the log says, as figures and a verdict: torn, lost, different, or stood still. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnr_store_tools.serve_demo.maintaining import POLICY
from cnr_store_tools.serve_demo.records import (
    INFERENCE,
    MAINTENANCE,
    ONLINE,
    TRAINER,
    FinalCopy,
    LearningReport,
    ProcessReport,
    SavingReport,
    ServingReport,
    Spread,
)
from cnr_store_tools.serve_demo.supervised import Heard

MAX_EXAMPLES = 3
"""Of each kind of tear: more would say the same."""


Told = Mapping[str, Sequence[Heard]]
"""Process name to all that it told."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the tally needs of a commit record; ``size_bytes`` is that of the segments that are new with it."""

    version: int
    kind: str
    step: int
    time_ms: int
    size_bytes: int

    @property
    def is_saved(self) -> bool:
        """Whether the trainer saved it."""
        return self.kind in ("full", "delta")


def spread_of(values: Iterable[float]) -> Spread:
    """Return median and 99th percentile.

    >>> spread_of([1.0, 2.0, 3.0]).p50
    2.0
    """
    given = np.fromiter(values, np.float64)
    if not len(given):
        return Spread(0, math.nan, math.nan)
    p50, p99 = np.quantile(given, [0.5, 0.99])
    return Spread(len(given), float(p50), float(p99))


def facts_of(heard: Iterable[Heard], event: str) -> list[Mapping[str, Any]]:
    """Return the facts of all events of that name, in order."""
    return [one.facts for one in heard if one.event == event]


def served_version(heard: Iterable[Heard]) -> int:
    """Return the version that a process served last; -1 if none is known."""
    return next((one["version"] for one in reversed([*facts_of(heard, "ready"), *facts_of(heard, "seen")])), -1)


def publish_to_served(commits: Iterable[Commit], heard: Sequence[Heard]) -> list[float]:
    """Return, for each save published in a life, the seconds until a lookup saw it or a newer one.

    What was there before a life began is not counted: that is the time of a start, not of a publication.
    """
    saved = [one for one in commits if one.is_saved]
    versions = [one.version for one in saved]
    found: list[float] = []
    served: dict[int, int] = {}
    for one in heard:
        if one.event not in ("ready", "seen"):
            continue
        version = one.facts["version"]
        before = served.get(one.life)
        if one.event == "seen" and before is not None:
            new = saved[bisect_right(versions, before) : bisect_right(versions, version)]
            found += [(one.facts["at_ms"] - commit.time_ms) / 1000 for commit in new]
        served[one.life] = version if before is None else max(before, version)
    return found


def staleness(saved: Sequence[Commit], version: int, at_ms: float) -> float:
    """Return for how many seconds the oldest save that is not in ``version`` had been there; 0 without one."""
    place = bisect_right(saved, version, key=lambda one: one.version)
    return max(0.0, (at_ms - saved[place].time_ms) / 1000) if place < len(saved) else 0.0


def tally_saving(commits: Sequence[Commit], told: Told) -> SavingReport:
    """Return what was saved, folded and deleted, and whether something acknowledged is missing."""
    saves = facts_of(told[TRAINER], "saved")
    saved = [one for one in commits if one.is_saved]
    folds = [one for one in commits if one.kind == "compact"]
    in_log = {(one.version, one.step) for one in saved}
    lost = sum((save["version"], save["step"]) not in in_log for save in saves) + _steps_back(told[TRAINER])
    return SavingReport(
        versions=len(saved), saved_bytes=sum(one.size_bytes for one in saved), folds=len(folds),
        folded_bytes=sum(one.size_bytes for one in folds),
        deleted_bytes=sum(one["deleted_bytes"] for one in facts_of(told[MAINTENANCE], "maintained")),
        acknowledged=len(saves), lost=lost, steps=max((one.step for one in saved), default=0),
    )  # fmt: skip


def _steps_back(heard: Iterable[Heard]) -> int:
    """How many restores of the trainer came back with less than what it had been told is committed."""
    acknowledged, lost = -1, 0
    for one in heard:
        if one.event == "saved":
            acknowledged = max(acknowledged, one.facts["step"])
        elif one.event == "restored":
            lost += one.facts["step"] < acknowledged
    return lost


def tally_serving(commits: Sequence[Commit], told: Told, since_ms: float = 0.0) -> ServingReport:
    """Return what the inference processes did, together; times only of what happened since ``since_ms``."""
    heard = [one for name in INFERENCE for one in told[name]]
    timed = [one for one in commits if one.time_ms >= since_ms]
    ticks, applied, compared = (facts_of(heard, event) for event in ("tick", "applied", "compared"))
    saved = [one for one in commits if one.is_saved]
    return ServingReport(
        lookups=sum(one["lookups"] for one in ticks), rows=sum(one["rows"] for one in ticks),
        torn=max(sum(one["torn"] for one in ticks), len(facts_of(heard, "torn"))),
        retries=sum(one["retries"] for one in ticks), versions_seen=len(applied),
        publish_to_served_s=spread_of(
            value for name in INFERENCE for value in publish_to_served(timed, told[name])
        ),
        staleness_s=spread_of(
            staleness(saved, one["version"], one["at_ms"]) for one in ticks if one["at_ms"] >= since_ms
        ),
        apply_s=spread_of(one["seconds"] for one in applied if one["at_ms"] >= since_ms),
        applied_rows=sum(one["rows"] for one in applied), applied_bytes=sum(one["size_bytes"] for one in applied),
        compared_rows=sum(one["rows"] for one in compared), different_rows=sum(one["different"] for one in compared),
        errors=len(facts_of(heard, "poll_failed")),
    )  # fmt: skip


def tally_learning(heard: Sequence[Heard]) -> LearningReport:
    """Return what the online training did."""
    moved = facts_of(heard, "moved")
    starts = facts_of(heard, "opened")
    return LearningReport(
        batches=sum(one["batches"] for one in moved), rows=sum(one["rows"] for one in moved),
        versions_seen=len(moved), steps=sum(one["steps"] for one in facts_of(heard, "learned")),
        warm_starts=sum(one["how"] == "snapshot" for one in starts),
        resumes=sum(one["how"] == "cursor" for one in starts),
    )  # fmt: skip


def final_copies(told: Told) -> tuple[FinalCopy, ...]:
    """Return the last comparison of each consumer that made one."""
    found = []
    for name in (*INFERENCE, ONLINE):
        for facts in facts_of(told[name], "finished")[-1:]:
            found.append(FinalCopy(name, facts["version"], facts["rows"], facts["different"]))
    return tuple(found)


def find_problems(
    told: Told,
    processes: Sequence[ProcessReport],
    crashes: Mapping[str, Sequence[str]],
    saving: SavingReport,
    serving: ServingReport,
    learning: LearningReport,
    finals: Sequence[FinalCopy],
    last_version: int,
    kills: int,
) -> tuple[str, ...]:
    """Return what is wrong, one line each; none if nothing is torn, lost or different and everything made progress."""
    found = [f"{name} ended by itself: {words}" for name in crashes for words in crashes[name]]
    for name in INFERENCE:
        for event in ("torn", "went_back"):
            for facts in facts_of(told[name], event)[:MAX_EXAMPLES]:
                found.append(
                    f"{name}, version {facts['version']}: {facts.get('found', 'an older version than before')}"
                )
        if not sum(one["lookups"] for one in facts_of(told[name], "tick")):
            found.append(f"{name} served no lookup")
        if not facts_of(told[name], "applied"):
            found.append(f"{name} never moved to another version")
    if serving.torn:
        found.append(f"{serving.torn} of {serving.lookups} lookups are torn")
    if serving.different_rows:
        found.append(f"{serving.different_rows} of {serving.compared_rows} rows differ from their version's snapshot")
    if saving.lost:
        found.append(f"{saving.lost} acknowledged saves are lost")
    if saving.versions < 2:
        found.append(f"only {saving.versions} versions were saved")
    if not saving.folds and saving.versions > 2 * POLICY.max_chain:
        found.append(f"{saving.versions} versions were saved, and nothing was folded")
    if not learning.rows:
        found.append("the change stream gave no row")
    for facts in facts_of(told[MAINTENANCE], "maintained"):
        if facts["error"] is not None:
            found.append(f"maintenance: {facts['error']}")
    names = {final.name for final in finals}
    found += [f"{name} did not compare its copy at the end" for name in (*INFERENCE, ONLINE) if name not in names]
    for final in finals:
        if final.version < last_version:
            found.append(f"{final.name} reached version {final.version} of {last_version}")
        if final.different_rows:
            found.append(f"{final.name}: {final.different_rows} of {final.rows} rows differ from the last snapshot")
    done = sum(process.kills for process in processes)
    if done < kills:
        found.append(f"only {done} of {kills} kills were carried out")
    return tuple(found)
