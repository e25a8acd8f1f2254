"""The trainer process: trains on traffic, writes its step into the witness rows, and saves about every second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from cnr_store_tools.demo.batches import ClickBatch, TimeOrderedBatches
from cnr_store_tools.demo.model import ModelConfig, SmallDLRM
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step
from cnr_store_tools.demo.trainer import report_saves
from cnr_store_tools.demo.worker import Channel
from tests.serving.soak.witness import DIM, NUM_WITNESSES, SHARES, make_tables, witness_row

PAUSE_S = 0.03
"""Pause between two steps, because five processes may share two cores."""

NUM_DENSE = 4
BATCH_SIZE = 256
NUM_SAMPLES = 64 * BATCH_SIZE


def make_model(tables: Mapping[str, int], seed: int) -> SmallDLRM:
    """Return a model for the tables with their witness rows."""
    config = ModelConfig(
        table_rows=tuple(count + NUM_WITNESSES for count in tables.values()), table_names=tuple(SHARES), dim=DIM,
        num_dense=NUM_DENSE, bottom_hidden=(16,), top_hidden=(32,), seed=seed,
    )  # fmt: skip
    return SmallDLRM(config)


def make_batches(tables: Mapping[str, int], seed: int) -> TimeOrderedBatches:
    """Return traffic: popular ids that drift, and clicks that a model can learn."""
    traffic = TrafficConfig(
        table_rows=tuple(tables.values()), num_samples=NUM_SAMPLES, num_dense=NUM_DENSE, drift_every=16 * BATCH_SIZE,
        seed=seed,
    )  # fmt: skip
    return TimeOrderedBatches(replace(generate_clicks(traffic), names=list(SHARES)), BATCH_SIZE)


def repeated(batches: TimeOrderedBatches) -> Iterator[ClickBatch]:
    """Yield the batches in an endless loop, from the saved position."""
    while True:
        yield from batches
        batches.load_state_dict({**batches.state_dict(), "next_batch": 0})


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Train from the newest state of the store until an order arrives; then save once more."""
    tables = make_tables(task["rows"])
    torch.set_num_threads(1)
    model, batches = make_model(tables, task["seed"]), make_batches(tables, task["seed"])
    optimizers = make_optimizers(model)
    manager = CheckpointManager(
        task["store"], model=model, optimizer=optimizers, reader=batches, options=TableOptions(bits=8),
        save_policy=SavePolicy(every_seconds=task["save_every_s"], first_baseline="live"),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
    )  # fmt: skip
    restored = manager.restore()
    if restored is None:
        write_witnesses(model, manager, tables, 0)
        manager.save()
    else:
        channel.report("restored", version=restored.version, step=restored.step)
    channel.report("ready")
    reported = 0
    for batch in repeated(batches):
        reported = report_saves(manager, channel, reported)
        if channel.order(PAUSE_S) is not None:
            break
        train_step(model, optimizers, batch)
        write_witnesses(model, manager, tables, manager.current_step + 1)
        manager.step()
    manager.save()
    report_saves(manager, channel, reported)
    manager.close()
    channel.report("finished")


def write_witnesses(model: SmallDLRM, manager: CheckpointManager, tables: Mapping[str, int], step: int) -> None:
    """Write ``step`` into the witness rows of every table, and mark these rows as changed."""
    for name, count in tables.items():
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight[count:] = torch.from_numpy(witness_row(step, weight.shape[1]))
        manager.tracker.mark(name, torch.arange(count, count + NUM_WITNESSES))
