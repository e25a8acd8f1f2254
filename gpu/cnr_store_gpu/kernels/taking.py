"""Taking the marked rows: sorted row ids by table, and clear words, with a single wait for the device.

The counts must reach the host before the ids can be allocated exactly; a buffer of a guessed size could lose rows,
because their marks are cleared in the kernel that lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from cnr_store.errors import BadInput, BadShape
from cnr_store_gpu.kernels import reference
from cnr_store_gpu.kernels.dispatch import NO_FUSION, cdiv, check_vector, is_interpreted, on_device, uses_triton

ALIGNMENT = 32
"""Tables start at multiples of this many words (1024 rows)."""

BLOCK = 1024


def take_rows(words: torch.Tensor, tables: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the marked rows of each table and a copy of their words, and clear them.

    Parameters
    ----------
    words
        int32 (num_words,), contiguous, num_words a multiple of 32. The words of ``tables`` are zero afterwards, the
        others stay.
    tables
        (first word, number of words) of each table, disjoint, in any order; first words are multiples of 32. Bits past
        a table's last row, up to the next multiple of 32 words, must be zero.

    Returns
    -------
    rows
        By table: int64 (n,), sorted, on the device of ``words``. Slices of one allocation.
    words_before
        int32 (num_words,): the words of ``tables`` as they were, all others zero. OR them back if the save fails.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Waits for the device once, for the counts, and then only launches. Order it against marks by stream: a mark that
    was launched before is taken, one launched after it stays.
    """
    check_vector("words", words, (torch.int32,))
    _check_tables(tables, len(words))
    if not tables or not uses_triton(words):
        return reference.take_rows(words, tables)
    from cnr_store_gpu.kernels.device import compact as device

    block = 8 * BLOCK if is_interpreted() else BLOCK
    # Up to the end of a table's last 32 words all of them are its own; so whole fours of words are read and written.
    sizes = [cdiv(size, ALIGNMENT) * ALIGNMENT for _, size in tables]
    blocks = [0]
    for size in sizes:
        blocks.append(blocks[-1] + cdiv(size, block))
    before = (torch.empty_like if sum(sizes) == len(words) else torch.zeros_like)(words)
    if blocks[-1] == 0:
        return [torch.empty(0, dtype=torch.int64, device=words.device) for _ in tables], before
    firsts = [first for first, _ in tables]
    places = torch.tensor([blocks, [*firsts, 0], [*sizes, 0]], device="cpu").to(words.device, non_blocking=True)
    counts = torch.empty(blocks[-1], dtype=torch.int32, device=words.device)
    starts = torch.zeros(blocks[-1] + 1, dtype=torch.int64, device=words.device)
    grid, num_tables = (blocks[-1],), len(tables)
    steps = num_tables.bit_length()
    with on_device(words):
        device.count_bits[grid](words, places, counts, num_tables, steps=steps, block=block, num_warps=4, **NO_FUSION)
        torch.cumsum(counts, 0, dtype=torch.int64, out=starts[1:])
        bounds = starts.index_select(0, places[0]).tolist()  # the one wait for the device
        rows = torch.empty(bounds[-1], dtype=torch.int64, device=words.device)
        device.emit_and_clear[grid](
            words, before, places, starts, rows, num_tables, steps=steps, block=block, num_warps=4, **NO_FUSION
        )
    return [rows[start:stop] for start, stop in pairwise(bounds)], before


def _check_tables(tables: Sequence[tuple[int, int]], num_words: int) -> None:
    if num_words % ALIGNMENT:
        raise BadShape(
            f"a bitmap has whole {ALIGNMENT}s of words, found {num_words}; pad the last table with zero words",
            found=[num_words],
        )
    end = 0
    for first, size in sorted(tables):
        if first % ALIGNMENT or first < end or size < 0 or first + size > num_words:
            raise BadInput(
                f"tables of a bitmap of {num_words} words are disjoint and start at multiples of "
                f"{ALIGNMENT}; found first word {first} with {size} words after one that ends at {end}",
                found=[first, size],
            )
        end = cdiv(first + size, ALIGNMENT) * ALIGNMENT
