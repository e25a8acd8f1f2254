"""Continue reading after a checkpoint, with the same random draws as in an uninterrupted run.

A loader draws from torch's generators when it makes an iterator: a seed for its workers, and some samplers theirs. The
uninterrupted run made its iterator before the checkpoint; the saved generators are those of after these draws. So what
the iterator draws that goes on from a checkpoint is taken back.

It is not made by the restore itself: worker processes begin with it, and would not see a ``sampler.set_epoch()`` that
follows.
"""

from __future__ import annotations

from typing import Any

import torch

from cnr_store.training.reader import Stateful
from cnr_store.training.rng import capture_rng, restore_rng


def resume(reader: Stateful, state: Any) -> None:
    """Give a reader its state back. If it is a loader of torch, its next iterator leaves the generators as they are.

    That is the one that goes on behind ``state``; those of later epochs draw as ever.
    """
    reader.load_state_dict(state)
    loader: Any = reader
    # What torch's DataLoader calls to make an iterator; nothing public lies between iter(loader) and the draws.
    make = getattr(type(loader), "_get_iterator", None)
    if make is None:
        return

    def without_draws() -> Any:
        before, own = capture_rng(), loader.generator
        is_shared = own is not None and own is getattr(loader.sampler, "generator", None)
        own_before = None if own is None or is_shared else own.get_state()
        try:
            iterator = make(loader)
            if getattr(iterator, "_finished", False):
                next(iterator, None)  # at the end of an epoch; else StatefulDistributedSampler ends the next one, too
        finally:
            restore_rng(before)
        del loader._get_iterator
        if own_before is not None:
            own.set_state(own_before)
        elif is_shared and loader.num_workers == 0:
            # StatefulDataLoader has set it back to where the sampler drew its order, and drew that alone. Without
            # workers the loader's seed was drawn behind it; with workers before.
            torch.empty((), dtype=torch.int64).random_(generator=own)
        return iterator

    loader._get_iterator = without_draws
