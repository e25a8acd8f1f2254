"""A small DLRM trained for real, and what a checkpoint sees of it: its tables, slots and touched rows at each save.

One thread, one seed, nothing kept on disk: the same arguments give the same intervals, bit for bit, on one machine and
set of versions. Sizes and quality are measured on the same run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from run_config import RunConfig

from cnr_store.types import Float32s, RowIds
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step

SLOT = "momentum1"
"""The one slot of every table: row-wise Adagrad's accumulator, float32 (num_rows,)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The model after one save interval.

    Attributes
    ----------
    step
        Training steps so far.
    tables, slots
        Table name to float32 (num_rows, dim) and (num_rows,): copies, so they stay what they were.
    touched
        Table name to the sorted ids of the rows that the interval looked up, int64.
    dense
        Everything that is no table, by name: copies.
    """

    step: int
    tables: dict[str, Float32s]
    slots: dict[str, Float32s]
    touched: dict[str, RowIds]
    dense: dict[str, npt.NDArray[Any]]

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(len(values) for values in self.tables.values())

    @property
    def num_touched(self) -> int:
        """Rows that the interval touched."""
        return sum(len(rows) for rows in self.touched.values())

    @property
    def touched_elements(self) -> int:
        """Elements of the touched rows, without slots."""
        return sum(len(rows) * self.tables[name].shape[1] for name, rows in self.touched.items())

    @property
    def fp32_bytes(self) -> int:
        """Bytes of all tables and slots in fp32, as a baseline has them."""
        return sum(array.nbytes for named in (self.tables, self.slots) for array in named.values())


def trace_config(*, steps: int = 1800, seed: int = 0) -> RunConfig:
    """Return the DLRM trace that delta sizes are measured on: 376,000 rows x 32 in six tables.

    About 40 % of the rows are touched in each interval of 150 steps of 2,048 samples.
    """
    batch_size, test_share = 2048, 0.05
    return RunConfig(
        traffic=TrafficConfig(
            table_rows=(200_000, 100_000, 50_000, 20_000, 5_000, 1_000),
            num_samples=round(steps * batch_size / (1.0 - test_share)) + batch_size,
            zipf_exponent=1.05,
            drift_every=16 * batch_size,
            drift_share=0.01,
            seed=seed,
        ),
        steps=steps,
        batch_size=batch_size,
        save_every=150,
        test_share=test_share,
        dim=32,
        seed=seed,
    )


def train(config: RunConfig, save_at: Collection[int] | None = None) -> Iterator[Interval]:
    """Train on the generated traffic of ``config`` and yield at each save. Blocks; see `train_on`."""
    assert config.traffic is not None
    past, _ = split_by_time(generate_clicks(config.traffic), config.test_share)
    return train_on(past, config, save_at)


def train_on(past: ClickLog, config: RunConfig, save_at: Collection[int] | None = None) -> Iterator[Interval]:
    """Train on a log in time order, ``config.steps`` batches of it at most, and yield at each save.

    Saves are due after the steps ``save_at``, by default every ``save_every`` steps. Sets the number of torch's
    threads, for the process: with another number of threads sums are taken in another order.
    """
    torch.set_num_threads(config.num_threads)
    model = SmallDLRM(config.model_config(past))
    optimizers = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)
    tables = dict(model.table_parameters())
    marks = {name: np.zeros(len(weight), np.bool_) for name, weight in tables.items()}
    batches = TimeOrderedBatches(past, config.batch_size, max_batches=config.steps)
    for step, batch in enumerate(batches, start=1):
        train_step(model, optimizers, batch)
        for column, mark in enumerate(marks.values()):
            mark[batch.ids[:, column].numpy()] = True
        if step % config.save_every == 0 if save_at is None else step in save_at:
            yield Interval(
                step=step,
                tables={name: _copy(weight) for name, weight in tables.items()},
                slots={name: _copy(optimizers[0].state[weight][SLOT]) for name, weight in tables.items()},
                touched={name: np.flatnonzero(mark).astype(np.int64) for name, mark in marks.items()},
                dense={name: _copy(weight) for name, weight in model.dense_parameters()},
            )
            for mark in marks.values():
                mark[:] = False


def _copy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.detach().numpy().copy()
