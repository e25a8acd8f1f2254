"""The storage reader of `torch.distributed.checkpoint`: `dcp.load` of any version of a store, in any shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cnr_store.errors import BadDtype
from cnr_store.integrations.dcp.values import LAYOUT_DOCUMENT, as_dcp_bytes, from_leaf, values_document
from cnr_store.integrations.dcp.writer import step_of
from cnr_store.read.snapshot import Snapshot
from cnr_store.store import Store
from cnr_store.training.tensors import as_array, as_tensor, windows, writable_array
from cnr_store.types import Rectangle

_VALUES = values_document(0).rstrip("0")


@dataclass(slots=True)
class StoredState:
    """What a version has, by the names of the state dict.

    Attributes
    ----------
    tensors
        Name to (table, slot), slot None for the values; to (None, name) for a dense tensor.
    values
        What is no tensor.
    planner_data
        What the planner of the save left; None for versions that DCP did not save.
    """

    snapshot: Snapshot
    tensors: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    planner_data: Any = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> StoredState:
        """Read the names of a version: one small object or two. Blocks."""
        found = cls(snapshot)
        documents = snapshot.documents
        layout = snapshot.read_document(LAYOUT_DOCUMENT, from_leaf) if LAYOUT_DOCUMENT in documents else {}
        found.planner_data = layout.get("planner_data")
        for name in documents:
            if name.startswith(_VALUES):
                found.values |= snapshot.read_document(name, from_leaf)
        found.tensors = {name: (None, name) for name in snapshot.dense}
        found.tensors |= {name: (name, None) for name, schema in snapshot.tables.items() if schema.keys == "dense"}
        found.tensors |= {name: (table, slot) for name, (table, slot) in layout.get("slots", {}).items()}
        return found

    def metadata_of(self, name: str) -> TensorStorageMetadata:
        """Return shape and dtype of a tensor, as one chunk: DCP then asks for exactly the boxes it needs."""
        table, slot = self.tensors[name]
        if table is None:
            entry = self.snapshot.dense[name]
            size, dtype = torch.Size(entry.shape), entry.dtype
        else:
            schema = self.snapshot.tables[table]
            shape: tuple[int, ...] = (schema.num_rows, schema.dim)
            if slot is not None and schema.slots[slot].kind == "row":
                shape = shape[:1]
            size, dtype = torch.Size(shape), schema.dtype if slot is None else schema.slots[slot].dtype
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), size, [chunk])


class CnrStorageReader(StorageReader):
    """Loads state dicts of DCP from a store. Also versions that a `CheckpointManager` saved, by the tables' names.

    Parameters
    ----------
    store
        A store, or its URL or path.
    version, step, tag, channel
        What is loaded, at most one of them; the newest version if none is given. ``checkpoint_id`` of `dcp.load`
        means the step at its end.
    allow_cast
        Whether a tensor may be loaded into one of another dtype.
    storage_options
        Passed to fsspec, with a URL.

    Raises
    ------
    NotAStore, StorageFailure
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        version: int | None = None,
        step: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        allow_cast: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = store if isinstance(store, Store) else Store.open(os.fspath(store), storage_options=storage_options)
        self._store = given
        self._which: dict[str, Any] = {"version": version, "step": step, "tag": tag, "channel": channel}
        self._allow_cast = allow_cast
        self._state: StoredState | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load the step at the end of ``checkpoint_id`` next.

        Raises
        ------
        BadInput
            It does not end with a number.
        """
        if checkpoint_id is not None:
            self._which = {"step": step_of(checkpoint_id)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Open the version and return what it has. Blocks; a few small objects.

        Raises
        ------
        VersionNotFound, VersionExpired, TagNotFound, CorruptStore, StorageFailure
        """
        self._state = state = StoredState.of(self._store.snapshot(**self._which))
        entries: dict[str, Any] = {name: state.metadata_of(name) for name in state.tensors}
        entries |= {name: BytesStorageMetadata() for name in state.values}
        return Metadata(
            entries, planner_data=state.planner_data, storage_data={"version": state.snapshot.version},
            storage_meta=StorageMeta(checkpoint_id=self._store.url),
        )  # fmt: skip

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the version."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which version this rank has opened."""
        return replace(plan, storage_data=self._opened.snapshot.version)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let all ranks read one version: a save may have come between their looks at the log."""
        oldest = min(plan.storage_data for plan in plans)
        return [replace(plan, storage_data=oldest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's boxes: values and slots of the same rectangle in one pass. Blocks until all is there.

        Raises
        ------
        BadDtype
            A destination has another dtype, and ``allow_cast`` is not set.
        CorruptStore, StorageFailure
            The tensors are undefined then.
        """
        if plan.storage_data != self._opened.snapshot.version:
            self._state = StoredState.of(self._store.snapshot(plan.storage_data))
        state = self._opened
        boxes: dict[tuple[str, Rectangle], dict[str | None, list[ReadItem]]] = {}
        dense: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, as_dcp_bytes(state.values[name]))
                continue
            table, slot = state.tensors[name]
            if table is None:
                dense.setdefault(name, []).append(item)
            elif all(item.lengths):
                place = _rectangle(item, state.snapshot.tables[table].dim)
                boxes.setdefault((table, place), {}).setdefault(slot, []).append(item)
        for (table, place), arrays in boxes.items():
            while arrays:  # mostly once: a state dict has a tensor twice where weights are tied
                self._read_box(table, place, {slot: items.pop() for slot, items in arrays.items()}, planner)
                arrays = {slot: items for slot, items in arrays.items() if items}
        for name, items in dense.items():
            whole = as_tensor(state.snapshot.read_dense(name), state.snapshot.dense[name].dtype)
            for item in items:
                target = self._target(item, planner, whole.dtype)
                box = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(whole[tuple(slice(start, start + length) for start, length in box)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id ends with a training step."""
        try:
            step_of(checkpoint_id)
        except ValueError:
            return False
        return True

    @property
    def _opened(self) -> StoredState:
        assert self._state is not None  # DCP calls read_metadata first
        return self._state

    def _target(self, item: ReadItem, planner: LoadPlanner, dtype: torch.dtype) -> torch.Tensor:
        """Return where an item goes, on any device."""
        target = planner.resolve_tensor(item).detach()
        if target.dtype != dtype and not self._allow_cast:
            name = item.storage_index.fqn
            raise BadDtype(
                f"tensor {name!r} is stored as {dtype}, and is loaded into {target.dtype}; make the model with the "
                "stored dtype, or pass allow_cast=True to CnrStorageReader",
                table=name, expected=str(dtype), found=str(target.dtype),
            )  # fmt: skip
        return target

    def _read_box(
        self, table: str, place: Rectangle, items: Mapping[str | None, ReadItem], planner: LoadPlanner
    ) -> None:
        """Read a rectangle of a table, its values (None) and slots, straight into host tensors of its dtype."""
        state = self._opened
        view = state.snapshot.table(table)
        schema = view.schema
        dtypes = {slot: getattr(torch, schema.dtype if slot is None else schema.slots[slot].dtype) for slot in items}
        targets = {slot: self._target(item, planner, dtypes[slot]) for slot, item in items.items()}
        direct = {slot: writable_array(one) for slot, one in targets.items() if one.dtype == dtypes[slot]}
        is_direct = len(direct) == len(targets) and all(array is not None for array in direct.values())
        row_bytes = sum(one[:1].numel() * dtypes[slot].itemsize for slot, one in targets.items())
        for start, stop in [(0, place.num_rows)] if is_direct else windows(place.num_rows, row_bytes):
            window = Rectangle((place.rows[0] + start, place.rows[0] + stop), place.columns)
            parts = {slot: one[start:stop] for slot, one in targets.items()}
            if not is_direct:
                parts = {
                    slot: torch.empty(part.shape, dtype=dtypes[slot], device="cpu") for slot, part in parts.items()
                }  # fmt: skip
            arrays = {slot: as_array(part) for slot, part in parts.items()}
            slots = {slot: array for slot, array in arrays.items() if slot is not None}
            view.read_rectangle(window, values=arrays.get(None), slots=slots)
            for slot, part in parts.items() if not is_direct else ():
                targets[slot][start:stop].copy_(part)
        for slot, item in items.items():
            planner.commit_tensor(item, targets[slot])


def _rectangle(item: ReadItem, dim: int) -> Rectangle:
    """Return the box of an item; of a slot with one value per row it is as wide as the table."""
    rows, *columns = zip(item.storage_offsets, item.lengths, strict=True)
    (start, width) = columns[0] if columns else (0, dim)
    return Rectangle((rows[0], rows[0] + rows[1]), (start, start + width))
