"""Marking rows in the linearised bitmap: one launch, no allocation on the device, no wait for it.

Contract: ``words`` is int32 (num_words,), contiguous, row r of a table is bit ``r % 32`` of word
``first_word + r // 32``. Bits only go from 0 to 1, so concurrent marks of any kind give the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cnr_store.errors import BadInput, BadShape
from cnr_store_gpu.kernels import reference
from cnr_store_gpu.kernels.dispatch import (
    INT_DTYPES,
    NO_FUSION,
    cdiv,
    check_same_device,
    check_vector,
    is_interpreted,
    on_device,
    uses_triton,
)

NO_ROW = -1
"""Value of ``skip_row`` when no row is skipped."""

BLOCK, ROUNDS = 256, 8
"""Ids of a program at a time, and how many times: see ``device.mark`` for why not all at once."""

Places = torch.Tensor | Sequence[int]


def mark(words: torch.Tensor, ids: torch.Tensor, first_word: int, num_rows: int, skip_row: int = NO_ROW) -> None:
    """Set the bits of ``ids`` in ``words``.

    Parameters
    ----------
    words
        int32 (num_words,), written in place.
    ids
        int32 or int64 (n,), contiguous, on the same device, any order, repeats allowed. Ids outside ``[0, num_rows)``
        mark nothing.
    first_word, num_rows
        Where the table starts and how many rows it has.
    skip_row
        A row that is never marked (``padding_idx``).

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Does not wait for the device and may be captured in a CUDA graph (the Triton kernel, once it is compiled:
    `warmup`).
    """
    check_vector("words", words, (torch.int32,))
    check_vector("ids", ids)
    check_same_device(words, ids=ids)
    if first_word < 0 or first_word * 32 + num_rows > len(words) * 32:
        raise BadInput(
            f"a table of {num_rows} rows from word {first_word} on does not fit a bitmap of {len(words)} words",
            expected=len(words) * 32,
            found=[first_word, num_rows],
        )
    if ids.numel() == 0 or num_rows == 0:
        return
    if not uses_triton(words):
        reference.mark(words, ids, first_word, num_rows, skip_row)
        return
    from cnr_store_gpu.kernels.device import mark as device

    block, rounds = _blocks()
    with on_device(words):
        device.mark_ids[(cdiv(ids.numel(), block * rounds),)](
            words,
            ids,
            ids.numel(),
            first_word,
            num_rows,
            skip_row,
            block=block,
            rounds=rounds,
            num_warps=4,
            **NO_FUSION,
        )


def mark_slices(words: torch.Tensor, ids: torch.Tensor, ends: Places, first_words: Places, num_rows: Places) -> None:
    """Set the bits of many slices of ``ids``, each of its own table, in one launch.

    Slice k is ``ids[ends[k]:ends[k + 1]]`` of the table that starts at word ``first_words[k]`` and has ``num_rows[k]``
    rows: the values of a KeyedJaggedTensor with its offsets per key.

    Parameters
    ----------
    words
        int32 (num_words,), written in place.
    ids
        int32 or int64 (n,), contiguous; what lies before ``ends[0]`` or from ``ends[-1]`` on is ignored.
    ends
        (num_slices + 1,), ascending.
    first_words, num_rows
        (num_slices,). Tables may repeat. A table that reaches beyond ``words`` is marked as far as they go.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Give int64 tensors on the device for what does not change between steps, and always for capture in a CUDA graph;
    a sequence of numbers is copied to the device on each call. Does not wait for the device.
    """
    ends = _on_device(ends, words.device)
    first_words, num_rows = _on_device(first_words, words.device), _on_device(num_rows, words.device)
    check_vector("words", words, (torch.int32,))
    check_vector("ids", ids)
    for name, places in (("ends", ends), ("first_words", first_words), ("num_rows", num_rows)):
        check_vector(name, places, (torch.int64,))
    check_same_device(words, ids=ids, ends=ends, first_words=first_words, num_rows=num_rows)
    num_slices = len(first_words)
    if len(ends) != num_slices + 1 or len(num_rows) != num_slices:
        raise BadShape(
            f"{num_slices} first words need {num_slices + 1} ends and {num_slices} row counts, found {len(ends)} and "
            f"{len(num_rows)}",
            expected=[num_slices + 1, num_slices],
            found=[len(ends), len(num_rows)],
        )
    if ids.numel() == 0 or num_slices == 0:
        return
    if not uses_triton(words):
        reference.mark_slices(words, ids, ends, first_words, num_rows)
        return
    from cnr_store_gpu.kernels.device import mark as device

    block, rounds = _blocks()
    with on_device(words):
        device.mark_slices[(cdiv(ids.numel(), block * rounds),)](
            words,
            ids,
            ends,
            first_words,
            num_rows,
            len(words) * 32,
            ids.numel(),
            num_slices,
            steps=num_slices.bit_length(),
            block=block,
            rounds=rounds,
            num_warps=4,
            **NO_FUSION,
        )


def _on_device(places: Places, device: torch.device) -> torch.Tensor:
    if isinstance(places, torch.Tensor):
        return places if places.dtype == torch.int64 or places.dtype not in INT_DTYPES else places.to(torch.int64)
    return torch.tensor(list(places), dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _blocks() -> tuple[int, int]:
    # The interpreter's time is per program.
    return (4096, 2) if is_interpreted() else (BLOCK, ROUNDS)
