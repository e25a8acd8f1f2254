"""Run several processes' worth of real code in one chosen interleaving of their storage calls.

Each actor runs in a thread of its own, and only one moves at a time: from one storage call to its next. A
schedule is a seed, so a failing one can be run again.

For the order to be a function of the seed, an actor may make storage calls from one thread at a time only: a store of
one worker thread does, one without any is faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from tests.support.faulty import Call, SimulatedCrash

Actor = Callable[[Callable[[Call], None]], None]
"""Does its work through a `FaultyFileSystem` whose ``on_call`` is the function that it is given."""

_TIMEOUT_S = 60.0


class _Turn:
    """One actor's thread, which moves only while it is its turn."""

    def __init__(self, schedule: _Schedule, index: int, actor: Actor) -> None:
        self.go = threading.Lock()  # a plain lock: a semaphore costs several times as much, and this is the hot path
        self.go.acquire()
        self.is_done = False
        self.error: BaseException | None = None
        self._schedule = schedule
        self._index = index
        self._actor = actor

    def run(self) -> None:
        self.go.acquire()
        try:
            self._actor(self._pause)
        except SimulatedCrash:
            pass  # A crashed actor has simply stopped; the others go on.
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            self.error = error
        self.is_done = True
        self._schedule.pass_on(self._index)

    def _pause(self, _call: Call) -> None:
        self._schedule.pause(self._index)


class _Schedule:
    """Whose turn it is. The actor that pauses chooses the next itself, so going on costs no change of threads."""

    def __init__(self, actors: Sequence[Actor], seed: int, speeds: Sequence[float] | None) -> None:
        self.order: list[int] = []
        self.over = threading.Lock()
        self.over.acquire()
        self.turns = [_Turn(self, index, actor) for index, actor in enumerate(actors)]
        self.misuse: RuntimeError | None = None
        self._random = Random(seed)
        self._speeds = list(speeds) if speeds is not None else [1.0] * len(actors)
        self._current = -1
        self._moves_left = 0

    def pause(self, index: int) -> None:
        """Let another actor move; returns when it is this one's turn again."""
        if index != self._current:
            self.misuse = RuntimeError(f"actor {index} made a storage call out of turn: it has several threads")
            raise self.misuse
        chosen = self._choose()
        if chosen != index:
            self.turns[chosen].go.release()
            self.turns[index].go.acquire()

    def pass_on(self, index: int) -> None:
        """Let another actor move, if there is one: this one has ended, or (-1) none has moved yet."""
        if index != self._current:
            self.misuse = RuntimeError(f"actor {index} ended out of turn: it has several threads")
            return  # whose turn it is goes on, and passes on itself
        chosen = self._choose()
        if chosen < 0:
            self.over.release()
        else:
            self.turns[chosen].go.release()

    def _choose(self) -> int:
        if self._moves_left and not self.turns[self._current].is_done:
            self._moves_left -= 1
        else:
            waiting = [index for index, turn in enumerate(self.turns) if not turn.is_done]
            if not waiting:
                return -1
            self._current = self._random.choices(waiting, [self._speeds[index] for index in waiting])[0]
            # Runs of one actor as well as quick changes: many races need one process to stand still for long.
            self._moves_left = self._random.choice((0, 0, 1, 7))
        self.order.append(self._current)
        return self._current


def run_schedule(actors: Sequence[Actor], seed: int, *, speeds: Sequence[float] | None = None) -> list[int]:
    """Run ``actors`` to their ends in the interleaving of ``seed``; return the order in which they moved.

    Parameters
    ----------
    speeds
        How often each actor is chosen, relative to the others; None treats them alike. A slow actor meets a store that
        has moved on a long way between two of its calls.

    Raises
    ------
    Exception
        What an actor raised first, after all have ended.
    TimeoutError
        An actor blocks without making a storage call.
    RuntimeError
        An actor made storage calls from several threads at once.
    """
    schedule = _Schedule(actors, seed, speeds)
    threads = [threading.Thread(target=turn.run, daemon=True) for turn in schedule.turns]
    for thread in threads:
        thread.start()
    schedule.pass_on(-1)
    moves = -1
    while not schedule.over.acquire(timeout=_TIMEOUT_S):
        if len(schedule.order) == moves:
            raise TimeoutError("an actor made no storage call: it waits for something that no actor will do")
        moves = len(schedule.order)
    for thread in threads:
        thread.join()
    if schedule.misuse is not None:
        raise schedule.misuse
    for turn in schedule.turns:
        if turn.error is not None:
            raise turn.error
    return schedule.order
