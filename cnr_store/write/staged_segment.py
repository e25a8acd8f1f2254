"""One rank's share of a segment: all data that a transaction was given, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping

from cnr_store.format.layout import writer_folder
from cnr_store.format.records import Manifest, Receipt
from cnr_store.segment.writer import SegmentWriter
from cnr_store.types import JsonValue
from cnr_store.write.argument_checks import check_json
from cnr_store.write.draft import SegmentDraft
from cnr_store.write.part_layout import PartWriter
from cnr_store.write.schema_changes import SchemaChanges
from cnr_store.write.staged_documents import StagedDocuments
from cnr_store.write.staged_tables import StagedTables
from cnr_store.write.writer_state import WriterState


class StagedSegment:
    """What a commit needs of one transaction, on this rank. The transaction fills it, `Commit` writes it.

    Attributes
    ----------
    draft
        What the segment will be.
    schemas, tables, documents
        What was declared and given.
    """

    def __init__(self, state: WriterState, draft: SegmentDraft) -> None:
        setup = state.setup
        self._state = state
        self._attempt = draft.txn[:8]
        out = SegmentWriter(
            setup.storage, draft.segment, folder=writer_folder(setup.ranks.rank, self._attempt),
            workers=setup.workers, throttle=setup.throttle,
        )  # fmt: skip
        self._parts = PartWriter(out)
        self.draft = draft
        self.schemas = SchemaChanges(state, draft)
        self.tables = StagedTables(state, draft, self.schemas, self._parts)
        self.documents = StagedDocuments(state)

    @property
    def base_manifest(self) -> Manifest | None:
        """The manifest that the segment is a delta to."""
        if self.draft.kind == "baseline" or self._state.snapshot is None:
            return None
        return self._state.snapshot.manifests[self.draft.keep - 1]

    def check_complete(self, user: Mapping[str, JsonValue] | None) -> None:
        """Raise `BadInput` if the commit lacks something."""
        self.tables.check_complete()
        check_json("user", user or {})

    def write(self) -> tuple[Receipt, str | None]:
        """Put this rank's objects and return their receipt, and its sha256 if it was put: rank 0 puts none. Blocks."""
        ranks, out = self._state.setup.ranks, self._parts.out
        base = self.base_manifest
        parts = self.tables.write_parts(base)
        self.documents.write(self._parts, base)
        receipt = out.finish(
            txn=self.draft.txn, rank=ranks.rank, world=ranks.world, attempt=self._attempt,
            base=self._state.head.record.v, l0=self.draft.l0, parts=parts,
        )  # fmt: skip
        # Rank 0 commits, and only it would read its own receipt: the manifest has everything.
        return receipt, out.put_receipt(receipt) if ranks.rank > 0 else None
