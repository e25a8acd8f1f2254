"""Decides from records which version a loader should serve, and the plan that leads there. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cnr_store.errors import BadInput, BranchNotFound, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import CommitRecord
from cnr_store.log.rebase import leaves_state
from cnr_store.runtime.arguments import checked_count
from cnr_store.serving.update.update_plan import UpdatePlan, follows_directly, plan_path, plan_update
from cnr_store.store.versions import version_of_channel, version_of_tag


@dataclass(frozen=True, slots=True)
class ServeTarget:
    """What a loader should serve: a version, the version of a tag or a channel, or, without these, the newest one.

    Raises
    ------
    BadInput
        More than one is given, or the version is no whole number.
    """

    version: int | None = None
    tag: str | None = None
    channel: str | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.version, self.tag, self.channel) if value is not None]
        if len(given) > 1:
            raise BadInput("give at most one of version, tag and channel", found=len(given))
        if self.version is not None:
            checked_count("a version", self.version, least=None)

    @property
    def is_newest(self) -> bool:
        """Whether every new version is wanted."""
        return self.version is None and self.tag is None and self.channel is None


def wanted_version(target: ServeTarget, newest: CommitRecord) -> int:
    """Return the version that the target means, by the newest record that is known.

    Raises
    ------
    BranchNotFound
        The record ends the branch.
    TagNotFound, ChannelNotFound, VersionNotFound
    VersionExpired
        The data of the version may be gone.
    """
    if newest.kind == "close":
        raise BranchNotFound(f"the branch was dropped by its record {newest.v}; fork another", version=newest.v)
    version = newest.v
    if target.version is not None:
        version = target.version
    elif target.tag is not None:
        version = version_of_tag(newest, target.tag)
    elif target.channel is not None:
        version = version_of_channel(newest, target.channel)
    if not 0 <= version <= newest.v:
        raise VersionNotFound(f"there is no version {version}; the newest is {newest.v}", version=version)
    if not is_live(newest, version):
        raise VersionExpired(
            f"version {version} has expired; the floor is {newest.floor}: take that or a newer one; tags, channels and "
            "cursors keep versions",
            version=version,
        )
    return version


def repeats(entry: LogEntry, refused: LogEntry) -> bool:
    """Return whether ``entry`` has the state of ``refused``: a refused state is not checked again."""
    if entry.digest == refused.digest:
        return True
    if entry.record.chain and entry.record.chain == refused.record.chain:
        return True
    return follows_directly(refused, entry) and leaves_state(entry.record)


def plan_between(present: LogEntry, target: LogEntry, known: Sequence[LogEntry]) -> UpdatePlan:
    """Return how the state of ``present`` becomes that of ``target``, by way of the records between them.

    Parameters
    ----------
    known
        Records that were read, oldest first; of any number of them, gaps do no harm.
    """
    between = [entry for entry in known if present.record.v < entry.record.v < target.record.v]
    return plan_path([present, *between, target]) if between else plan_update(present, target)
