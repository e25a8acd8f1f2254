"""Where a training stands in its data: the reader's position and the random generators, committed with the weights.

A loader's state is that of the last fetched batch. If batches are fetched ahead of training, it must not be saved
directly: a resume would skip them. An `IntervalReader` reports when its state is that of the last trained batch.

The generators of a process are saved as plain data: Python's, numpy's and torch's, without pickle. A loader of torch
draws random numbers when it makes an iterator. The generators that a checkpoint has are those after these draws, so
`resume` takes back what the next iterator draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.ranks import Ranks
from cnr_store.training.tensors import tensor_of

Redistribute = Callable[[list[Any]], Sequence[Any]]
"""From the saved states, by rank, to one for each rank that resumes."""


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and loads its state: torchdata's StatefulDataLoader, a scheduler, a GradScaler."""

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


@runtime_checkable
class IntervalReader(Stateful, Protocol):
    """A reader that knows which of its batches were trained; a due save waits until it is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether ``state_dict()`` is, now and until the next batch is trained, that of the last trained batch."""

    def trained(self) -> None:
        """Count one batch as trained; called once by each step, before a save."""

    def prepare(self) -> None:
        """Become ready within as few batches as possible, because a due save waits. Must not block.

        Called again at every step while the save waits, also on a ready reader: another rank's reader may not be
        ready. Until the first step without this call the reader should be ready at each step.
        """


def check_stateful(name: str, value: object) -> None:
    """Return if ``value`` can be saved and restored; warn about a loader whose sampling order cannot.

    Raises
    ------
    BadInput
    """
    if not isinstance(value, Stateful):
        advice = "use torchdata's StatefulDataLoader, or pass reader_state= to step() yourself"
        raise BadInput(
            f"{name} is a {type(value).__name__}, which has no state_dict() and load_state_dict(); "
            f"{advice if name == 'reader' else 'give it an object that has'}",
            found=type(value).__name__,
        )
    sampler = getattr(value, "sampler", None)
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        warn_caller(
            f"the sampler of {name} is torch's {type(sampler).__name__}, whose order is in no checkpoint: a resumed "
            "run trains some samples of the epoch twice and others not at all. Make the loader as torchdata's "
            "StatefulDataLoader(shuffle=True), also what a framework prepares, or with RandomSampler of "
            "torchdata.stateful_dataloader.sampler"
        )


def reader_document(reader: Stateful | None, given: Any) -> dict[str, Any] | None:
    """Return the reader's document: the caller's state of the last trained batch, else the reader's own state.

    The reader's own state is right only if no fetched batch waits for training. With a prefetching queue the caller
    must pass the state that came with the batch.
    """
    if given is not None:
        return {"state": given}
    return None if reader is None else {"state": reader.state_dict()}


def reader_name(rank: int) -> str:
    """Return the name of the document that holds a rank's reader state."""
    return f"reader/{rank}"


def stored_reader_state(
    snapshot: Snapshot, ranks: Ranks, redistribute: Redistribute | None, *, strict: bool = True
) -> Any:
    """Return this rank's reader state, None if none was saved. Blocks; reads one document if the ranks are as many.

    Raises
    ------
    BadInput
        Another number of ranks has saved, and there is no ``redistribute`` (without ``strict``: None is returned).
    CorruptStore
        A document is not what `reader_document` makes.
    """
    saved = [name for name in snapshot.documents if name.startswith("reader/")]
    if not saved:
        return None
    if len(saved) == ranks.world:
        return _state_in(snapshot, reader_name(ranks.rank))
    if redistribute is None and not strict:
        return None
    states = [_state_in(snapshot, reader_name(rank)) for rank in range(len(saved))]
    return reader_states_for(states, ranks.world, redistribute)[ranks.rank]


def _state_in(snapshot: Snapshot, name: str) -> Any:
    document = snapshot.read_document(name, tensor_of) if name in snapshot.documents else None
    if not isinstance(document, dict) or "state" not in document:
        raise CorruptStore(f"document {name} holds no reader state; restore another version", path=name)
    return document["state"]


