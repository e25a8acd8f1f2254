"""One rank's share of a segment: tables (`staged_tables`), dense tensors, scalars, documents; and where it is put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from cnr_store.errors import BadInput, TableNotFound
from cnr_store.format import document_tree
from cnr_store.format.documents import canonical_json, nests_deeper
from cnr_store.format.layout import check_name, check_names, is_rank_tensor, rank_tensor, writer_name
from cnr_store.format.limits import MAX_USER_NESTING
from cnr_store.format.manifest_state import is_same_tensor
from cnr_store.format.records import Manifest, Receipt
from cnr_store.segment.codes import Array
from cnr_store.segment.packs import check_dense_dtypes, tensor_digests
from cnr_store.segment.writer import SegmentWriter
from cnr_store.types import JsonValue
from cnr_store.write.schema_changes import SchemaChanges
from cnr_store.write.staged_tables import StagedTables
from cnr_store.write.writer_state import SegmentDraft, WriterState


class StagedDocuments:
    """Dense tensors, scalars and documents of one transaction. Errors are those of `Transaction`.

    Attributes
    ----------
    scalars
        Plain values of the manifest; those of rank 0 count.
    tensors
        The names of the dense tensors of the new state, but for those of other ranks; known on rank 0, once they are
        put.
    checks
        Called once all is put; each raises if a dense tensor that it stands for must not be committed.
    """

    def __init__(self, state: WriterState) -> None:
        self._state = state
        self.scalars: dict[str, JsonValue] = {}
        self.tensors: set[str] = set()
        self.checks: list[Callable[[], None]] = []
        self._given: dict[str, Array] = {}
        self._dtypes: dict[str, str] = {}
        self._dropped: set[str] = set()
        self._documents: dict[str, Any] = {}

    def put_dense(self, tensors: Mapping[str, Array], dtypes: Mapping[str, str]) -> None:
        """Take new values of dense tensors; nothing of the call if one of them is refused."""
        rank = self._state.setup.ranks.rank
        if rank > 0 and not all(name.startswith(rank_tensor(rank, "")) for name in tensors):
            self._refuse_unless_first("dense tensors")
        check_names(tensors)
        twice = sorted(tensors.keys() & (self._given.keys() | self._dropped))
        if twice:
            raise BadInput(f"dense tensor {twice[0]!r} was given twice, or dropped and given", found=twice[0])
        # Not ascontiguousarray, which turns a tensor without dimensions into one of shape (1,).
        arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        taken = {
            name: array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
            for name, array in arrays.items()
        }
        check_dense_dtypes(taken, dtypes)
        self._given.update(taken)
        self._dtypes.update({name: dtype for name, dtype in dtypes.items() if name in taken})

    def drop_dense(self, name: str) -> None:
        """End a dense tensor."""
        self._refuse_unless_first("dense tensors")
        snapshot = self._state.snapshot
        if snapshot is None or name not in snapshot.dense:
            raise TableNotFound(f"no dense tensor {name!r}", table=name)
        if name in self._given:
            raise BadInput(f"dense tensor {name!r} was given in this transaction", found=name)
        self._dropped.add(name)

    def put_scalars(self, scalars: Mapping[str, JsonValue]) -> None:
        """Take plain values."""
        self._refuse_unless_first("scalars")
        check_json("scalars", scalars)
        self.scalars.update(scalars)

    def put_document(self, name: str, value: Any, default: document_tree.Default | None) -> None:
        """Encode a document."""
        for part in name.split("/"):
            check_name(part)
        self._documents[name] = document_tree.encode(value, default)

    def write(self, out: SegmentWriter, base: Manifest | None) -> None:
        """Put documents and dense tensors, but for those of rank 0 and documents that ``base`` has with the same bytes.

        ``base``: the manifest that the segment is a delta to; None of a baseline.
        """
        if self._state.setup.ranks.rank == 0:
            self._write_dense(out, base)
        else:
            out.write_dense(self._given, self._dtypes)
        held = {} if base is None else base.documents
        for name, document in self._documents.items():
            out.write_document(name, document, held.get(name))

    def _write_dense(self, out: SegmentWriter, base: Manifest | None) -> None:
        """Put the tensors of the new state that ``base`` does not have: those given and those of earlier deltas."""
        before = self._state.snapshot
        earlier = {} if before is None or before.is_empty else before.dense
        held = {name: entry for name, entry in earlier.items() if not is_rank_tensor(name)}
        kept = {} if base is None else base.dense
        digests = tensor_digests(self._given, self._state.setup.workers)
        changed: dict[str, Array] = {}
        own = {dtype: dtype.name for dtype in {tensor.dtype for tensor in self._given.values()}}
        given = {name: (own[tensor.dtype], tensor.shape) for name, tensor in self._given.items()}
        dtypes = dict(self._dtypes)
        self.tensors = (self._given.keys() | held.keys()) - self._dropped
        for name in sorted(self.tensors):
            old = kept.get(name)
            if name in self._given:
                dtype, shape = given[name]
                now = digests[name], dtypes.get(name, dtype), shape
                if old is None or (old.digest, old.dtype, old.shape) != now:
                    changed[name] = self._given[name]
            elif before is not None and (old is None or not is_same_tensor(old, held[name])):
                changed[name] = before.read_dense(name)
                dtypes.setdefault(name, held[name].dtype)
        out.write_dense(changed, dtypes, digests)

    def _refuse_unless_first(self, what: str) -> None:
        if self._state.setup.ranks.rank > 0:
            raise BadInput(
                f"{what} are the same on every rank and saved by rank 0; this is rank {self._state.setup.ranks.rank}"
            )


def check_json(what: str, values: Mapping[str, JsonValue]) -> None:
    """Raise `BadInput` unless ``values`` can be stored as JSON, not nested too deep."""
    if nests_deeper(dict(values), MAX_USER_NESTING):
        raise BadInput(
            f"{what} nests deeper than {MAX_USER_NESTING} levels (or contains itself); flatten it, or save it as a "
            "document, which may nest 64",
            expected=MAX_USER_NESTING, found=what,
        )  # fmt: skip
    try:
        canonical_json(dict(values))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadInput(f"{what} cannot be stored as JSON: {error}", found=what) from error


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
        self._out = SegmentWriter(
            setup.storage, draft.segment, writer=writer_name(setup.ranks.rank, self._attempt),
            workers=setup.workers, throttle=setup.throttle,
        )  # fmt: skip
        self.draft = draft
        self.schemas = SchemaChanges(state, draft)
        self.tables = StagedTables(state, draft, self.schemas, self._out)
        self.documents = StagedDocuments(state)

    @property
    def base_manifest(self) -> Manifest | None:
        """The manifest that the segment is a delta to."""
        if self.draft.kind == "baseline" or self._state.snapshot is None:
            return None
        return self._state.snapshot.manifests[self.draft.keep - 1]

    @property
    def paths(self) -> list[str]:
        """The objects of rank 0, whose names become durable with the manifest's."""
        return self._out.paths

    def check_complete(self, user: Mapping[str, JsonValue] | None) -> None:
        """Raise `BadInput` if the commit lacks something."""
        self.tables.check_complete()
        check_json("user", user or {})

    def write(self) -> tuple[Receipt, str | None]:
        """Put this rank's objects and return their receipt, and its sha256 if it was put: rank 0 puts none. Blocks.

        The objects of rank 0 are not durable yet (`paths`).
        """
        ranks, out = self._state.setup.ranks, self._out
        base = self.base_manifest
        parts = self.tables.write_parts(base)
        self.documents.write(out, base)
        receipt = out.finish(
            txn=self.draft.txn, rank=ranks.rank, world=ranks.world, attempt=self._attempt,
            base=self.draft.base, l0=self.draft.l0, parts=parts,
            syncs=ranks.rank > 0,
        )  # fmt: skip
        for check in self.documents.checks:
            check()
        # Rank 0 commits, and only it would read its own receipt: the manifest has everything.
        return receipt, out.put_receipt(receipt) if ranks.rank > 0 else None
