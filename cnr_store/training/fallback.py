"""Find the newest version that is whole, with all ranks, when the head of a store is damaged. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cnr_store.errors import CorruptRecord, CorruptStore
from cnr_store.format.commit_record import LogEntry
from cnr_store.maintenance.repair import read_end
from cnr_store.maintenance.verify import find_newest_whole
from cnr_store.runtime.ranks import Ranks, described, rank_zero, together
from cnr_store.store import Store


@dataclass(frozen=True, slots=True)
class WentBack:
    """What a training continues from, the same on all ranks.

    Attributes
    ----------
    damaged
        The version that should have been restored.
    target
        The newest version that is whole.
    newest, torn
        The newest record that could be read, and the sha256 of each later position that could not.
    problem
        What is wrong, and which object it is.
    """

    damaged: int
    target: int
    newest: int
    torn: tuple[str, ...]
    problem: str

    def __str__(self) -> str:
        return (
            f"version {self.damaged} cannot be restored ({self.problem}); continuing from version {self.target}, the "
            "newest undamaged one; a rollback record will precede the first save after it"
        )


def go_back(ranks: Ranks, store: Store, error: Exception) -> WentBack:
    """Return the newest version that is whole. All ranks call it with what their restore raised. Blocks.

    Rank 0 reads the candidates, every object of them.

    Raises
    ------
    Exception
        ``error``, if that is no damage on some rank, or no version is whole.
    StorageFailure, AccessDenied
    """
    answers = together(ranks, lambda: _damage_here(error))
    if not all(one["is_damage"] for one in answers):
        raise error
    problem = next((one["message"] for one in answers if one["segment"]), answers[0]["message"])
    segments = {one["segment"] for one in answers if one["segment"]}
    answer = rank_zero(ranks, lambda: _find_whole(store, segments, answers[0]["kind"]))
    if answer is None:
        raise error
    return WentBack(problem=problem, **{**answer, "torn": tuple(answer["torn"])})


def _damage_here(error: Exception) -> dict[str, Any]:
    """What this rank knows of the damage, as plain JSON: an error of another rank has lost its path."""
    path = getattr(error, "path", None) or ""
    folder, _, rest = path.partition("data/")
    return {
        **described(error), "is_damage": isinstance(error, CorruptStore),
        "segment": rest.partition("/")[0] if not folder else "",
    }  # fmt: skip


def _find_whole(store: Store, damaged: Collection[str], kind: str) -> dict[str, Any] | None:
    """On rank 0: find the newest whole version; None if there is none."""
    tail = read_end(store)
    if tail.last is None:
        return None
    last = tail.last.record
    if not damaged and kind != CorruptRecord.kind and last.chain and tail.lost is None:
        damaged = {last.chain[-1].seg}  # a state that is wrong, and no object that is
    found = find_newest_whole(store, avoid=damaged)
    if found.entry is None:
        return None
    return {
        "damaged": tail.newest if tail.torn else _checkpoint(store, tail.last), "target": found.entry.record.v,
        "newest": last.v, "torn": tail.torn,
    }  # fmt: skip


def _checkpoint(store: Store, head: LogEntry) -> int:
    """Return the version that saved the head's state: later fences and tags only repeat its chain."""
    version = head.record.v
    try:
        for entry in store.internals.log.walk(head):
            if entry.record.chain != head.record.chain:
                break
            version = entry.record.v
    except CorruptStore:
        pass  # Only for the message: damage of older records does not matter here.
    return version
