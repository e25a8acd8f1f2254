"""One-bit LAMB: LAMB whose momentum travels as one bit per value, with layer-wise rates that are learned before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from cnr_store.communication.one_bit_optimizer import Group, Masks, OneBitOptimizer, State

_RATE_BETA, _FACTORS, _FACTOR_CHANGE = 0.9, (0.5, 4.0), 0.1
"""How slowly a rate's average moves; bounds of a factor, and by what share it may change in a step: as published."""


class OneBitLamb(OneBitOptimizer):
    """LAMB with error-compensated one-bit momentum after a warm-up (Li et al., HiPC 2022).

    In the warm-up it is LAMB without bias correction, and keeps a moving average of each tensor's rate. Then variances
    and averages are frozen. All tensors are sent with one scale, after each was brought to the same size
    (``scaling``), and a tensor's rate moves with the ratio of its frozen to its present variance (``factor``).

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, warmup_steps, floor, untouched, group, name
        As of `OneBitOptimizer`; the present variances have the same floor.
    coefficients
        The least and the largest rate of a tensor, its weights' norm divided by its update's.
    """

    _name = "one_bit_lamb"
    _has_one_scale = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, warmup_steps: int, coefficients: tuple[float, float] = (0.01, 10.0),
        floor: float = 0.01, untouched: Masks | None = None, group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        own = {"coefficients": coefficients}
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps, floor, untouched, group, name, own)

    def _warm_up(self, parameter: torch.Tensor, group: Group, state: State) -> None:
        update = _update_of(parameter, state["exp_avg"], group, state)
        of_weight, of_update = parameter.norm(), update.norm()
        rate = (of_weight / of_update).clamp(*group["coefficients"])
        rate = torch.where((of_weight > 0) & (of_update > 0), rate, torch.ones_like(rate))
        average = state.setdefault("rate", torch.zeros_like(rate))
        average.lerp_(rate, 1 - _RATE_BETA)
        parameter.sub_(update.mul_(group["lr"] * rate))

    def _after_freeze(self) -> None:
        sizes = []
        for group, parameter in self._parameters():
            state = self.state[parameter]
            variance = state["exp_avg_sq"]
            state["present_sq"] = variance.clone()
            state["factor"] = torch.ones_like(state["rate"])
            num_touched = (variance != 0).sum().clamp(min=1)
            state["least_sq"] = group["floor"] * variance.sum() / num_touched
            sizes.append(state["exp_avg"].norm() / num_touched.sqrt())
        if not sizes:
            return
        mean_size = torch.stack(sizes).mean()
        for (_, parameter), size in zip(self._parameters(), sizes, strict=True):
            is_known = (size > 0) & torch.isfinite(mean_size / size)
            self.state[parameter]["scaling"] = torch.where(is_known, mean_size / size, torch.ones_like(size))

    def _momentum(self, parameter: torch.Tensor, group: Group) -> torch.Tensor:
        return super()._momentum(parameter, group).mul_(self.state[parameter]["scaling"])

    def _compressed_update(self, parameter: torch.Tensor, momentum: torch.Tensor, group: Group, state: State) -> None:
        beta1, beta2 = group["betas"]
        momentum = momentum / state["scaling"]
        gradient = (momentum - beta1 * state["exp_avg"]).div_(1 - beta1)
        state["exp_avg"].copy_(momentum)
        present = state["present_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = _update_of(parameter, momentum, group, state)
        if parameter.numel():
            state["factor"].copy_(_factor_of(present, momentum, update, group, state))
        parameter.sub_(update.mul_(group["lr"] * state["rate"] * state["factor"]))


def _update_of(parameter: torch.Tensor, momentum: torch.Tensor, group: Group, state: State) -> torch.Tensor:
    update: torch.Tensor = momentum / state["exp_avg_sq"].sqrt().add_(group["eps"])
    return update.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else update


def _factor_of(
    present: torch.Tensor, momentum: torch.Tensor, update: torch.Tensor, group: Group, state: State
) -> torch.Tensor:
    """Return the tensor's new factor: its largest ratio of frozen to present deviation, within its bounds."""
    frozen: torch.Tensor = state["exp_avg_sq"]
    last: torch.Tensor = state["factor"]
    deviation = frozen.sqrt().add_(group["eps"])
    ratio = deviation / present.clamp(min=state["least_sq"]).sqrt_().add_(group["eps"])
    factor = torch.where(frozen > 0, ratio, torch.zeros_like(ratio)).max()
    if group["weight_decay"]:
        share = ((momentum / deviation).norm() / update.norm()).nan_to_num(1.0).clamp(max=1.0)
        factor = factor * share + (1 - share)
    lowest, highest = last * (1 - _FACTOR_CHANGE), last * (1 + _FACTOR_CHANGE)
    return factor.clamp(*_FACTORS).clamp(lowest, highest)
