"""The training process of ``cnr demo`` that is killed: trains from the newest state of the store, and saves to it.

Without a store it is the uninterrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import split_by_time
from cnr_store_tools.demo.model import ModelConfig, SmallDLRM
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.demo.train import evaluate, make_optimizers, train_step
from cnr_store_tools.demo.worker import Channel

TABLE_ROWS = (50_000, 20_000, 10_000, 5_000)
BATCH_SIZE = 1024
TEST_SHARE = 0.15
NUM_CHECKPOINTS = 9


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Train, save to ``store`` unless it is None, and write the final weights to the file ``weights``.

    Other keys of the task: ``steps``, ``seed``, ``policy``, ``bits``, ``is_exact``.
    """
    steps: int = task["steps"]
    traffic = TrafficConfig(
        table_rows=TABLE_ROWS, num_samples=round((steps + 1) * BATCH_SIZE / (1.0 - TEST_SHARE)),
        drift_every=16 * BATCH_SIZE, seed=task["seed"],
    )  # fmt: skip
    past, future = split_by_time(generate_clicks(traffic), TEST_SHARE)
    torch.set_num_threads(1)  # needed for two runs that are equal bit for bit
    model = SmallDLRM(
        ModelConfig(
            table_rows=TABLE_ROWS, table_names=tuple(past.names), num_dense=past.num_dense, seed=task["seed"]
        )
    )  # fmt: skip
    optimizers = make_optimizers(model)
    batches = TimeOrderedBatches(past, BATCH_SIZE, max_batches=steps)
    channel.report("ready", num_samples=len(past) + len(future), table_rows=sum(past.table_rows), dim=model.config.dim)
    if task["store"] is None:
        for batch in batches:
            train_step(model, optimizers, batch)
    else:
        _train_saved(task, channel, model, optimizers, batches)
    weights: dict[str, Any] = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    np.savez(task["weights"], **weights)
    quality = evaluate(model, future)
    channel.report("finished", steps=len(batches), auc=quality.auc, logloss=quality.logloss)


def _train_saved(
    task: Mapping[str, Any],
    channel: Channel,
    model: SmallDLRM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    batches: TimeOrderedBatches,
) -> None:
    # The six lines that a user writes:
    manager = CheckpointManager(
        task["store"], model=model, optimizer=optimizers, reader=batches,
        every_steps=max(1, len(batches) // NUM_CHECKPOINTS),
        options=TableOptions.exact() if task["is_exact"] else TableOptions(bits=task["bits"]),
        save_policy=SavePolicy(policy=task["policy"]),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
    )  # fmt: skip
    started = time.perf_counter()
    restored = manager.restore()
    if restored is not None:
        seconds = time.perf_counter() - started
        channel.report("restored", step=restored.step, version=restored.version, seconds=seconds)
    reported = 0
    for batch in batches:
        train_step(model, optimizers, batch)
        manager.step()
        reported = report_saves(manager, channel, reported)
    last = manager.wait_until_finished()
    if last is None or last.step < manager.current_step:
        manager.save()
    manager.close()
    report_saves(manager, channel, reported)


def report_saves(manager: CheckpointManager, channel: Channel, reported: int) -> int:
    """Report the saves after the first ``reported``; return their number now."""
    for report in manager.history[reported:]:
        channel.report("saved", **msgspec.to_builtins(report))
    return len(manager.history)
