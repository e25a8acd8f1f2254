"""Commit records: bytes to checked record and back, and which versions a record keeps live (spec, 3.3). Pure.

Unknown JSON fields of a record are kept in `LogEntry.extra`, and `encode_record` writes them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import msgspec
import xxhash

from cnr_store.errors import BadName, CorruptRecord, ReadOnlyStore, UnknownFeature
from cnr_store.format.documents import canonical_json, loads, sha256
from cnr_store.format.layout import check_name
from cnr_store.format.limits import MAX_RECORD_BYTES
from cnr_store.format.records import CommitRecord, Lists, Pin
from cnr_store.runtime.records import converter
from cnr_store.types import MAX_CHAIN

KNOWN_READER_FEATURES: frozenset[str] = frozenset()
KNOWN_WRITER_FEATURES: frozenset[str] = frozenset()
_RAW = msgspec.json.Decoder(dict[str, Any])
_record_of = converter(CommitRecord)

DATA_KINDS: frozenset[str] = frozenset({"baseline", "delta", "rollback"})
"""Kinds that change the training state a reader sees."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A side object: its sha256, its size, and its changes to the lists of the older layers."""

    digest: str
    size_bytes: int
    lists: Lists


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A decoded record, the sha256 of its bytes, and its unknown fields, which later records repeat.

    ``record.state`` is set while the lists of the side objects are not merged into the record; side objects of older
    records may have been collected. After the merge ``layers`` has them and ``record.state`` is None.
    """

    record: CommitRecord
    digest: str
    extra: dict[str, Any] = field(default_factory=dict)
    layers: tuple[Layer, ...] = field(default=(), repr=False)

    @property
    def side_objects(self) -> tuple[str, ...]:
        """The sha256 of each side object that the record names."""
        return self.record.state or tuple(layer.digest for layer in self.layers)

    def is_live(self, version: int) -> bool:
        """Return whether readers may open a version, if this is the newest entry: it has not expired. Pure."""
        return is_live(self.record, version)


def encode_record(record: CommitRecord, extra: dict[str, Any] | None = None) -> bytes:
    """Return the canonical bytes of a record with its check, unknown fields of its predecessor included."""
    return sealed({**(extra or {}), **msgspec.to_builtins(record)})


def sealed(document: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a record's plain document, with its ``check`` computed."""
    check = xxhash.xxh3_128_hexdigest(canonical_json({**document, "check": ""}))
    return msgspec.json.encode({**document, "check": check}, order="sorted")  # as `canonical_json`, which has looked


def decode_record(data: bytes, version: int) -> LogEntry:
    """Parse and check the record read from log position ``version``.

    Checks size, JSON, canonical form, ``check``, types, position, chain and lists. Unknown reader features are refused.

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
            f"{where} has more than {MAX_RECORD_BYTES} bytes, which no record has; it was torn or overwritten, run "
            "`cnr verify`",
            version=version,
            expected=MAX_RECORD_BYTES,
            found=len(data),
        )
    try:
        raw = loads(data, _RAW)
        if msgspec.json.encode(raw, order="sorted") != data:
            raise CorruptRecord(f"{where} is not canonical JSON; its bytes were altered", version=version)
        check = xxhash.xxh3_128_hexdigest(msgspec.json.encode({**raw, "check": ""}, order="sorted"))
        if raw.get("check") != check:
            raise CorruptRecord(
                f"{where} has another digest than its field check; its bytes were altered",
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
        record = msgspec.structs.replace(_record_of(raw), check="")
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise CorruptRecord(
            f"{where} cannot be parsed: {error}; it was torn or overwritten, run `cnr verify`",
            version=version,
        ) from error
    if record.v != version:
        raise CorruptRecord(
            f"{where} has v {record.v}; it was copied to the wrong log position",
            version=version,
            expected=version,
            found=record.v,
        )
    check_statements(record)
    extra = {key: value for key, value in raw.items() if key not in CommitRecord.__struct_fields__}
    return LogEntry(record, sha256(data), extra)


def parent_of(record: CommitRecord) -> tuple[int, str]:
    """Return version and digest of the record before this one, without the positions that it supersedes. Pure."""
    if record.supersedes is None:
        return record.v - 1, record.parent_digest
    return record.v - 1 - len(record.supersedes.torn), record.supersedes.follows


def check_statements(record: CommitRecord) -> None:
    """Refuse a record whose fields contradict each other; lists in side objects are not looked at. Pure.

    Raises
    ------
    CorruptRecord
        Names the first contradiction.
    """
    try:
        problem = next(chain(_chain_problems(record), _kind_problems(record), _list_problems(record)), None)
    except BadName as error:
        problem = str(error)
    if problem:
        raise CorruptRecord(f"commit record {record.v} {problem}; run `cnr verify`", version=record.v)


def _chain_problems(record: CommitRecord) -> Iterator[str]:
    """Baseline first, deltas after, every l0 the l1 before it; the last l1 is the record's."""
    entries = record.chain
    if len(entries) > MAX_CHAIN:
        yield f"has a chain of {len(entries)} segments, at most {MAX_CHAIN} are allowed"
    if (entries[-1].l1 if entries else 0) != record.checkpoint:
        yield f"is at checkpoint {record.checkpoint}, its chain ends at {entries[-1].l1 if entries else 0}"
    if entries and (entries[0].kind != "baseline" or entries[0].l0 != 0):
        yield "has a chain that does not start with a baseline"
    if len({entry.seg for entry in entries}) != len(entries):
        yield "has a segment twice in its chain"
    for index, (before, entry) in enumerate(pairwise(entries), start=1):
        if entry.kind != "delta":
            yield f"has a second baseline at position {index} of its chain"
        if entry.l0 != before.l1 or entry.l1 <= entry.l0:
            yield f"has a chain that breaks at position {index}: l0 {entry.l0}, l1 {entry.l1} after l1 {before.l1}"


