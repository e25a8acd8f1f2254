"""The documents of the format as types: identity, commit record, receipt, segment manifest, holds, relay documents.

What they mean is in sections 3, 4 and 7 of the specification. `documents` turns them into bytes and back;
`commit_record`, `identity` and `manifest` check what no type can say.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from cnr_store.format.fields import (
    ArrayDtype,
    ArrayName,
    ArrayShape,
    BranchOrNone,
    ChunkRows,
    Count,
    Dim,
    Feature,
    Float32,
    Hex8,
    Hex16,
    Hex32,
    Hex32s,
    KeyPath,
    Name,
    NumRows,
    ObjectSize,
    Positive,
    RowNumber,
    SegmentName,
    Sha256,
    Shape,
    ShardChunks,
    Shift,
    TensorDtype,
    Text,
)
from cnr_store.format.limits import MAX_LAYERS, MAX_SLOTS
from cnr_store.types import MAX_CHAIN, Encoding, JsonValue, TableDtype

FORMAT = "cnr-store"
MAJOR = 1
MINOR = 0

RecordKind = Literal[
    "init", "fence", "baseline", "delta", "compact", "rollback", "tag", "untag", "channel", "expire", "fork", "close"
]

SegmentKind = Literal["baseline", "delta"]
CodecName = Literal["bytes", "digits", "gaps"]
"""How a chunk is stored (spec, section 4.2): as it is; as digits of its integers; as digits of their differences."""

Operation = Literal["add", "set", "delete", "escape"]
OPERATIONS: tuple[Operation, ...] = ("add", "set", "delete", "escape")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """``cnr.json``: what the store is. Created once, never changed."""

    format: str
    major: Count
    minor: Count
    store_uuid: Hex32
    created_ms: Count
    hash: Literal["sha256"]
    exclusive_create: Literal["verified", "unsafe_single_writer"]


class ChainEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a chain: applies to the state at ``l0`` and gives the state at ``l1``."""

    seg: SegmentName
    sha256: Sha256
    kind: SegmentKind
    l0: Count
    l1: Count
    bytes: Count
    rows: Count


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a version for a branch: the fork point, the branch's name, and when the branch ends (None: never)."""

    version: Count
    name: Name
    expires_ms: Count | None = None


class WriterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote the record; for people, never for decisions."""

    host: Text
    lib: Text
    run_id: Text


class Superseded(msgspec.Struct, frozen=True, kw_only=True):
    """Positions directly before a record that cannot be read and hold no version any more (spec, section 7.10).

    ``torn`` has the sha256 of the bytes at each of them, oldest first; ``follows`` that of the record before them,
    whose fields the record carries on.
    """

    follows: Sha256
    torn: Annotated[tuple[Sha256, ...], Meta(min_length=1)]


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of the lists below is no more: names, uuids and versions; empty lists are left out."""

    tags: tuple[Name, ...] = ()
    channels: tuple[Name, ...] = ()
    pins: tuple[Hex32, ...] = ()
    kept: tuple[Count, ...] = ()
    expired: tuple[Count, ...] = ()
    aborted: tuple[Hex32, ...] = ()


