"""Which versions of a log stay, by the words of the specification (7.1, 7.8), without a line of the library's.

A model for state machines: it follows a log record by record and applies a collection's policy to sets of versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Version:
    """One log position: which checkpoint it shows, and which content; equal contents have equal chains."""

    number: int
    checkpoint: int
    content: int
    ts_ms: int


@dataclass(frozen=True)
class Rules:
    """A retention policy at a time; ``since_ms`` is None where no age is kept."""

    keep_last: int
    keep_every: int | None = None
    since_ms: float | None = None


NOTHING_SAVED = 0


@dataclass
class LogModel:
    """One log. ``names`` are tags, channels and fork points with the versions that they keep."""

    versions: list[Version] = field(default_factory=list)
    floor: int = 0
    kept: set[int] = field(default_factory=set)
    tags: dict[str, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    pins: dict[str, int] = field(default_factory=dict)

    @property
    def head(self) -> int:
        return self.versions[-1].number

    @property
    def named(self) -> set[int]:
        return {*self.tags.values(), *self.channels.values(), *self.pins.values()}

    def add(self, kind: str, target: int | None, ts_ms: int) -> None:
        """A record landed. Saves and compactions make content of their own, a rollback brings one back."""
        number = len(self.versions)
        before = self.versions[-1] if self.versions else Version(-1, 0, NOTHING_SAVED, 0)
        logical, content = before.checkpoint, before.content
        if kind in ("baseline", "delta"):
            logical, content = logical + 1, number + 1
        elif kind == "compact":
            content = number + 1
        elif kind == "rollback":
            assert target is not None
            logical, content = self.versions[target].checkpoint, self.versions[target].content
        self.versions.append(Version(number, logical, content, ts_ms))

    def begin_branch(self, point: Version, ts_ms: int) -> None:
        """Version 0 of a branch shows what its fork point shows."""
        assert not self.versions
        self.versions.append(Version(0, point.checkpoint, 1, ts_ms))

    def is_live(self, version: int) -> bool:
        return version >= self.floor or version in self.kept or version in self.named

    def live(self) -> set[int]:
        return {one.number for one in self.versions if self.is_live(one.number)}

    def expire(self, rules: Rules, leased: Iterable[int], cursors: Iterable[int]) -> None:
        """A collection by these rules came to its end."""
        live, leased = self.live(), set(leased)
        passed = min(cursors, default=None)
        stretches = self.stretches(live)
        wanted = [stretches[-1], *self.newest_of_each_checkpoint(stretches)[: rules.keep_last]]
        for stretch in self.newest_of_each_checkpoint(stretches):
            if rules.keep_every and self.versions[stretch[0]].checkpoint % rules.keep_every == 0:
                wanted.append(stretch)
        for stretch in stretches:
            if rules.since_ms is not None and self.versions[stretch[-1]].ts_ms >= rules.since_ms:
                wanted.append(stretch)
            if passed is not None and stretch[-1] >= passed:
                wanted.append(stretch)
        stays = {version for stretch in wanted for version in stretch}
        # The floor is where the newest stays without a gap begin; below it one version stands for its neighbours.
        floor = self.head
        while floor - 1 in stays:
            floor -= 1
        floor = max(floor, self.floor)
        first = {stretch[0] for stretch in stretches}
        behind = set() if passed is None else {version for version in live if version >= passed}
        self.kept = {v for v in (stays & (first | behind)) | ((leased | self.named) & live) if v < floor}
        self.floor = floor

    def stretches(self, live: set[int]) -> list[list[int]]:
        """Neighbouring versions that show the same."""
        found: list[list[int]] = []
        for version in sorted(live):
            same = found and found[-1][-1] == version - 1
            if same and self.versions[version].content == self.versions[version - 1].content:
                found[-1].append(version)
            else:
                found.append([version])
        return found

    def newest_of_each_checkpoint(self, stretches: list[list[int]]) -> list[list[int]]:
        """Newest first; what was before the first save is no checkpoint."""
        newest: dict[int, list[int]] = {}
        for stretch in reversed(stretches):
            one = self.versions[stretch[0]]
            if one.content != NOTHING_SAVED:
                newest.setdefault(one.checkpoint, stretch)
        return list(newest.values())
