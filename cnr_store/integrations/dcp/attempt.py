"""One save of DCP on one rank: a thread that writes, and commits when the coordinator says that all ranks are done.

DCP has no hook for a save that failed: a rank that raised is not asked again, and the others are not told. So what
needs all ranks runs on a thread, behind that of the save before, and no hook waits for another rank, but `finish`,
which DCP calls when every rank has got this far. The ranks first agree which save they are in (`roll_call`): who was
left alone in an earlier one gives that up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from cnr_store.errors import SaveInProgress, TransactionAborted
from cnr_store.runtime.ranks import Ranks

_PATIENCE_S = 5.0
"""How long the thread of a save that has failed may take to end."""

AwaitFinish = Callable[[], Any]
"""Waits on the coordinator until all ranks are done, and returns what `SaveAttempt.finish` was given.

Raises ``CancelledError`` if the save is given up.
"""


class SaveAttempt:
    """Runs ``act`` on a thread of its own, once the attempt before it is over.

    Parameters
    ----------
    act
        Writes and commits; returns the version. Gets `AwaitFinish`, to call on the coordinator before it commits.
    before
        The attempt before it.
    """

    def __init__(self, act: Callable[[AwaitFinish], int], before: SaveAttempt | None) -> None:
        self._finish: Future[Any] = Future()
        self._done: Future[int] = Future()
        self._caller = threading.current_thread()
        # Not waited for at the end of the process: another rank may never answer.
        thread = threading.Thread(target=self._run, args=(act, before), name="cnr-dcp-save", daemon=True)
        thread.start()

    def _run(self, act: Callable[[AwaitFinish], int], before: SaveAttempt | None) -> None:
        try:
            if before is not None:
                before.wait()
            self._done.set_result(act(self._finish.result))
        except BaseException as error:  # noqa: BLE001 (raised by `finish`, if anybody asks)
            self._done.set_exception(error)

    def finish(self, document: Any) -> int:
        """Let the coordinator commit, with this document; return the version or raise what failed. Blocks."""
        self._finish.set_result(document)
        return self._done.result()

    def give_up(self) -> None:
        """Give the save up, unless it is over or is being finished. Does not wait.

        Raises
        ------
        SaveInProgress
            Another thread is in the middle of it.
        """
        if self._done.done():
            return
        if self._caller is not threading.current_thread():
            self._caller.join(_PATIENCE_S)  # DCP makes a thread for each save, which ends with it
            if self._caller.is_alive() and not self._done.done():
                raise SaveInProgress(
                    "an earlier dcp.async_save of this storage writer is still under way; wait for the future that it "
                    "returned before you begin the next save"
                )
        self._finish.cancel()  # nothing happens if it is being finished

    def wait(self) -> None:
        """Block until the attempt is over, however it ended."""
        self._done.exception()


def roll_call(ranks: Ranks, save: int, layout: str) -> list[str]:
    """Meet the other ranks in this save; return each rank's ``layout``. Blocks.

    Raises
    ------
    TransactionAborted
        Another rank is in a later save already: it did not take part in this one.
    RankLost
    """
    while True:
        message = msgspec.json.encode([save, layout])
        given = [msgspec.json.decode(one) for one in ranks.exchange(message)]
        saves = [number for number, _ in given]
        if len(set(saves)) == 1:
            return [one for _, one in given]
        if save < max(saves):
            raise TransactionAborted(f"rank {saves.index(max(saves))} did not take part in this save", found=saves)
