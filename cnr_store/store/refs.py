"""Change tags, channels, branches and the head: each change reads the newest record and appends one."""

from __future__ import annotations

from typing import Any

from cnr_store.errors import BadInput, TagExists
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry
from cnr_store.log import beginning, branches
from cnr_store.log.author import writer_info
from cnr_store.log.branches import Branch
from cnr_store.log.clock import wall_ms
from cnr_store.log.commit_log import Rebase
from cnr_store.log.rebase import draft_after, rebase_channel, rebase_rollback, rebase_tag, rebase_untag
from cnr_store.runtime.arguments import checked_count, checked_number, checked_text
from cnr_store.store.internals import StoreInternals
from cnr_store.store.versions import Versions, version_of_channel, version_of_tag

MAX_EXPIRES_S = 10**10


class Refs:
    """Changes tags, channels and the head of one log, and forks branches. Blocks; a few requests per call.

    Unless documented otherwise, a method returns the version of the record that it appended.
    """

    def __init__(self, internals: StoreInternals, versions: Versions) -> None:
        self._internals = internals
        self._versions = versions

    def tag(self, name: str, version: int | None) -> int:
        """See `Store.tag`."""
        layout.check_name(checked_text("a tag", name))
        head = self._internals.settled_head()
        target = self._versions.live(head, version).record.v
        if name in head.record.channels:
            raise TagExists(f"{name!r} is a channel; choose another tag name", version=head.record.channels[name])
        if head.record.tags.get(name, target) != target:
            raise TagExists(
                f"tag {name!r} points to version {head.record.tags[name]}; a tag cannot be moved, untag it first",
                version=head.record.tags[name],
            )
        tags = {**head.record.tags, name: target}
        return self._append(head, "tag", rebase_tag, name=name, target=target, tags=tags)

    def untag(self, name: str) -> int:
        """See `Store.untag`."""
        head = self._internals.settled_head()
        version_of_tag(head.record, name)
        tags = {key: value for key, value in head.record.tags.items() if key != name}
        return self._append(head, "untag", rebase_untag, name=name, tags=tags)

    def set_channel(self, name: str, version: int | None) -> int:
        """See `Store.set_channel`."""
        layout.check_name(checked_text("a channel", name))
        head = self._internals.settled_head()
        target = self._versions.live(head, version).record.v
        if name in head.record.tags:
            raise TagExists(f"{name!r} is a tag; choose another channel name", version=head.record.tags[name])
        channels = {**head.record.channels, name: target}
        return self._append(head, "channel", rebase_channel, name=name, target=target, channels=channels)

    def drop_channel(self, name: str) -> int:
        """See `Store.drop_channel`."""
        head = self._internals.settled_head()
        version_of_channel(head.record, name)
        channels = {key: version for key, version in head.record.channels.items() if key != name}
        return self._append(head, "channel", rebase_channel, name=name, channels=channels)

    def rollback(self, version: int) -> int:
        """See `Store.rollback`."""
        head = self._internals.settled_head()
        target = self._versions.live(head, checked_count("a version", version, least=None)).record
        return self._append(
            head, "rollback", rebase_rollback,
            target=target.v, chain=target.chain, checkpoint=target.checkpoint, step=target.step,
        )  # fmt: skip

    def fork(self, name: str, version: int | None, ttl_s: float | None) -> Branch:
        """See `Store.fork`."""
        internals = self._internals
        if internals.branch is not None:
            raise BadInput(
                f"{internals.place} cannot be forked: only versions of the store's own log can; fork one of those",
                found=internals.branch.name,
            )
        layout.check_name(checked_text("a branch", name))
        if ttl_s is not None:
            checked_number("ttl_s", ttl_s, above=0, most=MAX_EXPIRES_S)
        head = internals.settled_head()
        point = self._versions.live(head, version)
        expires_ms = None if ttl_s is None else wall_ms() + int(1000 * ttl_s)
        return branches.fork(internals.main, head, point, name, writer_info(), expires_ms=expires_ms)

    def drop_branch(self, name: str) -> None:
        """See `Store.drop_branch`."""
        self._internals.check_not_relay()
        beginning.check_begun(self._internals.storage)
        main = self._internals.main
        branches.close_branch(main, branches.find_branch(main.latest().record, name).uuid, writer_info())

    def _append(self, head: LogEntry, kind: Any, rebase: Rebase, **changes: Any) -> int:
        draft = draft_after(head.record, kind, writer_info(), **changes)
        return self._internals.log.append(head, draft, rebase).record.v
