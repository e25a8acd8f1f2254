"""The code mirrors of a writer: one `TableCodes` per shard that it holds, in memory, in files, or not at all.

Those of hashed keys are a `KeyedMirror` each. `apply_rows` moves them to what a save wrote, once its commit has won.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cnr_store.encodings import row_kernels
from cnr_store.encodings.widths import as_columns, narrowest
from cnr_store.errors import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.runtime.local_files import failing_at, reserve
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, TASK_ROWS, Allocate, Array, TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.types import MAX_CODE, RowIds
from cnr_store.write.alike_shards import Held, ShardLines
from cnr_store.write.delta_rows import EncodedRows
from cnr_store.write.encode import ENCODE_ROWS, EncodedList, put_escapes
from cnr_store.write.keyed_mirrors import KeyedMirror, mirrored_arrays
from cnr_store.write.table_options import TableOptions

MirrorMode = Literal["memory", "mmap", "none"]
"""``memory``: 2 bytes per element (4 in exact mode), of hashed keys more (`KeyedMirror`). ``mmap``: the same in files.
``none``: deltas are ``set`` rows."""

HeldMirrors = Mapping[Shard, tuple[TableCodes, int | None]]
"""Mirrors with their digests, by shard."""

_NONE: Held = (None, None)


def check_mirror_folder(mode: MirrorMode, folder: str | None) -> None:
    """Raise if the folder for mirrors does not exist: its disk may not be mounted.

    Raises
    ------
    BadInput
    """
    if mode == "mmap" and folder is not None and not Path(folder).is_dir():
        raise BadInput(f"mirror_folder {folder!r} is no folder; make it first", path=folder)


class Mirrors:
    """What the codes of each shard are at the head, and the state digest that goes with them."""

    def __init__(self, mode: MirrorMode, folder: str | None, keyed_limit: int | None = None) -> None:
        check_mirror_folder(mode, folder)
        self._keyed_limit = keyed_limit
        self.mode: MirrorMode = mode
        self.options: dict[str, TableOptions] = {}
        self.is_complete = True
        self._folder = folder
        self._held: dict[Shard, tuple[TableCodes, int | None]] = {}
        self._staged: dict[Shard, tuple[TableCodes, int]] = {}
        self._keyed: dict[Shard, KeyedMirror] = {}
        self.lines = ShardLines()

    def __contains__(self, shard: Shard) -> bool:
        return shard in self._held

    @property
    def nbytes(self) -> int:
        """Bytes of all mirrors."""
        # A copy: the thread that saves may add a table while another one asks.
        dense, keyed = list(self._held.values()), list(self._keyed.values())
        return sum(one.nbytes for one, _ in dense) + sum(one.nbytes for one in keyed)

    def get(self, shard: Shard) -> TableCodes | None:
        """Return a shard's mirror as the open transaction sees it: with a staged resize, if there is one."""
        return self.with_digest(shard)[0]

    def digest(self, shard: Shard) -> int | None:
        """Return the state digest of the mirror, None for a shard without one."""
        return self.with_digest(shard)[1]

    def with_digest(self, shard: Shard) -> tuple[TableCodes | None, int | None]:
        """Return `get` and `digest` of a shard."""
        if self._staged and shard in self._staged:
            return self._staged[shard]
        return self._held.get(shard, _NONE)

    def of_many(self, shards: Sequence[Shard]) -> list[Held]:
        """Return `with_digest` of each shard."""
        if self._staged:
            return [self.with_digest(shard) for shard in shards]
        return [*map(self._held.get, shards, repeat(_NONE))]

    def committed_digest(self, shard: Shard) -> int | None:
        """Return the state digest of the head's state, without a staged resize."""
        return self._held.get(shard, _NONE)[1]

    def held(self) -> HeldMirrors:
        """Return every mirror with its digest, for another writer; empty while they are the state of no version."""
        if not self.is_complete or self._staged:
            return {}
        return dict(self._held)

    def put(self, shard: Shard, codes: TableCodes, digest: int | None) -> None:
        """Set a shard's mirror and digest."""
        self._held[shard] = codes, digest

    def put_many(self, shards: Sequence[Shard], codes: Sequence[TableCodes], digests: Sequence[int | None]) -> None:
        """Set mirrors and digests of shards."""
        self._held.update(zip(shards, zip(codes, digests, strict=True), strict=True))

    def keyed(self, shard: Shard) -> KeyedMirror | None:
        """Return the mirror of a table of hashed keys; None if no key of it is here."""
        return self._keyed.get(shard)

    def put_keyed(self, shard: Shard, keys: RowIds, codes: TableCodes, digest: int | None) -> None:
        """Set the mirror of a table of hashed keys: row i of ``codes`` is that of ``keys[i]``."""
        self._keyed[shard] = KeyedMirror(codes, keys, digest)
        self._empty_if_too_large(shard)

    def keyed_room(self, shard: Shard) -> int | None:
        """Return the bytes that the mirror of one table of hashed keys may take beside the others; None: any."""
        if self._keyed_limit is None:
            return None
        return self._keyed_limit - sum(one.nbytes for other, one in self._keyed.items() if other != shard)

    def keyed_digest(
        self, shard: Shard, schema: TableSchema, changes: Sequence[EncodedRows], workers: Workers, *, anew: bool
    ) -> int | None:
        """Return the state digest of the keys owned after encoded rows; None without a mirror of all of them."""
        if self.mode == "none" or not mirrored_arrays(schema):
            return None
        mirror = KeyedMirror.empty(schema, np.zeros) if anew else self._keyed.get(shard)
        return None if mirror is None else mirror.digest_after(changes, workers)

    def move_keyed(
        self, shard: Shard, schema: TableSchema, changes: Sequence[EncodedRows], workers: Workers, *,
        digest: int | None, anew: bool,
    ) -> None:  # fmt: skip
        """Move the mirror of a table of hashed keys to encoded rows, after the commit won; ``anew``: they are all."""
        if anew:
            self._keyed.pop(shard, None)
        if self.mode == "none" or not mirrored_arrays(schema):
            return
        mirror = self._keyed.get(shard)
        if mirror is None:
            mirror = self._keyed[shard] = KeyedMirror.empty(schema, self.allocator())
        for moved in mirror.move(changes, self.allocator(), digest, self.keyed_room(shard)):
            apply_alone(moved, mirror.codes, workers)
        self._empty_if_too_large(shard)

    def _empty_if_too_large(self, shard: Shard) -> None:
        """Forget the keys of a mirror that is beyond the limit, because its codes became wider; they come anew."""
        mirror, room = self._keyed[shard], self.keyed_room(shard)
        if room is not None and mirror.nbytes > room:
            self._keyed[shard] = mirror.emptied(self.allocator())

    def allocator(self) -> Allocate:
        """Return a function that allocates zeroed memory for a mirror; files reserve their space on the disk.

        What is returned raises AccessDenied or StorageFailure if the folder cannot be used, or has no room.
        """
        if self.mode != "mmap":
            return np.zeros
        folder = tempfile.gettempdir() if self._folder is None else self._folder

        def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            if 0 in shape:
                return np.zeros(shape, dtype)
            # A file without a name, which the mapping keeps: its blocks are free when the array or the process is gone.
            with (
                failing_at(folder, f"used for a mirror of {math.prod(shape) * dtype.itemsize} bytes"),
                tempfile.TemporaryFile(dir=folder) as file,
            ):
                reserve(file.fileno(), math.prod(shape) * dtype.itemsize)
                return np.memmap(file, dtype=dtype, mode="r+", shape=shape)

        return allocate

    def release_for_baseline(self, shard: Shard) -> None:
        """Free a shard's mirror before it is encoded again, so that memory never holds two.

        From here until the commit has won the mirrors are incomplete: `is_complete` is False.
        """
        self.is_complete = False
        self._held.pop(shard, None)
        self.lines.clear()

    def stage(self, shard: Shard, codes: TableCodes, digest: int) -> None:
        """Make this the mirror that a shard has in the open transaction, and the shard's once it has won."""
        self._staged[shard] = (codes, digest)

    def stage_resize(self, shard: Shard, schema: TableSchema, workers: Workers) -> None:
        """Make the mirror that a resized table will have: grown rows are absent, cut rows are gone."""
        old, _ = self._held.get(shard, _NONE)
        if old is None:
            return
        allocate = self.allocator()
        kept = min(old.num_rows, schema.num_rows)
        arrays = {}
        for name, held in old.arrays.items():
            arrays[name] = allocate((schema.num_rows, held.shape[1]), held.dtype)
            arrays[name][:kept] = held[:kept]
        codes = TableCodes(schema, 0, schema.num_rows, arrays, allocate, old.columns)
        if old.status is not None or schema.num_rows > old.num_rows:
            status = codes.track_status(ABSENT)
            status[:kept] = 0 if old.status is None else old.status[:kept]
        alive = old.escapes.rows < schema.num_rows
        codes.escapes.rows = old.escapes.rows[alive]
        codes.escapes.values = {name: values[alive] for name, values in old.escapes.values.items()}
        self._staged[shard] = (codes, codes.digest(workers))

    def stage_refine(self, shard: Shard, schema: TableSchema, halvings: int, workers: Workers) -> bool:
        """Make the mirror that a shard has at a finer scale: codes shifted left; False if one leaves the code range.

        Memory until the outcome is known: a second copy of the table's codes.
        """
        old = self.get(shard)
        assert old is not None  # the transaction has asked
        held = old.arrays["codes"]

        def block(start: int, stop: int) -> Array:
            codes: Array = held[start:stop].astype(np.int32)
            if old.status is not None:
                codes[old.status[start:stop] != CODED] = 0
            return codes

        ranges = blocks(old.num_rows, TASK_ROWS)
        largest = max((int(np.abs(block(start, stop)).max(initial=0)) for start, stop in ranges), default=0) << halvings
        if largest > MAX_CODE:
            return False
        allocate = self.allocator()
        finer = allocate(held.shape, np.result_type(held.dtype, narrowest(largest)))
        for start, stop in ranges:
            finer[start:stop] = block(start, stop) << halvings
        codes = TableCodes(schema, old.start, old.stop, {**old.arrays, "codes": finer}, allocate, old.columns)
        codes.status, codes.escapes = old.status, old.escapes
        self._staged[shard] = (codes, codes.digest(workers))
        return True

    def commit_staged(self) -> None:
        """Apply staged sizes and scales to the mirrors, after the commit won."""
        for shard, (codes, digest) in self._staged.items():
            self.put(shard, codes, digest)
        self.drop_staged()

    def drop_staged(self, shard: Shard | None = None) -> None:
        """Forget a shard's staged size or scale; those of all, where the transaction lost."""
        if self._staged:
            self.lines.clear()
        if shard is None:
            self._staged.clear()
        else:
            self._staged.pop(shard, None)

    def keep_only(self, tables: Iterable[str]) -> None:
        """Drop the mirrors of tables that no longer exist."""
        wanted = set(tables)
        for shard in [shard for shard in (*self._held, *self._keyed) if shard.table not in wanted]:
            self.forget(shard)
        for table in self.options.keys() - wanted:
            del self.options[table]

    def forget(self, shard: Shard) -> None:
        """Drop a shard's mirror: its new encoding has none."""
        self.lines.clear()
        self._held.pop(shard, None)
        self._keyed.pop(shard, None)

    def clear(self) -> None:
        """Free everything."""
        self.lines.clear()
        self.is_complete = True
        self._held.clear()
        self._staged.clear()
        self._keyed.clear()


