"""Run several processes' worth of real code in one chosen interleaving of their storage calls.

Each actor runs in a thread of its own, and only one moves at a time: from one storage call to its next. A
schedule is a seed, so a failing one can be run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from cnr_store.testing.faulty import Call, SimulatedCrash

Actor = Callable[[Callable[[Call], None]], None]
"""Does its work through a `FaultyFileSystem` whose ``on_call`` is the function that it is given."""

_TIMEOUT_S = 60.0


class _Turn:
    """One actor's thread, which waits at each storage call until it is let go."""

    def __init__(self, actor: Actor) -> None:
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self.is_done = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(actor,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let the actor run to its next storage call, or to its end."""
        self._go.release()
        if not self._paused.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError("an actor made no storage call: it waits for something that no actor will do")
        if self.is_done:
            self._thread.join()

    def _run(self, actor: Actor) -> None:
        self._go.acquire()
        try:
            actor(self._pause)
        except SimulatedCrash:
            pass  # A crashed actor has simply stopped; the others go on.
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            self.error = error
        self.is_done = True
        self._paused.release()

    def _pause(self, _call: Call) -> None:
        self._paused.release()
        self._go.acquire()


def run_schedule(actors: Sequence[Actor], seed: int) -> list[int]:
    """Run ``actors`` to their ends in the interleaving of ``seed``; return the order in which they moved.

    Raises
    ------
    Exception
        What an actor raised first, after all have ended.
    TimeoutError
        An actor blocks without making a storage call.
    """
    random = Random(seed)
    turns = [_Turn(actor) for actor in actors]
    order: list[int] = []
    while waiting := [index for index, turn in enumerate(turns) if not turn.is_done]:
        chosen = random.choice(waiting)
        # Runs of one actor as well as quick changes: many races need one process to stand still for long.
        for _ in range(random.choice((1, 1, 2, 8))):
            if not turns[chosen].is_done:
                turns[chosen].step()
                order.append(chosen)
    for turn in turns:
        if turn.error is not None:
            raise turn.error
    return order
