"""The torch optimizers inside TorchRec's.

Why this module exists: TorchRec wraps optimizers so that their state is keyed by name, and joins the fused ones with
them. Hooks on a wrapper's ``step`` see none of it, and its state is a copy of views; the optimizers inside are what
steps and what has the state.
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
    """Return the plain optimizers inside one of TorchRec's, in their order; None if it is none of TorchRec's.

    Fused optimizers are left out: their state belongs to the shards. A ``KeyedOptimizer`` of the caller's own class is
    plain itself.
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
