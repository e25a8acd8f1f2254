"""Kernels on packed row bits and on rows of tables: Triton on a GPU, torch elsewhere, the same results.

The launchers work on tensors of one device, allocate nothing but what they return, and do not wait for the device,
except `take_rows`, once. triton is imported when a kernel is first launched.

    mark(words, ids, first_word, num_rows)         # per lookup; or mark_slices, all features in one launch
    rows, words_before = take_rows(words, tables)  # at a step boundary: sorted ids, clear words
    gather_rows(table, rows[0], staging)           # then lattice_quantize, for rows that leave as codes
"""

from __future__ import annotations

from cnr_store_gpu.kernels.copying import gather_rows
from cnr_store_gpu.kernels.dispatch import uses_triton
from cnr_store_gpu.kernels.lattice import lattice_quantize
from cnr_store_gpu.kernels.marking import NO_ROW, mark, mark_slices
from cnr_store_gpu.kernels.taking import take_rows
from cnr_store_gpu.kernels.warming import warmup

__all__ = [
    "NO_ROW",
    "gather_rows",
    "lattice_quantize",
    "mark",
    "mark_slices",
    "take_rows",
    "uses_triton",
    "warmup",
]
