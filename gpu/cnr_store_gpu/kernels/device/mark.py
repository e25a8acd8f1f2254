"""Setting bits: the word is tested before the atomic, so that a hot row costs one atomic and not one per lookup.

The test reads past the first-level cache (``.cg``): that cache is not told of other processors' atomics, and a stale
word would bring an atomic for every later lookup of a hot row. Each program handles its ids in rounds, which
keeps the number of lookups in flight that cannot see each other's marks small.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _set_bits(words: tl.tensor, bit: tl.tensor, inside: tl.tensor) -> None:
    word = words + (bit >> 5)
    mask = (bit & 31).to(tl.int32)
    mask = tl.full(mask.shape, 1, tl.int32) << mask
    seen = tl.load(word, mask=inside, other=-1, cache_modifier=".cg")
    tl.atomic_or(word, mask, mask=inside & ((seen & mask) == 0), sem="relaxed")


@triton.jit(
    do_not_specialize=["num_ids", "first_word", "num_rows", "skip_row"], do_not_specialize_on_alignment=["words", "ids"]
)
def mark_ids(
    words: tl.tensor,
    ids: tl.tensor,
    num_ids: tl.int64,
    first_word: tl.int64,
    num_rows: tl.int64,
    skip_row: tl.int64,
    block: tl.constexpr,
    rounds: tl.constexpr,
) -> None:
    """Set the bits of ``ids`` (int32 or int64, (num_ids,)) of the table that starts at ``first_word``."""
    start = tl.program_id(0).to(tl.int64) * (block * rounds)
    for i in range(rounds):
        at = start + i * block + tl.arange(0, block)
        row = tl.load(ids + at, mask=at < num_ids, other=-1).to(tl.int64)
        # Bounds before the offset of the table is added: an id outside would reach the neighbouring table.
        inside = (row >= 0) & (row < num_rows) & (row != skip_row)
        _set_bits(words + first_word, row, inside)


@triton.jit(
    do_not_specialize=["num_bits", "num_ids", "num_slices"],
    do_not_specialize_on_alignment=["words", "ids", "ends", "first_words", "num_rows"],
)
def mark_slices(
    words: tl.tensor,
    ids: tl.tensor,
    ends: tl.tensor,
    first_words: tl.tensor,
    num_rows: tl.tensor,
    num_bits: tl.int64,
    num_ids: tl.int64,
    num_slices: tl.int64,
    steps: tl.constexpr,
    block: tl.constexpr,
    rounds: tl.constexpr,
) -> None:
    """Set the bits of slice k, ``ids[ends[k]:ends[k + 1]]``, of its own table; int64 (num_slices,) per slice."""
    start = tl.program_id(0).to(tl.int64) * (block * rounds)
    first = tl.load(ends)
    last = tl.minimum(tl.load(ends + num_slices), num_ids)
    for i in range(rounds):
        at = start + i * block + tl.arange(0, block)
        is_id = (at >= first) & (at < last)
        # The last slice that starts at or before this id; empty slices are stepped over.
        low = tl.zeros((block,), tl.int64)
        high = low + (num_slices - 1)
        for _ in range(steps):
            middle = (low + high + 1) >> 1
            starts_before = tl.load(ends + middle) <= at
            low = tl.where(starts_before, middle, low)
            high = tl.where(starts_before, high, middle - 1)
        # Before the first slice the search ends at -1.
        low = tl.maximum(low, 0)
        row = tl.load(ids + at, mask=is_id, other=-1).to(tl.int64)
        bit = tl.load(first_words + low) * 32 + row
        # Where the tables lie is known on the device only: what is outside the bitmap is left out here.
        inside = (row >= 0) & (row < tl.load(num_rows + low)) & (bit >= 0) & (bit < num_bits)
        _set_bits(words, bit, inside)
