"""Communication between the ranks of one training: each sends a message, and all receive all messages.

Several processes write one segment together. They must agree on what is saved, on one scale per table, and on whether
it was committed. They use only `together`: every rank does its share, and either all succeed or all raise. The
transport is implemented elsewhere (``torch.distributed`` in ``cnr_store.training``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import CnrStoreError, RankFailed, RankLost

Parcels = Sequence[tuple[int, npt.NDArray[np.uint8]]]
"""Bytes, each with the rank that gets them or sends them."""


class Ranks(Protocol):
    """A connection from one rank of a training to the others. One thread at a time may use it."""

    @property
    def rank(self) -> int:
        """This rank, 0 to ``world - 1``. Rank 0 commits."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a message to all ranks and return theirs, by rank. Blocks until every rank has called it.

        Raises
        ------
        RankLost
            A rank did not answer in time. This connection cannot be used any more.
        """

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        """Fill ``data`` with that of rank ``source``, in place; of equal length on all ranks. Blocks; all call it.

        Raises
        ------
        RankLost
        """

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        """Send arrays to ranks, and fill arrays with what ranks send to this one. Blocks; all ranks call it.

        Of each pair of ranks both have the same lengths in the same order.

        Raises
        ------
        RankLost
        """

    def another(self) -> Ranks:
        """Return another connection to the same ranks, for another thread. All ranks call it together. Blocks."""


class OneRank:
    """The ranks of a training with one process."""

    rank = 0
    world = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the message alone."""
        return [message]

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        """Do nothing: this rank has it."""

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        """Do nothing: there is no other rank."""

    def another(self) -> OneRank:
        """Return itself."""
        return self


_DECODER = msgspec.json.Decoder(dict[str, Any])
_KINDS: dict[str, type[CnrStoreError]] = {}


def together(ranks: Ranks, share: Callable[[], Any]) -> list[Any]:
    """Call ``share`` on all ranks; return all results, by rank, or raise on all ranks. Blocks.

    Parameters
    ----------
    share
        This rank's part; returns plain JSON values. Its error is sent to the other ranks, then raised here.

    Raises
    ------
    CnrStoreError
        The error of the first failing rank, with its number in the message; `RankFailed` for errors of other libraries.
    RankLost
        A rank did not answer.
    """
    if ranks.world == 1:
        return [share()]
    mine: BaseException | None = None
    try:
        answer = msgspec.json.encode({"ok": share()})
    except RankLost:
        raise
    except BaseException as error:  # noqa: BLE001 (raised again below, after the exchange)
        answer, mine = msgspec.json.encode({"error": described(error)}), error
    try:
        answers = [_DECODER.decode(message) for message in ranks.exchange(answer)]
    except RankLost:
        if mine is None:
            raise
        answers = []
    if mine is not None:
        raise mine  # outside the handler and without "from", so that it keeps its own cause
    for rank, given in enumerate(answers):
        if "error" in given:
            raise rebuilt(rank, given["error"])
    return [given["ok"] for given in answers]


def rank_zero(ranks: Ranks, act: Callable[[], Any]) -> Any:
    """Call ``act`` on rank 0 only; return its result, or raise its error, on every rank. Blocks."""
    return together(ranks, act if ranks.rank == 0 else lambda: None)[0]


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON, for other ranks."""
    if isinstance(error, CnrStoreError):
        version = None if error.version is None else int(error.version)
        table = None if error.table is None else _sendable(error.table)
        return {"kind": error.kind, "message": _sendable(error), "table": table, "version": version}
    message = f"{type(error).__name__}: {_sendable(error)}"
    return {"kind": RankFailed.kind, "message": message, "table": None, "version": None}


def _sendable(text: object) -> str:
    """Return the text without lone surrogates (of paths that are not UTF-8), which JSON cannot encode."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def rebuilt(rank: int, error: Mapping[str, Any]) -> CnrStoreError:
    """Return the error that rank ``rank`` described; of the same kind if it is an error of this library."""
    if not _KINDS:
        _KINDS.update((cls.kind, cls) for cls in _subclasses(CnrStoreError))
    cls = _KINDS.get(error["kind"], RankFailed)
    return cls(f"rank {rank}: {error['message']}", table=error["table"], version=error["version"])


def _subclasses(cls: type[CnrStoreError]) -> Iterator[type[CnrStoreError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)
