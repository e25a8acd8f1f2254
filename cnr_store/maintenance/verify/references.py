"""What the newest record says about versions and transactions: it names what is there, and gives up nothing needed."""

from __future__ import annotations

from collections.abc import Iterator

from cnr_store.errors import CorruptStore
from cnr_store.format import layout
from cnr_store.format.records import CommitRecord
from cnr_store.maintenance.verify.log import LogView
from cnr_store.maintenance.verify.report import Findings, Problem


def check_references(view: LogView, findings: Findings) -> None:
    """Add what the head names although it is not there, and what it gives up although a live version needs it.

    What only another log of the store needs may have been named before that log committed it, and is never deleted: the
    next collection takes the name back (spec, CNR-GC-8).
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
                f"the head names transaction {txn} as one that may be deleted, but live versions need its segment; "
                "run no garbage collection before that is put right"
            )
            key = layout.segment_key(segment, layout.MANIFEST)
            findings.add(Problem(CorruptStore.kind, key, view.versions_of(segment), message))


def _dangling(head: CommitRecord, superseded: set[int]) -> Iterator[str]:
    """What is said of versions that do not exist, or exist no more. Pure."""
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
