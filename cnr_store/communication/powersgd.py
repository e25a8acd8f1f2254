"""Makes the state of torch's PowerSGD hook part of a checkpoint: without pickle, by parameter, for any number of ranks.

Torch keys errors and factors by the number of a bucket, and DDP builds its buckets anew after the first step. Here they
are taken apart by parameter whenever a bucket has other parameters than before, and put together for the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication.hooks import GradientHook, Result
from cnr_store.communication.state import RankState, StateTensor


class PowerSGD(GradientHook):
    """Torch's PowerSGD hook with a state that a manager saves and restores, on the same or another number of ranks.

    Gradients of ``sparse=True`` embeddings pass as the rows that they are; torch's hook refuses them. Blocks for each
    bucket, so that its messages do not overlap with the backward pass: torch sends the factors in callbacks, on other
    threads, and with several buckets ranks of gloo would send them in different orders and wait for ever.

    ``state`` is as for ``powerSGD_hook``; ``start_powerSGD_iter`` may be 1. ``name``: of its state in checkpoints.

    Examples
    --------
    ``hook = PowerSGD(PowerSGDState(process_group=None, matrix_approximation_rank=2))``, ``hook.register(ddp)``.
    """

    held_back = "error"

    def __init__(self, state: torch_hook.PowerSGDState, *, name: str = "powersgd") -> None:
        super().__init__(name)
        self.state = state
        self._layouts: dict[int, list[torch.Tensor]] = {}
        self._apart: dict[str, torch.Tensor] = {}

    def register(self, model: DistributedDataParallel) -> None:
        """See `ThresholdedGradients.register`."""
        super().register(model)
        self.state.process_group = self.state.process_group or model.process_group

    def _reduce(self, bucket: GradBucket) -> Result:
        if bucket.buffer().is_sparse:
            self.state.maybe_increase_iter(bucket)  # where it is the last one
        return super()._reduce(bucket)

    def _reduce_dense(self, bucket: GradBucket, _step: int, /) -> Result:
        parameters, number = bucket.parameters(), bucket.index()
        if [id(one) for one in self._layouts.get(number, ())] != [id(one) for one in parameters]:
            self._apart |= {key: value.clone() for key, value in self._in_buckets()}
            self._clear()
        if number not in self._layouts:
            self._layouts[number] = list(parameters)
            self._put_together(number)
        is_compressed = self.state.iter >= self.state.start_powerSGD_iter
        before = self.state.total_numel_after_compression
        error, factors = self.state.error_dict.get(number), self.state.q_memory_dict.get(number)
        factors = None if factors is None else factors.clone()
        found: Result = torch_hook.powerSGD_hook(self.state, bucket)
        sent = self.state.total_numel_after_compression - before if is_compressed else bucket.buffer().numel()
        self._sent_bytes += sent * bucket.buffer().itemsize
        is_finite = found.wait().isfinite().all()
        # Torch would keep a NaN for ever. The factors are the same on all ranks, as the result is.
        for held, last in (self.state.error_dict, error), (self.state.q_memory_dict, factors):
            if number in held:
                held[number] = torch.where(is_finite, held[number], 0 if last is None else last)
        return found

    def _clear(self) -> None:
        for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict, self._layouts):
            held.clear()

    def _put_together(self, number: int) -> None:
        """Make torch's state of a bucket of that by parameter, as far as all of its parameters have one."""
        parameters = self._layouts[number]
        if (error := self._taken("error", parameters)) is not None:
            self.state.error_dict[number] = error
        compressed = list(self._compressed(parameters))
        if (factors := self._taken("factor", [one for one, _ in compressed])) is not None:
            self.state.q_memory_dict[number] = factors
            self.state.p_memory_dict[number] = factors.new_empty(sum(one.shape[0] * rank for one, rank in compressed))

    def _taken(self, what: str, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Take a part of the state of all of these parameters, end to end; None if one of them or all have none."""
        keys = [f"{self._names[one]}/{what}" for one in parameters]
        if not keys or not self._apart.keys() >= set(keys):
            return None
        return torch.cat([self._apart.pop(key).view(-1).to(one) for key, one in zip(keys, parameters, strict=True)])

    def _compressed(self, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
        """The parameters of a bucket that torch compresses, and their ranks, by shape as their factors are."""
        by_shape: dict[tuple[int, int], list[tuple[torch.Tensor, int]]] = {}
        for one in parameters:
            rows = one.shape[0] if one.ndim else 1
            columns = one.numel() // rows
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if torch_hook._should_compress(rows, columns, rank, self.state.min_compression_rate)[0]:
                by_shape.setdefault((rows, columns), []).append((one, rank))
        for same in by_shape.values():
            yield from same

    def _in_buckets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of torch's state, by parameter: views."""
        for number, error in self.state.error_dict.items():
            parameters = self._layouts[number]
            for one, part in zip(parameters, error.split([one.numel() for one in parameters]), strict=True):
                yield f"{self._names[one]}/error", part
        for number, factors in self.state.q_memory_dict.items():
            compressed = list(self._compressed(self._layouts[number]))
            sizes = [one.numel() // one.shape[0] * rank for one, rank in compressed]
            for (one, _), part in zip(compressed, factors.split(sizes), strict=True):
                yield f"{self._names[one]}/factor", part

    def rank_state(self) -> RankState:
        """See `CommunicationState`. Errors are each rank's own, factors and the generator are the same on all."""
        _, words, position, *_ = self.state.rng.get_state()
        parts = self._apart | dict(self._in_buckets()) | {"generator": torch.from_numpy(np.asarray(words, np.int64))}
        tensors = {key: StateTensor(part, "mean" if key.endswith("/error") else "same") for key, part in parts.items()}
        counts = super().rank_state().scalars
        return RankState(tensors, {**counts, "iteration": self.state.iter, "position": int(position)})

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`. The hook goes on with the model that it is registered with."""
        super().load_rank_state(state)
        self._clear()
        self._apart = {key: one.value.clone() for key, one in state.tensors.items()}
        words = self._apart.pop("generator").numpy().astype(np.uint32)
        self.state.rng.set_state(("MT19937", words, int(state.scalars["position"]), 0, 0.0))
        self.state.iter = int(state.scalars["iteration"])
