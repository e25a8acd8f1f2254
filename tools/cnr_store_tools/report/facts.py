"""The content of a report of a store, read through the public API: its records, its newest tables, its problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cnr_store import (
    CommitRecord,
    CorruptStore,
    SegmentSizes,
    Snapshot,
    Store,
    StoreStatus,
    VerifyReport,
    fp32_bytes,
    read_status,
    segment_sizes,
    verify_store,
)
from cnr_store_tools.output import to_document
from cnr_store_tools.render import encoding_text
from cnr_store_tools.text import natural

SAVED = ("baseline", "delta")


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """One record. Bytes and rows are those of the segment that it saved; None if it saved none.

    ``stall_s``, ``encode_s``: seconds that the training waited, and that the background wrote; None if unknown.
    """

    version: int
    kind: str
    step: int
    time_ms: int
    size_bytes: int | None
    rows: int | None
    restore_bytes: int
    restore_segments: int
    stall_s: float | None
    encode_s: float | None
    names: tuple[str, ...]
    """Tags and channels that name it now."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment of the newest chain."""

    name: str
    kind: str
    step: int
    sizes: SegmentSizes
    rows: Mapping[str, int]
    """Rows by table."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table of the newest version."""

    name: str
    rows: int
    dim: int
    encoding: str
    slots: str
    changed: Sequence[int]
    """Rows in each segment of the newest chain, oldest first."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Everything that the page shows. ``fp32_bytes``: of weights, slots and dense tensors of the newest version."""

    status: StoreStatus
    versions: Sequence[VersionFacts]
    """Oldest first."""
    segments: Sequence[SegmentFacts]
    tables: Sequence[TableFacts]
    fp32_bytes: int
    damage: str | None
    """Why the newest version could not be opened."""
    verified: VerifyReport | None


def read_facts(store: Store, *, verify: bool = False) -> StoreFacts:
    """Read a store. Blocks: one GET per record, the manifests of the newest chain; with ``verify`` every object.

    Raises
    ------
    NotFound, CorruptStore, StorageFailure
    """
    head = store.head().record
    names: dict[int, list[str]] = {}
    for name, version in (*head.tags.items(), *head.channels.items()):
        names.setdefault(version, []).append(name)
    versions = [_version(record, tuple(sorted(names.get(record.v, ())))) for record in store.log()]
    segments: list[SegmentFacts] = []
    tables: list[TableFacts] = []
    full, damage = 0, None
    try:
        snapshot = store.snapshot()
        segments, full = _segments(snapshot)
        tables = _tables(snapshot, segments)
    except CorruptStore as error:
        damage = str(error)
    return StoreFacts(
        status=read_status(store), versions=versions[::-1], segments=segments, tables=tables, fp32_bytes=full,
        damage=damage, verified=verify_store(store) if verify else None,
    )  # fmt: skip


def _version(record: CommitRecord, names: tuple[str, ...]) -> VersionFacts:
    saved = record.chain[-1] if record.kind in SAVED and record.chain else None
    timing = record.user.get("timing")
    return VersionFacts(
        version=record.v, kind=record.kind, step=record.step, time_ms=record.ts_ms,
        size_bytes=None if saved is None else saved.size_bytes, rows=None if saved is None else saved.rows,
        restore_bytes=sum(entry.size_bytes for entry in record.chain), restore_segments=len(record.chain), names=names,
        stall_s=_seconds(timing, "stall_s"), encode_s=_seconds(timing, "encode_s"),
    )  # fmt: skip


def _seconds(timing: object, name: str) -> float | None:
    """Return a time that a save recorded; None if it is no number, because anybody may write these notes."""
    value = timing.get(name) if isinstance(timing, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _segments(snapshot: Snapshot) -> tuple[list[SegmentFacts], int]:
    found, full = [], 0
    for manifest, entry in zip(snapshot.manifests, snapshot.record.chain, strict=True):
        rows: Counter[str] = Counter()
        for part in manifest.parts:
            lists = (part.add, part.set, part.delete, part.escape)
            # Column shards of a table have the same rows: count those that begin at its first column.
            if part.columns[0] == 0:
                rows[part.table] += sum(row_list.count for row_list in lists if row_list is not None)
        sizes = segment_sizes(manifest, segment_bytes=entry.size_bytes)
        found.append(SegmentFacts(entry.seg, entry.kind, manifest.step, sizes, rows))
        full = fp32_bytes(manifest)
    return found, full


def _tables(snapshot: Snapshot, segments: Sequence[SegmentFacts]) -> list[TableFacts]:
    found = []
    for name, schema in snapshot.tables.items():
        plain = to_document(schema)
        slots = [f"{slot}: {encoding_text(one['encoding'])}" for slot, one in plain["slots"].items()]
        changed = [segment.rows.get(name, 0) for segment in segments]
        rows = schema.num_rows if schema.keys == "dense" else sum(changed)
        encoding = encoding_text(plain["encoding"], schema.shift)
        found.append(TableFacts(name, rows, schema.dim, encoding, ", ".join(slots), changed))
    return sorted(found, key=lambda table: (-table.rows * table.dim, natural(table.name)))
