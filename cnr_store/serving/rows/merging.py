"""Put an overlay's rows into the held rows: first make room, then write. Views that still read them are not its matter.

`merge_target` takes all the memory needed and changes nothing that a reader sees; `merge_into` cannot fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_store.segment.codes import ABSENT
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.key_index import MISSING, KeyIndex
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import HeldTable, Overlay, index_capacity

GROWTH = 2
"""A table held by key that has no room left for new keys is copied to one with so many times its rows."""

COPY_ROWS = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class MergeTarget:
    """Where the rows of an overlay go.

    Attributes
    ----------
    held
        The table as it is after the merge; its arrays are those of the table before, unless it had to grow.
    positions
        int64 (n,): where each row of the overlay goes; `MISSING` for absent rows of a table held by key.
    new
        Positions in the overlay of the keys that come to the index.
    gone
        Keys that leave it.
    """

    held: HeldTable
    positions: gather.Places
    new: npt.NDArray[np.int64]
    gone: npt.NDArray[np.int64]


def merge_target(held: HeldTable, overlay: Overlay, memory: Memory) -> MergeTarget:
    """Return where an overlay's rows go, having taken the memory for it; nothing that is read is written.

    Raises
    ------
    StorageFailure
        There is no memory for more rows or their status.
    """
    if overlay.status.any() and (held.index is None or (overlay.status > ABSENT).any()):
        held = held.with_status(memory)
    none = np.empty(0, np.int64)
    if held.index is None:
        return MergeTarget(replace(held, schema=overlay.schema), overlay.ids - held.start, none, none)
    positions = held.index.find(overlay.ids)
    is_absent = overlay.status == ABSENT
    new = np.flatnonzero((positions == MISSING) & ~is_absent)
    # Readers of this view find the keys that leave in the overlay, so their rows may be given to others at once.
    spare = np.concatenate([held.spare, positions[(positions != MISSING) & is_absent]])
    fresh = max(0, len(new) - len(spare))
    if held.num_rows + fresh <= len(held.rows) and len(new) > held.index.room:
        held = replace(
            held, index=held.index.grown(index_capacity(held.index.count + len(new)), memory, f"{held.name}.index")
        )
    elif held.num_rows + fresh > len(held.rows):
        held = _grown(held, len(new), memory)
        assert held.index is not None
        positions = held.index.find(overlay.ids)
        spare = positions[(positions != MISSING) & is_absent]
        fresh = max(0, len(new) - len(spare))
    gone = np.flatnonzero((positions != MISSING) & is_absent)
    taken = len(new) - fresh
    positions[new] = np.concatenate([spare[:taken], held.num_rows + np.arange(fresh)])
    positions[gone] = MISSING
    memory.reserve(held.rows, held.num_rows + fresh)
    after = replace(held, schema=overlay.schema, num_rows=held.num_rows + fresh, spare=spare[taken:])
    return MergeTarget(after, positions, new, overlay.ids[gone])


def merge_into(target: MergeTarget, overlay: Overlay) -> None:
    """Write the rows of an overlay where they go. Releases the GIL; takes no memory that could lack."""
    held, positions = target.held, target.positions
    gather.scatter(gather.as_words(held.rows), positions, gather.as_words(overlay.rows))
    if held.index is None:
        absent = positions[overlay.status == ABSENT]
        if len(absent):
            held.rows[absent] = held.kind.absent_row
    if held.status is not None:
        written = positions >= 0
        held.status[positions[written]] = overlay.status[written]
    if held.index is not None:
        held.index.remove_many(target.gone)
        duplicate = held.index.insert_many(overlay.ids[target.new], positions[target.new])
        assert duplicate < 0, "a key that was not found is not in the index"


def _grown(held: HeldTable, new: int, memory: Memory) -> HeldTable:
    """Return a copy with room for ``new`` keys and as many again, its rows close together."""
    assert held.index is not None
    keys, positions = held.index.entries()
    count = len(keys)
    capacity = GROWTH * (count + new)
    rows = memory.allocate(f"{held.name}.rows", (capacity, held.rows.shape[1]), held.rows.dtype, used_rows=count + new)
    for low in range(0, count, COPY_ROWS):
        at = positions[low : low + COPY_ROWS]
        np.take(held.rows, at, axis=0, out=rows[low : low + len(at)])
    index = KeyIndex.allocate(index_capacity(count + new), memory, f"{held.name}.index")
    index.insert_many(keys, np.arange(count, dtype=np.int64))
    larger = replace(held, rows=rows, index=index, num_rows=count, spare=np.empty(0, np.int64), status=None)
    if held.status is not None:
        larger = larger.with_status(memory)
        assert larger.status is not None
        larger.status[:count] = held.status[positions]
    return larger
