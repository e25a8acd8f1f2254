"""Check the newest record: names refer to live versions, and no needed segment is marked for deletion."""

from __future__ import annotations

from collections.abc import Iterator

from cnr_store.errors import CorruptStore
from cnr_store.format import layout
from cnr_store.format.records import CommitRecord
from cnr_store.maintenance.verify.log import LogView
from cnr_store.maintenance.verify.report import Findings, Problem


def check_references(view: LogView, findings: Findings) -> None:
    """Report names of versions that do not exist, and marked transactions that a live version needs.

    A transaction that only another log needs may be marked here: it may have been marked before that log committed it.
    Its segment is never deleted, and the next collection removes the mark (spec, CNR-GC-8).
    """
    if view.head is None:
        return
    head = view.head.record
    wrong = "; ".join(_dangling(head, set(view.superseded)))
    if wrong:
        findings.add(Problem(CorruptStore.kind, view.key(head.v), (), wrong))
    for segment in sorted(view.users):
        txn = segment.rpartition("-")[2]
        if txn in head.aborted:
            message = (
                f"the head marks transaction {txn} for deletion, but live versions need its segment; repair this "
                "before the next garbage collection"
            )
            key = layout.segment_key(segment, layout.MANIFEST)
            findings.add(Problem(CorruptStore.kind, key, view.versions_of(segment), message))


def _dangling(head: CommitRecord, superseded: set[int]) -> Iterator[str]:
    """Yield the names that refer to superseded or expired versions. Pure."""
    expired = set(head.expired)
    named = [(f"tag {name!r}", version) for name, version in sorted(head.tags.items())]
    named += [(f"channel {name!r}", version) for name, version in sorted(head.channels.items())]
    named += [(f"the pin of branch {pin.name!r}", pin.version) for _, pin in sorted(head.pins.items())]
    named += [("the list of kept versions", version) for version in head.kept]
    for what, version in named:
        if version in superseded:
            yield f"{what} names version {version}, which does not exist; the head is {head.v}"
        elif version in expired:
            yield f"{what} names version {version}, which has expired"
