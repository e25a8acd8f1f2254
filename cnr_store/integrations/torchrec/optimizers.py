"""Finds the torch optimizers inside TorchRec's wrappers.

Why this module exists: TorchRec wraps optimizers to key their state by name, and combines them with the fused ones.
Hooks on a wrapper's ``step`` do not run, and its state is a copy of views. The inner optimizers have the real ``step``
and state.
"""

from __future__ import annotations

import torch

from cnr_store.integrations.torchrec.names import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    private,
)


def unwrap(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer] | None:
    """Return the plain optimizers inside one of TorchRec's, in order; None if it is not one of TorchRec's.

    Fused optimizers are omitted, because their state belongs to the shards. A ``KeyedOptimizer`` of the caller's own
    class counts as plain.
    """
    if isinstance(optimizer, FusedOptimizer):
        return []
    if isinstance(optimizer, CombinedOptimizer):
        return [one for _, inner in private(optimizer, "optimizers") for one in _inside(inner)]
    if isinstance(optimizer, (KeyedOptimizerWrapper, OptimizerWrapper)):
        return _inside(private(optimizer, "_optimizer"))
    return [optimizer] if isinstance(optimizer, KeyedOptimizer) else None


def _inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found = unwrap(optimizer)
    return [optimizer] if found is None else found
