"""Decide which versions of a log are kept, and why. A pure function of its live records (annex F).

A version expires only if nothing keeps it: no rule of the policy, no tag, channel or pin, no lease, no cursor. That
frees a segment only if no kept version has it in its chain. Nothing here reads storage or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from cnr_store.format.records import CommitRecord
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_number

Best = Literal["largest", "smallest"]
"""Which values of a metric are the best."""


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The saves with the best values of a metric that they recorded.

    Attributes
    ----------
    metric
        Its name in ``metrics=`` of the saves.
    count
        How many saves; of equal values the newer ones.
    best
        Whether the ``largest`` or the ``smallest`` values are the best.

    Raises
    ------
    BadInput
    """

    metric: str
    count: int = 1
    best: Best = "largest"

    def __post_init__(self) -> None:
        checked_count("count", self.count, least=1)
        checked_choice("best", self.best, get_args(Best))

    def chosen(self, versions: Iterable[tuple[int, Mapping[str, float]]]) -> list[int]:
        """Return the best of the versions with their metrics, best first; those without the metric are none. Pure."""
        sign = 1 if self.best == "largest" else -1
        found = [(sign * metrics[self.metric], version) for version, metrics in versions if self.metric in metrics]
        return [version for _, version in sorted(found, reverse=True)[: self.count]]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which versions are kept, besides the head's state and those with a name, pin, lease or cursor.

    Attributes
    ----------
    keep_last
        Keep the newest version of each of this many newest checkpoints. At least 1.
    keep_within_s
        Also keep every version committed in the last so many seconds; no version counts as younger than a later one.
    keep_every
        Also keep every checkpoint whose number is a multiple of this.
    keep_best
        Also keep the versions of the saves with the best values of a metric.

    Raises
    ------
    BadInput
        A rule is out of range.
    """

    keep_last: int = 10
    keep_within_s: float | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        checked_count("keep_last", self.keep_last, least=1)
        if self.keep_within_s is not None:
            checked_number("keep_within_s", self.keep_within_s, least=0)
        if self.keep_every is not None:
            checked_count("keep_every", self.keep_every, least=1)


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """The fields of a record for retention: version, checkpoint, time in ms, segments of the chain, metrics."""

    version: int
    checkpoint: int
    ts_ms: int
    chain: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holds:
    """Leased versions, each with a reason; and cursors, which keep their version and all later ones."""

    leases: Mapping[int, str]
    cursors: Mapping[str, int]


NO_HOLDS = Holds({}, {})


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """Whether one version is kept, and why."""

    version: int
    stays: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The fields of the last ``expire`` record of a collection, and the decision for each version.

    Attributes
    ----------
    floor, kept
        Versions from ``floor`` on are kept, and those below it in ``kept``. ``kept`` includes versions that only a tag,
        channel or pin keeps: when the name is removed, the next ``expire`` marks what only that version needs.
    verdicts
        One per live version, ascending.
    """

    floor: int
    kept: tuple[int, ...]
    verdicts: tuple[VersionVerdict, ...]

    @property
    def going(self) -> tuple[int, ...]:
        """The versions that expire, ascending."""
        return tuple(verdict.version for verdict in self.verdicts if not verdict.stays)


@dataclass(frozen=True, slots=True)
class _StateSpan:
    """Adjacent versions with the same chain: indices [start, stop) into the live versions."""

    start: int
    stop: int


def plan_retention(
    head: CommitRecord, versions: Sequence[LiveVersion], policy: RetentionPolicy, holds: Holds, now_ms: int
) -> RetentionPlan:
    """Return which of a log's live versions are kept. Pure; linear in the number of versions.

    Adjacent versions with the same chain form a run (tags, fences and other records without a new state). From the
    floor on, a run is kept or expires as a whole, at no cost. Below the floor only its first version is kept, whose
    commit wrote the state. So ``kept`` grows with the kept checkpoints, not with the records.

    Parameters
    ----------
    head
        The newest record of the log.
    versions
        Every live version, ascending, the head's last.

    Examples
    --------
    >>> from cnr_store.log.rebase import draft_init
    >>> from cnr_store.format.records import WriterInfo
    >>> head = draft_init(WriterInfo(host="", lib="", run_id=""))
    >>> log = [LiveVersion(v, checkpoint=v, ts_ms=v, chain=(f"full {v}",)) for v in range(1, 7)]
    >>> plan = plan_retention(head, log, RetentionPolicy(keep_last=2, keep_every=3), NO_HOLDS, now_ms=9)
    >>> plan.floor, plan.kept, plan.going
    (5, (3,), (1, 2, 4))
    """
    runs = _runs(versions)
    newest = _newest_runs(versions, runs)
    reasons = _policy_reasons(versions, runs, newest, policy, now_ms)
    cursor, passed = min(holds.cursors.items(), key=lambda item: item[1], default=("", None))
    for index, run in enumerate(runs):
        if passed is not None and versions[run.stop - 1].version >= passed:
            reasons.setdefault(index, f"cursor {cursor!r} has not passed it")
    names = _names(head)
    floor = max(_floor(versions, runs, reasons), head.floor)
    verdicts: list[VersionVerdict] = []
    for index, run in enumerate(runs):
        first, reason = versions[run.start], reasons.get(index)
        for here in versions[run.start : run.stop]:
            version = here.version
            is_held = version >= floor or here is first or (passed is not None and version >= passed)
            if reason is not None and is_held:
                verdicts.append(VersionVerdict(version, True, reason))
            elif version in holds.leases:
                verdicts.append(VersionVerdict(version, True, holds.leases[version]))
            elif version in names:
                verdicts.append(VersionVerdict(version, True, names[version]))
            elif reason is not None:
                verdicts.append(VersionVerdict(version, False, f"version {first.version} has the same state"))
            else:
                newer = versions[runs[newest.get(first.checkpoint, index)].start]
                verdicts.append(VersionVerdict(version, False, _why_not(first, newer)))
    kept = tuple(verdict.version for verdict in verdicts if verdict.stays and verdict.version < floor)
    return RetentionPlan(floor, kept, tuple(verdicts))


