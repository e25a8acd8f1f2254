"""Yields batches of a click log in time order, from a position that can be saved and restored exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cnr_store.errors import BadInput
from cnr_store_tools.demo.click_log import ClickLog


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """Samples of one step, views of a log: int64 (batch, num_tables), float32 (batch, num_dense), float32 (batch,)."""

    ids: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor


class TimeOrderedBatches:
    """Iterates over a log once, in order; ``state_dict`` is the position after the last returned batch.

    Iterating again continues where the last iteration stopped, so ``load_state_dict`` before the loop resumes with the
    next batch. A last partial batch is dropped, so every step has the same cost.

    Parameters
    ----------
    log
        Samples in time order; referenced, not copied.
    batch_size
        Samples per batch.
    max_batches
        Stop after this many batches of the log; None uses all whole batches.

    Raises
    ------
    BadInput
        The log has no whole batch; or a state has another batch size or another log length.
    """

    def __init__(self, log: ClickLog, batch_size: int, *, max_batches: int | None = None) -> None:
        whole = len(log) // batch_size if batch_size > 0 else 0
        if whole == 0:
            raise BadInput(f"batch size {batch_size} gives no whole batch of {len(log)} samples", found=batch_size)
        self.batch_size = batch_size
        self._num_batches = whole if max_batches is None else min(whole, max_batches)
        self._num_samples = len(log)
        self._ids, self._dense, self._labels = map(torch.from_numpy, (log.ids, log.dense, log.labels))
        self._next_batch = 0

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[ClickBatch]:
        while self._next_batch < self._num_batches:
            batch = self.batch(self._next_batch)
            # Advance first, so that a state saved while this batch is trained is the position after it.
            self._next_batch += 1
            yield batch

    def batch(self, index: int) -> ClickBatch:
        """Return batch ``index`` as views of the log, without moving the position."""
        start, stop = index * self.batch_size, (index + 1) * self.batch_size
        return ClickBatch(self._ids[start:stop], self._dense[start:stop], self._labels[start:stop])

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain integers."""
        return {"next_batch": self._next_batch, "batch_size": self.batch_size, "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the batch at which ``state`` was saved."""
        own = self.state_dict()
        is_inside = 0 <= state["next_batch"] <= self._num_samples // self.batch_size
        if not is_inside or any(state[name] != own[name] for name in ("batch_size", "num_samples")):
            raise BadInput(
                f"the state points at batch {state['next_batch']} of {dict(state)}; resume on the same data as {own}",
                expected=own, found=state,
            )  # fmt: skip
        self._next_batch = int(state["next_batch"])
