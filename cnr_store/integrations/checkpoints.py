"""Saves a file of ``torch.save``, or a folder of DCP, as a version that a `CheckpointManager` resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cnr_store.errors import BadDtype
from cnr_store.integrations.dcp.folder import load_dcp
from cnr_store.integrations.torch_file import load_torch_file
from cnr_store.integrations.training_content import SavedOptimizer, TrainingContent, split_content
from cnr_store.store import Store
from cnr_store.training.document import RateDocument, TableRates, documents_of
from cnr_store.training.reader import reader_document, reader_name
from cnr_store.training.state import is_inline, optimizer_tensor_name
from cnr_store.training.tensors import as_array, dense_dtype_name, flat_rows, leaf_of, table_dtype_name
from cnr_store.transfer.importing import (
    ImportPlan,
    ImportProgress,
    ImportReport,
    check_planned,
    commit_import,
    plan_import,
)
from cnr_store.transfer.safetensors_file import Tensor, TensorFile
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu.optimizers import is_row_slot

__all__ = ["check_checkpoint", "import_checkpoint", "load_checkpoint"]


def load_checkpoint(
    path: str | Path,
    *,
    model: str | None = None,
    parameters: Sequence[str] | None = None,
    extras: Sequence[str] = (),
    reader: str | None = None,
) -> TrainingContent:
    """Return what a file of ``torch.save`` or a folder of DCP has of a training. Blocks.

    Nothing is unpickled: tensors and values are loaded as weights only. A file of ``torch.save`` is memory-mapped, a
    folder of DCP is read into host memory.

    Parameters
    ----------
    model
        The entry that has the model's tensors, with dots where it is nested; None takes the only one that has tensors
        besides the optimizers, or the one called ``model``, ``state_dict`` or ``model_state_dict``.
    parameters
        The names of the optimizers' parameters, in their order, one optimizer after the other: for files that number
        them, where the order and the shapes of the model's tensors leave a choice.
    extras
        Entries that the manager gets back as its ``extras=`` of the same names (schedulers, scalers).
    reader
        The entry with the state of the data loader, for the manager's ``reader=``.

    Raises
    ------
    NotFound
    BadInput
        It does not load as weights only; or it is not clear what is the model, or which parameters an optimizer has.
    BadDtype
        A tensor that a store does not support (complex, quantized, sparse, float8).
    Unsupported
        A DCP folder that was compressed by an extension of DCP.
    AccessDenied, StorageFailure
    """
    place = Path(path)
    content = load_dcp(place) if place.is_dir() else load_torch_file(place)
    found = split_content(content, model=model, parameters=parameters, extras=extras, reader=reader)
    for name, tensor in found.tensors.items():
        _dense(name, tensor)
    return found


def check_checkpoint(
    source: TrainingContent, *, tables: Sequence[str] | None = None, options: TableOptions | None = None
) -> None:
    """Raise if `import_checkpoint` cannot store a training in an empty store; as `check_import`."""
    planned = _plan(source, tables, options)
    check_planned(planned.file, planned.plan, options)


def import_checkpoint(
    store: Store,
    source: str | Path | TrainingContent,
    *,
    step: int | None = None,
    tables: Sequence[str] | None = None,
    options: TableOptions | None = None,
    replace: bool = False,
    progress: ImportProgress | None = None,
) -> ImportReport:
    """Commit a training as a ``baseline`` that `CheckpointManager.restore` resumes. Blocks.

    Optimizer state of tables becomes their slots; of other parameters it is stored as a manager stores it. What a
    resumed training does is equal to the last bit if ``options`` are `TableOptions.exact()`. Becomes the store's writer
    and fences another open one.

    Parameters
    ----------
    source
        A file of ``torch.save``, a folder of DCP, or what `load_checkpoint` returns.
    step
        The training step of the state; None uses the entry ``step`` or ``global_step``, or 0.
    tables
        Names or patterns of the parameters that are tables, by the model's names: those of the embeddings. None takes
        all float matrices of at least 1,000 rows.
    options
        How all tables are stored; None uses the defaults.
    replace
        Drop tables of the store's head that the source does not contain; without it they are an error.
    progress
        Called with (bytes done, total bytes) after each table.

    Raises
    ------
    TableNotFound, BadInput and its kinds, NotFound
        Nothing was committed.
    Conflict, CommitStateUnknown, StorageFailure
    """
    found = source if isinstance(source, TrainingContent) else load_checkpoint(source)
    planned = _plan(found, tables, options)
    report = commit_import(
        store, planned.file, planned.plan, step=found.step or 0 if step is None else step, options=options,
        scalars=found.scalars, documents=planned.documents, leaf=leaf_of, replace=replace, progress=progress,
    )  # fmt: skip
    return dataclasses.replace(report, ignored=found.ignored)


@dataclass(frozen=True, slots=True)
class _PlannedTraining:
    """Every tensor by the name in the store, which of them are tables and slots, and the manager's documents."""

    file: TensorFile
    plan: ImportPlan
    documents: dict[str, Any]


def _plan(
    found: TrainingContent, patterns: Sequence[str] | None, options: TableOptions | None
) -> _PlannedTraining:  # fmt: skip
    tensors = {name: _dense(name, value) for name, value in found.tensors.items()}
    tables = plan_import(TensorFile(tensors), patterns).tables
    slots: dict[str, dict[str, str]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    described = []
    for index, optimizer in enumerate(found.optimizers):
        small: dict[str, dict[str, Any]] = {}
        for name, state in optimizer.state.items():
            small[name] = {}
            for key, value in state.items():
                stored = optimizer_tensor_name(index, name, key)
                if name in tables and is_row_slot(value, found.tensors[name].shape):
                    tensors[stored] = Tensor(table_dtype_name(value, stored), as_array(flat_rows(value)))
                    slots.setdefault(name, {})[key] = stored
                    layouts.setdefault(name, {})[key] = _layout(value)
                elif is_inline(value):
                    small[name][key] = value
                else:
                    tensors[stored] = _dense(stored, value)
        described.append(_described(optimizer, small))
    used = {*tables.values(), *(name for of_table in slots.values() for name in of_table.values())}
    plan = ImportPlan(tables, slots, {}, tuple(name for name in tensors if name not in used))
    documents: dict[str, Any] = {}
    if described or found.extras:
        rate = RateDocument(tables=TableRates.by(dict.fromkeys(tables, options or TableOptions())))
        documents = documents_of(described, layouts, {}, found.extras, rate)
    if found.reader is not None:
        documents[reader_name(0)] = reader_document(None, found.reader)
    return _PlannedTraining(TensorFile(tensors), plan, documents)


def _described(optimizer: SavedOptimizer, small: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer as `document.optimizer_documents` does. The file does not say its class."""
    groups = [{"parameters": list(group.parameters), "options": group.options} for group in optimizer.groups]
    return {"class": "", "groups": groups, "state": small}


def _layout(slot: torch.Tensor) -> dict[str, Any]:
    layout = "strided" if slot.layout is torch.strided else "sparse"
    return {"shape": list(slot.shape), "layout": layout}


def _dense(name: str, value: torch.Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_quantized:
        raise BadDtype(
            f"tensor {name!r} is {value.layout} {value.dtype}, which a store does not support", found=str(value.layout)
        )
    dtype = dense_dtype_name(value, name)
    return Tensor(dtype, as_array(value))
