"""`GrantedReader`: hands out exactly the batches of one interval, so that every queue runs empty where a save is due.

This is the paper's protocol (Check-N-Run): what was read and what was trained are the same set at the instant of the
snapshot. A reader that blocked at the end of its grant would need no loop over intervals, but a pipeline that fetches
in the training thread would wait for itself; so an interval ends as an iterator does.

The rule that it must never break: nothing is fetched from the loader while its state is taken, and the state is not
given while a batch that it counts as read has not been trained.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_count
from cnr_store.training.reader import check_stateful, resume

T = TypeVar("T")


class GrantedReader(Generic[T]):
    """Reads a loader in intervals of ``grant`` batches; its state exists only when all that was read was trained.

    Iterating it goes through one epoch, as intervals. Put whatever fetches ahead around an interval, not around the
    reader. The state is the loader's own, so a run may change to another way of reading when it resumes.

    An interval that an epoch's end cuts short goes on in the next epoch. `prepare` ends one early. The thread that
    iterates an interval may be another one than the one that trains.

    Parameters
    ----------
    loader
        What has a state after each batch: torchdata's ``StatefulDataLoader``, with or without worker processes.
    grant
        Batches per interval, best the manager's ``every_steps``.
    micro_batches
        Batches per optimizer step, where gradients are accumulated: no interval ends between two of them, except with
        the epoch. ``grant`` is a multiple of it.

    Attributes
    ----------
    grant
        Batches of the next interval.

    Raises
    ------
    BadInput
        The loader has no state, or the numbers do not fit.

    Examples
    --------
    >>> from torchdata.stateful_dataloader import StatefulDataLoader
    >>> reader = GrantedReader(StatefulDataLoader(range(10), batch_size=2), grant=2)
    >>> for interval in reader:
    ...     for batch in interval:
    ...         reader.trained()  # `CheckpointManager.step` does this
    ...     print(batch.tolist(), reader.is_ready)
    [2, 3] True
    [6, 7] True
    [8, 9] True

    Source: Eisenman et al., Check-N-Run (NSDI 2022), the gap between reader and trainer.
    """

    def __init__(self, loader: Iterable[T], *, grant: int, micro_batches: int = 1) -> None:
        check_stateful("the loader of a GrantedReader", loader)
        grant = checked_count("grant, best the manager's every_steps,", grant, least=1)
        if grant % checked_count("micro_batches", micro_batches, least=1):
            raise BadInput(
                f"a grant of {grant} batches is no whole number of optimizer steps of {micro_batches} batches each; "
                "saves are made between those", expected=micro_batches, found=grant,
            )  # fmt: skip
        self.grant = grant
        self._micro_batches = micro_batches
        self._loader: Any = loader
        self._lock = threading.Lock()
        self._epoch: Iterator[T] | None = None
        self._serial = 0  # of the current interval; a reference to it would be a cycle that keeps workers alive
        self._is_open, self._was_asked = False, True
        self._save_waits = False
        self._left = 0
        self._in_flight = 0

    def __iter__(self) -> Iterator[Iterator[T]]:
        """Yield the intervals of what is left of the epoch, each an iterator of batches.

        Raises
        ------
        BadInput
            The next interval is asked for before the last one was trained to its end, or without reading it.
        """
        with self._lock:
            if self._epoch is None:
                self._epoch = iter(self._loader)
        while self._epoch is not None:
            yield self._begin()

    @property
    def in_flight(self) -> int:
        """Batches fetched, or being fetched, and not trained."""
        return self._in_flight

    @property
    def is_ready(self) -> bool:
        """Whether nothing is in flight and nothing will be before the next interval: the state may be taken."""
        with self._lock:
            return self._is_drained()

    def trained(self, batches: int = 1) -> None:
        """Count ``batches`` more as trained; `CheckpointManager.step` counts one. Call it from the training thread.

        Raises
        ------
        BadInput
            More than were handed out.
        """
        with self._lock:
            if batches > self._in_flight:
                raise BadInput(
                    f"{batches} batches count as trained, but {self._in_flight} that the reader handed out are not "
                    "trained yet; call step() once per batch of this reader, and trained() for no others",
                    expected=self._in_flight, found=batches,
                )  # fmt: skip
            self._in_flight -= batches
            self._save_waits = False

    def prepare(self) -> None:
        """End the interval with the optimizer step of what was fetched: a save is due.

        Where the save waits for others although the state may be taken, the next interval is one optimizer step.
        """
        with self._lock:
            self._left %= self._micro_batches
            self._save_waits = True

    def state_dict(self) -> Any:
        """Return the loader's state, which is that after exactly the trained batches.

        Raises
        ------
        BadInput
            The interval is not over. Nothing is changed; the state can be taken later.
        """
        with self._lock:
            if not self._is_drained():
                raise BadInput(
                    f"the reader's state would skip {self._in_flight} batches in flight (fetched and not trained), and "
                    f"{self._left} more of the interval may be fetched at any time; save at the end of an interval, "
                    "or end it with prepare() and train what was fetched",
                    expected=0, found=self._in_flight,
                )  # fmt: skip
            self._save_waits = False
            return self._loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue after the batches of ``state_dict``; intervals handed out before yield nothing more.

        Batches in flight are forgotten: end the pipeline that holds them before.
        """
        with self._lock:
            resume(self._loader, state_dict)
            self._epoch = None
            self._serial += 1
            self._is_open, self._was_asked = False, True
            self._save_waits = False
            self._left = self._in_flight = 0

    def _is_drained(self) -> bool:
        return self._in_flight == 0 and not (self._is_open and self._left > 0)

    def _begin(self) -> _IntervalBatches[T]:
        with self._lock:
            if self._in_flight:
                raise BadInput(
                    f"the next interval was asked for with {self._in_flight} batches of the last one in flight; train "
                    "them first and call step() after each, or load_state_dict() to give them up",
                    expected=0, found=self._in_flight,
                )  # fmt: skip
            if not self._was_asked:
                raise BadInput(
                    "an interval was asked for and not read; iterate each one (for batch in interval), and make the "
                    "pipeline anew for each if it does not go on with another iterator"
                )
            if self._left == 0:
                self._left = self._micro_batches if self._save_waits else self.grant
            self._serial += 1
            self._is_open, self._was_asked = True, False
            return _IntervalBatches(self, self._serial)

    def _fetch(self, serial: int) -> T:
        """Fetch one batch; it counts as in flight before it is read, so that no state is taken meanwhile."""
        with self._lock:
            epoch = self._epoch
            is_current = serial == self._serial
            self._was_asked |= is_current
            if not is_current or not self._is_open or self._left == 0 or epoch is None:
                raise StopIteration
            self._left -= 1
            self._in_flight += 1
        try:
            return next(epoch)
        except BaseException as error:
            with self._lock:
                if serial == self._serial:
                    self._in_flight -= 1
                    self._left += 1
                    if isinstance(error, StopIteration):
                        self._is_open, self._epoch = False, None
            raise


class _IntervalBatches(Iterator[T]):
    """What is left of a grant; ends with it, with the epoch, and when another interval has begun."""

    def __init__(self, reader: GrantedReader[T], serial: int) -> None:
        self._reader, self._serial = reader, serial

    def __next__(self) -> T:
        return self._reader._fetch(self._serial)
