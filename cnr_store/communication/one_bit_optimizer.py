"""What one-bit Adam and one-bit LAMB share: dense steps first, then momentum at one bit per value.

For ``warmup_steps`` steps the gradients are averaged whole, and the optimizer is an ordinary one. Then the variances
are frozen, and only momentum is averaged: each rank adds its own gradient to it, and `OneBitMean` averages the result
with error feedback. Weights, momentum and variances are the same on all ranks at all times; the errors are not.

An element whose variance is 0 at the freeze never had a gradient. It is held: its momentum and weight stay as they
are, and it is not sent, because a sign cannot say 0. Every other variance is raised to a share of its tensor's mean,
because momentum that comes back as one size for all elements explodes where the variance is almost 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication.hooks import Result, register
from cnr_store.communication.one_bit import OneBitMean, rank_and_world
from cnr_store.communication.state import RankState, StateTensor
from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_count, checked_number

State = dict[str, Any]
Group = dict[str, Any]
Masks = Mapping[torch.Tensor, torch.Tensor]


class OneBitOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer with a dense warm-up and one-bit momentum after it; `OneBitAdam` and `OneBitLamb` are two.

    Gradients stay those of their rank. A ``torch.amp.GradScaler`` skips a step on all ranks where one rank's are not
    finite, and scales on each rank by itself. Ranks with fewer batches: ``with Join([model, optimizer])``.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay
        As of ``torch.optim.Adam``; ``eps`` must be above 0. All ranks have the same parameters, in the same order, with
        the same weights. One without a gradient counts as one with a gradient of zeros.
    warmup_steps
        How many steps are dense, at least 1; 15 to 25 % of all steps is usual.
    floor
        The least variance after the freeze, as a share of its tensor's mean. Without it near-dead elements explode.
    untouched
        Parameter to bool mask in its shape: elements to hold after the freeze beside those without variance.
    group, name
        The process group; None means the default one, or one rank alone if there is none. The name of its state in
        checkpoints, ``one_bit_adam`` or ``one_bit_lamb`` if not given; two of one training differ.
    options
        Those that only one optimizer has, for its groups of parameters.

    A value out of range raises `BadInput`.
    """

    _name: ClassVar[str]
    _step_supports_amp_scaling = True  # a `GradScaler` calls `step` always, with `found_inf` and `grad_scale` set
    _has_one_scale = False
    """Whether all tensors are sent with one scale, or each with its own."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        warmup_steps: int, floor: float, untouched: Masks | None, group: dist.ProcessGroup | None, name: str | None,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        defaults = {
            "lr": checked_number("lr", lr, least=0),
            "betas": tuple(checked_number("betas", beta, least=0, most=1 - 1e-12) for beta in betas),
            "eps": checked_number("eps", eps, above=0),
            "weight_decay": checked_number("weight_decay", weight_decay, least=0),
            "warmup_steps": checked_count("warmup_steps", warmup_steps, least=1),
            "floor": checked_number("floor", floor, least=0),
        }
        self.name, self._group = name or self._name, group
        self._untouched = dict(untouched or {})
        self._mean: OneBitMean | None = None
        self._sent_bytes = self._dense_bytes = 0
        self._loaded: dict[str, torch.Tensor] = {}
        self._stamps: list[tuple[int, int]] = []
        self._touched: list[torch.Tensor | None] = []
        self._is_scaled = False
        super().__init__(params, {**defaults, **options, "is_frozen": False})
        Joinable.__init__(self)

    def register(self, model: DistributedDataParallel) -> None:
        """Switch off the all-reduce of a DDP model: this optimizer averages its gradients, in the model's group.

        Once, before the first backward pass. ``model.no_sync()`` around every backward pass does the same.
        """
        register(model, _unchanged)
        self._group = self._group or model.process_group

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over: momentum travels as one bit per value."""
        return bool(self.param_groups[0]["is_frozen"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Blocks; all ranks call it. A sparse gradient raises `BadInput`."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        Join.notify_join_context(self)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        self._is_scaled = found_inf is not None
        self._step_unless(found_inf)
        return loss

    def _step_unless(self, found_inf: torch.Tensor | None) -> None:
        """Take a step, unless a `GradScaler` found gradients on any rank that are not finite. All ranks call it."""
        if found_inf is not None:
            found_inf = found_inf.clone()
            if rank_and_world(self._group)[1] > 1:
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._group)
            if found_inf.item():
                return
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)  # None, too, where the caller has unscaled
        for _, parameter in self._parameters():
            self._dense_bytes += parameter.nbytes
            if scale is not None and parameter.grad is not None:
                parameter.grad.div_(scale)
        (self._compressed_step if self.is_frozen else self._dense_step)()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: in the warm-up, which ends when they have had it; later, without variances, `BadInput`."""
        if self.param_groups and self.is_frozen:
            raise BadInput(
                f"{type(self).__name__} takes no more parameters after its warm-up; give them an optimizer of their own"
            )
        super().add_param_group(param_group)

    @property
    def join_device(self) -> torch.device:
        """See `torch.distributed.algorithms.Joinable`."""
        return next(parameter.device for _, parameter in self._parameters())

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """See `torch.distributed.algorithms.Joinable`."""
        return self._group or dist.distributed_c10d._get_default_group()

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return what takes a step with gradients of zeros, where this rank has no batch left and others have."""
        return _StepOfZeros(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of any optimizer, and under ``one_bit`` this rank's errors: save it on every rank."""
        found = super().state_dict()
        return found | {"one_bit": {name: one.value for name, one in self.rank_state().tensors.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of as many; a difference is an error of the next step.

        A state without errors, as a manager loads it, leaves those of `load_rank_state`.
        """
        super().load_state_dict(state_dict)
        if "one_bit" in state_dict:
            self._put_errors(state_dict["one_bit"])

    def rank_state(self) -> RankState:
        """Return this rank's errors, for ``CheckpointManager(communication=[...])``; the rest is on all ranks alike."""
        tensors = {}
        if self.is_frozen:
            mean = self._averaging()
            tensors["worker_error"] = StateTensor(mean.worker_error, "mean")
            tensors["server_error"] = StateTensor(mean.server_error, "concatenate")
        counts = {"sent_bytes": self._sent_bytes, "dense_bytes": self._dense_bytes}
        return RankState(tensors, {"values": self._num_values(), **counts})

    def load_rank_state(self, state: RankState) -> None:
        """Take over the errors of `rank_state`, before or after the optimizer's other state.

        Those of other parameters raise `BadInput`, and change nothing. The bytes are counted on.
        """
        values, found = self._num_values(), state.scalars["values"]
        if found != values:
            raise BadInput(
                f"errors of one-bit averages: expected those of parameters with {values} values, found {found}; build "
                "the model and its optimizer as they were saved",
                expected=values, found=found,
            )  # fmt: skip
        self._put_errors({name: one.value for name, one in state.tensors.items()})
        self._sent_bytes, self._dense_bytes = (int(state.scalars[name]) for name in ("sent_bytes", "dense_bytes"))

    def metrics(self) -> dict[str, float]:
        """Return what a manager records with each save: bytes sent, and what they would be in dense steps."""
        return {"sent_bytes": self._sent_bytes, "dense_bytes": self._dense_bytes}

    def _num_values(self) -> int:
        return sum(parameter.numel() for _, parameter in self._parameters())

    def _put_errors(self, errors: Mapping[str, torch.Tensor]) -> None:
        self._mean = None
        self._loaded = {name: error.clone() for name, error in errors.items()}

    def _dense_step(self) -> None:
        steps = 0
        for (group, parameter), mean in zip(self._parameters(), self._mean_gradients(), strict=True):
            state = self.state[parameter]
            if not state:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state.update({"step": torch.zeros((), dtype=torch.float32), **zeros})
            state["step"] += 1
            steps = int(state["step"].item())
            beta, gradient = group["betas"][1], self._decayed(parameter, mean, group)
            state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
            state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
            self._warm_up(parameter, group, state)
        if steps >= self.param_groups[0]["warmup_steps"]:
            self._freeze()

    def _compressed_step(self) -> None:
        mean = self._averaging()
        self._sent_bytes += mean.layout.sent_bytes
        parts = []
        for (group, parameter), touched in zip(self._parameters(), self._touched, strict=True):
            momentum = self._momentum(parameter, group).reshape(-1)
            parts.append(momentum if touched is None else momentum[touched])
        averages = mean(torch.cat([*parts, torch.empty(0, device=mean.worker_error.device)])).split([*map(len, parts)])
        for (group, parameter), touched, average in zip(self._parameters(), self._touched, averages, strict=True):
            found = average.to(parameter.dtype)
            if touched is not None:
                found = found.new_zeros(parameter.numel()).index_copy_(0, touched, found)
            self.state[parameter]["step"] += 1
            self._compressed_update(parameter, found.view_as(parameter), group, self.state[parameter])

    def _freeze(self) -> None:
        """Fix the variances: 0 for elements to hold, at least ``floor`` of their tensor's mean for all others."""
        for group, parameter in self._parameters():
            state = self.state[parameter]
            self._before_freeze(group, state)
            variance = state["exp_avg_sq"]
            if parameter in self._untouched:
                variance.masked_fill_(self._untouched[parameter].to(variance.device), 0)
            is_held = variance == 0
            least = group["floor"] * variance.sum() / (~is_held).sum().clamp(min=1)
            variance.clamp_(min=least).masked_fill_(is_held, 0)
            state["exp_avg"].masked_fill_(is_held, 0)
        for group in self.param_groups:
            group["is_frozen"] = True
        self._mean = None
        self._after_freeze()

    def _decayed(self, _parameter: torch.Tensor, gradient: torch.Tensor, _group: Group, /) -> torch.Tensor:
        """Return the gradient with weight decay in it, or apply that to the weight."""
        return gradient

    @abstractmethod
    def _warm_up(self, parameter: torch.Tensor, group: Group, state: State) -> None:
        """Update the weight by the momentum and variance of this step."""

    def _before_freeze(self, group: Group, state: State) -> None:
        """Make ``exp_avg_sq`` the variance to keep."""

    def _after_freeze(self) -> None:
        """Prepare what compressed steps need."""

    def _momentum(self, parameter: torch.Tensor, group: Group) -> torch.Tensor:
        """Return this rank's new momentum, to be averaged; state is not changed."""
        gradient = self._decayed(parameter, self._gradient_of(parameter), group)
        momentum: torch.Tensor = self.state[parameter]["exp_avg"].lerp(gradient, 1 - group["betas"][0])
        return momentum

    @abstractmethod
    def _compressed_update(self, parameter: torch.Tensor, momentum: torch.Tensor, group: Group, state: State) -> None:
        """Update state and weight by the mean momentum."""

    def _parameters(self) -> Iterator[tuple[Group, torch.Tensor]]:
        for group in self.param_groups:
            yield from ((group, parameter) for parameter in group["params"] if parameter.requires_grad)

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.is_sparse:
            raise BadInput(
                f"{type(self).__name__} got a sparse gradient of a parameter {tuple(parameter.shape)}, and averages "
                "dense ones only; give tables an optimizer of their own, as SparseAdam or Adagrad",
                found=tuple(parameter.shape),
            )
        return gradient

    def _mean_gradients(self) -> list[torch.Tensor]:
        gradients = [self._gradient_of(parameter) for _, parameter in self._parameters()]
        _, world = rank_and_world(self._group)
        if world == 1 or not gradients:
            return gradients
        # Divided before it is summed, as DDP does; on more than two ranks it may sum in another order.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(1 / world)
        self._sent_bytes += flat.nbytes
        dist.all_reduce(flat, group=self._group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(one).to(one.dtype) for part, one in zip(parts, gradients, strict=True)]

    def _averaging(self) -> OneBitMean:
        """Return what averages momentum; made anew, with errors that were loaded or none, when variances changed."""
        variances = [self.state[parameter]["exp_avg_sq"] for _, parameter in self._parameters()]
        stamps = [(id(variance), variance._version) for variance in variances]
        if self._mean is None or stamps != self._stamps:
            touched = [variance.reshape(-1).nonzero().squeeze(1) for variance in variances]
            whole = [variance.numel() for variance in variances]
            sizes = [len(one) for one in touched]
            self._stamps = stamps
            self._touched = [None if len(one) == size else one for one, size in zip(touched, whole, strict=True)]
            sizes = [sum(sizes)] if self._has_one_scale else sizes
            self._mean = OneBitMean(sizes, self._group, variances[0].device if variances else None)
            for name, error in self._loaded.items():
                self._mean.put_error(name, error)
            self._loaded = {}
        return self._mean


@dataclass
class _StepOfZeros(JoinHook):
    optimizer: OneBitOptimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        self.optimizer.zero_grad()
        zero = torch.zeros((), device=self.optimizer.join_device)
        self.optimizer._step_unless(zero if self.optimizer._is_scaled else None)


def _unchanged(bucket: GradBucket) -> Result:
    future: Result = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
