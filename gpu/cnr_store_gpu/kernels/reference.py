"""The kernels in plain torch: the oracle of the Triton kernels, and what runs where there is no triton.

No function here checks its arguments (the launchers do), and none waits for the device, except `take_rows`, whose
result has a size that only the device knows. Divisors are tensors on the device: torch multiplies by the reciprocal of
a number that lives on the host, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BITS = 32
MAX_CODE = 1 << 21
LARGEST = {torch.float16: 65504.0, torch.float32: 2.0**126}
_NOT_INVERTIBLE = 2.0**-128


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


def set_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to ``target[rows]``."""
    target.index_copy_(0, rows, values)


# ---- lattice


def lattice_quantize(values: torch.Tensor, scale: float, out: torch.Tensor, flag: torch.Tensor) -> None:
    """Write ``rint(values / scale)`` and OR what went wrong into ``flag``."""
    code = torch.round(values.to(torch.float32) / _number(scale, values.device))
    is_storable = code.abs() <= MAX_CODE
    code = torch.where(is_storable, code, 0.0).to(torch.int32)
    wrong = (~is_storable).any().to(torch.int32)
    if out.dtype == torch.int16:
        is_wide = code.abs() > 32767
        wrong = wrong + 2 * is_wide.any().to(torch.int32)
        code = torch.where(is_wide, 0, code)
    out.copy_(code)
    flag.bitwise_or_(wrong)


def lattice_add(table: torch.Tensor, rows: torch.Tensor, deltas: torch.Tensor, scale: float) -> None:
    """Add code differences to rows that hold decoded values."""
    step = _number(scale, table.device)
    code = torch.round(torch.index_select(table, 0, rows) / step)
    table.index_copy_(0, rows, (code + deltas.to(torch.float32)) * step)


# ---- affine


def affine_quantize(
    values: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor,
    flag: torch.Tensor,
    *,
    bits: int,
    candidates: torch.Tensor | None,
    fit_steps: int,
    relax: float,
) -> None:
    """Write packed codes (uint8) with their parameters; ``candidates`` is None for min-max."""
    x = values.to(torch.float32)
    is_codable = x.abs() <= LARGEST[out_scale.dtype]
    flag.bitwise_or_((~is_codable).any().to(torch.int32))
    x = torch.where(is_codable, x, 0.0)
    low = x.amin(dim=1)
    width = x.amax(dim=1) - low
    if candidates is None:
        scale, zero_point = width / _number(2.0**bits - 1.0, x.device), low
    else:
        u = (x - low[:, None]) * _inverse(width)[:, None]
        scale, zero_point = _search(u, candidates, bits, fit_steps, relax)
        scale, zero_point = width * scale, low + width * zero_point
    _store_params(scale, zero_point, out_scale, out_zero_point)
    codes = _codes(x, out_scale.to(torch.float32), out_zero_point.to(torch.float32), bits)
    out.copy_(pack(codes.to(torch.uint8), bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 codes (n, dim) packed least significant bit first, rows padded to eight codes."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).to(torch.int64)
    shift = torch.arange(8, device=codes.device) * bits
    word = (padded.reshape(len(codes), padded.shape[1] // 8, 8) << shift).sum(dim=2)
    byte = torch.arange(bits, device=codes.device) * 8
    return ((word[:, :, None] >> byte) & 255).to(torch.uint8).reshape(len(codes), padded.shape[1] // 8 * bits)


def _codes(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    t = (x - zero_point[:, None]) * _inverse(scale)[:, None]
    return torch.round(t).clamp(0.0, 2.0**bits - 1.0)


def _store_params(
    scale: torch.Tensor, zero_point: torch.Tensor, out_scale: torch.Tensor, out_zero_point: torch.Tensor
) -> None:
    if out_scale.dtype == torch.float16:
        largest = LARGEST[torch.float16]
        out_scale.copy_(torch.where(scale > 0, scale.clamp(2.0**-24, largest), 0.0))
        zero_point = zero_point.clamp(-largest, largest)
    else:
        out_scale.copy_(torch.where(scale > _NOT_INVERTIBLE, scale, 0.0))
    out_zero_point.copy_(zero_point)
    out_zero_point.masked_fill_(out_zero_point == 0, 0.0)  # -0.0 depends on the order in which zeros are met


def _search(
    u: torch.Tensor, candidates: torch.Tensor, bits: int, fit_steps: int, relax: float
) -> tuple[torch.Tensor, torch.Tensor]:
    max_code = 2.0**bits - 1.0
    best_error = torch.full_like(u[:, 0], float("inf"))
    best_scale, best_zero = torch.zeros_like(best_error), torch.zeros_like(best_error)
    for low, scale, inverse in candidates:
        t = (u - low) * inverse
        error = (t - torch.round(t).clamp(0.0, max_code)).square().sum(dim=1) * (scale * scale)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_zero = torch.where(is_better, low, best_zero)
    size = _number(float(u.shape[1]), u.device)
    mean_u = u.sum(dim=1) / size
    for _ in range(fit_steps):
        q = _codes(u, best_scale, best_zero, bits)
        sum_q, sum_qq = q.sum(dim=1), (q * q).sum(dim=1)
        mean_q = sum_q / size
        variance = sum_qq - sum_q * mean_q
        has_line = variance > 1e-6 * sum_qq  # else all codes are equal: no line through them
        fitted = (q * (u - mean_u[:, None])).sum(dim=1) / torch.where(has_line, variance, 1.0)
        moved = best_scale + relax * (fitted - best_scale)
        is_moved = has_line & (moved > 1e-6)
        best_scale = torch.where(is_moved, moved, best_scale)
        best_zero = torch.where(is_moved, best_zero + relax * (mean_u - fitted * mean_q - best_zero), best_zero)
    return best_scale, best_zero


def _inverse(x: torch.Tensor) -> torch.Tensor:
    is_usable = x > _NOT_INVERTIBLE
    return torch.where(is_usable, torch.ones_like(x) / torch.where(is_usable, x, 1.0), 0.0)


def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
