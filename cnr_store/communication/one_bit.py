"""The mean of a vector over all ranks at one bit per value and direction, with error feedback.

Each rank adds to its vector what it could not send before, and sends signs and one scale per tensor. Rank r averages
the r-th chunk of all ranks, compresses it in the same way with an error of its own, and sends it to all: two bits per
value instead of the 64 of an all-reduce in float32. The new error is what was to be sent minus what was sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from cnr_store.communication.state import chunk
from cnr_store.errors import BadShape


@dataclass(frozen=True)
class OneBitLayout:
    """How the values of several tensors, end to end, are cut into one chunk per rank. Pure; nothing communicates.

    ``sizes``: number of values of each tensor, which has a scale of its own; 0 is allowed.
    """

    sizes: tuple[int, ...]
    world: int

    @property
    def num_values(self) -> int:
        """Number of values of all tensors."""
        return sum(self.sizes)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Of each rank, where its chunk of the vector begins and ends, by `chunk`."""
        return [chunk(self.num_values, rank, self.world) for rank in range(self.world)]

    @cached_property
    def pieces(self) -> list[list[tuple[int, int]]]:
        """Of each chunk the tensors in it: position among ``sizes``, and how many values of it are in the chunk."""
        ends = list(accumulate(self.sizes))
        return [
            [
                (tensor, min(end, stop) - max(end - size, start))
                for tensor, (end, size) in enumerate(zip(ends, self.sizes, strict=True))
                if min(end, stop) > max(end - size, start)
            ]
            for start, stop in self.spans
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank gives to others in one mean: foreign chunks of its vector, and its chunk of the mean."""
        return self.world * 4 * (self._num_scales + self._bit_words) if self.world > 1 else 0

    @cached_property
    def _num_scales(self) -> int:
        return max(1, *(len(pieces) for pieces in self.pieces))

    @property
    def _bit_words(self) -> int:
        return math.ceil(self.spans[0][1] / 32)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank sends of its vector, and what is not sent.

        ``values``: ``(num_values,)`` float32, the error added. The messages are uint8, a row for each rank, about its
        chunk: its scales, then its bits, a multiple of 4 bytes. The new error is ``values`` minus what they mean.
        """
        scales, messages = _scales(values, self.sizes), []
        for pieces, (start, stop) in zip(self.pieces, self.spans, strict=True):
            found = [scales[tensor] for tensor, _ in pieces]
            messages.append(self._message(torch.stack(found) if found else scales[:0], values[start:stop]))
        return torch.stack(messages), values - self.join(messages)

    def encode_chunk(self, values: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank sends of the mean of its chunk, a message like those of `encode`, and what is not sent."""
        message = self._message(_scales(values, [count for _, count in self.pieces[rank]]), values)
        return message, values - self.decode(message, rank)

    def _message(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        bits = pack_signs(pad(values >= 0, (0, 32 * self._bit_words - len(values))))
        return torch.cat([pad(scales, (0, self._num_scales - len(scales))).view(torch.uint8), bits])

    def decode(self, message: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the values, float32, that a message about the chunk of ``rank`` means."""
        counts = [count for _, count in self.pieces[rank]]
        scales = message[: 4 * self._num_scales].view(torch.float32)
        values = unpack_signs(message[4 * self._num_scales :])[: sum(counts)]
        for scale, part in zip(scales, values.split(counts), strict=False):
            part.mul_(scale)
        return values

    def mean(self, messages: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the mean of what the messages of all ranks, a row each, mean about the chunk of a rank."""
        total = self.decode(messages[0], rank)
        for message in messages[1:]:
            total += self.decode(message, rank)
        return total.div_(self.world)

    def join(self, messages: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the whole vector, ``(num_values,)`` float32, from one message about each chunk."""
        return torch.cat([self.decode(message, rank) for rank, message in enumerate(messages)])


class OneBitMean:
    """Averages a vector over the ranks of a group with one bit per value, and keeps what was not sent.

    ``group``: None means the default one, or one rank alone if there is none. ``worker_error``, ``(num_values,)``
    float32: what this rank has not sent of its vectors. ``server_error``, float32: the same of the means of its chunk.
    """

    def __init__(
        self, sizes: Sequence[int], group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> None:
        self._group = group
        self.rank, self.world = rank_and_world(group)
        self.layout = OneBitLayout(tuple(sizes), self.world)
        start, stop = self.layout.spans[self.rank]
        self.worker_error = torch.zeros(self.layout.num_values, device=device)
        self.server_error = torch.zeros(stop - start, device=device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean, ``(num_values,)`` float32, the same bits on every rank. Blocks; all ranks call it."""
        layout = self.layout
        messages, self.worker_error = layout.encode(values.float() + self.worker_error)
        if self.world > 1:
            received = torch.empty_like(messages)
            dist.all_to_all_single(received, messages, group=self._group)
            messages = received
        own = layout.mean(messages, self.rank) + self.server_error
        answer, self.server_error = layout.encode_chunk(own, self.rank)
        answers = [torch.empty_like(answer) for _ in range(self.world)] if self.world > 1 else [answer]
        if self.world > 1:
            dist.all_gather(answers, answer, group=self._group)
        return layout.join(answers)

    def put_error(self, name: str, error: torch.Tensor) -> None:
        """Take over ``worker_error`` or ``server_error``; that of another rank or number of ranks raises `BadShape`."""
        held: torch.Tensor = getattr(self, name)
        if held.shape != error.shape:
            raise BadShape(
                f"{name} of one-bit averages: expected {tuple(held.shape)} on rank {self.rank} of {self.world}, found "
                f"{tuple(error.shape)}; it was saved on another rank or number of ranks, for which "
                "CheckpointManager(communication=[...]) divides it anew",
                expected=tuple(held.shape), found=tuple(error.shape),
            )  # fmt: skip
        held.copy_(error)


def rank_and_world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank in a group and the number of ranks; ``(0, 1)`` without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """Return bools ``(n,)``, n a multiple of 8, as ``(n / 8,)`` uint8; value i is bit i % 8 of byte i // 8."""
    # Eight bytes of 0 or 1 as one integer; the product has the byte i of it as bit i of its highest byte.
    return ((signs.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_signs(bits: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``(n,)`` uint8 as ``(8 n,)`` float32: +1 where a bit is set, else -1."""
    return torch.index_select(_signs_of_bytes(bits.device), 0, bits.int()).view(-1)


@cache
def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return ((every_byte >> torch.arange(8, dtype=torch.uint8, device=device)) & 1).float().mul_(2).sub_(1)


def _scales(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return of each tensor the root mean square of its values, ``(tensors,)``; 0 for an empty one."""
    parts = values.split(list(counts))
    scales = [torch.linalg.vector_norm(part) / math.sqrt(max(len(part), 1)) for part in parts]
    return torch.stack(scales) if scales else values[:0]
