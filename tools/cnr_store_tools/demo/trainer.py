"""The training process of ``cnr demo``: a program of its own, because it is going to be killed.

It trains from wherever the store says, saves through `CheckpointManager`, and reports on its standard output, one
JSON document per line. Without a store it is the run that nobody interrupts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cnr_store import BadInput, CnrStoreError, TableOptions
from cnr_store.training import CheckpointManager
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.datasets import read_click_log
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.presets import RunConfig, demo_config, file_config
from cnr_store_tools.demo.traffic import generate_clicks
from cnr_store_tools.demo.train import Quality, evaluate, make_optimizers, train_step

NUM_CHECKPOINTS = 9
"""Checkpoints of one run, when the caller chooses the number of steps."""


def load(data: str | None, steps: int | None, seed: int) -> tuple[RunConfig, ClickLog, ClickLog]:
    """Return the run, its samples to train on, and the later ones that it is judged by."""
    if data is None:
        config = demo_config(seed=seed)
        assert config.traffic is not None  # the generated run
        if steps is not None:
            samples = round(steps * config.batch_size / (1.0 - config.test_share)) + config.batch_size
            config = replace(config, steps=steps, traffic=replace(config.traffic, num_samples=samples))
        traffic = config.traffic
        assert traffic is not None
        past, future = split_by_time(generate_clicks(traffic), config.test_share)
    else:
        log = read_click_log(Path(data))
        past, future = split_by_time(log, demo_config(seed=seed).test_share)
        config = file_config(len(past), seed=seed)
        if steps is not None:
            config = replace(config, steps=min(steps, len(past) // config.batch_size))
    return replace(config, save_every=max(1, config.steps // NUM_CHECKPOINTS)), past, future


def table_options(*, is_exact: bool, bits: Any) -> TableOptions:
    """Return how the demonstration stores its tables."""
    return TableOptions.exact() if is_exact else TableOptions(bits=bits)


def train(order: Mapping[str, Any]) -> None:
    """Carry out an order: train, save to ``store`` unless it is None, leave the final weights and their quality.

    Keys: ``data``, ``steps``, ``seed``, ``weights``, ``store``, ``policy``, ``bits``, ``is_exact``.
    """
    config, past, future = load(order["data"], order["steps"], order["seed"])
    torch.set_num_threads(config.num_threads)
    model = SmallDLRM(config.model_config(past))
    optimizers = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)
    batches = TimeOrderedBatches(past, config.batch_size, max_batches=config.steps)
    _tell("loaded", num_samples=len(past) + len(future), table_rows=sum(past.table_rows), dim=config.dim)
    if order["store"] is None:
        for batch in batches:
            train_step(model, optimizers, batch)
    else:
        _train_saved(order, config, model, optimizers, batches)
    weights: dict[str, Any] = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    np.savez(order["weights"], **weights)
    quality = _quality(model, future)
    _tell("finished", steps=len(batches), auc=quality.auc, logloss=quality.logloss)


def _train_saved(
    order: Mapping[str, Any],
    config: RunConfig,
    model: SmallDLRM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    batches: TimeOrderedBatches,
) -> None:
    # The six lines that a user writes:
    manager = CheckpointManager(
        order["store"], model=model, optimizer=optimizers, reader=batches, policy=order["policy"],
        options=table_options(is_exact=order["is_exact"], bits=order["bits"]), every_steps=config.save_every,
        first_full="copy", assume={"RowWiseAdagrad": "touched"},
    )  # fmt: skip
    started = time.perf_counter()
    restored = manager.restore()
    if restored is not None:
        _tell("restored", step=restored.step, version=restored.version, seconds=time.perf_counter() - started)
    told = 0
    for batch in batches:
        train_step(model, optimizers, batch)
        manager.step()
        told = _tell_saves(manager, told)
    last = manager.wait()
    if last is None or last.step < manager.current_step:
        manager.save()
    manager.close()
    _tell_saves(manager, told)


def _tell_saves(manager: CheckpointManager, told: int) -> int:
    for report in manager.history[told:]:
        _tell("saved", **msgspec.to_builtins(report))
    return len(manager.history)


def _quality(model: SmallDLRM, future: ClickLog) -> Quality:
    try:
        return evaluate(model, future)
    except BadInput:  # a very small file may have no click, or nothing but clicks, in its last part
        return Quality(math.nan, math.nan)


def _tell(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Train as the first argument says; returns the exit code."""
    try:
        train(json.loads(sys.argv[1]))
    except CnrStoreError as error:
        _tell("failed", kind=error.kind, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
