"""The documents of the format: identity, commit record, receipt, segment manifest (spec, sections 3 and 4).

Parsing happens here, at the edge, with strict types; inside the library nobody re-validates. Pure: bytes in,
records out. Unknown JSON fields of a commit record are kept in `LogEntry.extra`, and `encode_record` writes them back.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from cnr_store.errors import BadName, CorruptRecord, CorruptStore, NewerFormat, UnknownFeature
from cnr_store.layout import check_relative_path, check_segment_name, state_key
from cnr_store.types import MAX_CHAIN, Affine, Encoding, FloatBits, JsonValue, Lattice, Profile, Rectangle, TableDtype

FORMAT = "cnr-store"
MAJOR = 1
MINOR = 0
MAX_RECORD_BYTES = 64 * 1024
OVERFLOW_BYTES = 8 * 1024
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
"""A manifest or receipt beyond this is refused before it is parsed."""

INT8_CODES = "int8_codes"
"""Reader feature of records in whose chain codes are stored as int8."""

ROW_ORDER = "row_order"
"""Reader feature of records in whose chain the rows of codes lie in the order of a slot."""

KNOWN_READER_FEATURES: frozenset[str] = frozenset({INT8_CODES, ROW_ORDER})
KNOWN_WRITER_FEATURES: frozenset[str] = frozenset()
RESERVED_FEATURES: frozenset[str] = frozenset({"row_classes"})

_ARRAY_DTYPES = frozenset(
    {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}
)
_CARRIERS = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
MAX_SHIFT = 31
MAX_SHIFT_IN_CHAIN = 8
"""Halvings between the segments of a chain: differences of codes of the coarsest fit int32 in the finest's unit."""
MIN_SCALE, MAX_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127 / 2.0**22
"""The scales that decode every code to a finite, normal number or zero."""

RecordKind = Literal[
    "init", "fence", "full", "delta", "compact", "rollback", "tag", "untag", "channel", "expire", "fork", "close"
]
DATA_KINDS: frozenset[str] = frozenset({"full", "delta", "rollback"})
"""Kinds that change the training state a reader sees."""

SegmentKind = Literal["baseline", "delta"]
CodecName = Literal["pcodec", "zstd", "bytes"]
DocumentType = TypeVar("DocumentType")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """``cnr.json``: what the store is. Created once, never changed."""

    format: str
    major: int
    minor: int
    store_uuid: str
    created_ms: int
    hash: Literal["sha256"]
    exclusive_create: Literal["verified", "unsafe_single_writer"]
    profile: Profile


class ChainEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a chain: applies to the state at ``l0`` and gives the state at ``l1``."""

    seg: str
    sha256: str
    kind: SegmentKind
    l0: int
    l1: int
    bytes: int
    rows: int


class WaitingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Rows whose last change waits for a later segment (thresholded deltas); for people, never for decisions.

    ``count`` rows, counted once per column range; every element of their weights was within ``max_error`` of what the
    store holds, but for the rounding of floats; the one that waits longest does so for ``oldest`` saves.
    """

    count: int
    max_error: float
    oldest: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A table's scale history: ``generation`` counts scales, ``shift`` the halvings since that scale was chosen.

    ``waiting`` is that of all its parts; left out where no row waits.
    """

    generation: int
    scale: float | None = None
    shift: int = 0
    waiting: WaitingEntry | msgspec.UnsetType = msgspec.UNSET


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a version for a branch: the fork point, the branch's name, and when the branch ends (None: never)."""

    version: int
    name: str
    expires_ms: int | None = None


class WriterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote the record; for people, never for decisions."""

    host: str
    lib: str
    run_id: str


class Superseded(msgspec.Struct, frozen=True, kw_only=True):
    """Positions directly before a record that cannot be read and hold no version any more (spec, section 7.10).

    ``torn`` has the sha256 of the bytes at each of them, oldest first; ``follows`` that of the record before them,
    whose fields the record carries on.
    """

    follows: str
    torn: tuple[str, ...]


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One position of the commit log (spec, section 3).

    The fields of `Overflow` move to a side object named by ``state`` (its sha256) when together they exceed
    `OVERFLOW_BYTES`. ``kept`` are versions below ``floor`` that stay, ``expired`` those above it that are gone.
    ``check`` is the digest of the record's own bytes without it; in memory it is empty, as it is in drafts.
    ``aborted`` names the transactions that may never commit or whose segments no live version needs, each with the
    time (ms) from which its objects may be deleted.
    """

    v: int
    kind: RecordKind
    commit_uuid: str
    store_uuid: str
    parent_digest: str
    epoch: int
    logical: int
    step: int
    ts_ms: int
    chain: tuple[ChainEntry, ...] = ()
    tables: dict[str, Generation] = {}
    tags: dict[str, int] = {}
    channels: dict[str, int] = {}
    pins: dict[str, Pin] = {}
    floor: int = 0
    kept: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    aborted: dict[str, int] = {}
    state: str | None = None
    target: int | None = None
    name: str | None = None
    supersedes: Superseded | None = None
    reader_features: tuple[str, ...] = ()
    writer_features: tuple[str, ...] = ()
    writer: WriterInfo
    user: dict[str, JsonValue] = {}
    check: str = ""


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """``state/<sha256>.json``: the lists of a record that outgrew it."""

    tags: dict[str, int]
    channels: dict[str, int]
    pins: dict[str, Pin]
    kept: tuple[int, ...]
    expired: tuple[int, ...]
    aborted: dict[str, int]
    tables: dict[str, Generation]


class SlotSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer state of a table: ``row`` is (num_rows,), ``element`` is (num_rows, dim).

    With ``mirror`` an ``add`` row holds the difference to the previous code, without it the code itself.
    """

    kind: Literal["row", "element"]
    dtype: TableDtype
    encoding: Encoding
    mirror: bool
    fill: float = 0.0


class TableSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and encoding of a table as of a segment's ``l1``. ``num_rows`` is 0 for hashed tables."""

    num_rows: int
    dim: int
    dtype: TableDtype
    keys: Literal["dense", "hashed"] = "dense"
    encoding: Encoding
    generation: int = 1
    shift: int = 0
    fill: float = 0.0
    slots: dict[str, SlotSchema] = {}


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One Zarr array; ``path`` is relative to the segment, chunks are (chunk_rows, full width).

    ``order`` is the path of the array of the same row list whose values, ascending, the rows of each chunk follow; left
    out where they follow the row ids.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk_rows: int
    codec: CodecName
    order: str | msgspec.UnsetType = msgspec.UNSET


class RowListEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row list of a part and its arrays, all chunked alike.

    ``first[k]``, ``last[k]`` are the first and last row id of chunk k (inclusive).
    """

    count: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    arrays: dict[str, ArrayEntry]


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One writer's rectangle of a table: half-open row and column ranges, its row lists, its digests.

    A part without row lists is a line here and no object. ``base_digest`` is the state digest the part starts from.
    ``waiting`` is left out where no row of the rectangle waits.
    """

    table: str
    folder: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    base_digest: str | None = None
    state_digest: str | None = None
    add: RowListEntry | None = None
    set: RowListEntry | None = None
    delete: RowListEntry | None = None
    escape: RowListEntry | None = None
    waiting: WaitingEntry | msgspec.UnsetType = msgspec.UNSET


class DenseEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a dense tensor's elements are: ``shape`` elements from ``offset`` of array ``path`` of ``segment``.

    ``segment`` is empty for the manifest's own segment; else it must be in the same record's chain.
    """

    segment: str
    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    digest: str


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the inventory: path relative to the segment, size and xxh3-128 of the stored bytes."""

    path: str
    size: int
    xxh3_128: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """``_receipt.json``: what one writer wrote, for whoever puts the manifest over it; no reader opens one."""

    txn: str
    rank: int
    world: int
    attempt: str
    base: int
    l0: int
    parts: tuple[PartEntry, ...]
    dense: dict[str, DenseEntry] = {}
    dense_arrays: tuple[ArrayEntry, ...] = ()
    documents: dict[str, str] = {}
    objects: tuple[ObjectEntry, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``_segment.json``: the whole segment; opening a snapshot reads one of these per segment."""

    format: int
    profile: Profile
    txn: str
    base: int
    kind: SegmentKind
    l0: int
    l1: int
    step: int
    tables: dict[str, TableSchema]
    parts: tuple[PartEntry, ...]
    dense: dict[str, DenseEntry] = {}
    dense_arrays: tuple[ArrayEntry, ...] = ()
    scalars: dict[str, JsonValue] = {}
    documents: dict[str, str] = {}
    objects: tuple[ObjectEntry, ...]

    @property
    def changed_rows(self) -> int:
        """Rows in all row lists of all parts."""
        lists = (entry for part in self.parts for entry in (part.add, part.set, part.delete, part.escape))
        return sum(entry.count for entry in lists if entry is not None)


class Hint(msgspec.Struct, frozen=True):
    """``hint/latest.json``: advisory, may be stale."""

    version: int


class ReaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/readers/<uuid>.json``: a reader that is at work on a version, until ``expires_ms``. Advisory."""

    version: int
    branch: str
    expires_ms: int
    holder: str


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/cursors/<name>.json``: how far a consumer of a log is; it holds every version from its own on.

    ``branch`` is the uuid of a branch, or empty. Without ``expires_ms`` it holds until it is dropped. Advisory.
    """

    name: str
    version: int
    branch: str
    moved_ms: int
    expires_ms: int | None = None
    holder: str


class RelayMarker(msgspec.Struct, frozen=True, kw_only=True):
    """``relay.json``: this root is a read-only copy of one log from position ``first`` on (spec, section 7.11).

    ``source`` is the URL that was copied from, without credentials; ``branch`` is the uuid of the branch whose log it
    is, or empty.
    """

    store_uuid: str
    branch: str
    first: int
    source: str
    library: str
    created_ms: int


class RelayTrims(msgspec.Struct, frozen=True, kw_only=True):
    """``relay/trims.json``: what a relay holds no longer, and from when (ms) the objects of a segment may be deleted.

    Versions from ``floor`` on and those in ``kept`` are held. Of no meaning to readers.
    """

    floor: int = 0
    kept: tuple[int, ...] = ()
    doomed: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A decoded record, the sha256 of its bytes, and the unknown fields that rewriters carry on."""

    record: CommitRecord
    digest: str
    extra: dict[str, Any] = field(default_factory=dict)


# Built while the module is imported: msgspec makes the type information of a Struct at its first use, and two threads
# that do so at once crash the interpreter (msgspec 0.22). `convert` uses the same information.
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        dict, Identity, CommitRecord, Overflow, Receipt, Manifest, Hint, ReaderLease, Cursor, RelayMarker, RelayTrims,
    )
}  # fmt: skip


def stated_digest(parts: Iterable[PartEntry], rectangle: Rectangle) -> int | None:
    """Return the state digest that parts of one table state for a rectangle of it, by their sum. Pure.

    None where the parts inside do not make the rectangle up, or one of them states none. Parts without rows do not
    count.
    """
    (first, stop), (left, right) = rectangle.rows, rectangle.columns
    covered = total = 0
    for part in parts:
        (start, end), (low, high) = part.rows, part.columns
        if first <= start < end <= stop and left <= low and high <= right:
            if part.state_digest is None:
                return None
            covered += (end - start) * (high - low)
            total += int(part.state_digest, 16)
    return total % (1 << 64) if covered == rectangle.area else None


