"""Sends only the gradients above a threshold, and keeps the rest for later steps (DCT of Gupta et al., KDD 2021).

The threshold of a tensor is chosen from order statistics once in many steps. In between it follows the number of values
that cross it: held constant, it would let 30 times too many through, as what was held back piles up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cnr_store.communication.hooks import GradientHook, Messages, Result, parts_of
from cnr_store.communication.state import RankState, StateTensor
from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_number

_POWER, _SLOWEST, _FASTEST = 0.2, 0.67, 1.5
_COUNTED = 8
"""Crossings are counted up to so many times the kept ones: there the factor of the threshold is at its largest."""


@dataclass(slots=True)
class _Held:
    """What a rank holds back of one parameter: fp32 residual (n + 1,), of which the last is always 0; its threshold."""

    residual: torch.Tensor
    threshold: torch.Tensor


def kept_values(length: int, keep: float) -> int:
    """Return how many values of a tensor are sent in a step: ``keep`` of them, at least one."""
    return min(length, max(1, round(keep * length)))


def take_above(
    residual: torch.Tensor, threshold: torch.Tensor, count: int, *, renew: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the first ``count`` values of at least the threshold out of a residual; returns indices, values, threshold.

    No synchronisation with a device. Where fewer values cross, the rest of ``count`` is the last index with value 0.
    ``residual`` is float32 (n + 1,), the last one 0; the values taken become 0 in it. NaN and Inf cross every
    threshold. ``threshold`` is float32 (), for the next step renewed from what crossed: by at most a third less or half
    more; one that is 0 or not finite begins at the largest value. ``renew`` chooses the ``count``-th largest value.
    """
    sizes = residual[:-1].abs()
    if renew:
        threshold = sizes.topk(count, sorted=False).values.amin()
    threshold = torch.where((threshold > 0) & threshold.isfinite(), threshold, sizes.amax())
    crosses = (sizes < threshold).logical_not_()
    length = len(sizes)
    found = torch.nonzero_static(crosses, size=min(length, _COUNTED * count), fill_value=length).view(-1)
    crossed = (found < length).sum()
    indices = found[:count]
    values = residual[indices]
    residual[indices] = 0
    factor = (crossed / count).pow(_POWER).clamp(_SLOWEST, _FASTEST)
    return indices.clamp(max=length - 1), values, threshold * factor


