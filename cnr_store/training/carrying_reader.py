"""`CarryingReader`: yields each batch with the reader's state, so no queue must be drained before a save.

Threads, queues and lookahead between the loader and the training pass on batch and state together. The training gives
the manager the state of the batch that it trained.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_count
from cnr_store.training.reader import check_stateful, resume

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CarriedBatch(Generic[T]):
    """A batch, and the reader's state directly after it.

    ``to``, ``pin_memory`` and ``record_stream`` call those of the batch, for pipelines that need them.

    Attributes
    ----------
    batch
        As it came from the loader.
    state
        For ``CheckpointManager.step(reader_state=...)``; None for batches between two saves (`CarryingReader.every`).
    """

    batch: T
    state: Any

    def to(self, *args: Any, **options: Any) -> CarriedBatch[Any]:
        """Return the batch moved as its own ``to`` moves it, with the same state."""
        batch: Any = self.batch
        return CarriedBatch(batch.to(*args, **options), self.state)

    def pin_memory(self, *args: Any, **options: Any) -> CarriedBatch[Any]:
        """Return the batch pinned as its own ``pin_memory`` does it, with the same state."""
        batch: Any = self.batch
        return CarriedBatch(batch.pin_memory(*args, **options), self.state)

    def record_stream(self, stream: Any) -> None:
        """Tell the batch's memory that ``stream`` uses it."""
        batch: Any = self.batch
        batch.record_stream(stream)


class CarryingReader(Generic[T]):
    """Reads a loader; yields `CarriedBatch`, one epoch per iteration.

    Give it to the manager as its ``reader`` and hand it the state at every step:
    ``manager.step(reader_state=carried.state)``. A save that is due at a batch without a state waits for the next one
    that has it.

    The state is copied, because a `StatefulDataLoader` without workers returns live objects. A copy takes 0.1 to 0.2
    ms, and more if the dataset's own state is large (30 ms for 100,000 integers). ``every`` sets which batches pay it.
    The loader's ``snapshot_every_n_steps`` does the same for the states that worker processes send.

    Parameters
    ----------
    loader
        What has a state after each batch: torchdata's ``StatefulDataLoader``, with or without worker processes.
    every
        Batches from one copy of the state to the next: the manager's ``every_steps``, or 1 if a save may be due at any
        step.

    Raises
    ------
    BadInput
        The loader has no state, or ``every`` is not positive.

    Examples
    --------
    >>> from torchdata.stateful_dataloader import StatefulDataLoader
    >>> reader = CarryingReader(StatefulDataLoader(range(8), batch_size=2), every=2)
    >>> [(carried.batch.tolist(), carried.state is not None) for carried in reader]
    [([0, 1], False), ([2, 3], True), ([4, 5], False), ([6, 7], True)]
    """

    def __init__(self, loader: Iterable[T], *, every: int = 1) -> None:
        check_stateful("the loader of a CarryingReader", loader)
        self.every = checked_count("every, in batches,", every, least=1)
        self._loader: Any = loader
        self._is_wanted = threading.Event()
        self._was_asked = False
        self._fetched = self._last_state_at = 0

    def __iter__(self) -> Iterator[CarriedBatch[T]]:
        """Yield what is left of the epoch. The thread that iterates may be another one than the one that trains."""
        for batch in self._loader:
            self._fetched += 1
            if self._fetched < self._last_state_at + self.every and not self._is_wanted.is_set():
                yield CarriedBatch(batch, None)
                continue
            self._last_state_at = self._fetched
            yield CarriedBatch(batch, copy.deepcopy(self._loader.state_dict()))

    @property
    def is_ready(self) -> bool:
        """Always False: only the training knows which batch was trained."""
        return False

    def trained(self) -> None:
        """Note a trained step: states are requested only while `prepare` is called at every step."""
        if not self._was_asked:
            self._is_wanted.clear()
        self._was_asked = False

    def prepare(self) -> None:
        """Copy the state with every fetched batch, until the first step without this call."""
        self._was_asked = True
        self._is_wanted.set()

    def state_dict(self) -> Any:
        """Raise, because the loader's state may count batches that were not trained.

        Raises
        ------
        BadInput
        """
        raise BadInput(
            f"the batch trained last carries no reader state (every={self.every}); save at a step whose batch has one, "
            "and give it: manager.step(reader_state=carried.state)"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue after the batch of ``state_dict``. Begin a new iteration after this call."""
        resume(self._loader, state_dict)
        self._fetched = self._last_state_at = 0
        self._was_asked = False
        self._is_wanted.clear()
