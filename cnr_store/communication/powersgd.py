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

    Gradients of ``sparse=True`` embeddings pass as the rows that they are; torch's hook refuses them.

    Parameters
    ----------
    state
        As for ``powerSGD_hook``; ``start_powerSGD_iter`` may be 1.
    name
        Of its state in checkpoints.

    Examples
    --------
    ``hook = PowerSGD(PowerSGDState(process_group=None, matrix_approximation_rank=2))``, ``hook.register(ddp)``.
    """

    def __init__(self, state: torch_hook.PowerSGDState, *, name: str = "powersgd") -> None:
        super().__init__(name)
        self.state = state
        self._layouts: dict[int, list[torch.Tensor]] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

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
            self._take_apart()
            self._layouts.clear()
        if number not in self._layouts:
            self._layouts[number] = list(parameters)
            self._put_together(number)
        is_compressed = self.state.iter >= self.state.start_powerSGD_iter
        before = self.state.total_numel_after_compression
        found: Result = torch_hook.powerSGD_hook(self.state, bucket)
        sent = self.state.total_numel_after_compression - before if is_compressed else bucket.buffer().numel()
        self._sent_bytes += sent * bucket.buffer().itemsize
        # Torch reduces the factors in callbacks, on other threads. With several buckets, ranks of gloo would reduce
        # them in different orders, and wait for each other for ever.
        found.wait()
        return found

    def _take_apart(self) -> None:
        """Move torch's state of all buckets to that by parameter."""
        self._errors |= {name: value.clone() for name, value in self._errors_held()}
        self._factors |= {name: value.clone() for name, value in self._factors_held()}
        for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            held.clear()

    def _put_together(self, number: int) -> None:
        """Make torch's state of a bucket of that by parameter, as far as all of its parameters have one."""
        parameters = self._layouts[number]
        names = [self._names[one] for one in parameters]
        if all(name in self._errors for name in names):
            joined = [self._errors.pop(name).view(-1).to(one) for name, one in zip(names, parameters, strict=True)]
            self.state.error_dict[number] = torch.cat(joined)
        compressed = list(self._compressed(parameters))
        if compressed and all(self._names[one] in self._factors for one, _ in compressed):
            factors = [self._factors.pop(self._names[one]).view(-1).to(one) for one, _ in compressed]
            self.state.q_memory_dict[number] = torch.cat(factors)
            rows = sum(one.shape[0] * rank for one, rank in compressed)
            self.state.p_memory_dict[number] = torch.empty(rows, dtype=factors[0].dtype, device=factors[0].device)

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

    def _errors_held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, error in self.state.error_dict.items():
            parameters = self._layouts[number]
            for one, part in zip(parameters, error.split([one.numel() for one in parameters]), strict=True):
                yield self._names[one], part

    def _factors_held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, factors in self.state.q_memory_dict.items():
            compressed = list(self._compressed(self._layouts[number]))
            sizes = [one.numel() // one.shape[0] * rank for one, rank in compressed]
            for (one, _), part in zip(compressed, factors.split(sizes), strict=True):
                yield self._names[one], part

    def rank_state(self) -> RankState:
        """See `CommunicationState`. Errors are each rank's own, factors and the generator are the same on all."""
        errors = self._errors | dict(self._errors_held())
        factors = self._factors | dict(self._factors_held())
        tensors = {f"{name}/error": StateTensor(value, "mean") for name, value in errors.items()}
        tensors |= {f"{name}/factor": StateTensor(value, "same") for name, value in factors.items()}
        _, words, position, *_ = self.state.rng.get_state()
        tensors["generator"] = StateTensor(torch.from_numpy(np.asarray(words).astype(np.int64)), "same")
        return RankState(tensors, {**self._counts(), "iteration": self.state.iter, "position": int(position)})

    def load_rank_state(self, state: RankState) -> None:
        """See `CommunicationState`. The hook goes on with the model that it is registered with."""
        for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            held.clear()
        self._layouts.clear()
        self._errors, self._factors = {}, {}
        for key, tensor in state.tensors.items():
            name, _, what = key.rpartition("/")
            if what == "generator":
                words = tensor.value.numpy().astype(np.uint32)
                self.state.rng.set_state(("MT19937", words, int(state.scalars["position"]), 0, 0.0))
            else:
                (self._errors if what == "error" else self._factors)[name] = tensor.value.clone()
        self._load_counts(state.scalars)
        self.state.iter = int(state.scalars["iteration"])