def _runs(versions: Sequence[LiveVersion]) -> list[_StateSpan]:
    runs: list[_StateSpan] = []
    start = 0
    for position in range(1, len(versions) + 1):
        if position < len(versions):
            before, here = versions[position - 1], versions[position]
            if here.version == before.version + 1 and here.chain == before.chain:
                continue
        runs.append(_StateSpan(start, position))
        start = position
    return runs


def _newest_runs(versions: Sequence[LiveVersion], runs: Sequence[_StateSpan]) -> dict[int, int]:
    """Map each checkpoint number to the newest run with it; newest checkpoint first."""
    newest: dict[int, int] = {}
    for index in reversed(range(len(runs))):
        first = versions[runs[index].start]
        if first.chain:
            newest.setdefault(first.checkpoint, index)
    return newest


def _policy_reasons(
    versions: Sequence[LiveVersion],
    runs: Sequence[_StateSpan],
    newest: Mapping[int, int],
    policy: RetentionPolicy,
    now_ms: int,
) -> dict[int, str]:
    """Map each run that the policy keeps to the reason."""
    reasons = {len(runs) - 1: "the head's state"}
    for index in list(newest.values())[: policy.keep_last]:
        reasons.setdefault(index, f"one of the newest {policy.keep_last} checkpoints")
    if policy.keep_every is not None:
        for checkpoint, index in newest.items():
            if checkpoint % policy.keep_every == 0:
                reasons.setdefault(index, f"every {policy.keep_every}. checkpoint")
    if policy.keep_best is not None:
        best = set(policy.keep_best.chosen((one.version, one.metrics) for one in versions))
        for index, run in enumerate(runs):
            if best.intersection(one.version for one in versions[run.start : run.stop]):
                reasons.setdefault(index, f"one of the best {policy.keep_best.count} by {policy.keep_best.metric!r}")
    if policy.keep_within_s is not None:
        since_ms = now_ms - policy.keep_within_s * 1000
        least_ms = versions[-1].ts_ms
        for index in reversed(range(len(runs))):
            # A version never counts as younger than a later one: a wrong clock may have stamped it ahead.
            least_ms = min(least_ms, versions[runs[index].stop - 1].ts_ms)
            if least_ms >= since_ms:
                reasons.setdefault(index, f"committed in the last {policy.keep_within_s:g} s")
    return reasons


def _names(head: CommitRecord) -> dict[int, str]:
    """Map each version with a name to a text about the name."""
    names = {pin.version: f"branch {pin.name!r} begins here" for pin in head.pins.values()}
    names |= {version: f"channel {name!r}" for name, version in head.channels.items()}
    return names | {version: f"tag {name!r}" for name, version in head.tags.items()}


def _floor(versions: Sequence[LiveVersion], runs: Sequence[_StateSpan], reasons: Mapping[int, str]) -> int:
    """Return the first version of the newest kept range without a gap."""
    index = len(runs) - 1
    while index > 0 and index - 1 in reasons:
        before, after = versions[runs[index - 1].stop - 1].version, versions[runs[index].start].version
        if before + 1 != after:
            break
        index -= 1
    return versions[runs[index].start].version


def _why_not(here: LiveVersion, newest: LiveVersion) -> str:
    if not here.chain:
        return "nothing was saved yet"
    if newest.version != here.version:
        # Not the same state: after a rollback a number is used again.
        return f"version {newest.version} has the same checkpoint number, {here.checkpoint}, and is newer"
    return "no rule keeps it"
