"""The ranks of one training, as far as a store needs them: each gives a message, all get all of them.

Several processes write one segment together, and must agree: on what is saved, on one scale per table, on whether it
was committed. They do so in one way only, `together`: every rank does its share, and either all succeed or all raise.
How the messages travel is somebody else's business (``torch.distributed`` in ``cnr_store.training``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from cnr_store.errors import CnrStoreError, RankFailed, RankLost


class Ranks(Protocol):
    """The ranks of a training, seen from one of them. One thread at a time may use a line to the others."""

    @property
    def rank(self) -> int:
        """This rank, 0 to ``world - 1``. Rank 0 commits."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Give a message to all ranks and return theirs, by rank. Blocks until every rank has called it.

        Raises
        ------
        RankLost
            A rank did not answer in time. Nothing more can be exchanged on this line.
        """

    def another(self) -> Ranks:
        """Return another line to the same ranks, for use by another thread. All ranks call it together. Blocks."""


class OneRank:
    """A training of one process: nobody else to ask."""

    rank = 0
    world = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the message alone."""
        return [message]

    def another(self) -> OneRank:
        """Return itself."""
        return self


_DECODER = msgspec.json.Decoder(dict[str, Any])
_KINDS: dict[str, type[CnrStoreError]] = {}


def together(ranks: Ranks, share: Callable[[], Any]) -> list[Any]:
    """Do one thing on all ranks: return what each rank's ``share`` returned, or raise on all of them. Blocks.

    Parameters
    ----------
    share
        This rank's part; returns plain JSON values. What it raises is raised here, after the others were told.

    Raises
    ------
    CnrStoreError
        Of the kind that the first failing rank raised, its number in the message; `RankFailed` for errors of others.
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
    except BaseException as error:  # noqa: BLE001 (raised again below, when the others know)
        answer, mine = msgspec.json.encode({"error": described(error)}), error
    try:
        answers = [_DECODER.decode(message) for message in ranks.exchange(answer)]
    except RankLost:
        if mine is None:
            raise
        answers = []
    if mine is not None:
        raise mine  # not in the handler, nor "from" something: it keeps its own cause
    for rank, given in enumerate(answers):
        if "error" in given:
            raise rebuilt(rank, given["error"])
    return [given["ok"] for given in answers]


def rank_zero(ranks: Ranks, act: Callable[[], Any]) -> Any:
    """Let rank 0 act; return on every rank what it returned, or raise on every rank as it raised. Blocks."""
    return together(ranks, act if ranks.rank == 0 else _nothing)[0]


def _nothing() -> None:
    return None


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON, for other ranks."""
    if isinstance(error, CnrStoreError):
        version = None if error.version is None else int(error.version)
        table = None if error.table is None else _sendable(error.table)
        return {"kind": error.kind, "message": _sendable(error), "table": table, "version": version}
    message = f"{type(error).__name__}: {_sendable(error)}"
    return {"kind": RankFailed.kind, "message": message, "table": None, "version": None}


def _sendable(text: object) -> str:
    """Text with no half of a surrogate pair, as paths that are not UTF-8 have: it could not be sent, nor the error."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def rebuilt(rank: int, error: Mapping[str, Any]) -> CnrStoreError:
    """Return the error that rank ``rank`` described: of the same kind where it is one of this library's."""
    if not _KINDS:
        _KINDS.update((cls.kind, cls) for cls in _subclasses(CnrStoreError))
    cls = _KINDS.get(error["kind"], RankFailed)
    return cls(f"rank {rank}: {error['message']}", table=error["table"], version=error["version"])


def _subclasses(cls: type[CnrStoreError]) -> Iterator[type[CnrStoreError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)
