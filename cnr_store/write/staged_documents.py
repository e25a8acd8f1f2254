"""What a transaction saves beside tables: dense tensors, scalars, documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cnr_store.errors import BadInput, TableNotFound
from cnr_store.format import document_tree
from cnr_store.format.layout import check_name
from cnr_store.format.packed import pack
from cnr_store.format.records import Manifest
from cnr_store.segment.codes import Array
from cnr_store.segment.writer import check_dense_dtype
from cnr_store.storage import object_digest
from cnr_store.types import JsonValue
from cnr_store.write.argument_checks import check_json
from cnr_store.write.part_layout import DenseTensors, PartWriter
from cnr_store.write.writer_state import WriterState


class StagedDocuments:
    """Dense tensors, scalars and documents of one transaction. Methods raise what those of `Transaction` say.

    Attributes
    ----------
    scalars
        Plain values of the manifest; those of rank 0 count.
    tensors
        The names of the dense tensors of the new state; known on rank 0, once they are put.
    """

    def __init__(self, state: WriterState) -> None:
        self._state = state
        self.scalars: dict[str, JsonValue] = {}
        self.tensors: set[str] = set()
        self._dense = DenseTensors()
        self._documents: dict[str, Any] = {}

    def put_dense(self, tensors: Mapping[str, Array], dtypes: Mapping[str, str]) -> None:
        """Take new values of dense tensors; nothing of the call if one of them is refused."""
        self._refuse_unless_first("dense tensors")
        taken: dict[str, Array] = {}
        for name, tensor in tensors.items():
            check_name(name)
            if name in self._dense.given or name in self._dense.dropped:
                raise BadInput(f"dense tensor {name!r} was given twice, or dropped and given", found=name)
            # Not ascontiguousarray, which turns a tensor without dimensions into one of shape (1,).
            array = np.asarray(tensor, order="C")
            taken[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
            check_dense_dtype(name, taken[name].dtype, dtypes.get(name))
        self._dense.given.update(taken)
        self._dense.dtypes.update({name: dtype for name, dtype in dtypes.items() if name in taken})

    def drop_dense(self, name: str) -> None:
        """End a dense tensor."""
        self._refuse_unless_first("dense tensors")
        snapshot = self._state.snapshot
        if snapshot is None or name not in snapshot.dense:
            raise TableNotFound(f"no dense tensor {name!r}", table=name)
        if name in self._dense.given:
            raise BadInput(f"dense tensor {name!r} was given in this transaction", found=name)
        self._dense.dropped.add(name)

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

    def write(self, parts: PartWriter, base: Manifest | None) -> None:
        """Put documents and, on rank 0, dense tensors, but for those that ``base`` has with the same bytes.

        ``base``: the manifest that the segment is a delta to; None of a baseline.
        """
        if self._state.setup.ranks.rank == 0:
            self.tensors = parts.write_dense(self._dense, self._state.snapshot, base)
        held = {} if base is None else base.documents
        for name, document in self._documents.items():
            data = pack(document)
            old = held[name].object if name in held else None
            if old is not None and (old.size, old.xxh3_128) == (len(data), object_digest(data)):
                parts.out.keep_document(name)
            else:
                parts.out.write_document(name, data)

    def _refuse_unless_first(self, what: str) -> None:
        if self._state.setup.ranks.rank > 0:
            raise BadInput(
                f"{what} are the same on every rank and saved by rank 0; this is rank {self._state.setup.ranks.rank}"
            )