def _kind_problems(record: CommitRecord) -> Iterator[str]:
    """What each kind of record needs."""
    kind, length = record.kind, len(record.chain)
    if kind not in ("init", "fork") if record.v == 0 else kind == "init":
        yield f"has kind {kind}, which cannot be at its position"
    lengths = {
        "init": range(1), "baseline": range(1, 2), "delta": range(2, MAX_CHAIN + 1), "compact": range(1, MAX_CHAIN),
    }  # fmt: skip
    if length not in lengths.get(kind, range(MAX_CHAIN + 1)):
        yield f"has kind {kind} and a chain of {length} segments"
    lacks_name = record.name is None and kind in ("tag", "untag", "channel", "fork")
    lacks_target = record.target is None and kind in ("tag", "rollback")
    if lacks_name or lacks_target:
        yield f"has kind {kind}, name {record.name!r} and target {record.target}"
    if record.target is not None and record.target >= record.v > 0:
        yield f"has target {record.target}, which is not before it"
    superseded = record.supersedes
    if superseded is not None:
        torn = superseded.torn
        if not len(torn) < record.v or torn[-1] != record.parent_digest or kind not in ("rollback", "close"):
            yield "supersedes positions that are not directly before it"


def _list_problems(record: CommitRecord) -> Iterator[str]:
    """Yield invalid names, and versions that do not exist or contradict the floor."""
    for name in (*record.tags, *record.channels, *(pin.name for pin in record.pins.values())):
        check_name(name)
    if record.floor > record.v:
        yield f"has floor {record.floor}, which is after it"
    if record.kept and max(record.kept) >= record.floor:
        yield f"keeps version {max(record.kept)}, which is not below its floor {record.floor}"
    named = named_versions(record)
    beyond = [version for version in (*named, *record.expired) if version > record.v]
    if beyond:
        yield f"names version {beyond[0]}, which is after it"
    if record.removed and not record.state:
        yield "removes entries from lists, and names no side object that has them"
    both = record.tags.keys() & record.channels.keys()
    if both:
        yield f"has {sorted(both)[0]!r} as a tag and as a channel"


def is_live(head: CommitRecord, version: int) -> bool:
    """Whether readers may open ``version``, by the newest record: it has not expired (spec, section 7.1). Pure."""
    if version in head.expired or head.kind == "close":
        return False
    return version >= head.floor or version in head.kept or version in named_versions(head)


def named_versions(record: CommitRecord) -> set[int]:
    """Return the versions of the tags, channels and pins of a record. Pure."""
    return {*record.tags.values(), *record.channels.values(), *(pin.version for pin in record.pins.values())}


@dataclass(frozen=True, slots=True)
class Names:
    """The tags, channels and pins of a log at one of its records."""

    tags: Mapping[str, int] = field(default_factory=dict)
    channels: Mapping[str, int] = field(default_factory=dict)
    pins: Mapping[str, Pin] = field(default_factory=dict)

    def after(self, record: CommitRecord) -> Names:
        """Return the names after the next record, by its kind, name and target. Pure.

        The name and the expiry of a branch are in its pin only. Without a pin in the record, its uuid is its name.
        """
        tags, channels, pins = dict(self.tags), dict(self.channels), dict(self.pins)
        name, target = record.name or "", record.target
        if record.kind == "tag" and target is not None:
            tags[name] = target
        elif record.kind == "untag":
            tags.pop(name, None)
        elif record.kind == "channel":
            channels.pop(name, None)
            if target is not None:
                channels[name] = target
        elif record.kind == "fork" and record.v > 0:
            pins.pop(name, None)
            if target is not None:
                pin = record.pins.get(name, Pin(version=target, name=name))
                pins[name] = msgspec.structs.replace(pin, version=target)
        return Names(tags, channels, pins)


def check_writer_features(record: CommitRecord, what: str) -> None:
    """Raise `ReadOnlyStore` if ``what``, whose newest record this is, was written by a newer library."""
    unknown = [name for name in record.writer_features if name not in KNOWN_WRITER_FEATURES]
    if unknown:
        raise ReadOnlyStore(
            f"{what} uses unknown writer features {unknown}, so it is read-only; use a newer library",
            version=record.v, found=unknown,
        )  # fmt: skip
