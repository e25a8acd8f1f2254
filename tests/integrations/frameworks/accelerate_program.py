"""Trains with Accelerate and a manager, perhaps killed, and prints what is left: ``accelerate_program.py '{...}'``."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import TableOptions
from cnr_store.integrations.accelerate import checkpoint_manager
from tests.integrations.frameworks.trained import Samples, digests, kill, loss_of, main, new_model


class Counter:
    """An object of the caller's, registered for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def train(
    store: str, *, ranks: str = "", epochs: int = 2, every: int | None = None, kill_at: int = -1, how: str = "raise",
    accumulate: int = 1, workers: int = 0, seedable: bool = False, stateful: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train until the end, or until it is killed; returns digests and counts."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable),
    )  # fmt: skip
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    made = StatefulDataLoader if stateful and not seedable else torch.utils.data.DataLoader
    loader = made(Samples(world), batch_size=8, shuffle=True, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    manager = checkpoint_manager(accelerator, store, loader, every_steps=every, options=TableOptions.exact())
    with manager:
        restored = manager.restore()
        for _ in range(loader.iteration, epochs):
            for batch in loader:
                if manager.current_step == kill_at:
                    kill(how)
                counter.batches += 1
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    manager.step()
    unwrapped = accelerator.unwrap_model(model)
    return {
        **digests(unwrapped, optimizer, step=manager.current_step, epoch=loader.iteration),
        "batches": counter.batches, "restored": None if restored is None else restored.step,
    }  # fmt: skip


if __name__ == "__main__":
    main(train)
