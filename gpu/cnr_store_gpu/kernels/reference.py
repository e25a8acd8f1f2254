"""The kernels in plain torch: the oracle of the Triton kernels, and what runs where there is no triton.

No function here checks its arguments (the launchers do), and none waits for the device, except `take_rows`, whose
result has a size that only the device knows. Divisors are tensors on the device: torch multiplies by the reciprocal of
a number that lives on the host, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BITS = 32
MAX_CODE = 32767


# ---- marks


def mark(words: torch.Tensor, ids: torch.Tensor, first_word: int, num_rows: int, skip_row: int) -> None:
    """Set the bits of ``ids``."""
    rows = ids.to(torch.int64)
    _set_bits(words, first_word * BITS + rows, (rows >= 0) & (rows < num_rows) & (rows != skip_row))


def mark_slices(
    words: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, first_words: torch.Tensor, num_rows: torch.Tensor
) -> None:
    """Set the bits of each slice of ``ids`` in its own table."""
    at = torch.arange(len(ids), device=ids.device)
    piece = torch.searchsorted(ends, at, right=True) - 1
    is_id = (piece >= 0) & (piece < len(first_words))
    piece = piece.clamp(0, len(first_words) - 1)
    rows = ids.to(torch.int64)
    bits = first_words[piece] * BITS + rows
    is_id &= (rows >= 0) & (rows < num_rows[piece]) & (bits >= 0)
    _set_bits(words, bits, is_id)


def _set_bits(words: torch.Tensor, bits: torch.Tensor, inside: torch.Tensor) -> None:
    end = len(words) * BITS
    bits = torch.sort(torch.where(inside, bits, end)).values
    is_first = torch.ones_like(bits, dtype=torch.bool)
    is_first[1:] = bits[1:] != bits[:-1]
    inside = bits < end
    at = torch.where(inside, bits, 0) >> 5
    mask = torch.bitwise_left_shift(torch.ones_like(bits, dtype=torch.int32), (bits & 31).to(torch.int32))
    is_new = inside & is_first & ((words[at] & mask) == 0)
    # Each bit is clear and added once: the sum (modulo 2^32) is the OR.
    words.index_add_(0, at, torch.where(is_new, mask, 0))


def take_rows(words: torch.Tensor, tables: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the set bits of each table, and the words as they were; clear them."""
    before = torch.zeros_like(words)
    rows = []
    bit = torch.arange(BITS, dtype=torch.int32, device=words.device)
    for first_word, num_words in tables:
        piece = words[first_word : first_word + num_words]
        before[first_word : first_word + num_words] = piece
        # Only words with a bit are spread out: 32 columns of all of them would not fit.
        used = torch.nonzero(piece).reshape(-1)
        is_set = (torch.bitwise_right_shift(piece[used][:, None], bit) & 1) != 0
        rows.append((used[:, None] * BITS + bit)[is_set])
        piece.zero_()
    return rows, before


# ---- rows


def gather_rows(source: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``source[rows]`` to ``out``."""
    out.copy_(torch.index_select(source, 0, rows))


# ---- lattice


def lattice_quantize(values: torch.Tensor, scale: float, out: torch.Tensor, flag: torch.Tensor) -> None:
    """Write ``rint(values / scale)``, and OR 1 into ``flag`` if an element has no code."""
    divisor = torch.full((), scale, dtype=torch.float32, device=values.device)
    code = torch.round(values.to(torch.float32) / divisor)
    is_storable = code.abs() <= MAX_CODE
    out.copy_(torch.where(is_storable, code, 0.0))
    flag.bitwise_or_((~is_storable).any())
