"""The documents of the format as types: identity, commit record, receipt, manifest, leases, relay documents.

What they mean is in sections 3, 4 and 7 of the specification. `documents` turns them into bytes and back;
`commit_record`, `identity` and `manifest` check what no type can say. ``gc=False``: of these a save makes many for each
table, and none of them can be part of a cycle, so the garbage collector need not visit them.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NoReturn

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
    DocumentName,
    Feature,
    Float32,
    Hex8,
    Hex32,
    Hex32s,
    KeyPath,
    KnownPath,
    Name,
    NumRows,
    ObjectSize,
    PartDigest,
    Positive,
    RowNumber,
    SegmentName,
    Sha256,
    Shape,
    ShardChunks,
    Shift,
    TableName,
    TensorDtype,
    Text,
)
from cnr_store.format.limits import MAX_LAYERS, MAX_SLOTS
from cnr_store.types import MAX_CHAIN, Encoding, JsonValue, SlotEncoding, TableDtype

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
    major: Positive
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
    size_bytes: Count
    rows: Count


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The fork point of a branch, which keeps a version live, its name, and when the branch ends (None: never)."""

    version: Count
    name: Name
    expires_ms: Count | None = None


class WriterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The process that wrote the record: information for people, never used for decisions."""

    host: Text
    lib: Text
    run_id: Text


class Superseded(msgspec.Struct, frozen=True, kw_only=True):
    """Positions directly before a record that cannot be read and hold no version any more (spec, section 7.10).

    ``torn`` has the sha256 of the bytes at each position, oldest first. ``follows`` is the sha256 of the record before
    them, which this record continues.
    """

    follows: Sha256
    torn: Annotated[tuple[Sha256, ...], Meta(min_length=1)]


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entries that are removed from the lists of older layers: names, uuids, versions. Empty lists are left out."""

    tags: tuple[Name, ...] = ()
    channels: tuple[Name, ...] = ()
    pins: tuple[Hex32, ...] = ()
    kept: tuple[Count, ...] = ()
    expired: tuple[Count, ...] = ()
    aborted: tuple[Hex32, ...] = ()


