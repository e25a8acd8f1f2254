"""One training step, its optimizers, and the evaluation of a model on held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from cnr_store_tools.demo import metrics
from cnr_store_tools.demo.adagrad import RowWiseAdagrad
from cnr_store_tools.demo.batches import ClickBatch
from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.model import SmallDLRM


@dataclass(frozen=True, slots=True)
class Quality:
    """AUC (0.5 is chance) and logloss (nats) on held-out samples."""

    auc: float
    logloss: float


def make_optimizers(
    model: SmallDLRM, *, table_lr: float = 0.05, dense_lr: float = 0.01
) -> tuple[RowWiseAdagrad, torch.optim.Optimizer]:
    """Return (row-wise Adagrad over the tables, Adagrad over the dense parameters).

    Both allocate all state at the start, so that a restore can fill every tensor.
    """
    tables = RowWiseAdagrad([weight for _, weight in model.table_parameters()], lr=table_lr)
    # foreach=False: the plain loop has one order of operations on every machine.
    dense = torch.optim.Adagrad([parameter for _, parameter in model.dense_parameters()], lr=dense_lr, foreach=False)
    return tables, dense


def train_step(model: SmallDLRM, optimizers: Sequence[torch.optim.Optimizer], batch: ClickBatch) -> float:
    """Train on one batch in place and return its mean loss before the step.

    Bit-deterministic on the CPU for equal state, batch and ``torch.set_num_threads``.
    """
    model.train()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    logits = model(batch.ids, batch.dense)
    loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.item())


@torch.no_grad()
def predict(model: SmallDLRM, log: ClickLog, *, batch_size: int = 8192) -> npt.NDArray[np.float32]:
    """Return click probabilities float32 (num_samples,); does not change the model."""
    was_training = model.training
    model.eval()
    probabilities = np.empty(len(log), dtype=np.float32)
    for start in range(0, len(log), batch_size):
        part = log.part(start, start + batch_size)
        logits = model(torch.from_numpy(part.ids), torch.from_numpy(part.dense))
        probabilities[start : start + batch_size] = torch.sigmoid(logits).numpy()
    model.train(was_training)
    return probabilities


def evaluate(model: SmallDLRM, log: ClickLog) -> Quality:
    """Return AUC and logloss of the model on ``log``; does not change the model. Raises as `metrics.auc`."""
    probabilities = predict(model, log)
    return Quality(metrics.auc(log.labels, probabilities), metrics.logloss(log.labels, probabilities))
