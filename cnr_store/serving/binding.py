"""Serves tables in a module's tensors. Besides `sinks`, this is the only module of the room that needs torch.

A parameter on the CPU with the dtype of its table adopts the base rows as its memory, so that there is one copy. For
all others the changed rows are copied. A loader does this in `Loader.apply` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from cnr_store.errors import BadDtype, BadInput, BadShape, TableNotFound
from cnr_store.format.records import DenseEntry
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.threads import windows
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.served_table import RowKind, ServedTable
from cnr_store.serving.rows.tensors import tensor_of
from cnr_store.types import RowIds
from cnr_store_gpu.streams import wait_for_streams

WINDOW_BYTES = 64 * 1024 * 1024
"""Bytes of rows on their way to another device or dtype at a time."""

_SERVED_AS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.uint8}


class ModuleBinding:
    """The tensors of a module that are served, each with the table or the dense tensor that it shows.

    They take no gradients from then on: what is served is not trained.

    Parameters
    ----------
    module
        Its ``state_dict`` names its tensors.
    names
        Name in the module to name in the store; what it lacks has the same name in both.
    tables
        What is served now; a tensor of such a name shows the table.
    dense
        The dense tensors that are served now.

    Raises
    ------
    TableNotFound
        A tensor of the module is neither a table nor a dense tensor of the version.
    BadInput, BadShape, BadDtype
        It cannot show what it should.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[str, str] | None,
        tables: Mapping[str, ServedTable],
        dense: Mapping[str, DenseEntry],
    ) -> None:
        names = dict(names or {})
        self._module = module
        tensors: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        unknown = sorted(names.keys() - tensors.keys())
        if unknown:
            raise BadInput(
                f"the module has no tensors {some_of(unknown)}; it has {some_of(tensors, unknown[0])}",
                found=unknown,
            )
        stored = {name: names.get(name, name) for name in tensors}
        self._tables = {name: at for name, at in stored.items() if at in tables}
        self._dense = {name: at for name, at in stored.items() if at not in tables and at in dense}
        missing = sorted(stored.keys() - self._tables.keys() - self._dense.keys())
        if missing:
            raise TableNotFound(
                f"the version has nothing for the module's {missing}; map them by names=; it has tables "
                f"{some_of(tables)} and dense tensors {some_of(dense)}",
                table=stored[missing[0]], found=missing,
            )  # fmt: skip
        self._adopted: dict[str, Array] = {}
        self.check(tables, dense)
        for tensor in tensors.values():
            # A step of an optimizer would be written to rows that are served, and later differences added to it.
            tensor.requires_grad_(False)

    def check(self, tables: Mapping[str, ServedTable], dense: Mapping[str, DenseEntry]) -> None:
        """Refuse a version that the module cannot show. No I/O.

        Raises
        ------
        TableNotFound, BadInput, BadShape, BadDtype
        """
        tensors = self._module.state_dict(keep_vars=True)
        for name, at in self._tables.items():
            if at not in tables:
                raise TableNotFound(f"the version has no table {at!r}, which the module shows as {name!r}", table=at)
            _check_table(name, tensors[name], tables[at])
        for name, at in self._dense.items():
            entry = dense.get(at)
            if entry is None:
                raise TableNotFound(f"the version has no tensor {at!r}, which the module shows as {name!r}", table=at)
            if tuple(entry.shape) != tuple(tensors[name].shape):
                raise BadShape(
                    f"dense tensor {at!r} has shape {tuple(entry.shape)}, the module's {name!r} has "
                    f"{tuple(tensors[name].shape)}",
                    table=at, expected=tuple(tensors[name].shape), found=tuple(entry.shape),
                )  # fmt: skip

    def show(
        self,
        tables: Mapping[str, ServedTable],
        changed: Mapping[str, RowIds | None],
        dense: Mapping[str, Array],
        entries: Mapping[str, DenseEntry],
        changed_dense: Iterable[str],
    ) -> None:
        """Make the module's tensors those of a view; blocks until the rows are there, on other devices too.

        Parameters
        ----------
        tables
            The view's tables; those of adopted parameters have no overlay.
        changed
            Table to its changed rows (those that are no longer in the table included), or None for all of them.
        dense, entries
            The view's dense tensors.
        changed_dense
            Those that changed.
        """
        tensors = self._module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, at in self._tables.items():
                table = tables[at]
                if _is_adoptable(tensors[name], table):
                    assert table.overlay is None, "an adopted parameter is the base rows, so overlays are merged first"
                    self._adopt(name, tensors[name], table)
                elif at in changed or name in self._adopted:
                    self._adopted.pop(name, None)
                    _copy_rows(tensors[name], table, changed.get(at))
            moved = set(changed_dense)
            for name, at in self._dense.items():
                if at in moved:
                    # A copy: torch shares no memory that may not be written.
                    tensors[name].copy_(tensor_of(dense[at].copy(), entries[at].dtype))
        wait_for_streams(tensors.values())  # lookups may run on another stream

    def _adopt(self, name: str, tensor: torch.Tensor, table: ServedTable) -> None:
        rows = table.base.rows
        if self._adopted.get(name) is not rows:
            shared = tensor_of(rows, table.kind.served)
            tensor.data = shared.reshape(tensor.shape)
            self._adopted[name] = rows


def _check_table(name: str, tensor: torch.Tensor, table: ServedTable) -> None:
    base, kind = table.base, table.kind
    if base.is_keyed:
        raise BadInput(
            f"table {table.name!r} is found by key, and the module's {name!r} has rows by position; look its rows up",
            table=table.name,
        )
    if kind.served == "int8" or not tensor.dtype.is_floating_point:
        raise BadDtype(
            f"table {table.name!r} is served as {kind.served}, the module's {name!r} is {tensor.dtype}: only floats "
            "can be bound", table=table.name, expected="floats", found=str(tensor.dtype),
        )  # fmt: skip
    if tensor.is_meta:
        raise BadInput(f"the module's {name!r} has no memory; call module.to_empty(device=...) first", table=table.name)
    expected = (base.stop - base.start, kind.dim)
    if tuple(tensor.shape) != expected:
        raise BadShape(
            f"{expected[0]} rows of {expected[1]} of table {table.name!r} are served, the module's {name!r} has shape "
            f"{tuple(tensor.shape)}; build the module again",
            table=table.name, expected=expected, found=tuple(tensor.shape),
        )  # fmt: skip


def _is_adoptable(tensor: torch.Tensor, table: ServedTable) -> bool:
    """Whether the base rows can be the tensor's memory: as they are, and no part of what other tensors see."""
    kind: RowKind = table.kind
    return (
        kind.kept_as == "values"
        and not table.base.is_keyed
        and _SERVED_AS[kind.served] == tensor.dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _copy_rows(tensor: torch.Tensor, table: ServedTable, rows: RowIds | None) -> None:
    """Copy rows of a table, all of them if None, to where the tensor is, by windows."""
    start, stop, kind = table.base.start, table.base.stop, table.kind
    ids = np.arange(start, stop, dtype=np.int64) if rows is None else rows[(rows >= start) & (rows < stop)]
    for low, high in windows(len(ids), kind.served_width * kind.served_dtype.itemsize, WINDOW_BYTES):
        chosen = ids[low:high]
        out = np.empty((len(chosen), kind.served_width), kind.served_dtype)
        table.read(chosen, out)
        fresh = tensor_of(out, kind.served).to(device=tensor.device, dtype=tensor.dtype)
        if rows is None:
            tensor[low:high].copy_(fresh)
        else:
            tensor.index_copy_(0, torch.from_numpy(chosen - start).to(tensor.device), fresh)
