"""Decodes rows that were set only once directly to floats, chunk by chunk, without an array of codes.

This is the case for a compacted chain. A chunk's codes are unpacked piece by piece: while a piece is in the CPU cache,
it is added to the state digest and converted to floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from cnr_store.encodings import digest, kernels, row_kernels
from cnr_store.read.plan import Step, TablePlan
from cnr_store.read.prefetch import chunks_of, prefetching
from cnr_store.read.replay import ChunkReader, Replay, checked_codes
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import BLOCK_ROWS, Array, ArraySpec, array_specs, decode_block
from cnr_store.types import Lattice


def is_direct(plan: TablePlan) -> bool:
    """Return whether the chunks of the plan are ``set`` rows that tile its rows, each without a gap. Pure.

    Then no row has another state than coded, and nothing is added to any.
    """
    steps = sorted((step for batch in plan.batches for step in batch.steps), key=lambda step: step.first)
    if plan.tracks_status or any(step.operation != "set" for step in steps):
        return False
    reached = plan.start
    for step in steps:
        is_next = step.first == reached or (reached == plan.start and step.first <= reached <= step.last)
        if not is_next or step.last - step.first + 1 != step.num_rows:
            return False
        reached = step.last + 1
    return reached >= plan.stop


def load_directly(
    readers: Sequence[ChunkReader], plan: TablePlan, outputs: Mapping[str, Array], workers: Workers
) -> int:
    """Fill ``outputs`` as `table_reader.read_range` does from a settled plan of one column interval; blocks.

    Returns the state digest of what was read. Memory: a chunk of each array per thread, and of a remote
    store what is fetched ahead (`prefetch.PREFETCH_BYTES`).

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
        ``outputs`` then hold undefined values.
    """
    specs = array_specs(plan.schema, plan.columns)
    with prefetching(readers, chunks_of(plan, list(outputs)), workers) as sources:
        engine = Replay(sources, workers)
        totals = workers.run(
            partial(_load, engine, step, plan, specs, outputs) for batch in plan.batches for step in batch.steps
        )
    return digest.add_digests(*totals)


def _load(
    engine: Replay, step: Step, plan: TablePlan, specs: Mapping[str, ArraySpec], outputs: Mapping[str, Array]
) -> int:
    """Decode one chunk of each array into the outputs; returns what it adds to the digest."""
    low, high = max(step.first, plan.start), min(step.last + 1, plan.stop)
    total = 0
    for name, out in outputs.items():
        for start, held in engine.pieces(step, plan, specs[name], low - step.first, high - step.first):
            row = step.first + start
            total += _put(specs[name], held, out[row - plan.start : row - plan.start + len(held)], step, row, plan)
    return total


def _put(spec: ArraySpec, held: Array, out: Array, step: Step, first_row: int, plan: TablePlan) -> int:
    """Decode the rows from ``first_row`` on, and return what they add to the digest."""
    shift = step.left_shift if spec.name == "codes" else 0
    is_moved = spec.is_integer and (shift > 0 or held.itemsize > spec.memory_dtype.itemsize)
    multipliers, presence = (spec.multipliers, spec.presence()) if spec.is_additive else (None, None)
    total = 0
    is_plain = not is_moved and held.flags.c_contiguous and out.flags.c_contiguous
    if is_plain and isinstance(spec.encoding, Lattice) and out.dtype == np.float32 and multipliers is not None:
        return int(kernels.lattice_decode_digest(held, spec.scale, out, first_row, multipliers, presence))
    for low, high in blocks(len(held), BLOCK_ROWS):
        block = np.ascontiguousarray(held[low:high])
        if is_moved:
            moved = np.empty(block.shape, spec.memory_dtype)
            checked_codes(row_kernels.put_block(moved, block, shift), plan, step)
            block = moved
        if multipliers is not None:
            total += int(kernels.digest_block(block, first_row + low, multipliers, presence))
        decode_block(spec, block, out[low:high])
    return total