class Lists(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lists of a record, or how they differ from what lies below; empty ones are left out."""

    tags: dict[Name, Count] = {}
    channels: dict[Name, Count] = {}
    pins: dict[Hex32, Pin] = {}
    kept: tuple[Count, ...] = ()
    expired: tuple[Count, ...] = ()
    aborted: dict[Hex32, Count] = {}
    removed: Removed | msgspec.UnsetType = msgspec.UNSET


class Overflow(Lists, frozen=True, kw_only=True, omit_defaults=True):
    """``state/<sha256>.json``, a side object: changes of lists that were too many for record ``v``, which put it.

    ``branch`` says in which log: that branch's, or (empty) the store's own.
    """

    v: Count
    branch: BranchOrNone


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One position of the commit log (spec, section 3).

    The fields of `Lists` are as they are; where ``state`` names side objects (by sha256, largest first), they and
    ``removed`` are what has changed since those. ``kept`` are versions below ``floor`` that stay, ``expired`` those
    above it that are gone.
    ``check`` is the digest of the record's own bytes without it; in memory it is empty, as it is in drafts.
    ``aborted`` names the transactions that may never commit or whose segments no live version needs, each with the
    time (ms) from which its objects may be deleted.
    """

    v: Count
    kind: RecordKind
    commit_uuid: Hex32
    store_uuid: Hex32
    parent_digest: Sha256
    epoch: Count
    checkpoint: Count
    step: Count
    ts_ms: Count
    chain: Annotated[tuple[ChainEntry, ...], Meta(max_length=MAX_CHAIN)] = ()
    tags: dict[Name, Count] = {}
    channels: dict[Name, Count] = {}
    pins: dict[Hex32, Pin] = {}
    floor: Count = 0
    kept: tuple[Count, ...] = ()
    expired: tuple[Count, ...] = ()
    aborted: dict[Hex32, Count] = {}
    state: Annotated[tuple[Sha256, ...], Meta(min_length=1, max_length=MAX_LAYERS)] | None = None
    removed: Removed | msgspec.UnsetType = msgspec.UNSET
    target: Count | None = None
    name: Name | None = None
    supersedes: Superseded | None = None
    reader_features: tuple[Feature, ...] = ()
    writer_features: tuple[Feature, ...] = ()
    writer: WriterInfo
    user: dict[str, JsonValue] = {}
    check: Hex32 = ""


class SlotSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer state of a table: ``row`` is (num_rows,), ``element`` is (num_rows, dim).

    With ``mirror`` an ``add`` row holds the difference to the previous code, without it the code itself.
    """

    kind: Literal["row", "element"]
    dtype: TableDtype
    encoding: Encoding
    mirror: bool
    fill: Float32 = 0.0


class TableSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and encoding of a table as of a segment's ``l1``. ``num_rows`` is 0 for hashed tables."""

    num_rows: NumRows
    dim: Dim
    dtype: TableDtype
    keys: Literal["dense", "hashed"] = "dense"
    encoding: Encoding
    generation: Count = 1
    shift: Shift = 0
    fill: Float32 = 0.0
    slots: Annotated[dict[Name, SlotSchema], Meta(max_length=MAX_SLOTS)] = {}


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """What is inside the shards of an array, chunk by chunk in the array's order, which is that of the bytes, too.

    ``chunks``: how many a shard has, the last one maybe fewer. ``sizes``: stored bytes of each chunk. ``digests``: the
    xxh3-128 of each, one behind the other.
    """

    chunks: ShardChunks
    sizes: tuple[ObjectSize, ...]
    digests: Hex32s


class ChunkPlace(NamedTuple):
    """Where the stored bytes of a chunk are, and what they are: an object of a segment, or bytes inside one."""

    path: str
    start: int
    size: int
    xxh3_128: str


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Rows [start, start + count) of a stored Zarr array: all of it, or what it holds of one row list; in memory alone.

    ``path`` is relative to the segment, ``shape`` that of the whole array, chunks are (chunk_rows, full width);
    ``dtype`` and ``shape`` are those of its values, whatever the ``codec`` stores.
    ``order`` is the path of the array of the same group whose values, ascending, the rows of each chunk follow; left
    out where they follow the row ids. The chunks of an entry are those that hold rows of it, counted from 0.
    ``shards`` is left out where each chunk is an object of its own.
    """

    path: KeyPath
    dtype: ArrayDtype
    shape: ArrayShape
    chunk_rows: ChunkRows
    codec: CodecName
    order: KeyPath | msgspec.UnsetType = msgspec.UNSET
    shards: Shards | msgspec.UnsetType = msgspec.UNSET
    start: int
    count: int

    def stored_chunk(self, index: int) -> int:
        """Return which chunk of the array its chunk ``index`` is."""
        return self.start // self.chunk_rows + index

    def span(self, index: int) -> tuple[int, int]:
        """Return which of its rows, counted from 0, stand in its chunk ``index``: half-open."""
        begin = index * self.chunk_rows - self.start % self.chunk_rows
        return max(begin, 0), min(begin + self.chunk_rows, self.count)


class RowListEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row list of a part: what it has of the arrays of its group, all chunked alike; in memory alone.

    ``first[k]``, ``last[k]`` are the first and last row id in chunk k (inclusive).
    """

    count: Positive
    first: tuple[RowNumber, ...]
    last: tuple[RowNumber, ...]
    arrays: dict[str, ArrayEntry]

    def rows_in(self, chunk: int) -> int:
        """Return how many of its rows stand in chunk ``chunk``."""
        low, high = self.arrays["rows"].span(chunk)
        return high - low


class ObjectDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Size and xxh3-128 of an object's stored bytes."""

    size: ObjectSize
    xxh3_128: Hex32


class ObjectEntry(ObjectDigest, frozen=True, kw_only=True):
    """One line of the inventory: path relative to the segment, size and xxh3-128 of the stored bytes."""

    path: KeyPath


class StoredArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of a group, at ``<path of the group>.<name>``.

    ``width`` is None for a one-dimensional array. ``order`` names the array of the group whose values, ascending, the
    rows of each chunk follow; left out where they follow the row ids. ``objects``: its ``zarr.json``, then its chunks,
    or its shards, in order. ``shards`` is left out where it has none.
    """

    dtype: ArrayDtype
    width: Dim | None
    codec: CodecName
    order: ArrayName | msgspec.UnsetType = msgspec.UNSET
    shards: Shards | msgspec.UnsetType = msgspec.UNSET
    objects: tuple[ObjectDigest, ...]


class ArrayGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays of as many ``rows``, chunked alike, that hold row lists end to end, in the order of the parts."""

    path: KeyPath
    rows: NumRows
    chunk_rows: ChunkRows
    arrays: dict[ArrayName, StoredArray]


class ListLine(msgspec.Struct, frozen=True, kw_only=True):
    """One row list of a part: ``count`` rows of the group at path ``group``, behind those of the parts before.

    ``first[k]``, ``last[k]``: first and last row id (inclusive) in the k-th chunk that holds some of them.
    """

    group: KeyPath
    count: Positive
    first: tuple[RowNumber, ...]
    last: tuple[RowNumber, ...]


class PartPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One writer's rectangle of a table: half-open row and column ranges, and its digests.

    ``base_digest`` is the state digest the part starts from.
    """

    table: Name
    rows: tuple[NumRows, NumRows]
    columns: tuple[NumRows, Dim]
    base_digest: Hex16 | None = None
    state_digest: Hex16 | None = None

    def __str__(self) -> str:
        return f"{self.table!r} (rows {self.rows}, columns {self.columns})"


class PartLine(PartPlace, frozen=True, kw_only=True, omit_defaults=True):
    """A part as documents have it. What is not there is left out; without row lists it is a line and no object."""

    add: ListLine | None = None
    set: ListLine | None = None
    delete: ListLine | None = None
    escape: ListLine | None = None


class PartEntry(PartPlace, frozen=True, kw_only=True):
    """A part as readers have it: its row lists know their arrays; in memory alone."""

    add: RowListEntry | None = None
    set: RowListEntry | None = None
    delete: RowListEntry | None = None
    escape: RowListEntry | None = None


class TensorLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a dense tensor's elements are in the manifest's segment: ``shape`` elements from ``offset`` of ``path``."""

    path: KeyPath
    offset: NumRows
    dtype: TensorDtype
    shape: Shape
    digest: Hex32


class DenseEntry(TensorLine, frozen=True, kw_only=True):
    """A dense tensor of a state, and the segment of the chain that has its bytes; in memory alone."""

    segment: str


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What writers put: parts, the groups of arrays with their rows, dense tensors, documents, all other objects."""

    parts: tuple[PartLine, ...]
    groups: tuple[ArrayGroup, ...] = ()
    dense: dict[Name, TensorLine] = {}
    dense_arrays: tuple[ArrayGroup, ...] = ()
    documents: dict[Text, KeyPath] = {}
    objects: tuple[ObjectEntry, ...]


class Receipt(Written, frozen=True, kw_only=True):
    """``_receipt.json.zst``: what one writer wrote, for whoever puts the manifest over it; no reader opens one."""

    txn: Hex32
    rank: Count
    world: Positive
    attempt: Hex8
    base: Count
    l0: Count


class SegmentDocument(Written, frozen=True, kw_only=True):
    """``_segment.json.zst``: the whole segment; opening a snapshot reads one of these per segment.

    ``tables`` are those that it states, with all their ``parts``: of a baseline every one, of a delta those that it
    changes. ``dropped`` are tables, ``ended`` dense tensors that the state before has and this one does not.
    """

    format: Positive
    txn: Hex32
    base: Count
    kind: SegmentKind
    l0: Count
    l1: Count
    step: Count
    tables: dict[Name, TableSchema]
    dropped: tuple[Name, ...] = ()
    ended: tuple[Name, ...] = ()
    scalars: dict[str, JsonValue] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A segment's manifest as readers have it; in memory alone.

    ``tables``, ``parts`` and ``dense`` are those of the state at ``l1`` where it was read as part of a chain
    (`fold.fold`), and those that the document states where it was read alone. ``stated`` names the tables which that
    states. ``arrays`` are those of all row lists, whole, and ``objects`` all that are named, also as parts of arrays.
    """

    format: int
    txn: str
    base: int
    kind: SegmentKind
    l0: int
    l1: int
    step: int
    tables: dict[str, TableSchema]
    dropped: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    parts: tuple[PartEntry, ...]
    arrays: tuple[ArrayEntry, ...] = ()
    dense: dict[str, DenseEntry] = {}
    dense_arrays: tuple[ArrayEntry, ...] = ()
    scalars: dict[str, JsonValue] = {}
    documents: dict[str, str] = {}
    objects: tuple[ObjectEntry, ...]

    @cached_property
    def parts_of(self) -> dict[str, tuple[PartEntry, ...]]:
        """The parts by table; a table without one is not there."""
        found: dict[str, list[PartEntry]] = {}
        for part in self.parts:
            found.setdefault(part.table, []).append(part)
        return {table: tuple(parts) for table, parts in found.items()}

    @property
    def changed_rows(self) -> int:
        """Rows in all row lists of all parts."""
        lists = (entry for part in self.parts for entry in (part.add, part.set, part.delete, part.escape))
        return sum(entry.count for entry in lists if entry is not None)


class Hint(msgspec.Struct, frozen=True):
    """``hint/latest.json``: advisory, may be stale."""

    version: Count


class ReaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/readers/<uuid>.json``: a reader that is at work on a version, until ``expires_ms``. Advisory."""

    version: Count
    branch: BranchOrNone
    expires_ms: Count
    holder: Text


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/cursors/<name>.json``: how far a consumer of a log is; it holds every version from its own on.

    ``branch`` is the uuid of a branch, or empty. Without ``expires_ms`` it holds until it is dropped. Advisory.
    """

    name: Name
    version: Count
    branch: BranchOrNone
    moved_ms: Count
    expires_ms: Count | None = None
    holder: Text


class RelayMarker(msgspec.Struct, frozen=True, kw_only=True):
    """``relay.json``: this root is a read-only copy of one log from position ``first`` on (spec, section 7.11).

    ``source`` is the URL that was copied from, without credentials; ``branch`` is the uuid of the branch whose log it
    is, or empty.
    """

    store_uuid: Hex32
    branch: BranchOrNone
    first: Positive
    source: Text
    library: Text
    created_ms: Count


class RelayTrims(msgspec.Struct, frozen=True, kw_only=True):
    """``relay/trims.json``: what a relay holds no longer, and from when (ms) the objects of a segment may be deleted.

    Versions from ``floor`` on and those in ``kept`` are held. Of no meaning to readers.
    """

    floor: Count = 0
    kept: tuple[Count, ...] = ()
    pending_delete: dict[SegmentName, Count] = {}