class ThresholdedGradients(GradientHook):
    """A hook of DistributedDataParallel that sends a share of the values of each gradient, and the rest later.

    Each rank sends (index, value) of the values of gradient and residual that reach its threshold; all ranks average
    what all sent. For SGD and Adagrad; in front of Adam, whose second moment would see rare bursts, use
    `cnr_store.communication.OneBitAdam`. Parameters with fewer than two dimensions are averaged whole; gradients of
    ``sparse=True`` embeddings as the rows that they are. Nothing waits for the device, but for sparse gradients.

    Memory: 4 bytes per element of the parameters with two dimensions or more, on their device; with ``float16`` of all.

    Parameters
    ----------
    keep
        Share of the values that are sent in a step, above 0 and below 1: 0.005 is 100 times fewer bytes.
    refresh_every, warmup_steps
        Steps from one choice of thresholds by order statistics to the next; first steps, averaged whole.
    values
        ``float32`` (8 bytes per value with its index) or ``float16`` (6, and 2 per value of a parameter that is
        averaged whole); what rounding takes is held back too.
    error_feedback, name
        False forgets what was not sent: for measurements of how much that costs. The name of its state in checkpoints;
        two hooks of one training need different ones.

    Examples
    --------
    ``hook = ThresholdedGradients(keep=0.005)``, ``hook.register(ddp)``,
    ``CheckpointManager(..., communication=[hook])``.
    """

    held_back = "residual"

    def __init__(
        self, *, keep: float = 0.005, refresh_every: int = 1000, warmup_steps: int = 0,
        values: Literal["float32", "float16"] = "float32", error_feedback: bool = True,
        name: str = "thresholded_gradients",
    ) -> None:  # fmt: skip
        super().__init__(name)
        checked_number("keep", keep, above=0)
        if keep >= 1:
            raise BadInput(f"keep= is a share of the values below 1; found {keep}", found=keep)
        self._keep, self._refresh_every = keep, checked_count("refresh_every", refresh_every, least=1)
        self._warmup = checked_count("warmup_steps", warmup_steps)
        self._dtype = getattr(torch, checked_choice("values", values, ("float32", "float16")))
        self._error_feedback = error_feedback
        self._held: dict[str, _Held] = {}

    def _reduce_dense(self, bucket: GradBucket, step: int, /) -> Result:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if step < self._warmup:
            self._sent_bytes += buffer.nbytes
            work = dist.all_reduce(buffer.mul_(1 / self._ranks.size()), group=self._ranks, async_op=True)  # DDP's bits
            mean: Result = work.get_future().then(lambda reduced: reduced.value()[0])
            return mean
        renew = (step - self._warmup) % self._refresh_every == 0
        whole: list[slice] = []
        small, indices, values = [], [buffer[:0]], [buffer[:0]]
        for parameter, part in zip(parameters, parts_of(parameters), strict=True):
            if parameter.ndim < 2:
                whole.append(part)
                small.append(self._rounded(parameter, buffer[part]))
            elif parameter.numel():
                at, sent = self._take(self._of(parameter), buffer[part], renew=renew)
                indices.append(at.add_(part.start))
                values.append(sent)
        index_dtype = torch.int32 if len(buffer) < 2**31 else torch.int64
        share = torch.cat(small or [buffer[:0]]), torch.cat(indices).to(index_dtype), torch.cat(values).to(self._dtype)
        return self._share(share, lambda messages: _mean(buffer, whole, messages))

    def _take(self, held: _Held, gradient: torch.Tensor, *, renew: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a gradient to what is held back, and take out what is sent now: indices, values.

        One of zeros takes nothing out: DDP drops the mean of a parameter that no rank used, and what it has of ours.
        One with NaN or Inf is sent as NaN and changes nothing, so that a step that is skipped leaves nothing behind.
        """
        residual = held.residual
        if not self._error_feedback:
            residual.zero_()
        least, most = torch.aminmax(gradient)
        largest = torch.maximum(-least, most).float()
        is_taken = (largest > 0) & largest.isfinite()
        residual[:-1].addcmul_(gradient.nan_to_num_(0, 0, 0), is_taken.to(gradient.dtype))
        count = kept_values(len(gradient), self._keep)
        indices, values, threshold = take_above(residual, held.threshold, count, renew=renew)
        residual.index_add_(0, indices, values.masked_fill(is_taken, 0))
        held.threshold = torch.where(is_taken, threshold, held.threshold)
        values = torch.where(is_taken, values, largest - largest)  # 0, or NaN
        if self._dtype is torch.float16:
            values, lost = _halved(values)
            residual.index_add_(0, indices, lost)  # an index that fills up may be that of a value: not `+=`
        return indices, values

    def _rounded(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what is sent of a gradient that is sent whole; what rounding takes is held back."""
        if self._dtype is torch.float32:
            return gradient
        residual = self._of(parameter).residual[:-1]
        sent, lost = _halved(residual + gradient)
        residual.copy_(lost if self._error_feedback else torch.zeros_like(lost))
        return sent

    def _of(self, parameter: torch.Tensor) -> _Held:
        name, device = self._names[parameter], parameter.device
        held = self._held.get(name) or _held(torch.zeros(parameter.numel()), torch.zeros(()))
        if name not in self._held or held.residual.device != device:
            self._held[name] = held = _Held(held.residual.to(device), held.threshold.to(device))
        return held

    def rank_state(self) -> RankState:
        """Return by parameter what is held back, and the threshold now; see `CommunicationState`."""
        tensors = {}
        for name, held in self._held.items():
            tensors[f"{name}/residual"] = StateTensor(held.residual[:-1], "mean")
            tensors[f"{name}/threshold"] = StateTensor(held.threshold, "mean")
        return RankState(tensors, super().rank_state().scalars)

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`. The bytes are counted on."""
        super().load_rank_state(state)
        values = {key: one.value for key, one in state.tensors.items()}
        residuals = {key.removesuffix("/residual"): one for key, one in values.items() if key.endswith("/residual")}
        self._held = {name: _held(one, values[f"{name}/threshold"]) for name, one in residuals.items()}


def _held(residual: torch.Tensor, threshold: torch.Tensor) -> _Held:
    padded = torch.nn.functional.pad(residual.view(-1), (0, 1))  # a copy
    return _Held(padded, threshold.clone().view(()))


def _halved(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values as float16, the large ones clamped, and what that takes from them; NaN and Inf are sent as such."""
    largest, finite = torch.finfo(torch.float16).max, values.isfinite()
    sent = torch.where(finite, values.clamp(-largest, largest), values).half()
    return sent, torch.where(finite, values - sent, 0)


def _mean(buffer: torch.Tensor, whole: list[slice], messages: Messages) -> torch.Tensor:
    """Replace a bucket's buffer by the mean of what all ranks sent of it; the same bits on all ranks."""
    buffer.zero_()
    for small, indices, values in messages:  # each divided before it is added, so that no sum overflows
        buffer.index_add_(0, indices, values.to(buffer.dtype), alpha=1 / len(messages))
        for part, own in zip(whole, small.split([part.stop - part.start for part in whole]), strict=True):
            buffer[part].add_(own, alpha=1 / len(messages))
    return buffer