def reader_states_for(states: Sequence[Any], world: int, redistribute: Redistribute | None = None) -> list[Any]:
    """Return one reader state per rank of a training that resumes on ``world`` ranks. Pure, no I/O.

    A reader's state records what one rank has read of its share. With another number of ranks the shares differ, and
    only the caller knows how they are made. This function does not guess.

    Parameters
    ----------
    states
        The saved states, by the rank that saved them; not changed.
    world
        Ranks that resume.
    redistribute
        Makes ``world`` states, by rank, of the saved ones; called only when their numbers differ.

    Raises
    ------
    BadInput
        The numbers differ and there is no ``redistribute``, or it returned another number of states.
    """
    if world < 1:
        raise BadInput(f"a training resumes on 1 rank or more, not {world}", found=world)
    if len(states) == world:
        return list(states)
    if redistribute is None:
        raise BadInput(
            f"the checkpoint holds the reader states of {len(states)} ranks, the training resumes on {world}; samples "
            f"would be trained twice or skipped. Resume on {len(states)} ranks, or pass redistribute=, a function "
            f"from the list of {len(states)} states to a list of {world}",
            expected=len(states), found=world,
        )  # fmt: skip
    made = list(redistribute(list(states)))
    if len(made) != world:
        raise BadInput(
            f"redistribute= made {len(made)} reader states of {len(states)}, the training resumes on {world} ranks; "
            "return one per rank",
            expected=world, found=len(made),
        )  # fmt: skip
    return made


def resume(reader: Stateful, state: Any) -> None:
    """Give a reader its state back. If it is a loader of torch, its next iterator leaves the generators as they are.

    That iterator continues after ``state``. Iterators of later epochs draw as usual.
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


def capture_rng() -> dict[str, Any]:
    """Return the state of every global generator; those of devices only if a device is in use. Takes microseconds."""
    state: dict[str, Any] = {
        "python": _python_state(),
        # Much training code still draws from numpy's global generator.
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": _torch_state(torch.get_rng_state()),
    }
    for kind, module in _device_generators():
        if module.is_initialized():
            state[kind] = list(module.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every global generator that ``state`` names; those of devices as far as this machine has them.

    Raises
    ------
    CorruptStore
        One of them is no state of that generator; those before it are set.
    """
    try:
        _set_generators(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptStore(
            f"the saved state of the random generators cannot be set: {error!r}; restore another version, or make the "
            "manager with rng=False"
        ) from error


def _set_generators(state: Mapping[str, Any]) -> None:
    if "python" in state:
        saved = state["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss_next"]))
    if "numpy" in state:
        np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state:
        torch.set_rng_state(_torch_blob(state["torch"]))
    for kind, module in _device_generators():
        for device, one in enumerate(state.get(kind, ())[: module.device_count()]):
            module.set_rng_state(one, device)


def _device_generators() -> Iterator[tuple[str, Any]]:
    """Yield the kind of accelerator of this machine and torch's module of it, if that has generators of all devices."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and hasattr(torch.get_device_module(accelerator), "get_rng_state_all"):
        yield accelerator.type, torch.get_device_module(accelerator)


def _python_state() -> dict[str, Any]:
    # As one array: 625 numbers of a JSON list would be most of a small delta.
    version, words, gauss_next = random.getstate()
    return {"version": version, "words": np.asarray(words, np.uint32), "gauss_next": gauss_next}


_WORDS = slice(24, 24 + 8 * 624)
"""Where torch's state of 5,056 bytes has the words of its Mersenne Twister, behind seed, position and flags."""


def _torch_state(blob: torch.Tensor) -> Any:
    """Return torch's state without the upper half of each word, which is zero: these words alone do not compress."""
    data = blob.numpy()
    words = data[_WORDS].view("<u8") if len(data) == 5056 else np.ones(1, "<u8") << np.uint64(32)
    if np.any(words >> np.uint64(32)):
        return blob  # another layout than that of torch 1.6 to 2.x
    return {"words": words.astype("<u4"), "rest": np.delete(data, _WORDS)}


def _torch_blob(state: Any) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    words = state["words"].astype("<u8").view(np.uint8)
    return torch.from_numpy(np.insert(state["rest"], _WORDS.start, words).astype(np.uint8, copy=False))
