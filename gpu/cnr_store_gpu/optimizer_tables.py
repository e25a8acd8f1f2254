"""Which tables an optimizer steps, and their gradients marked together.

Why this module exists: a step of a small model takes milliseconds, and a tracker that asks every parameter group for
its tables, and marks table by table, takes a percent of it in Python alone. Here the answer is kept while the groups
stay as they are, and the sparse gradients of all tables of a device are marked by one call: on a GPU by one launch in
place of one for each table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cnr_store_gpu import operators
from cnr_store_gpu.bitmap import RowBitmap
from cnr_store_gpu.streams import streams_of
from cnr_store_gpu.tracked_table import TrackedTable

Group = dict[str, Any]

SMALL_BYTES, UNIT = 1 << 20, 4
"""Dense gradients above the first are read by torch, on its threads; the second as in `words.mark_gradients`."""

Gradients = list[tuple[TrackedTable, torch.Tensor]]
"""Tables and the gradients that a step has for them."""


class SteppedTables:
    """The tables among an optimizer's parameters, by group.

    Parameters
    ----------
    optimizer
        Its groups may change at any time: ``refresh`` notices.
    by_weight
        The tables by the ``id`` of their weights, which live as long as this does.

    Attributes
    ----------
    groups
        Groups that have tables, each with them.
    tables, places
        All of those tables, and their places in the ledger.
    moving
        Those that the running step has a gradient for, or may get one for.

    All but the last are as of the last ``refresh``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, by_weight: Mapping[int, TrackedTable]) -> None:
        self._optimizer, self._by_weight = optimizer, by_weight
        self._seen: list[tuple[Group, list[int]]] = []
        self.groups: list[tuple[Group, list[TrackedTable]]] = []
        self.tables: list[TrackedTable] = []
        self.places: list[int] = []
        self.moving: list[TrackedTable] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for tables again if a group came, went, or has other parameters."""
        groups, seen = self._optimizer.param_groups, self._seen
        if len(groups) == len(seen):
            for group, (known, ids) in zip(groups, seen, strict=True):
                # A parameter that took the number of a dead one is no table: tables live.
                if group is not known or list(map(id, group["params"])) != ids:
                    break
            else:
                return
        self._seen = [(group, list(map(id, group["params"]))) for group in groups]
        found = [
            (group, [self._by_weight[number] for number in ids if number in self._by_weight])
            for group, ids in self._seen
        ]
        self.groups = [(group, tables) for group, tables in found if tables]
        self.tables = [watched for _, tables in self.groups for watched in tables]
        self.places = [watched.place for watched in self.tables]
        self._spans: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        # One bitmap per device: all tables whose bits are on the host have the same.
        self._host = next((watched.bitmap for watched in self.tables if watched.bitmap.is_on_host), None)

    def mark_together(self, gradients: Gradients) -> Gradients:
        """Mark rows of the sparse gradients of each device, and of small dense ones of the host, in one call each.

        Returns the gradients that are left.

        ``gradients`` may leave tables out, and names each at most once. Waits for no device.
        """
        return self._mark_on_devices(self._mark_on_host(gradients))

    def _mark_on_devices(self, gradients: Gradients) -> Gradients:
        left: Gradients = []
        by_bitmap: dict[RowBitmap, Gradients] = {}
        for watched, gradient in gradients:
            if gradient.is_sparse and not watched.bitmap.is_on_host and gradient.device == watched.bitmap.device:
                by_bitmap.setdefault(watched.bitmap, []).append((watched, gradient))
            else:
                left.append((watched, gradient))
        for bitmap, found in by_bitmap.items():
            if len(found) == 1 or (bitmap.words.is_cuda and torch.cuda.is_current_stream_capturing()):
                left += found  # a copy of the bounds cannot be captured
                continue
            first_words, num_rows = self._spans_of([watched for watched, _ in found], bitmap.device)
            rows = [gradient._indices()[0] for _, gradient in found]
            ends = np.cumsum([0, *(len(indices) for indices in rows)])
            bounds = torch.from_numpy(ends)
            if streams_of(bitmap.device) is not None:
                # From ordinary memory the host may wait for what the training has queued; torch keeps pinned blocks.
                bounds = bounds.pin_memory()
            bounds = bounds.to(bitmap.device, non_blocking=True)
            operators.mark_slices_here(bitmap.words, torch.cat(rows), bounds, first_words, num_rows)
        return left

    def _spans_of(self, tables: Sequence[TrackedTable], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        places = tuple([watched.place for watched in tables])
        if places not in self._spans:
            self._spans[places] = (
                torch.tensor([watched.first_word for watched in tables], dtype=torch.int64, device=device),
                torch.tensor([watched.num_rows for watched in tables], dtype=torch.int64, device=device),
            )
        return self._spans[places]

    def _mark_on_host(self, gradients: Gradients) -> Gradients:
        if self._host is None or not self._host.is_on_host:
            return gradients
        left: Gradients = []
        parts: list[int] = []  # flat: numpy reads numbers twice as fast as tuples of them
        dense: list[int] = []
        for watched, gradient in gradients:
            if not (gradient.is_cpu and watched.bitmap is self._host):
                left.append((watched, gradient))
                continue
            if not gradient.is_sparse:
                is_plain = gradient.layout is torch.strided and type(gradient) is torch.Tensor
                if is_plain and gradient.is_contiguous() and gradient.nbytes <= SMALL_BYTES:
                    row_units, odd = divmod(gradient.shape[1] * gradient.element_size(), UNIT)
                    if not odd and gradient.data_ptr() % UNIT == 0:
                        dense += gradient.data_ptr(), watched.num_rows, row_units, watched.first_word
                        continue
                left.append((watched, gradient))
                continue
            indices, count = gradient._indices(), gradient._nnz()  # their memory is the gradient's, and lives as long
            if indices.is_contiguous() and indices.numel() == count:  # it is sparse by row
                parts += indices.data_ptr(), count, watched.first_word, watched.num_rows
            else:
                left.append((watched, gradient))
        if parts:
            self._host.mark_parts(np.array(parts, np.int64).reshape(-1, 4))
        if dense:
            self._host.mark_gradients(np.array(dense, np.int64).reshape(-1, 4))
        return left
