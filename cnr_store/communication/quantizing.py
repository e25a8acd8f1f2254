"""Sends gradients as few levels, rounded at random so that they stay unbiased (QSGD; AdaQuantFL's rule for levels)."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cnr_store.communication.hooks import GradientHook, Messages, Result, parts_of
from cnr_store.communication.state import RankState
from cnr_store.runtime.arguments import checked_count

MAX_LEVELS = 1 << 15


def quantize(values: torch.Tensor, levels: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int64 (n,) from -levels to levels, and the norm, float32 (): values are about codes norm / levels.

    Unbiased: a value between two levels takes the upper one with the probability that keeps its mean. The mean squared
    error is at most ``min(n / levels**2, sqrt(n) / levels)`` times the squared norm. A norm that is not finite gives
    codes of 0, so that NaN and Inf arrive as NaN.
    """
    norm = values.float().norm()
    scaled = torch.where(norm > 0, values.float().abs() * (levels / norm), 0).nan_to_num(0.0, 0.0, 0.0)
    lower = scaled.floor()
    draws = torch.rand(len(values), generator=generator, device=values.device)
    codes = (lower + (draws < scaled - lower)).clamp(max=levels).long()
    return torch.where(values < 0, -codes, codes), norm


def dequantize(codes: torch.Tensor, norm: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the values of codes, float32 (n,)."""
    return codes.float() * (norm / levels)


def pack_codes(codes: torch.Tensor, levels: int) -> torch.Tensor:
    """Return codes as digits to the base of ``2 levels + 1``, as many in each word of int64 as it holds."""
    powers = _powers(levels, codes.device)
    padded = torch.nn.functional.pad(codes + levels, (0, -len(codes) % len(powers)))
    return (padded.view(-1, len(powers)) * powers).sum(dim=1)


def unpack_codes(words: torch.Tensor, levels: int, length: int) -> torch.Tensor:
    """Return the ``length`` codes of `pack_codes`."""
    places = words[:, None].div(_powers(levels, words.device), rounding_mode="floor") % (2 * levels + 1)
    return places.view(-1)[:length] - levels


@cache
def _powers(levels: int, device: torch.device) -> torch.Tensor:
    base = 2 * levels + 1
    digits = int(math.log(2**63 - 1) / math.log(base))
    return torch.tensor([base**place for place in range(digits)], device=device)


def levels_for(loss: float, first_loss: float, first_levels: int) -> int:
    """Return AdaQuantFL's levels, ``ceil(s0 sqrt(f0 / f))``, at most 32,768; the first where a loss is not above 0."""
    if not (loss > 0 and first_loss > 0 and math.isfinite(loss) and math.isfinite(first_loss)):
        return first_levels
    return min(MAX_LEVELS, math.ceil(first_levels * math.sqrt(first_loss / loss)))


class QuantizedGradients(GradientHook):
    """A hook of DistributedDataParallel that sends each gradient as random levels of its norm (QSGD).

    Each tensor of each rank has its own norm. Codes travel packed, log2(2 levels + 1) bits per value, by all-gather;
    all ranks average the same values. Nothing is held back. Sparse gradients pass as the rows that they are.

    Parameters
    ----------
    levels
        Levels on each side of 0, at first. More cost more bits and add less noise.
    seed, name
        Of the rounding: with the rank and the step it gives the draws, so that a resumed run draws the same; of its
        state in checkpoints.

    Examples
    --------
    ``hook = QuantizedGradients(levels=2)``, ``hook.register(ddp)``; with ``hook.report_loss(loss)`` on all ranks, now
    and then, the levels grow as the loss falls.
    """

    def __init__(self, *, levels: int = 2, seed: int = 0, name: str = "quantized_gradients") -> None:
        super().__init__(name)
        self.levels = self._first_levels = checked_count("levels", levels, least=1, most=MAX_LEVELS)
        self._seed, self._first_loss = checked_count("seed", seed), 0.0

    def report_loss(self, loss: float) -> int:
        """Report a rank's loss, on all ranks together; returns the levels from now on. Blocks for one number's mean."""
        device = next((one.device for one in self._names), None)
        mean = torch.tensor([loss], dtype=torch.float64, device=device)
        dist.all_reduce(mean, group=self._ranks)
        found = float(mean) / self._ranks.size()
        if not self._first_loss and 0 < found < math.inf:
            self._first_loss = found
        self.levels = levels_for(found, self._first_loss, self._first_levels)
        return self.levels

    def _reduce_dense(self, bucket: GradBucket, step: int, /) -> Result:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        levels, parts = self.levels, parts_of(parameters)
        share = []
        for parameter, part in zip(parameters, parts, strict=True):
            draws = torch.Generator(buffer.device)
            mixed = np.random.SeedSequence([self._seed, step, self._ranks.rank(), *self._names[parameter].encode()])
            draws.manual_seed(int(mixed.generate_state(1, np.uint64)[0]))
            codes, norm = quantize(buffer[part], levels, draws)
            share += [pack_codes(codes, levels), norm]
        return self._share(share, lambda messages: _mean(buffer, parts, messages, levels))

    def metrics(self) -> dict[str, float]:
        """Return what a manager records with each save: bytes sent, those of dense gradients, levels."""
        return {**super().metrics(), "levels": self.levels}

    def rank_state(self) -> RankState:
        """See `CommunicationState`."""
        return RankState({}, {**super().rank_state().scalars, "levels": self.levels, "first_loss": self._first_loss})

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`."""
        super().load_rank_state(state)
        self.levels, self._first_loss = int(state.scalars["levels"]), float(state.scalars["first_loss"])


def _mean(buffer: torch.Tensor, parts: list[slice], messages: Messages, levels: int) -> torch.Tensor:
    buffer.zero_()
    for message in messages:
        for part, words, norm in zip(parts, message[::2], message[1::2], strict=True):
            found = dequantize(unpack_codes(words, levels, part.stop - part.start), norm, levels)
            buffer[part].add_(found, alpha=1 / len(messages))
    return buffer