class Lists(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lists of a record, or their changes against the older layers. Empty ones are left out."""

    tags: dict[Name, Count] = {}
    channels: dict[Name, Count] = {}
    pins: dict[Hex32, Pin] = {}
    kept: tuple[Count, ...] = ()
    expired: tuple[Count, ...] = ()
    aborted: dict[Hex32, Count] = {}
    removed: Removed | msgspec.UnsetType = msgspec.UNSET


class Overflow(Lists, frozen=True, kw_only=True, omit_defaults=True):
    """``state/<sha256>.json``, a side object: list entries that did not fit into record ``v``, whose writer put it.

    ``branch`` is the uuid of the branch whose log has the record; empty for the store's own log.
    """

    v: Count
    branch: BranchOrNone


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One position of the commit log (spec, section 3).

    Without ``state`` the fields of `Lists` are complete. With it they and ``removed`` are changes against the side
    objects that ``state`` names (by sha256, largest first). ``kept`` are live versions below ``floor``, ``expired``
    expired ones from ``floor`` on.
    ``check`` is the xxh3-128 of the record with an empty ``check``. In memory it is empty.
    ``aborted`` maps transactions that may not commit any more, or whose segments no live version needs, to the time
    (ms) from which their objects may be deleted.
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


class SlotSchema(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Optimizer state of a table: ``row`` is (num_rows,), ``element`` is (num_rows, dim)."""

    kind: Literal["row", "element"]
    dtype: TableDtype
    encoding: SlotEncoding
    fill: Float32 = 0.0


class TableSchema(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Say where the rows are: ``snapshot.tables[name].read_rows`` is an easy mistake."""
            raise AttributeError(
                f"TableSchema has no attribute {name!r}: it describes a table; snapshot.table(name) reads its rows",
                name=name, obj=self,
            )  # fmt: skip


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks inside the shards of an array, in the order of the array, which is also the order of their bytes.

    ``chunks``: chunks per shard; the last shard may have fewer. ``sizes``: stored bytes of each chunk. ``digests``: the
    xxh3-128 of each, joined.
    """

    chunks: ShardChunks
    sizes: tuple[ObjectSize, ...]
    digests: Hex32s


class ChunkPlace(NamedTuple):
    """The object that has the bytes of a chunk, their place in it (bytes), and their digest."""

    path: str
    start: int
    size: int
    xxh3_128: str


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Rows [start, start + count) of a stored Zarr array: the whole array, or the rows of one row list; never stored.

    ``path`` is relative to the segment. ``shape`` is that of the whole array; each chunk has all its columns. ``dtype``
    and ``shape`` describe the values, not the bytes that the ``codec`` stores.
    ``order`` is the path of an array of the same group: the rows of each chunk are stored by its ascending values.
    Without it they are stored by ascending row id. The chunks of an entry are those that have rows of it, counted from
    0. ``shards`` is left out if each chunk is an object.
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
        """Return the number of the array's chunk that is chunk ``index`` of this entry."""
        return self.start // self.chunk_rows + index

    def span(self, index: int) -> tuple[int, int]:
        """Return the range [start, stop) of this entry's rows, counted from 0, that chunk ``index`` has."""
        begin = index * self.chunk_rows - self.start % self.chunk_rows
        return max(begin, 0), min(begin + self.chunk_rows, self.count)


class RowListEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row list of a part: ``count`` rows from row ``start`` on of each array of its group; never stored.

    ``first[k]``, ``last[k]`` are the first and last row id in chunk k (inclusive). ``group`` are the arrays, whole, by
    name, which all have the same chunk size.
    """

    count: Positive
    first: tuple[RowNumber, ...]
    last: tuple[RowNumber, ...]
    group: dict[str, ArrayEntry]
    start: int

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """Its rows of each array of its group; made anew by each call, because a manifest may have thousands."""
        return {name: self.array(name) for name in self.group}

    def array(self, name: str) -> ArrayEntry:
        """Return its rows of one array of its group."""
        return msgspec.structs.replace(self.group[name], start=self.start, count=self.count)

    @property
    def chunks(self) -> int:
        """How many chunks of each array have rows of it."""
        rows = self.group["rows"].chunk_rows
        return -(-(self.start % rows + self.count) // rows)

    def rows_in(self, chunk: int) -> int:
        """Return how many of its rows chunk ``chunk`` has."""
        rows = self.group["rows"].chunk_rows
        begin = chunk * rows - self.start % rows
        return min(begin + rows, self.count) - max(begin, 0)


class ObjectDigest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Size and xxh3-128 of an object's stored bytes."""

    size: ObjectSize
    xxh3_128: Hex32


class ObjectEntry(ObjectDigest, frozen=True, kw_only=True, gc=False):
    """One line of the inventory: path relative to the segment, size and xxh3-128 of the stored bytes."""

    path: KeyPath


class StoredArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of a group, at ``<path of the group>.<name>``.

    ``width`` is None for a one-dimensional array. ``order`` names an array of the group: the rows of each chunk are
    stored by its ascending values; without it, by ascending row id. ``objects``: its ``zarr.json``, then its chunks or
    shards, in order. ``shards`` is left out if it has none.
    """

    dtype: ArrayDtype
    width: Dim | None
    codec: CodecName
    order: ArrayName | msgspec.UnsetType = msgspec.UNSET
    shards: Shards | msgspec.UnsetType = msgspec.UNSET
    objects: tuple[ObjectDigest, ...]


class ArrayGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays with the same ``rows`` and chunk size. They hold row lists end to end, in the order of the parts."""

    path: KeyPath
    rows: NumRows
    chunk_rows: ChunkRows
    arrays: dict[ArrayName, StoredArray]


class ListLine(msgspec.Struct, kw_only=True, gc=False):
    """One row list of a part: ``count`` rows of the group at path ``group``, after the rows of earlier parts.

    ``first[k]``, ``last[k]``: first and last row id (inclusive) in the k-th chunk that has rows of the list; a writer
    sets them as it makes the chunks.
    """

    group: KnownPath
    count: Positive
    first: tuple[RowNumber, ...]
    last: tuple[RowNumber, ...]


class PartPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One writer's rectangle of a table: half-open row and column ranges, and its digests.

    ``base_digest`` is the state digest the part starts from.
    """

    table: TableName
    rows: tuple[NumRows, NumRows]
    columns: tuple[NumRows, Dim]
    base_digest: PartDigest | None = None
    state_digest: PartDigest | None = None

    def __str__(self) -> str:
        return f"{self.table!r} (rows {self.rows}, columns {self.columns})"


class PartLine(PartPlace, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A part as a document has it. Absent fields are left out. A part without row lists has no objects."""

    add: ListLine | None = None
    set: ListLine | None = None
    delete: ListLine | None = None
    escape: ListLine | None = None


class PartEntry(PartPlace, frozen=True, kw_only=True, gc=False):
    """A part as a reader uses it: its row lists have their arrays; never stored."""

    add: RowListEntry | None = None
    set: RowListEntry | None = None
    delete: RowListEntry | None = None
    escape: RowListEntry | None = None


class TensorLine(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a dense tensor in the manifest's segment: its elements in array ``path``, from ``offset`` on."""

    path: KeyPath
    offset: NumRows
    dtype: TensorDtype
    shape: Shape
    digest: Hex32


class DenseEntry(TensorLine, frozen=True, kw_only=True):
    """A dense tensor of a state, and the segment of the chain that has its bytes; never stored."""

    segment: str


class DocumentEntry(NamedTuple):
    """A document of a state: the segment of the chain that has it, as an object or as JSON text; in memory alone."""

    segment: str
    object: ObjectEntry | None = None
    text: bytes = b""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What writers put: parts, the groups of arrays with their rows, dense tensors, documents, all other objects.

    ``documents`` has the paths of documents that are objects, ``small`` the content of others. ``kept_documents``
    names documents of the state before that this one has, too.
    """

    parts: tuple[PartLine, ...]
    groups: tuple[ArrayGroup, ...] = ()
    dense: dict[Name, TensorLine] = {}
    dense_arrays: tuple[ArrayGroup, ...] = ()
    documents: dict[DocumentName, KeyPath] = {}
    small: dict[DocumentName, msgspec.Raw] = {}
    kept_documents: tuple[DocumentName, ...] = ()
    objects: tuple[ObjectEntry, ...]


class Receipt(Written, frozen=True, kw_only=True):
    """What one writer wrote, for the process that puts the manifest; readers never open it."""

    txn: Hex32
    rank: Count
    world: Positive
    attempt: Hex8
    base: Count
    l0: Count


class SegmentDocument(Written, frozen=True, kw_only=True):
    """``_segment.json.zst``, the manifest of a segment. Opening a snapshot reads one per segment of the chain.

    ``tables`` are the recorded tables, with all their ``parts``: all tables in a baseline, the changed ones in a delta.
    ``dropped`` are tables, and ``ended`` dense tensors, that the state before has and this state does not have.
    """

    format: Positive
    txn: Hex32
    base: Count
    kind: SegmentKind
    l0: Count
    l1: Count
    step: Count
    tables: dict[TableName, TableSchema]
    dropped: tuple[Name, ...] = ()
    ended: tuple[Name, ...] = ()
    scalars: dict[str, JsonValue] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A segment's manifest as a reader uses it; never stored.

    ``tables``, ``parts``, ``dense`` and ``documents`` are those of the state at ``l1`` after
    `manifest_state.with_state`, and those in the document before. ``recorded`` names the tables in the document.
    ``arrays`` are those of all row lists, whole. ``objects`` are all objects of the segment, also those of arrays.
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
    recorded: tuple[str, ...] = ()
    parts: tuple[PartEntry, ...]
    arrays: tuple[ArrayEntry, ...] = ()
    dense: dict[str, DenseEntry] = {}
    dense_arrays: tuple[ArrayEntry, ...] = ()
    scalars: dict[str, JsonValue] = {}
    documents: dict[str, DocumentEntry] = {}
    kept_documents: tuple[str, ...] = ()
    objects: tuple[ObjectEntry, ...]

    @cached_property
    def parts_of(self) -> dict[str, tuple[PartEntry, ...]]:
        """The parts by table; a table without one is not there."""
        alone: dict[str, tuple[PartEntry, ...]] = {part.table: (part,) for part in self.parts}
        if len(alone) == len(self.parts):  # of each table one, as nearly always
            return alone
        found: dict[str, list[PartEntry]] = {}
        for part in self.parts:
            found.setdefault(part.table, []).append(part)
        return {table: tuple(parts) for table, parts in found.items()}

    @property
    def changed_rows(self) -> int:
        """Rows in all row lists of all parts."""
        lists = chain.from_iterable(map(attrgetter(operation), self.parts) for operation in OPERATIONS)
        return sum(int(entry.count) for entry in lists if entry is not None)


class Hint(msgspec.Struct, frozen=True):
    """``hint/latest.json``: advisory, may be stale."""

    version: Count


class ReaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/readers/<uuid>.json``: a reader uses a version, at most until ``expires_ms``. Advisory."""

    version: Count
    branch: BranchOrNone
    expires_ms: Count
    holder: Text


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/cursors/<name>.json``: the last version that a consumer has read; it keeps that and later versions.

    ``branch`` is the uuid of a branch, or empty. Without ``expires_ms`` it stays until it is dropped. Advisory.
    """

    name: Name
    version: Count
    branch: BranchOrNone
    moved_ms: Count
    expires_ms: Count | None = None
    holder: Text


class RelayMarker(msgspec.Struct, frozen=True, kw_only=True):
    """``relay.json``: this root is a read-only copy of one log from position ``first`` on (spec, section 7.11).

    ``source`` is the URL that was copied from, without credentials. ``branch`` is the uuid of the branch whose log was
    copied, or empty.
    """

    store_uuid: Hex32
    branch: BranchOrNone
    first: Positive
    source: Text
    library: Text
    created_ms: Count


class RelayTrims(msgspec.Struct, frozen=True, kw_only=True):
    """``relay/trims.json``: the versions that a relay still has, and when (ms) objects of a segment may be deleted.

    A relay has the versions from ``floor`` on and those in ``kept``. Readers ignore this document.
    """

    floor: Count = 0
    kept: tuple[Count, ...] = ()
    pending_delete: dict[SegmentName, Count] = {}
