"""Which versions of a log stay, and why: a pure function of its live records (spec, annex F).

A version goes only if nothing names it: no rule of the policy, no tag, channel or pin, no lease, no cursor. What goes
frees a segment only where no version that stays has it in its chain. Nothing here reads storage or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cnr_store.format.records import CommitRecord
from cnr_store.runtime.arguments import checked_count, checked_number


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What of a log's past stays. The head's state, tags, channels, fork points, leases and cursors always do.

    Attributes
    ----------
    keep_last
        The newest this many checkpoints; of each the newest version. At least 1.
    keep_within_s
        Every version committed in the last so many seconds as well; none counts as younger than a later one.
    keep_every
        Every checkpoint whose number is a multiple of this as well.

    Raises
    ------
    BadInput
        A rule that cannot be meant.
    """

    keep_last: int = 10
    keep_within_s: float | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        checked_count("keep_last", self.keep_last, least=1)
        if self.keep_within_s is not None:
            checked_number("keep_within_s", self.keep_within_s, least=0)
        if self.keep_every is not None:
            checked_count("keep_every", self.keep_every, least=1)


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """What retention needs of one record: its place, checkpoint and time, and the names of its chain's segments."""

    version: int
    checkpoint: int
    ts_ms: int
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holds:
    """What readers of a log hold: leased version to who leases it, and cursors by name, which hold all behind them."""

    leases: Mapping[int, str]
    cursors: Mapping[str, int]


NO_HOLDS = Holds({}, {})


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """Whether one version stays, and why."""

    version: int
    stays: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What an ``expire`` record says when all that goes is gone.

    Attributes
    ----------
    floor, kept
        Of that record: every version from ``floor`` on stays, and of those below it ``kept``. What a tag, channel or
        pin names is listed too: once the name is gone the next ``expire`` gives up what only that version needs.
    verdicts
        One per live version, ascending.
    """

    floor: int
    kept: tuple[int, ...]
    verdicts: tuple[VersionVerdict, ...]

    @property
    def going(self) -> tuple[int, ...]:
        """The versions that go, ascending."""
        return tuple(verdict.version for verdict in self.verdicts if not verdict.stays)


@dataclass(frozen=True, slots=True)
class _StateSpan:
    """Adjacent versions of one state: all have the same chain. Positions [start, stop) of the live versions."""

    start: int
    stop: int


def plan_retention(
    head: CommitRecord, versions: Sequence[LiveVersion], policy: RetentionPolicy, holds: Holds, now_ms: int
) -> RetentionPlan:
    """Return which of a log's live versions stay. Pure; grows with the number of versions.

    Adjacent versions with the same chain (tags, fences and other records without a state of their own) stay or go
    together at and above the floor, where they cost nothing; below it the first of them, whose commit made the state,
    stands for all. So ``kept`` grows with the checkpoints that stay, not with the records.

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
    """Checkpoint number to the newest run that shows it; newest checkpoint first."""
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
    """Run to the rule of the policy that keeps it."""
    reasons = {len(runs) - 1: "the head's state"}
    for index in list(newest.values())[: policy.keep_last]:
        reasons.setdefault(index, f"one of the newest {policy.keep_last} checkpoints")
    if policy.keep_every is not None:
        for checkpoint, index in newest.items():
            if checkpoint % policy.keep_every == 0:
                reasons.setdefault(index, f"every {policy.keep_every}. checkpoint")
    if policy.keep_within_s is not None:
        since_ms = now_ms - policy.keep_within_s * 1000
        least_ms = versions[-1].ts_ms
        for index in reversed(range(len(runs))):
            # No version is younger than those behind it, whatever a clock that was wrong then has stamped it with.
            least_ms = min(least_ms, versions[runs[index].stop - 1].ts_ms)
            if least_ms >= since_ms:
                reasons.setdefault(index, f"committed in the last {policy.keep_within_s:g} s")
    return reasons


def _names(head: CommitRecord) -> dict[int, str]:
    """Version to what names it."""
    names = {pin.version: f"branch {pin.name!r} begins here" for pin in head.pins.values()}
    names |= {version: f"channel {name!r}" for name, version in head.channels.items()}
    return names | {version: f"tag {name!r}" for name, version in head.tags.items()}


def _floor(versions: Sequence[LiveVersion], runs: Sequence[_StateSpan], reasons: Mapping[int, str]) -> int:
    """The first version of the newest stretch that stays without a gap."""
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
        return f"version {newest.version} is a newer one of the same checkpoint"
    return "no rule keeps it"
