"""Row-wise Adagrad: one accumulator per table row; only the rows of a sparse gradient change, as in FBGEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with state ``{"momentum1": float32 (num_rows,)}`` per table, allocated before the first step.

    A step sums repeated rows of the gradient, then for each touched row adds ``mean(g ** 2)`` to ``momentum1`` and
    subtracts ``lr * g / (sqrt(momentum1) + eps)``. On the CPU equal inputs and thread counts give equal bits.

    Parameters
    ----------
    params
        Tables, float32 (num_rows, dim), whose gradients are sparse (``nn.Embedding(..., sparse=True)``).
    lr, eps
        As in the formula, not negative.
    """

    def __init__(
        self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float = 0.05, eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables and allocate their accumulators, zero."""
        super().add_param_group(param_group)
        for table in self.param_groups[-1]["params"]:
            self.state[table]["momentum1"] = torch.zeros(table.shape[0], dtype=torch.float32, device=table.device)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradient of every table that has one; other tables do not change."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, group["lr"], group["eps"])
        return loss

    def _update(self, table: torch.Tensor, gradient: torch.Tensor, lr: float, eps: float) -> None:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        momentum = self.state[table]["momentum1"]
        accumulated = momentum.index_select(0, rows).add_(values.square().mean(dim=1))
        momentum.index_copy_(0, rows, accumulated)
        denominator = accumulated.sqrt_().add_(eps)
        table.index_add_(0, rows, values.div(denominator.unsqueeze(1)), alpha=-lr)
