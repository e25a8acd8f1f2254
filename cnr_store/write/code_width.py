"""Which integer a baseline stores lattice codes in: int8 where that is as small as int16, and quicker. Pure, no I/O.

int8 codes are compressed by zstd, whose Huffman decoder makes about three and a half times as many values a second as
pcodec's (`format_spec/decisions/0012`). Where codes need four bits or so they are as small as with pcodec; where they
need less they are not, because a Huffman code has whole bits. So a sample is compressed in both ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import widths
from cnr_store.format import arrays
from cnr_store.runtime.threads import blocks

LEAST_CODES = 1 << 16
"""Below it int16 is taken: there is little to gain."""

SAMPLE_CODES = 1 << 17
SAMPLE_PLACES = 16
LARGEST_INT8 = 127
MAX_GROWTH = 1.02
"""How much larger than pcodec's the bytes may be."""


def sample_blocks(num_rows: int, width: int) -> list[tuple[int, int]]:
    """Return row ranges of about `SAMPLE_CODES` codes, evenly over the table. Pure."""
    rows = max(1, SAMPLE_CODES // (SAMPLE_PLACES * width))
    if num_rows <= rows * SAMPLE_PLACES:
        return blocks(num_rows, rows)
    starts = np.linspace(0, num_rows - rows, SAMPLE_PLACES).astype(np.int64)
    return [(int(start), int(start) + rows) for start in starts]


def stored_dtype(largest: int, num_codes: int, sample: npt.NDArray[np.int16] | None) -> np.dtype[Any]:
    """Return the dtype for ``num_codes`` codes up to ``largest``: int32 or int16 by size, int8 if the sample says so.

    Parameters
    ----------
    largest
        Of the absolute values, as far as it is known: a sample may have larger ones, and is then no sample of int8.
    sample
        Some of the codes, any shape; None never takes int8.
    """
    if largest > LARGEST_INT8 or num_codes < LEAST_CODES or sample is None or sample.size == 0:
        return widths.narrowest(largest)
    wide = np.ascontiguousarray(sample).reshape(-1)
    if max(int(wide.max()), -int(wide.min())) > LARGEST_INT8:
        return np.dtype(np.int16)
    narrow = wide.astype(np.int8)
    return np.dtype(np.int8) if _size_of(narrow) <= MAX_GROWTH * _size_of(wide) else np.dtype(np.int16)


def _size_of(codes: npt.NDArray[Any]) -> int:
    return len(arrays.encode_chunk(arrays.describe("codes", codes.shape, codes.dtype, len(codes), "compact"), codes))
