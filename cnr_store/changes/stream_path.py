"""Decides from records how the consumed state becomes that of the next record. No I/O."""

from __future__ import annotations

from typing import Literal

from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import CommitRecord
from cnr_store.serving.update.update_plan import Apply, Compare, Same, UpdatePlan, plan_path, plan_update

Step = Literal["report", "same", "expired"]
"""What happens to a record: it is reported, has the consumed state, or expired and is skipped."""


class StreamPath:
    """The record whose state a consumer has, and the expired records after it, which were not reported.

    ``has_changed``: whether one of these has another state than the consumer.
    """

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self.has_changed = False

    def __bool__(self) -> bool:
        """Whether the consumer has a state."""
        return bool(self._entries)

    @property
    def consumed(self) -> LogEntry:
        """The record whose state the consumer has."""
        return self._entries[0]

    @property
    def newest(self) -> LogEntry:
        """The last record of the path; the next one is read after it."""
        return self._entries[-1]

    def restart(self, entry: LogEntry) -> None:
        """Start at a record whose state the consumer has."""
        self._entries, self.has_changed = [entry], False

    def take(self, entry: LogEntry, newest: CommitRecord) -> Step:
        """Classify the record directly after the path; add it to the path unless it is to be reported."""
        step = plan_update(self.newest, entry)
        if not is_live(newest, entry.record.v):
            self.pass_by(entry, is_same=isinstance(step, Same))
            return "expired"
        is_same = isinstance(plan_path([*self._entries, entry]) if self.has_changed else step, Same)
        if not is_same:
            return "report"
        self.restart(entry)
        return "same"

    def pass_by(self, entry: LogEntry, *, is_same: bool = False) -> None:
        """Add a record that is not reported."""
        self._entries.append(entry)
        self.has_changed = self.has_changed or not is_same

    def plans_to(self, target: LogEntry) -> list[UpdatePlan]:
        """Return plans from the consumed state to the target's, the best first; the last needs the two ends only."""
        if not self._entries:
            return [Compare()]
        between_ends = plan_update(self.consumed, target)
        if isinstance(between_ends, Apply):  # of the target's own segments, which stay as long as it does
            return [between_ends]
        by_path = plan_path([*self._entries, target])
        return [between_ends] if by_path == between_ends else [by_path, between_ends]
