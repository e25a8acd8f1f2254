"""The trainer: trains on traffic without end, writes its step into the witnesses, and saves every second or so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager
from cnr_store_tools.demo.batches import Batch, TimeOrderedBatches
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import make_optimizers, train_step
from cnr_store_tools.serve_demo.channel import Channel
from cnr_store_tools.serve_demo.clicks import BATCH_SIZE, make_clicks, make_model_config
from cnr_store_tools.serve_demo.tables import make_tables, parameter_of
from cnr_store_tools.serve_demo.witness import NUM_WITNESSES, witness_row

PAUSE_S = 0.03
"""Between two steps: the machine may have two cores, and five processes share them."""


def play(order: Mapping[str, Any], channel: Channel) -> None:
    """Train from where the store stands until an order comes; then save once more. Keys: ``store``, ``rows``, ..."""
    tables = make_tables(order["rows"])
    torch.set_num_threads(1)
    model = SmallDLRM(make_model_config(tables, order["seed"]))
    optimizers = make_optimizers(model)
    batches = TimeOrderedBatches(make_clicks(tables, order["seed"]), BATCH_SIZE)
    manager = CheckpointManager(
        order["store"], model=model, optimizer=optimizers, reader=batches, options=TableOptions(bits=8),
        every_seconds=order["save_every_s"], first_full="copy", assume={"RowWiseAdagrad": "touched"},
    )  # fmt: skip
    restored = manager.restore()
    if restored is None:
        write_witnesses(model, manager, tables.rows, 0)
        manager.save()
    else:
        channel.tell("restored", version=restored.version, step=restored.step, fallback_from=restored.fallback_from)
    channel.tell("ready")
    told = 0
    for batch in endless(batches):
        told = _tell_saves(manager, channel, told)
        if channel.order(PAUSE_S) is not None:
            break
        train_step(model, optimizers, batch)
        write_witnesses(model, manager, tables.rows, manager.current_step + 1)
        manager.step()
    last = manager.save()
    _tell_saves(manager, channel, told)
    manager.close()
    channel.tell("finished", version=None if last is None else last.version, step=manager.current_step)


def write_witnesses(model: SmallDLRM, manager: CheckpointManager, rows: Mapping[str, int], step: int) -> None:
    """Write ``step`` into the witnesses of every table, and say so to the tracker."""
    for name, count in rows.items():
        weight = model.get_parameter(parameter_of(name))
        with torch.no_grad():
            weight[count:] = torch.from_numpy(witness_row(step, weight.shape[1]))
        manager.tracker.mark(parameter_of(name), torch.arange(count, count + NUM_WITNESSES))


def endless(batches: TimeOrderedBatches) -> Iterator[Batch]:
    """Yield the batches again and again; their saved position says where to go on."""
    while True:
        yield from batches
        batches.load_state_dict({**batches.state_dict(), "next_batch": 0})


def _tell_saves(manager: CheckpointManager, channel: Channel, told: int) -> int:
    for report in manager.history[told:]:
        channel.tell("saved", **msgspec.to_builtins(report))
    return len(manager.history)
