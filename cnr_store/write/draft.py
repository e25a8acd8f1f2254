"""The plan of a segment that is not written yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cnr_store.format.layout import segment_name
from cnr_store.format.records import CommitRecord

CommitKind = Literal["baseline", "delta"]


@dataclass(slots=True)
class SegmentDraft:
    """The kind, step and name of a new segment, and the number ``keep`` of chain segments that it follows.

    ``is_one_shot``: whether it takes the place of deltas. ``step`` alone may change.
    """

    kind: CommitKind
    step: int
    txn: str
    segment: str
    keep: int
    l0: int
    is_one_shot: bool

    @classmethod
    def after(cls, head: CommitRecord, kind: CommitKind, *, step: int, txn: str, one_shot: bool) -> SegmentDraft:
        """Return the draft of a segment after ``head``: a delta after its last segment or its baseline."""
        is_delta = kind == "delta"
        keep = 0 if not is_delta else 1 if one_shot else len(head.chain)
        l0 = head.chain[keep - 1].l1 if is_delta else 0
        is_one_shot = is_delta and keep < len(head.chain)
        return cls(kind, step, txn, segment_name(head.v, txn), keep, l0, is_one_shot)
