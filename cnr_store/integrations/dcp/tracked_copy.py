"""A tracked table, or a slot of one, in a staged state dict: DCP plans it like the live tensor, and never reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from cnr_store.integrations.dcp.row_marks import TakenMarks
from cnr_store.types import RowIds


class TrackedCopy(torch.Tensor):
    """Stands for a live tensor of this rank: plain, or a DTensor, whose shape and dtype it has.

    Attributes
    ----------
    taken
        The marks that were taken when it was staged.
    row_ids
        int64, ascending, local to the rank's shard: the rows that were copied. None: all of them.
    """

    taken: TakenMarks
    row_ids: RowIds | None
    _items: list[WriteItem]
    _read: Callable[[], torch.Tensor]
    _lease: object

    @staticmethod
    def __new__(
        cls: type[TrackedCopy],
        live: torch.Tensor,
        taken: TakenMarks,
        row_ids: RowIds | None,
        read: Callable[[], torch.Tensor],
        lease: object,
    ) -> TrackedCopy:
        """Make one; ``read`` returns its host copy, and ``lease`` keeps that copy's memory."""
        made = torch.Tensor._make_wrapper_subclass(cls, live.shape, dtype=live.dtype, device=torch.device("cpu"))
        made.taken, made.row_ids, made._read, made._lease = taken, row_ids, read, lease
        made._items = _write_items(live)
        return made

    @property
    def rows(self) -> torch.Tensor:
        """The copied rows, (n, ...) on the host. Blocks until they have arrived."""
        return self._read()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return DCP's plan of the live tensor."""
        return [replace(item, index=MetadataIndex(fqn, item.index.offset, item.index.index)) for item in self._items]

    def __get_tensor_shard__(self, _: MetadataIndex) -> TrackedCopy:
        """Return itself: the rank has one shard of it."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TrackedCopy({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuse every operation: there is nothing to compute with."""
        raise TypeError(f"{func} on a table that CnrStager has staged: only CnrStorageWriter can read it")


def _write_items(live: torch.Tensor) -> list[WriteItem]:
    make = getattr(live, "__create_write_items__", None)
    if make is not None:
        return list(make("", live))
    origin = torch.Size([0] * live.ndim)
    data = TensorWriteData(ChunkStorageMetadata(origin, live.shape), TensorProperties(dtype=live.dtype), live.shape)
    return [WriteItem(MetadataIndex("", origin), WriteItemType.TENSOR, tensor_data=data)]
