"""Accelerate: a `CheckpointManager` of what an `Accelerator` has prepared.

```python
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from cnr_store.integrations.accelerate import checkpoint_manager

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
manager = checkpoint_manager(accelerator, "s3://bucket/run-7", loader, every_steps=100)
manager.restore()
```

It never pickles, and writes nothing to the accelerator's project folder. Needs accelerate; importing this module
without it raises `MissingDependency`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

from cnr_store.errors import BadInput, Unsupported
from cnr_store.integrations.frameworks import ManagerOptions, missing_framework
from cnr_store.store import Store
from cnr_store.training import CheckpointManager
from cnr_store.training.reader import Stateful, resume

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
except ImportError as error:
    raise missing_framework("manager for Accelerate", "accelerate") from error

__all__ = ["checkpoint_manager"]

_PLAIN = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
)


def checkpoint_manager(
    accelerator: Accelerator,
    store: str | os.PathLike[str] | Store,
    loader: Any = None,
    *,
    extras: Mapping[str, Stateful] | None = None,
    **options: Unpack[ManagerOptions],
) -> CheckpointManager:
    """Return the manager that saves and restores everything that an accelerator has prepared, as its ``save_state``.

    That is the model, the optimizers, learning rate schedulers, the scaler of mixed precision, objects that were
    registered with ``register_for_checkpointing``, and random generators of each rank; and the position of ``loader``.
    Call ``manager.step()`` where ``accelerator.sync_gradients`` is true, so accumulated batches count once. All ranks
    call it.

    Parameters
    ----------
    accelerator
        After its ``prepare``; with one model.
    loader
        The prepared loader that the training reads, made with ``use_stateful_dataloader=True``. ``loader.iteration`` is
        the epoch to go on with after a restore.
    extras
        As for `CheckpointManager`, besides what the accelerator has.
    **options
        ``every_steps``, ``options``, ``save_policy`` and what else a `CheckpointManager` takes.

    Raises
    ------
    BadInput
        What a `CheckpointManager` refuses; no model or several; a loader without a state.
    Unsupported
        The accelerator shards the model (FSDP, DeepSpeed; use `cnr_store.integrations.dcp`), or rank 0 reads for all.
    """
    reader = None if loader is None else _PreparedLoader(loader)
    return manager_of(accelerator, store, reader, extras or {}, options)


def manager_of(
    accelerator: Accelerator, store: str | os.PathLike[str] | Store, reader: Stateful | None,
    extras: Mapping[str, Stateful], options: ManagerOptions,
) -> CheckpointManager:  # fmt: skip
    """Return a manager of what an accelerator has prepared, with a ``reader`` of the caller's; see above.

    Raises
    ------
    BadInput, Unsupported
    """
    kind = str(accelerator.distributed_type.value)
    if kind not in _PLAIN:
        raise Unsupported(
            f"Accelerate runs with {kind}, which shards or places parameters itself; save through "
            "torch.distributed.checkpoint, with cnr_store.integrations.dcp",
            expected=_PLAIN, found=kind,
        )  # fmt: skip
    models = accelerator._models
    if len(models) != 1:
        raise BadInput(
            f"the accelerator has prepared {len(models)} models, a manager saves one; prepare() one module that holds "
            "all, before this call",
            expected=1, found=len(models),
        )  # fmt: skip
    found: dict[str, Stateful] = {f"scheduler/{index}": one for index, one in enumerate(accelerator._schedulers)}
    found |= {f"registered/{index}": one for index, one in enumerate(accelerator._custom_objects)}
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return CheckpointManager(
        store, model=accelerator.unwrap_model(models[0]), optimizer=list(accelerator._optimizers),
        reader=reader, extras={**found, **extras}, **options,
    )  # fmt: skip


class _PreparedLoader:
    """A prepared loader: which epoch it is in, and what it has yielded of it; it reads one batch ahead."""

    def __init__(self, loader: Any) -> None:
        if type(loader) is not DataLoaderShard:
            raise Unsupported(
                f"the loader is a {type(loader).__name__}, not one that each rank reads by itself; prepare() it with "
                "DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)",
                expected="DataLoaderShard", found=type(loader).__name__,
            )  # fmt: skip
        if not isinstance(loader.base_dataloader, Stateful):
            raise BadInput(
                "the loader has no state, so a resumed training would begin the epoch again; make the Accelerator with "
                "dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)",
                found=type(loader.base_dataloader).__name__,
            )
        self._loader = loader

    @property
    def sampler(self) -> Any:
        """What the manager looks at, to warn about an order that is in no checkpoint."""
        return self._loader.get_sampler()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._loader.iteration, "loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        loader, epoch = self._loader, state_dict["epoch"]
        loader.set_epoch(epoch)
        resume(loader.base_dataloader, state_dict["loader"])
        if state_dict["loader"].get("_iterator_finished"):
            loader.base_dataloader._get_iterator()  # the rest of the epoch, which is nothing: samplers count its end
            loader.set_epoch(epoch + 1)