def apply_rows(changes: Iterable[tuple[EncodedRows, TableCodes]], workers: Workers) -> None:
    """Move mirrors to encoded rows; call once, after the commit has won. Blocks; runs on ``workers``.

    Of one mirror all changes are in other rows.
    """
    for encoded, mirror in changes:
        apply_alone(encoded, mirror, workers)


def apply_alone(encoded: EncodedRows, mirror: TableCodes, workers: Workers) -> None:
    """Move the mirror of one table to its encoded rows."""
    for operation, item in encoded.lists.items():
        status = {"add": CODED, "set": CODED, "delete": ABSENT, "escape": ESCAPED}[operation]
        if operation in ("add", "set"):
            for name in mirror.arrays:
                move_array(mirror, name, item, workers, adds=operation == "add")
        if operation != "add":
            mirror.mark(item.row_ids, status)
        if operation == "escape":
            put_escapes(mirror.escapes, item, mirror.arrays)


def move_array(mirror: TableCodes, name: str, item: EncodedList, workers: Workers, *, adds: bool) -> None:
    """Add the codes of a list to one array of a mirror, or put them there."""
    codes = np.ascontiguousarray(as_columns(item.arrays[name]))
    held = mirror.arrays[name]
    kernel: Callable[..., int] = row_kernels.add_codes if adds else row_kernels.put_codes
    is_wrapping = adds and held.dtype == np.int32 and mirror.specs[name].wraps

    def move(start: int, stop: int) -> int:
        """Return the position that an int16 mirror cannot hold, or ``stop``."""
        rows, block = item.row_ids[start:stop], codes[start:stop]
        if is_wrapping:
            row_kernels.add_codes_wrapping(held, rows, mirror.start, block)
            return stop
        done = int(kernel(held, rows, mirror.start, block, 0))
        return stop if done < 0 else start + done

    ranges = blocks(len(codes), ENCODE_ROWS)
    reached = workers.run_blocks(move, len(codes), ENCODE_ROWS)
    rest = [(done, stop) for done, (_, stop) in zip(reached, ranges, strict=True) if done < stop]
    if rest:
        finish_move(mirror, name, item, rest, adds=adds)


def finish_move(
    mirror: TableCodes, name: str, item: EncodedList, rest: Sequence[tuple[int, int]], *, adds: bool
) -> None:
    """Widen a mirror's array and move positions ``(start, stop)`` of a list, at whose first the kernel stopped."""
    codes = np.ascontiguousarray(as_columns(item.arrays[name]))
    held = mirror.arrays[name]
    for done, _ in rest if adds else []:
        # The kernel stopped after it wrapped this row in int16; wrapping back restores it.
        held[item.row_ids[done] - mirror.start] -= codes[done].astype(np.int16)
    mirror.widen(name)
    kernel: Callable[..., int] = row_kernels.add_codes if adds else row_kernels.put_codes
    for start, stop in rest:
        kernel(mirror.arrays[name], item.row_ids[start:stop], mirror.start, codes[start:stop], 0)
