"""Copies of dense tensors for a save, made while the training goes on, until its next optimizer step.

Why this module exists: dense parameters and their optimizer's state can be most of a model, and every step changes all
of them, but only in the optimizer's step. Between two steps a thread can copy them (DataStates-LLM, HPDC 2024). Before
any optimizer's next step the thread that trains copies what is left, and waits for what is being copied.

It must never let a copy of two instants be committed. Which tensors change between steps is found out: the first copy
of a tensor is made at the stall, and compared with the tensor, bit for bit, before the next step. What differs
(averages, weights that are clipped later) is copied at the stall ever after, as are buffers, which forward changes. A
tensor that was steady and is written in place all the same is known by its version, and its save is given up.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cnr_store.errors import BadInput
from cnr_store.runtime.threads import blocks
from cnr_store.training.tensors import Array, as_array, dense_dtype_name, host_copy
from cnr_store_gpu.memory import check_held

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes that a thread copies at a time: how long the training may wait for another thread's copy."""

Bytes = npt.NDArray[np.uint8]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def can_be_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in host memory in one piece, and its writes are counted."""
    return _is_plain(tensor) and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_inference()


def stepped_by(optimizers: Iterable[torch.optim.Optimizer], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that are parameters which a step of these optimizers writes; others write the rest."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    stepped = {id(one) for group in groups for one in group["params"] if one.requires_grad}
    return {name for name, tensor in tensors.items() if id(tensor) in stepped}


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return as_array(tensor.detach()).reshape(-1).view(np.uint8)


def _pieces_of(first: Bytes, second: Bytes) -> list[tuple[Bytes, Bytes]]:
    return [(first[a:b], second[a:b]) for a, b in blocks(len(first), PIECE_BYTES)]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return all(np.array_equal(a, b) for a, b in _pieces_of(_bytes_of(first), _bytes_of(second)))


@dataclass(slots=True, eq=False)
class StagedDense:
    """The dense tensors of one save, as of one instant; copies of some are still being made. Thread-safe.

    Attributes
    ----------
    copies, dtypes
        By name: the elements in host memory, once `copy_rest` has returned, and their logical dtypes.
    waited_s
        Seconds for which the training waited for copies, and made them, before its next step.
    """

    copies: Mapping[str, Array]
    dtypes: Mapping[str, str]
    step: int
    waited_s: float = 0.0
    _live: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _pieces: deque[tuple[Bytes, Bytes]] = field(default_factory=deque)
    _under_way: int = 0
    _is_settled: bool = False
    _changed: set[str] = field(default_factory=set)
    _condition: threading.Condition = field(default_factory=threading.Condition)

    def add(self, name: str, live: torch.Tensor) -> None:
        """Have a tensor copied later; nobody has seen the save yet."""
        source, target = _bytes_of(live), self.copies[name].reshape(-1).view(np.uint8)
        self._live[name] = live, live._version
        self._pieces.extend(_pieces_of(target, source))

    def copy_rest(self) -> None:
        """Copy what is not copied, with other threads that do the same; returns when all is there. Blocks."""
        while True:
            with self._condition:
                if not self._pieces:
                    self._condition.wait_for(lambda: not self._under_way)
                    return
                target, source = self._pieces.popleft()
                self._under_way += 1
            try:
                np.copyto(target, source)
            finally:
                with self._condition:
                    self._under_way -= 1
                    self._condition.notify_all()

    def settle(self) -> set[str]:
        """Before the training may write the tensors: have all copied, and return which were written before that."""
        started = time.perf_counter()
        self.copy_rest()
        with self._condition:
            self._find_changed()
            self._is_settled = True
        self.waited_s = time.perf_counter() - started
        return self._changed

    def check(self) -> None:
        """Return if no tensor was written while it was copied. The background calls it once everything is put.

        Raises
        ------
        BadInput
            Names the tensors.
        """
        with self._condition:
            if not self._is_settled:
                self._find_changed()
        if self._changed:
            names = sorted(self._changed)
            raise BadInput(
                f"dense tensors {names[:5]} ({len(names)} in all) were written between the save of step {self.step} "
                "and the next optimizer step, so their copies may be of two instants. From now on they are copied "
                "while the training waits, as SavePolicy(dense_copies='stall') copies all",
                found=names[:5],
            )  # fmt: skip

    def _find_changed(self) -> None:
        self._changed |= {name for name, (live, version) in self._live.items() if live._version != version}


@dataclass(frozen=True, slots=True, eq=False)
class _DenseCopy:
    """Memory for the copy of a tensor, as a tensor and as an array; its logical dtype.

    ``is_plain``: whether it may take other values. Else it is made anew for each copy.
    """

    tensor: torch.Tensor
    array: Array
    dtype: str
    is_plain: bool


class DenseStaging:
    """Stages the dense tensors of one training. One save at a time may use it: the memory of copies is kept.

    Call it from the thread that trains. Memory: a copy of all dense tensors in host memory.

    Parameters
    ----------
    is_lazy
        Whether tensors may be copied after `stage` has returned.
    """

    def __init__(self, *, is_lazy: bool) -> None:
        self.is_lazy = is_lazy
        self._kept: dict[str, _DenseCopy] = {}
        self._steady: set[str] = set()
        self._changing: set[str] = set()
        self._open: StagedDense | None = None
        self._on_trial: dict[str, torch.Tensor] = {}
        self._handle: Any = None
        if is_lazy:
            held = weakref.ref(self)

            def before_step(*_: object) -> None:
                staging = held()
                if staging is not None and staging._open is not None:
                    staging.settle(is_step=True)

            # Of all optimizers: one that the manager does not know may write these tensors, too.
            self._handle = register_optimizer_step_pre_hook(_outside_graphs(before_step))

    def stage(self, live: Mapping[str, torch.Tensor], steady: Collection[str], step: int) -> StagedDense:
        """Return copies of tensors as they are now; those of ``steady`` names may be made later. Blocks for the others.

        Parameters
        ----------
        live
            By name. The save before must be over.
        steady
            Names of those that only an optimizer's step writes: parameters, and optimizer state.

        Raises
        ------
        BadDtype, MemoryMoved
            Nothing was copied.
        """
        self.settle()
        for name, tensor in live.items():
            check_held(tensor, name)
        self._kept = {name: self._memory_for(name, tensor) for name, tensor in live.items()}
        candidates = {name for name in steady if can_be_lazy(live[name])} - self._changing if self.is_lazy else set()
        arrays = {name: kept.array for name, kept in self._kept.items()}
        staged = StagedDense(arrays, {name: kept.dtype for name, kept in self._kept.items()}, step)
        for name, tensor in live.items():
            if name in candidates and name in self._steady:
                staged.add(name, tensor.detach())
            elif self._kept[name].is_plain:
                self._kept[name].tensor.copy_(tensor.detach())
        self._on_trial = {name: live[name] for name in candidates - self._steady}
        self._open = staged
        return staged

    def settle(self, *, is_step: bool = False) -> None:
        """Have everything copied that is not, because the training may write it next. Blocks for that.

        ``is_step``: an optimizer's step is next, so that what a step of the training writes elsewhere is written.
        """
        staged, self._open = self._open, None
        if staged is None:
            return
        self._reject(staged.settle())
        trial, self._on_trial = self._on_trial, {}
        if is_step:
            started = time.perf_counter()
            same = {name for name, live in trial.items() if _is_same(live, self._kept[name].tensor)}
            self._steady |= same
            self._reject(trial.keys() - same)
            staged.waited_s += time.perf_counter() - started

    def _reject(self, names: Collection[str]) -> None:
        if names:
            logger.info("%d dense tensors change between steps, and are copied while the training waits", len(names))
        self._changing |= set(names)
        self._steady -= set(names)

    def _memory_for(self, name: str, tensor: torch.Tensor) -> _DenseCopy:
        kept, is_plain = self._kept.get(name), _is_plain(tensor)
        if kept is not None and kept.is_plain and is_plain:
            held = kept.tensor
            if held.dtype is tensor.dtype and held.shape == tensor.shape:
                return kept
        dtype = dense_dtype_name(tensor, name)
        with torch.inference_mode(False):  # else no later save outside that mode may write into it
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if is_plain else None
        memory = host_copy(tensor) if plain is None else plain
        return _DenseCopy(memory, as_array(memory), dtype, is_plain)

    def close(self) -> None:
        """Remove the hook and give the memory back; the last save is over."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._open, self._on_trial, self._kept = None, {}, {}


def _outside_graphs(hook: Any) -> Any:
    disabled = torch.compiler.disable(hook)

    def call(*args: Any) -> None:
        (disabled if torch.compiler.is_compiling() else hook)(*args)

    return call
