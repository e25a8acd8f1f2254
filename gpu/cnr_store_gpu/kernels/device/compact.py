"""From words to sorted row ids: count the bits of each block, then emit, keep a copy and clear in one pass.

A block never holds words of two tables. ``places`` is int64 (3, num_tables + 1): by table the number of its first
block (and the number of all blocks last), its first word, and its number of words.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _popcount(word: tl.tensor) -> tl.tensor:
    # In this form the compiler finds its population count instruction.
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _first_of_block(places: tl.tensor, num_tables: tl.tensor, steps: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """Return (first word of the table, first word of the block within it, words of the table)."""
    program = tl.program_id(0).to(tl.int64)
    low = program * 0
    high = low + (num_tables - 1)
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        starts_before = tl.load(places + middle) <= program
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    start = (program - tl.load(places + low)) * block
    # Said so that words are read four at a time: tables start at multiples of 32 words and have whole 32 of them.
    first_word = tl.multiple_of(tl.load(places + num_tables + 1 + low), 32)
    return first_word, start, tl.multiple_of(tl.load(places + 2 * (num_tables + 1) + low), 32)


@triton.jit(do_not_specialize=["num_tables"], do_not_specialize_on_alignment=["places", "counts"])
def count_bits(
    words: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    num_tables: tl.int64,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write how many bits each block holds to ``counts``, int32 (num_blocks,)."""
    first_word, start, num_words = _first_of_block(places, num_tables, steps, block)
    at = start + tl.arange(0, block)
    word = tl.load(words + first_word + at, mask=at < num_words, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(_popcount(word), axis=0))


@triton.jit(do_not_specialize=["num_tables"], do_not_specialize_on_alignment=["places", "starts", "rows"])
def emit_and_clear(
    words: tl.tensor,
    before: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    num_tables: tl.int64,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the rows of each block from ``starts[block]`` on, copy its words to ``before`` and clear them."""
    first_word, start, num_words = _first_of_block(places, num_tables, steps, block)
    program = tl.program_id(0).to(tl.int64)
    base = tl.load(starts + program)
    has_bits = tl.load(starts + program + 1) > base
    at = start + tl.arange(0, block)
    inside = at < num_words
    place = first_word + at
    # A block without a bit is neither read nor cleared.
    word = tl.load(words + place, mask=inside & has_bits, other=0)
    tl.store(before + place, word, mask=inside)
    if has_bits:
        tl.store(words + place, tl.zeros((block,), tl.int32), mask=inside)
        count = _popcount(word)
        # Within a block 32 bits are enough.
        position = tl.cumsum(count, 0) - count
        row = at * 32
        rows += base
        for bit in range(32):
            is_set = (word >> bit) & 1
            tl.store(rows + position, row + bit, mask=is_set != 0)
            position += is_set
