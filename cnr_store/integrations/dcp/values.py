"""Items of a state dict that are no tensors: plain values in documents of the store, never pickles."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from cnr_store.errors import BadInput
from cnr_store.format.document_tree import TensorLeaf
from cnr_store.training.tensors import leaf_of, tensor_of

LAYOUT_DOCUMENT = "dcp/layout"
_BUFFER = "io.BytesIO"


def values_document(rank: int) -> str:
    """Return the name of the document that has the values which a rank saved."""
    return f"dcp/values/{rank}"


def plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the value of an item that is no tensor. A document takes numbers, text, bytes, arrays, dicts and lists.

    Raises
    ------
    BadInput
        A planner of your own gave a pickle of something else.
    """
    lookup = getattr(planner, "lookup_object", None)  # of the default planner and those derived from it
    if lookup is not None:
        return lookup(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)  # DCP's contract for such items
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise BadInput(
            f"item {item.index.fqn!r} of the state dict is no plain value ({str(error).splitlines()[0][:200]}); save "
            "its plain content instead (numbers, text, lists, dicts and tensors), or leave it out",
            table=item.index.fqn,
        ) from error


def to_leaf(value: Any) -> TensorLeaf | None:
    """Return a tensor or an ``io.BytesIO`` as the leaf of a document; None for anything else."""
    if isinstance(value, io.BytesIO):
        return TensorLeaf(np.frombuffer(value.getvalue(), np.uint8), _BUFFER)
    return leaf_of(value)


def from_leaf(leaf: TensorLeaf) -> Any:
    """Return what `to_leaf` was given."""
    return io.BytesIO(leaf.array.tobytes()) if leaf.kind == _BUFFER else tensor_of(leaf)


def as_dcp_bytes(value: Any) -> io.BytesIO:
    """Return a value as DCP's planners take it; made here, of plain values: nothing of a store is unpickled."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
