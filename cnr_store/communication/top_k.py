"""Activations at a cut between devices: of each sample only the largest values travel, with their positions.

The model-parallel side of dynamic communication thresholding (Gupta et al., KDD 2021). There is no error feedback:
what was left out of one sample means nothing for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from cnr_store.errors import BadShape
from cnr_store.runtime.arguments import checked_choice, checked_number

Backward = Literal["own", "mask", "whole"]
Move = Callable[[torch.Tensor], torch.Tensor]


class TopKActivations(nn.Module):
    """Keeps the largest values of each row, and sends only them to the other side of a cut.

    Parameters
    ----------
    keep
        Share of the values of a row that is sent, above 0 and at most 1; at least one value. Others raise `BadInput`.
    backward
        What of the gradient is sent back: ``"own"``, its own largest values; ``"mask"``, its values where forward sent
        some (as published: neurons that are not sent do not learn, and more of them die); ``"whole"``, all of it.
    dtype, group
        The type of values and gradients on the wire. The process group of `exchange`; None means the default one.

    Notes
    -----
    A value costs its bytes and those of its position: 1 in rows of up to 256 values, 2 up to 32,768, else 4.

    Examples
    --------
    Both sides in one process, to see what it does to a model's quality:

    >>> TopKActivations(keep=0.5)(torch.tensor([[1.0, -3.0, 0.5, 2.0]]))
    tensor([[ 0., -3.,  0.,  2.]])
    """

    def __init__(
        self,
        keep: float,
        backward: Backward = "own",
        *,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.keep, self.dtype, self.group = checked_number("keep", keep, above=0, most=1), dtype, group
        self.backward_mode: Backward = checked_choice("backward", backward, ("own", "mask", "whole"))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` ``(batch, width)`` as the other side of a cut would get them; nothing communicates."""
        return self._cut(rows, lambda message: message, lambda message: message)

    def exchange(self, rows: torch.Tensor, to: Sequence[int], source: Sequence[int]) -> torch.Tensor:
        """Send rows to all ranks and return theirs: an all-to-all, as of pooled embeddings. Blocks; all ranks call it.

        Two stages of a pipeline are a group of two: the first one sends all rows and calls ``backward()`` of the sum of
        the nothing that it gets; the second one sends no rows, of a tensor that requires a gradient.

        ``rows``: ``(sum(to), width)``, by rank that they go to; another number raises `BadShape`. ``to``, ``source``:
        how many rows go to each rank, and come from each. The result is ``(sum(source), width)``, by rank; its backward
        is an all-to-all the other way.
        """
        if len(rows) != sum(to):
            raise BadShape(f"expected {sum(to)} rows, found {len(rows)}", expected=sum(to), found=len(rows))
        return self._cut(rows, self._all_to_all(to, source), self._all_to_all(source, to))

    def num_kept(self, width: int) -> int:
        """Return how many values of a row are sent."""
        return max(1, round(self.keep * width))

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row's message."""
        return self.num_kept(width) * (self.dtype.itemsize + _position_type(width).itemsize)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return messages ``(batch, row_bytes)`` uint8, and the positions ``(batch, num_kept)`` of the sent values."""
        width = rows.shape[1]
        positions = rows.abs().topk(self.num_kept(width), dim=1, sorted=False).indices
        parts = rows.gather(1, positions).to(self.dtype), positions.to(_position_type(width))
        return torch.cat([_viewed(part, torch.uint8) for part in parts], dim=1), positions

    def decode(self, messages: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows ``(batch, width)`` float32 that messages mean, and the positions of the sent values."""
        of_values = self.num_kept(width) * self.dtype.itemsize
        values = _viewed(messages[:, :of_values], self.dtype).float()
        positions = _viewed(messages[:, of_values:], _position_type(width)).long()
        return _spread(values, positions, width), positions

    def gradient_message(self, gradient: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what is sent back of a gradient, uint8; ``positions`` are those that came with the activations."""
        if self.backward_mode == "own":
            return self.encode(gradient)[0]
        sent = gradient.gather(1, positions) if self.backward_mode == "mask" else gradient
        return _viewed(sent.to(self.dtype), torch.uint8)

    def gradient_of(self, message: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Return the gradient that a message means; ``positions`` are those that were sent."""
        if self.backward_mode == "own":
            return self.decode(message, width)[0]
        sent = _viewed(message, self.dtype).float()
        return _spread(sent, positions, width) if self.backward_mode == "mask" else sent

    def _cut(self, rows: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        received: torch.Tensor = _Cut.apply(rows, self, there, back)  # type: ignore[no-untyped-call]
        return received

    def _all_to_all(self, to: Sequence[int], source: Sequence[int]) -> Move:
        def move(message: torch.Tensor) -> torch.Tensor:
            received = message.new_empty(sum(source), message.shape[1])
            dist.all_to_all_single(received, message.contiguous(), list(source), list(to), group=self.group)
            return received

        return move


class _Cut(torch.autograd.Function):
    """Both directions of a cut that every rank has both sides of."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: TopKActivations, there: Move, back: Move) -> torch.Tensor:
        ctx.layer, ctx.back, ctx.width = layer, back, rows.shape[1]
        message, sent = layer.encode(rows.float())
        received, positions = layer.decode(there(message), ctx.width)
        ctx.save_for_backward(sent, positions)
        return received.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, positions = ctx.saved_tensors
        message = ctx.back(ctx.layer.gradient_message(gradient.float(), positions))
        return ctx.layer.gradient_of(message, sent, ctx.width).to(gradient.dtype), None, None, None


def _viewed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of each row as another type; copied, because a view needs them aligned and dense."""
    flat = rows.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(dtype).view(len(rows), rows.shape[1] * rows.itemsize // dtype.itemsize)


def _spread(values: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    return values.new_zeros(len(values), width).scatter_(1, positions, values)


def _position_type(width: int) -> torch.dtype:
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32
