"""Live views of an FBGEMM kernel: weights, row state of its fused optimizer, and its counters.

Why this module exists: ``state_dict()`` shows the same memory as sharded tensors whose layout depends on the
sharding (under column-wise sharding the row state of all shards is one long vector). The kernel has one tensor per
shard, as a checkpoint needs. Tests check row by row which rows an optimizer changes, for those that run on a CPU
(tests/training/torchrec); the others run on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cnr_store.integrations.torchrec.names import private
from cnr_store.training.shards import Scalars, Slots
from cnr_store_gpu import Movement, RowMovement

# Their backward changes only the rows of the batch, also with weight decay.
_LAZY = {
    "exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "lars_sgd", "adam", "partial_row_wise_adam", "lamb",
    "partial_row_wise_lamb",
}  # fmt: skip
# These rewrite whole tables in some forwards.
_SWEEPING = {"ensemble_row_wise_adagrad", "ema_in_place_row_wise_adagrad"}


def fused_movement(kernel: nn.Module) -> RowMovement:
    """Return which rows a step of the kernel's fused optimizer changes. No side effects."""
    name = str(private(kernel, "optimizer"))
    if name in _LAZY:
        return RowMovement(
            Movement.TOUCHED, Movement.TOUCHED, f"fused {name}: its backward visits only the rows of the batch"
        )
    if name in _SWEEPING:
        return RowMovement(Movement.ALL, Movement.ALL, f"fused {name}: it rewrites whole tables every so many steps")
    return RowMovement(
        Movement.ALL, Movement.ALL, f"fused {name}: unknown optimizer, so every row may change", is_known=False
    )


_PLACES = ("_dev", "_host", "_uvm")
"""How names of tensors of rows end; each kind of state has one per place, of which one holds the rows.

What is not used has no element, or a single integer.
"""


def kernel_memory(kernel: nn.Module) -> Callable[[], list[torch.Tensor]]:
    """Return a function that returns the tensors which hold the kernel's rows and row state now.

    Asked anew, because memory stashing gives a parameter other memory while it keeps the views of the old one.
    """
    own = [
        (holder, name)
        for holder in (kernel._parameters, kernel._buffers)
        for name, tensor in holder.items()
        if tensor is not None and tensor.numel() > (not tensor.is_floating_point())
        if name == "weights" or name.endswith(_PLACES)
    ]

    def tensors() -> list[torch.Tensor]:
        return [tensor for holder, name in own if (tensor := holder[name]) is not None]

    return tensors


def fused_slots(kernel: nn.Module, position: int) -> Callable[[], Slots]:
    """Return a function that returns the live row state of the kernel's table number ``position``.

    The names are TorchRec's: ``momentum1`` for the first slot of every optimizer, then the optimizer's names.
    """

    def slots() -> Slots:
        states = private(kernel, "get_optimizer_state")()
        if not states:  # an optimizer without state, such as SGD
            return {}
        num_rows = private(kernel, "split_embedding_weights")()[position].shape[0]
        named = {
            name if number else "momentum1": value for number, (name, value) in enumerate(states[position].items())
        }
        # For some optimizers the step counter is among them; its name also excludes it in a table of one row.
        return {
            name: value
            for name, value in named.items()
            if name != "iter" and value.ndim > 0 and value.shape[0] == num_rows
        }

    return slots


def fused_scalars(kernel: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Scalars]:
    """Return a function that reads the kernel's counters and learning rate, and waits for its device."""

    def scalars() -> Scalars:
        found: Scalars = {
            "iter": int(private(kernel, "iter").item()),
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
        }
        if getattr(kernel, "_used_rowwise_adagrad_with_counter", False):
            found["max_counter"] = float(private(kernel, "max_counter")[0])
        return found

    return scalars


def put_fused_scalars(kernel: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes values of `fused_scalars` into the kernel."""

    def put(values: Mapping[str, Any]) -> None:
        if "iter" in values:
            private(kernel, "iter").fill_(int(values["iter"]))
            # The kernel increments this one, and reads the other only if this one is zero.
            private(kernel, "iter_cpu").fill_(int(values["iter"]))
        if "learning_rate" in values:
            optimizer.param_groups[0]["lr"] = values["learning_rate"]
            private(kernel, "set_learning_rate")(values["learning_rate"])
        if "max_counter" in values and getattr(kernel, "_used_rowwise_adagrad_with_counter", False):
            private(kernel, "max_counter").fill_(values["max_counter"])

    return put
