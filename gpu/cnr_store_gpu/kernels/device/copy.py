"""Copies of rows by number; the elements are opaque integers of their width."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_copied", "table_rows"], do_not_specialize_on_alignment=["rows"])
def gather_rows(
    source: tl.tensor,
    rows: tl.tensor,
    target: tl.tensor,
    num_copied: tl.int64,
    table_rows: tl.int64,
    dim: tl.constexpr,
    source_stride: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """Write ``target[i] = source[rows[i]]``, ``target`` contiguous; zeros for a row number outside the table."""
    at = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_dim + tl.arange(0, block_dim)
    is_row = at < num_copied
    row = tl.load(rows + at, mask=is_row, other=-1)
    inside = (row >= 0) & (row < table_rows)
    is_column = (column < dim)[None, :]
    values = tl.load(source + row[:, None] * source_stride + column[None, :], mask=inside[:, None] & is_column, other=0)
    tl.store(target + at[:, None] * dim + column[None, :], values, mask=is_row[:, None] & is_column)
