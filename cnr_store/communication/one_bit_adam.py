"""One-bit Adam: Adam whose gradients travel as one bit per value once its variances have settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from cnr_store.communication.one_bit_optimizer import Group, OneBitOptimizer, State


class OneBitAdam(OneBitOptimizer):
    """Adam with error-compensated one-bit momentum after a warm-up (Tang et al., ICML 2021).

    The first ``warmup_steps`` steps are those of ``torch.optim.Adam`` on averaged gradients, bit for bit. Then the
    bias-corrected variances are frozen, and a value costs two bits per step instead of 64.

    Parameters
    ----------
    params, untouched, group, name
        As of `OneBitOptimizer`.
    lr, betas, eps, weight_decay, decoupled_weight_decay
        As of ``torch.optim.Adam``; ``eps`` must be above 0. With ``decoupled_weight_decay`` it is AdamW.
    warmup_steps
        How many steps are dense, at least 1.
    floor
        The least variance after the freeze, as a share of its tensor's mean. Without it near-dead elements explode.

    Raises
    ------
    BadInput
        A value out of range.

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

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        decoupled_weight_decay: bool = False,
        floor: float = 0.01,
        untouched: Mapping[torch.Tensor, torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        name: str = "one_bit_adam",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps,
            "decoupled_weight_decay": decoupled_weight_decay, "floor": floor,
        }  # fmt: skip
        super().__init__(params, defaults, untouched, group, name)

    def _warm_up(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group, state: State) -> None:
        beta = group["betas"][1]
        gradient = _decayed(parameter, gradient, group)
        state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
        deviation = state["exp_avg_sq"].sqrt() / (1 - beta ** state["step"].item()) ** 0.5
        _update(parameter, state["exp_avg"], deviation, group, state)

    def _before_freeze(self, group: Group, state: State) -> None:
        state["exp_avg_sq"].div_(1 - group["betas"][1] ** state["step"].item())

    def _momentum(self, parameter: torch.Tensor, group: Group) -> torch.Tensor:
        gradient = _decayed(parameter, self._gradient_of(parameter), group)
        momentum: torch.Tensor = self.state[parameter]["exp_avg"].lerp(gradient, 1 - group["betas"][0])
        return momentum

    def _compressed_update(self, parameter: torch.Tensor, momentum: torch.Tensor, group: Group, state: State) -> None:
        state["exp_avg"].copy_(momentum)
        _update(parameter, momentum, state["exp_avg_sq"].sqrt(), group, state)


def _decayed(parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the gradient with the weight decay of Adam in it, or apply that of AdamW to the weight."""
    if not group["weight_decay"]:
        return gradient
    if group["decoupled_weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return gradient
    return gradient.add(parameter, alpha=group["weight_decay"])


def _update(
    parameter: torch.Tensor, momentum: torch.Tensor, deviation: torch.Tensor, group: Group, state: State
) -> None:
    step_size = group["lr"] / (1 - group["betas"][0] ** state["step"].item())
    parameter.addcdiv_(momentum, deviation.add_(group["eps"]), value=-step_size)
