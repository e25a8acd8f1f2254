"""The torch operators of the lookup hooks: ``cnr_store::mark``, ``mark_slices`` and ``note_lookup``.

Why this module exists: a hook that runs Python of its own breaks the graph of ``torch.compile``, and what dynamo
traces runs once, not once per call. An operator with a fake implementation is one node of the graph: it runs on every
call, compiled or not, and whatever must happen on every call (setting bits, counting lookups) happens inside it.

``words`` and ``counts`` are declared as written, so no compiler drops or reorders the calls. Inductor runs them in
place; the ``aot_eager`` backend, which is for debugging, works on a copy of the words that it writes back at the end
of the graph, so no other thread may mark meanwhile there.

The device path waits for nothing, checks nothing on the host and allocates nothing: it may be captured in a CUDA
graph, once the kernels are compiled. Counting runs on the host, so the replay of a captured graph marks rows but
counts no lookup.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np
import torch

from cnr_store_gpu import words as packed

NO_ROW = packed.NO_ROW
NO_LEDGER = 0
"""``ledger`` of lookups that are counted only."""


class Keeper(Protocol):
    """What keeps the ids of lookups until their update is done."""

    def keep(
        self, ids: torch.Tensor, ends: torch.Tensor | None, places: list[int], skip_row: int, is_copy: bool
    ) -> None:
        """Keep the ids of one lookup; ``is_copy``: no other code can write to them."""


_keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
_next_key = NO_LEDGER


def register_keeper(keeper: Keeper) -> int:
    """Return the number by which ``note_lookup`` finds the keeper, for as long as it lives."""
    global _next_key
    with packed.LOCK:
        _next_key += 1
        _keepers[_next_key] = keeper
        return _next_key


_library = torch.library.Library("cnr_store", "DEF")
_library.define("mark(Tensor(a!) words, Tensor ids, int first_word, int num_rows, int skip_row) -> ()")
_library.define("mark_slices(Tensor(a!) words, Tensor ids, Tensor ends, Tensor first_words, Tensor num_rows) -> ()")
_library.define(
    "note_lookup(Tensor(a!) counts, Tensor ids, Tensor? ends, int[] places, int skip_row, int ledger, bool is_traced)"
    " -> ()"
)


def mark_here(words: torch.Tensor, ids: torch.Tensor, first_word: int, num_rows: int, skip_row: int) -> None:
    """Set the bits of ``ids`` in ``words``: the implementation of ``cnr_store::mark``.

    Parameters
    ----------
    words
        int32 ``(num_words,)``, written in place.
    ids
        Integers of any shape and order; ids outside ``[0, num_rows)`` mark nothing. Copied if they are on another
        device than ``words`` (which waits for theirs).
    first_word, num_rows
        Where the table starts, and how many rows it has.
    skip_row
        A row that is never marked, or -1.
    """
    flat = _flat(words, ids)
    with packed.LOCK:
        if words.device.type == "cpu":
            packed.mark_words(words.numpy().view(np.uint32), flat.numpy(), first_word, num_rows, skip_row)
        else:
            from cnr_store_gpu import kernels

            kernels.mark(words, flat, first_word, num_rows, skip_row)


def mark_slices_here(
    words: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, first_words: torch.Tensor, num_rows: torch.Tensor
) -> None:
    """Set the bits of slice k, ``ids[ends[k]:ends[k + 1]]``, in the table at ``first_words[k]``.

    The implementation of ``cnr_store::mark_slices``. ``ends`` int64 ``(num_slices + 1,)``, ascending; ``first_words``
    and ``num_rows`` int64 ``(num_slices,)``, all three on the device of ``words``; the rest as for ``mark``.
    """
    flat = _flat(words, ids)
    with packed.LOCK:
        if words.device.type == "cpu":
            packed.mark_slices_words(
                words.numpy().view(np.uint32), flat.numpy(), ends.numpy(), first_words.numpy(), num_rows.numpy()
            )
        else:
            from cnr_store_gpu import kernels

            kernels.mark_slices(words, flat, ends, first_words, num_rows)


def _flat(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = ids.detach().reshape(-1)
    if flat.dtype not in (torch.int32, torch.int64):
        flat = flat.to(torch.int64)
    return flat if flat.device == words.device and flat.is_contiguous() else flat.to(words.device).contiguous()


def _note_lookup(
    counts: torch.Tensor,
    ids: torch.Tensor,
    ends: torch.Tensor | None,
    places: list[int],
    skip_row: int,
    ledger: int,
    is_traced: bool,
) -> None:
    array = counts.numpy()
    with packed.LOCK:
        for place in places:
            array[place] += 1
    keeper = _keepers.get(ledger)
    if keeper is not None:
        # A compiled graph reuses the memory of what it computed, the ids too.
        keeper.keep(ids.detach().clone() if is_traced else ids, ends, places, skip_row, is_traced)


_library.impl("mark", mark_here, "CompositeExplicitAutograd")
_library.impl("mark_slices", mark_slices_here, "CompositeExplicitAutograd")
_library.impl("note_lookup", _note_lookup, "CompositeExplicitAutograd")
for _name in ("mark", "mark_slices", "note_lookup"):
    torch.library.register_fake(f"cnr_store::{_name}", lambda *_: None, lib=_library)

mark = torch.ops.cnr_store.mark.default
mark_slices = torch.ops.cnr_store.mark_slices.default
note_lookup = torch.ops.cnr_store.note_lookup.default
