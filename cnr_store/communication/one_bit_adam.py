"""One-bit Adam: Adam whose gradients travel as one bit per value once its variances have settled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from cnr_store.communication.one_bit_optimizer import Group, Masks, OneBitOptimizer, State


class OneBitAdam(OneBitOptimizer):
    """Adam with error-compensated one-bit momentum after a warm-up (Tang et al., ICML 2021).

    The first ``warmup_steps`` steps are those of ``torch.optim.Adam`` on averaged gradients, bit for bit. Then the
    bias-corrected variances are frozen, and a value costs two bits per step instead of 64.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, warmup_steps, floor, untouched, group, name
        As of `OneBitOptimizer`.
    decoupled_weight_decay
        True is AdamW: weights decay by themselves, not by their gradients.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = OneBitAdam(layer.parameters(), warmup_steps=1)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     layer(torch.ones(3, 4)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.is_frozen
    True
    """

    _name = "one_bit_adam"

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, warmup_steps: int, decoupled_weight_decay: bool = False,
        floor: float = 0.01, untouched: Masks | None = None, group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        own = {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps, floor, untouched, group, name, own)

    def _decayed(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group, /) -> torch.Tensor:
        if not group["weight_decay"]:
            return gradient
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            return gradient
        return gradient.add(parameter, alpha=group["weight_decay"])

    def _warm_up(self, parameter: torch.Tensor, group: Group, state: State) -> None:
        correction = 1 - group["betas"][1] ** state["step"].item()
        _update(parameter, state["exp_avg_sq"].sqrt() / correction**0.5, group, state)

    def _before_freeze(self, group: Group, state: State) -> None:
        state["exp_avg_sq"].div_(1 - group["betas"][1] ** state["step"].item())

    def _compressed_update(self, parameter: torch.Tensor, momentum: torch.Tensor, group: Group, state: State) -> None:
        state["exp_avg"].copy_(momentum)
        _update(parameter, state["exp_avg_sq"].sqrt(), group, state)


def _update(parameter: torch.Tensor, deviation: torch.Tensor, group: Group, state: State) -> None:
    step_size = group["lr"] / (1 - group["betas"][0] ** state["step"].item())
    parameter.addcdiv_(state["exp_avg"], deviation.add_(group["eps"]), value=-step_size)
