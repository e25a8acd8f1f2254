"""Models that are trained for real, so that a step takes its time, and touches the rows that its batch looks up."""

from __future__ import annotations

from typing import Protocol

import torch
from dlrm_trace import trace_config
from drifting import DIM
from models import BenchModel
from trainee import TablesState, TrainingState

from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.traffic import generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step

BATCH = 256
"""Samples in a step of `TrainedTables`, with one row of each table."""


class Trained(Protocol):
    """A training of which steps can be taken."""

    @property
    def state(self) -> TrainingState:
        """What is saved."""

    def step(self) -> None:
        """Train on the next batch."""


class TrainedTrace:
    """The DLRM trace: 376,000 rows x 32 in six tables, batches of 2,048 samples in the order of time, then again."""

    def __init__(self, steps: int) -> None:
        config = trace_config(steps=steps)
        assert config.traffic is not None
        log, _ = split_by_time(generate_clicks(config.traffic), config.test_share)
        self._model = SmallDLRM(config.model_config(log))
        self.state = TrainingState(self._model, make_optimizers(self._model))
        self._batches = TimeOrderedBatches(log, config.batch_size, max_batches=steps)
        self._steps = 0

    def step(self) -> None:
        """Train on the next batch."""
        train_step(self._model, self.state.optimizers, self._batches.batch(self._steps % len(self._batches)))
        self._steps += 1


class TrainedTables:
    """A model with at least four times `DIM` columns. Each sample looks up one row of each table.

    The rows are log-uniform by rank, as clicks are about.
    """

    def __init__(self, shape: BenchModel) -> None:
        self._state = TablesState(shape)
        for bag in self._state.tables:
            for slot in self._state.slots(bag.weight):
                slot.zero_()  # as a training begins: its gradients are small beside the slots of a `TablesState`
        self._rows = torch.tensor([float(bag.num_embeddings) for bag in self._state.tables])[:, None]
        self._random = torch.Generator().manual_seed(0)

    @property
    def state(self) -> TrainingState:
        """What is saved."""
        return self._state

    def step(self) -> None:
        """Look rows up, feed what the dense layers take to them, and step."""
        bags = self._state.tables
        drawn = torch.rand(len(bags), BATCH, generator=self._random)
        ids = (self._rows**drawn).long().clamp_(max=self._rows.long() - 1)
        looked_up = torch.cat([bag(rows[:, None]) for bag, rows in zip(bags, ids, strict=True)], dim=1)
        for optimizer in self.state.optimizers:
            optimizer.zero_grad()
        (self._state.model.dense(looked_up[:, : 4 * DIM]).mean() + looked_up.square().mean()).backward()
        for optimizer in self.state.optimizers:
            optimizer.step()
