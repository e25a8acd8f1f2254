"""How the state that a consumer has becomes that of the next record: kept and decided from records. No I/O."""

from __future__ import annotations

from typing import Literal

from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import CommitRecord
from cnr_store.serving.update.update_plan import Apply, Compare, Same, UpdatePlan, plan_path, plan_update

Step = Literal["told", "same", "expired"]
"""What a record is to a consumer: its changes are told, its state is the one consumed, or it is passed by."""


class StreamPath:
    """The record whose state a consumer has, and those behind it that have expired and were not told."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._has_changed = False

    def __bool__(self) -> bool:
        """Whether the consumer has a state."""
        return bool(self._entries)

    @property
    def held(self) -> LogEntry:
        """The record whose state the consumer has."""
        return self._entries[0]

    @property
    def newest(self) -> LogEntry:
        """The last record of the path; the next one is read behind it."""
        return self._entries[-1]

    @property
    def has_changed(self) -> bool:
        """Whether a record that was passed by has another state than the consumer."""
        return self._has_changed

    def restart(self, entry: LogEntry) -> None:
        """Begin at a record whose state the consumer has."""
        self._entries, self._has_changed = [entry], False

    def take(self, entry: LogEntry, newest: CommitRecord) -> Step:
        """Say what the record directly behind the path is, and take it into the path unless it is to be told."""
        step = plan_update(self.newest, entry)
        if not is_live(newest, entry.record.v):
            self.pass_by(entry, is_same=isinstance(step, Same))
            return "expired"
        is_same = isinstance(plan_path([*self._entries, entry]) if self._has_changed else step, Same)
        if not is_same:
            return "told"
        self.restart(entry)
        return "same"

    def pass_by(self, entry: LogEntry, *, is_same: bool = False) -> None:
        """Take a record that is not told."""
        self._entries.append(entry)
        self._has_changed = self._has_changed or not is_same

    def ways_to(self, target: LogEntry) -> list[UpdatePlan]:
        """Return how the state consumed becomes the target's, the best way first; the last needs only the two ends."""
        if not self._entries:
            return [Compare()]
        between_ends = plan_update(self.held, target)
        if isinstance(between_ends, Apply):  # of the target's own segments, which stay as long as it does
            return [between_ends]
        by_path = plan_path([*self._entries, target])
        return [between_ends] if by_path == between_ends else [by_path, between_ends]