def canonical_json(document: Any) -> bytes:
    """Return the canonical form: UTF-8, sorted keys, no white space, no NaN or Infinity.

    Raises
    ------
    ValueError
        If a number is not finite (JSON has no form for it).
    """
    builtins = msgspec.to_builtins(document)
    _refuse_non_finite(builtins)
    return msgspec.json.encode(builtins, order="sorted")


def sha256(data: bytes) -> str:
    """Return the hex sha256 that records and manifests are named by."""
    return hashlib.sha256(data).hexdigest()


def encode_record(record: CommitRecord, extra: dict[str, Any] | None = None) -> bytes:
    """Return the canonical bytes of a record with its check, unknown fields of its predecessor included."""
    return sealed({**(extra or {}), **msgspec.to_builtins(record)})


def sealed(document: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a record's plain document, with its ``check`` made right."""
    check = xxhash.xxh3_128_hexdigest(canonical_json({**document, "check": ""}))
    return canonical_json({**document, "check": check})


def decode_record(data: bytes, version: int) -> LogEntry:
    """Parse and check the record read from log position ``version``.

    Checks size, JSON, canonical form, its own check, types, position and chain; unknown reader features refuse.

    Raises
    ------
    CorruptRecord
        Torn, mistyped, non-canonical, at the wrong position, or with a chain that does not connect.
    UnknownFeature
        A reader feature of a newer library.
    """
    where = f"commit record {version}"
    if len(data) > MAX_RECORD_BYTES:
        raise CorruptRecord(
            f"{where} has {len(data)} bytes; at most {MAX_RECORD_BYTES} are allowed",
            version=version,
            expected=MAX_RECORD_BYTES,
            found=len(data),
        )
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        if msgspec.json.encode(raw, order="sorted") != data:
            raise CorruptRecord(f"{where} is not canonical JSON; its bytes were altered", version=version)
        check = xxhash.xxh3_128_hexdigest(msgspec.json.encode({**raw, "check": ""}, order="sorted"))
        if raw.get("check") != check:
            raise CorruptRecord(
                f"{where} has another digest than it says of itself; its bytes were altered",
                version=version,
                expected=raw.get("check"),
                found=check,
            )
        features = raw.get("reader_features", [])
        unknown = [name for name in features if name not in KNOWN_READER_FEATURES]
        if unknown:
            raise UnknownFeature(
                f"{where} needs reader features {unknown} that this library does not know; install a newer cnr-store",
                version=version,
                found=unknown,
            )
        record = msgspec.convert({**raw, "check": ""}, CommitRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise CorruptRecord(
            f"{where} cannot be parsed: {error}; it was torn or overwritten, run `cnr verify`",
            version=version,
        ) from error
    if record.v != version:
        raise CorruptRecord(
            f"{where} says it is version {record.v}; it was copied to the wrong log position",
            version=version,
            expected=version,
            found=record.v,
        )
    if record.supersedes is not None and not _may_supersede(record, record.supersedes):
        raise CorruptRecord(f"{where} supersedes what is not directly before it", version=version)
    try:
        check_chain(record)
        if record.state is not None:
            state_key(record.state)
    except BadName as error:
        raise CorruptRecord(f"{where} names {error}", version=version, found=error.found) from error
    extra = {key: value for key, value in raw.items() if key not in CommitRecord.__struct_fields__}
    return LogEntry(record, sha256(data), extra)


def _may_supersede(record: CommitRecord, superseded: Superseded) -> bool:
    torn = superseded.torn
    return 0 < len(torn) < record.v and torn[-1] == record.parent_digest and record.kind in ("rollback", "close")


def parent_of(record: CommitRecord) -> tuple[int, str]:
    """Return version and digest of the record that this one carries on: the one before what it supersedes. Pure."""
    if record.supersedes is None:
        return record.v - 1, record.parent_digest
    return record.v - 1 - len(record.supersedes.torn), record.supersedes.follows


def check_chain(record: CommitRecord) -> None:
    """Refuse a chain that does not connect: baseline first, deltas after, every l0 the l1 before it.

    Raises
    ------
    CorruptRecord
        Naming the position in the chain.
    """
    chain = record.chain
    problem = None
    if len(chain) > MAX_CHAIN:
        problem = f"has {len(chain)} segments, at most {MAX_CHAIN} are allowed"
    elif chain and (chain[0].kind != "baseline" or chain[0].l0 != 0):
        problem = "does not start with a baseline"
    elif chain and chain[-1].l1 != record.logical:
        problem = f"ends at logical {chain[-1].l1}, the record is at {record.logical}"
    for index in range(1, len(chain)):
        if chain[index].kind != "delta":
            problem = f"has a second baseline at position {index}"
        elif chain[index].l0 != chain[index - 1].l1 or chain[index].l1 <= chain[index].l0:
            problem = (
                f"breaks at position {index}: l0 {chain[index].l0}, l1 {chain[index].l1} after l1 {chain[index - 1].l1}"
            )
    if problem:
        raise CorruptRecord(f"the chain of commit record {record.v} {problem}", version=record.v)
    for entry in chain:
        check_segment_name(entry.seg)


def is_live(head: CommitRecord, version: int) -> bool:
    """Whether readers may open ``version``, by the newest record: it has not expired (spec, section 7.1). Pure."""
    if version in head.expired or head.kind == "close":
        return False
    if version >= head.floor or version in head.kept:
        return True
    named = (*head.tags.values(), *head.channels.values(), *(pin.version for pin in head.pins.values()))
    return version in named


def needed_reader_features(manifest: Manifest) -> tuple[str, ...]:
    """Return the reader features that the segment's own arrays need. Pure."""
    found = set()
    for row_list in (one for part in manifest.parts for one in (part.add, part.set) if one is not None):
        for entry in row_list.arrays.values():
            if entry.dtype == "int8":
                found.add(INT8_CODES)
            if entry.order is not msgspec.UNSET:
                found.add(ROW_ORDER)
    return tuple(sorted(found))


def unknown_writer_features(record: CommitRecord) -> list[str]:
    """Return the writer features that make the store read-only for this library."""
    return [name for name in record.writer_features if name not in KNOWN_WRITER_FEATURES]


def split_overflow(record: CommitRecord) -> tuple[CommitRecord, bytes | None]:
    """Move the growing lists to a side object when they exceed `OVERFLOW_BYTES`; pure.

    Returns the record to write and the side object's bytes, which must be put first, or None.
    """
    overflow = Overflow(**{name: getattr(record, name) for name in Overflow.__struct_fields__})
    data = canonical_json(overflow)
    if len(data) <= OVERFLOW_BYTES:
        return msgspec.structs.replace(record, state=None), None
    emptied = {name: type(value)() for name, value in msgspec.structs.asdict(overflow).items()}
    return msgspec.structs.replace(record, state=sha256(data), **emptied), data


def merge_overflow(record: CommitRecord, data: bytes) -> CommitRecord:
    """Return the record with the lists of its side object; checks the side object's digest.

    Raises
    ------
    CorruptStore
        If the bytes are not those the record names.
    """
    if sha256(data) != record.state:
        raise CorruptStore(
            f"side object of commit record {record.v} has another digest than the record names; run `cnr verify`",
            version=record.v,
            expected=record.state,
            found=sha256(data),
        )
    overflow = decode_document(data, Overflow, f"side object of commit record {record.v}")
    return msgspec.structs.replace(record, state=None, **msgspec.structs.asdict(overflow))


def decode_identity(data: bytes, where: str) -> Identity:
    """Parse ``cnr.json``; refuses other formats and newer majors.

    Raises
    ------
    CorruptStore, NewerFormat
    """
    header = decode_document(data, dict, where)
    if header.get("format") != FORMAT:
        raise CorruptStore(f"{where} is not a {FORMAT} identity", path=where, found=header.get("format"))
    major = header.get("major")
    if not isinstance(major, int) or major > MAJOR:
        raise NewerFormat(
            f"{where} has format {major}.{header.get('minor')}, this library reads up to {MAJOR}; "
            "install a newer cnr-store",
            path=where,
            expected=MAJOR,
            found=major,
        )
    return decode_document(data, Identity, where)


def decode_relay_marker(data: bytes, store_uuid: str, where: str) -> RelayMarker:
    """Parse ``relay.json`` and check that it can be one, of that store.

    Raises
    ------
    CorruptStore
    """
    marker = decode_document(data, RelayMarker, where)
    if marker.store_uuid != store_uuid:
        raise CorruptStore(
            f"{where} is of store {marker.store_uuid}, expected {store_uuid}; two stores were mixed, or another one is "
            "being copied here: take an empty place",
            path=where, expected=store_uuid, found=marker.store_uuid,
        )  # fmt: skip
    if marker.first < 1:
        raise CorruptStore(f"{where} begins at version {marker.first}; a relay has no position 0", path=where)
    return marker


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse ``_segment.json`` and check its paths, ranges and sizes before anybody allocates by them.

    Raises
    ------
    CorruptStore, NewerFormat
    """
    manifest = decode_document(data, Manifest, where)
    if manifest.format > MAJOR:
        raise NewerFormat(f"{where} has manifest format {manifest.format}, this library reads {MAJOR}", path=where)
    try:
        problem = next(_manifest_problems(manifest), None)
    except BadName as error:
        raise CorruptStore(f"{where}: {error}", path=where, found=error.found) from error
    if problem:
        raise CorruptStore(f"{where}: {problem}", path=where)
    return manifest


def decode_document(data: bytes, kind: type[DocumentType], where: str) -> DocumentType:
    """Parse a JSON document as ``kind``; unknown fields are ignored.

    Raises
    ------
    CorruptStore
        If it is too large, not JSON, or mistyped; names ``where``.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorruptStore(f"{where} has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are read", path=where)
    try:
        return _DECODERS[kind].decode(data)  # type: ignore[no-any-return]  # the table is typed by its keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptStore(f"{where} cannot be parsed: {error}; run `cnr verify`", path=where) from error


def _manifest_problems(manifest: Manifest) -> Any:
    """Yield what is wrong with a manifest's own statements (hostile names, ranges, counts)."""
    known = {entry.path for entry in manifest.objects}
    if len(known) != len(manifest.objects):
        yield "an object is listed twice"
    for entry in manifest.objects:
        check_relative_path(entry.path)
        if entry.size < 0:
            yield f"object {entry.path} has size {entry.size}"
    for path in manifest.documents.values():
        if path not in known:
            yield f"document {path} is not in the inventory"
    for name, schema in manifest.tables.items():
        if schema.num_rows < 0 or schema.dim < 1 or schema.num_rows * schema.dim > 1 << 50:
            yield f"table {name!r} has shape ({schema.num_rows}, {schema.dim})"
        yield from _schema_problems(name, schema)
    for part in manifest.parts:
        if part.table not in manifest.tables:
            yield f"a part belongs to unknown table {part.table!r}"
            continue
        yield from _part_problems(part, manifest.tables[part.table], known)
    yield from _overlaps(manifest.parts)
    for array in manifest.dense_arrays:
        yield from _array_problems(array, known)
    yield from _order_problems(manifest)
    for name, tensor in manifest.dense.items():
        check_relative_path(tensor.path)
        if tensor.segment:
            check_segment_name(tensor.segment)
        dtype = {"bfloat16": "uint16", "bool": "uint8"}.get(tensor.dtype, tensor.dtype)
        if tensor.offset < 0 or any(size < 0 for size in tensor.shape) or dtype not in _ARRAY_DTYPES:
            yield f"dense tensor {name!r} is {tensor.dtype} of shape {tensor.shape} at offset {tensor.offset}"


def _schema_problems(table: str, schema: TableSchema) -> Any:
    """What would make decoding undefined: scales, bits and shifts outside their range."""
    if not 0 <= schema.shift <= MAX_SHIFT:
        yield f"table {table!r} has shift {schema.shift}"
    encodings = [(schema.encoding, schema.dtype), *((slot.encoding, slot.dtype) for slot in schema.slots.values())]
    for encoding, dtype in encodings:
        if isinstance(encoding, Lattice) and not MIN_SCALE <= encoding.scale * 0.5**schema.shift <= MAX_SCALE:
            yield f"table {table!r} has scale {encoding.scale} and shift {schema.shift}"
        if isinstance(encoding, FloatBits):
            allowed = range(1, 24) if dtype == "float32" else (10 if dtype == "float16" else 7,)
            if encoding.mantissa_bits not in allowed:
                yield f"table {table!r} has float_bits with {encoding.mantissa_bits} mantissa bits of {dtype}"
    for name, slot in schema.slots.items():
        if isinstance(slot.encoding, Affine):
            yield f"slot {name!r} of table {table!r} is affine"


def _overlaps(parts: tuple[PartEntry, ...]) -> Any:
    """Parts of one table are disjoint rectangles: swept by their first row."""
    active: dict[str, list[PartEntry]] = {}
    for part in sorted(parts, key=lambda part: part.rows):
        if part.rows[0] == part.rows[1]:
            continue
        beside = [other for other in active.get(part.table, []) if other.rows[1] > part.rows[0]]
        if any(other.columns[0] < part.columns[1] and part.columns[0] < other.columns[1] for other in beside):
            yield f"two parts of table {part.table!r} overlap at row {part.rows[0]}"
            return
        active[part.table] = [*beside, part]


def _expected_arrays(schema: TableSchema, operation: str, width: int) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Array name to the dtypes and the number of columns it may have in a row list (None: one-dimensional)."""
    expected: dict[str, tuple[tuple[str, ...], int | None]] = {"rows": (("int64",), None)}
    if operation == "delete":
        return expected
    encodings = {"codes": (schema.encoding, schema.dtype, False)} | {
        f"slots/{name}": (slot.encoding, slot.dtype, slot.kind == "row") for name, slot in schema.slots.items()
    }
    for name, (encoding, dtype, is_vector) in encodings.items():
        columns = None if is_vector else width
        if operation == "escape":
            expected["values" if name == "codes" else name] = ((_CARRIERS[dtype],), columns)
        elif isinstance(encoding, Affine):
            expected["codes"] = (("uint8",), (width + 7) // 8 * encoding.bits)
            expected["scale"] = expected["zero_point"] = ((encoding.param_dtype,), None)
        elif isinstance(encoding, Lattice | FloatBits):
            is_narrow = name == "codes" and operation == "set" and isinstance(encoding, Lattice)
            expected[name] = (("int8", "int16", "int32") if is_narrow else ("int16", "int32"), columns)
        else:
            expected[name] = ((_CARRIERS[dtype],), columns)
    return expected


def _part_problems(part: PartEntry, schema: TableSchema, known: set[str]) -> Any:
    start, stop = part.columns
    if not 0 <= start < stop <= schema.dim:
        yield f"part {part.folder} has columns {part.columns} of {schema.dim}"
    if schema.keys == "hashed" and part.columns != (0, schema.dim):
        yield f"part {part.folder} of a hashed table has columns {part.columns} of {schema.dim}"
    if schema.keys == "dense" and not 0 <= part.rows[0] <= part.rows[1] <= schema.num_rows:
        yield f"part {part.folder} has rows {part.rows} of {schema.num_rows}"
    for op in ("add", "set", "delete", "escape"):
        entry: RowListEntry | None = getattr(part, op)
        if entry is None:
            continue
        where = f"part {part.folder} {op}"
        if not entry.arrays or "rows" not in entry.arrays or entry.count < 1:
            yield f"{where} has no rows"
            continue
        for name, (dtypes, width) in _expected_arrays(schema, op, stop - start).items():
            found = entry.arrays.get(name)
            if found is None:
                yield f"{where} lacks array {name!r}"
            elif found.dtype not in dtypes or found.shape[1:] != (() if width is None else (width,)):
                yield f"{where}: array {name!r} is {found.dtype} {found.shape}"
        chunk_rows = entry.arrays["rows"].chunk_rows
        for array in entry.arrays.values():
            yield from _array_problems(array, known)
            if array.shape[:1] != (entry.count,) or array.chunk_rows != chunk_rows:
                yield f"{where}: array {array.path} has shape {array.shape}, the list has {entry.count} rows"
        chunks = -(-entry.count // chunk_rows) if chunk_rows > 0 else 0
        if len(entry.first) != chunks or len(entry.last) != chunks:
            yield f"{where} has {len(entry.first)} chunk ranges for {chunks} chunks"
            continue
        for k in range(chunks):
            rows_here = min(chunk_rows, entry.count - k * chunk_rows)
            if entry.last[k] - entry.first[k] + 1 < rows_here or (k and entry.first[k] <= entry.last[k - 1]):
                yield f"{where} chunk {k} covers rows {entry.first[k]} to {entry.last[k]} out of order"
        outside = chunks and (entry.first[0] < part.rows[0] or entry.last[-1] >= part.rows[1])
        if schema.keys == "dense" and outside:
            yield f"{where} holds rows outside {part.rows}"


def _order_problems(manifest: Manifest) -> Any:
    """Only codes of an ``add`` list have an order: that of a one-dimensional int16 array beside them, and of no other.

    A reader finds that array by its path, and gives it to a kernel without checks of bounds.
    """
    lists = [
        (f"part {part.folder} {op}", op, row_list.arrays)
        for part in manifest.parts
        for op in ("add", "set", "delete", "escape")
        if (row_list := getattr(part, op)) is not None
    ]
    lists += [(f"dense array {array.path}", "", {"dense": array}) for array in manifest.dense_arrays]
    times = Counter(array.path for _, _, arrays in lists for array in arrays.values())
    for where, op, arrays in lists:
        for name, array in arrays.items():
            if array.order is msgspec.UNSET:
                continue
            keys = next((one for one in arrays.values() if one.path == array.order), None)
            is_key = keys is not None and times[keys.path] == 1 and (keys.dtype, len(keys.shape)) == ("int16", 1)
            if (op, name) != ("add", "codes") or not is_key:
                yield f"{where}: the rows of array {name!r} lie in the order of {array.order!r}"


def _array_problems(array: ArrayEntry, known: set[str]) -> Any:
    check_relative_path(array.path)
    if array.dtype not in _ARRAY_DTYPES:
        yield f"array {array.path} has dtype {array.dtype!r}"
        return
    if not 1 <= len(array.shape) <= 2 or any(n < 0 for n in array.shape) or array.chunk_rows < 1:
        yield f"array {array.path} has shape {array.shape} in chunks of {array.chunk_rows} rows"
        return
    if math.prod(array.shape) > 1 << 50:
        yield f"array {array.path} claims {math.prod(array.shape)} elements"
        return
    count = -(-array.shape[0] // array.chunk_rows)
    if count > len(known):
        yield f"array {array.path} claims {count} chunks, the inventory has {len(known)} objects"
        return
    suffix = "/0" if len(array.shape) == 2 else ""
    for k in range(count):
        if f"{array.path}/c/{k}{suffix}" not in known:
            yield f"chunk {k} of array {array.path} is not in the inventory"


def _refuse_non_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot stand in a JSON document")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in inside:
        if type(item) not in _NOT_FLOATS:  # most of a document, so looked at without a call
            _refuse_non_finite(item)


_NOT_FLOATS = frozenset({str, int, bool, type(None)})
