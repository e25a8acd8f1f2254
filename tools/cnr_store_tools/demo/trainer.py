"""The training process of ``cnr demo``, which will be killed: trains from where the store stands, and saves to it.

Without a store it is the run that nobody interrupts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.presets import RunConfig, demo_config
from cnr_store_tools.demo.traffic import generate_clicks
from cnr_store_tools.demo.train import evaluate, make_optimizers, train_step
from cnr_store_tools.demo.worker import Channel

NUM_CHECKPOINTS = 9
"""Checkpoints of one run."""


def run_config(steps: int | None, seed: int) -> RunConfig:
    """Return the run of so many steps; of the default number if None."""
    config = demo_config(seed=seed)
    if steps is not None:
        assert config.traffic is not None  # the generated run
        samples = round(steps * config.batch_size / (1.0 - config.test_share)) + config.batch_size
        config = replace(config, steps=steps, traffic=replace(config.traffic, num_samples=samples))
    return replace(config, save_every=max(1, config.steps // NUM_CHECKPOINTS))


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Train, save to ``store`` unless it is None, and leave the final weights in the file ``weights``.

    Other keys of the task: ``steps``, ``seed``, ``policy``, ``bits``, ``is_exact``.
    """
    config = run_config(task["steps"], task["seed"])
    assert config.traffic is not None
    past, future = split_by_time(generate_clicks(config.traffic), config.test_share)
    torch.set_num_threads(config.num_threads)
    model = SmallDLRM(config.model_config(past))
    optimizers = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)
    batches = TimeOrderedBatches(past, config.batch_size, max_batches=config.steps)
    channel.tell("ready", num_samples=len(past) + len(future), table_rows=sum(past.table_rows), dim=config.dim)
    if task["store"] is None:
        for batch in batches:
            train_step(model, optimizers, batch)
    else:
        _train_saved(task, channel, config, model, optimizers, batches)
    weights: dict[str, Any] = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    np.savez(task["weights"], **weights)
    quality = evaluate(model, future)
    channel.tell("finished", steps=len(batches), auc=quality.auc, logloss=quality.logloss)


def _train_saved(
    task: Mapping[str, Any],
    channel: Channel,
    config: RunConfig,
    model: SmallDLRM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    batches: TimeOrderedBatches,
) -> None:
    # The six lines that a user writes:
    manager = CheckpointManager(
        task["store"], model=model, optimizer=optimizers, reader=batches, every_steps=config.save_every,
        options=TableOptions.exact() if task["is_exact"] else TableOptions(bits=task["bits"]),
        save_policy=SavePolicy(policy=task["policy"], first_full="copy"),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
    )  # fmt: skip
    started = time.perf_counter()
    restored = manager.restore()
    if restored is not None:
        seconds = time.perf_counter() - started
        channel.tell("restored", step=restored.step, version=restored.version, seconds=seconds)
    told = 0
    for batch in batches:
        train_step(model, optimizers, batch)
        manager.step()
        told = tell_saves(manager, channel, told)
    last = manager.wait()
    if last is None or last.step < manager.current_step:
        manager.save()
    manager.close()
    tell_saves(manager, channel, told)


def tell_saves(manager: CheckpointManager, channel: Channel, told: int) -> int:
    """Tell of the saves behind the first ``told``; returns how many there are now."""
    for report in manager.history[told:]:
        channel.tell("saved", **msgspec.to_builtins(report))
    return len(manager.history)
