"""What TorchRec's managed collision keeps beside its buffers, so that unsharded modules resume exactly.

Why this module exists: a `MCHManagedCollisionModule` counts steps and collects the ids since its last eviction in plain
attributes, which are in no state dict. With its buffers alone it would evict at other steps and forget those ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from cnr_store.errors import BadInput
from cnr_store.integrations.torchrec.names import private

_COUNTERS = ("_current_iter", "_last_eviction_iter", "_current_history_buffer_offset", "_input_history_buffer_size")


class ManagedCollisionState:
    """The ids and counters of all unsharded managed-collision modules of a model, for ``CheckpointManager(extras=)``.

    Examples
    --------
    ``CheckpointManager(url, model=model, optimizer=optimizer, extras={"collisions": ManagedCollisionState(model)})``
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {n: one for n, one in model.named_modules() if isinstance(one, MCHManagedCollisionModule)}
        if not self._modules:
            raise BadInput("the model has no MCHManagedCollisionModule, so it needs no ManagedCollisionState")

    def state_dict(self) -> dict[str, Any]:
        """Return copies: counters, the ids since the last eviction, int64 ``(ids,)``, and what is noted of each."""
        return {name: _state_of(module) for name, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state in place.

        Raises
        ------
        BadInput
            It is of other modules. Nothing was changed.
        """
        if state.keys() != self._modules.keys():
            raise BadInput(
                f"the state is of managed-collision modules {sorted(state)}, the model has {sorted(self._modules)}",
                expected=sorted(self._modules), found=sorted(state),
            )  # fmt: skip
        for name, module in self._modules.items():
            _load(module, state[name])


def _state_of(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: int(private(module, name)) for name in _COUNTERS}
    if found["_input_history_buffer_size"] >= 0:
        count = found["_current_history_buffer_offset"]
        found["ids"] = private(module, "_history_accumulator")[:count].clone()
        found["noted"] = {key: one[:count].clone() for key, one in private(module, "_history_metadata").items()}
    return found


def _load(module: Any, state: Mapping[str, Any]) -> None:
    private(module, "_init_history_buffers")({})  # of no size, with the names that the eviction policy wants
    for name in _COUNTERS:
        setattr(module, name, state[name])
    size = max(0, state["_input_history_buffer_size"])
    module._history_accumulator = _buffer(module, size, state.get("ids"))
    for key in module._history_metadata:
        module._history_metadata[key] = _buffer(module, size, state.get("noted", {}).get(key))
        setattr(module, f"_history_{key}", module._history_metadata[key])


def _buffer(module: Any, size: int, held: torch.Tensor | None) -> torch.Tensor:
    made = torch.zeros(size, dtype=torch.int64, device=module.device)
    if held is not None:
        made[: len(held)] = held.to(made.device)
    return made
