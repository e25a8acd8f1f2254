"""Manifests: bytes to checked manifest, and what one says of its segment (spec, sections 3.5 and 4). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from cnr_store.errors import BadName, CorruptObject, CorruptStore, NewerFormat
from cnr_store.format.arrays import chunk_count, object_count, object_paths
from cnr_store.format.documents import decode_document, loads, sha256, text_of, unpack
from cnr_store.format.fields import Name
from cnr_store.format.layout import array_path, segment_name
from cnr_store.format.manifest_checks import entry_problems, manifest_problems
from cnr_store.format.records import (
    MAJOR,
    ArrayEntry,
    ArrayGroup,
    ChainEntry,
    DenseEntry,
    DocumentEntry,
    ListLine,
    Manifest,
    ObjectEntry,
    PartEntry,
    PartLine,
    PartPlace,
    RowListEntry,
    SegmentDocument,
    TableSchema,
    Written,
)
from cnr_store.types import Rectangle


def recorded_digest(parts: Iterable[PartPlace], rectangle: Rectangle) -> int | None:
    """Return the state digest that parts of one table state for a rectangle of it, by their sum. Pure.

    None where the parts inside do not make the rectangle up, or one of them states none. Parts without rows do not
    count; but of a rectangle without rows, as that of a hashed table, all that are in the same place do.
    """
    (first, stop), (left, right) = rectangle.rows, rectangle.columns
    covered = total = 0
    for part in parts:
        (start, end), (low, high) = part.rows, part.columns
        is_inside = first <= start < end <= stop or first == start == end == stop
        if is_inside and left <= low and high <= right:
            if part.state_digest is None:
                return None
            covered += (end - start) * (high - low)
            total += int(part.state_digest, 16)
    return total % (1 << 64) if covered == rectangle.area else None


def started_digest(parts: Iterable[PartPlace], rectangle: Rectangle) -> int | None:
    """Return what `recorded_digest` does of the states that parts start from. Pure."""
    return recorded_digest((msgspec.structs.replace(part, state_digest=part.base_digest) for part in parts), rectangle)


class Expanded(NamedTuple):
    """What writers put, with every array and object at its path: as the fields of `Manifest`."""

    parts: tuple[PartEntry, ...]
    arrays: tuple[ArrayEntry, ...]
    dense_arrays: tuple[ArrayEntry, ...]
    objects: tuple[ObjectEntry, ...]


def expand(written: Written) -> Expanded:
    """Work out what `Written` leaves out because it follows from the rest. Pure; takes no more memory than that has.

    Raises
    ------
    ValueError
        Statements contradict each other.
    BadName
        Of a slot.
    """
    objects = [*written.objects]
    groups = {group.path: _arrays_of(group, objects) for group in written.groups}
    dense = [entry for group in written.dense_arrays for entry in _arrays_of(group, objects).values()]
    if len(groups) != len(written.groups):
        raise ValueError("a group of arrays is listed twice")
    begun = dict.fromkeys(groups, 0)

    def placed(line: PartLine, own: ListLine) -> RowListEntry:
        path, count = own.group, own.count
        if path not in groups:
            raise ValueError(f"part {line} has rows in {path}, which is no group of arrays")
        start = begun[path]
        begun[path] += count
        return RowListEntry(count=count, first=own.first, last=own.last, group=groups[path], start=start)

    parts = tuple(
        PartEntry(
            table=line.table, rows=line.rows, columns=line.columns, base_digest=line.base_digest,
            state_digest=line.state_digest,
            add=None if line.add is None else placed(line, line.add),
            set=None if line.set is None else placed(line, line.set),
            delete=None if line.delete is None else placed(line, line.delete),
            escape=None if line.escape is None else placed(line, line.escape),
        )
        for line in written.parts
    )  # fmt: skip
    for group in written.groups:
        if begun[group.path] != group.rows:
            raise ValueError(f"the lists of group {group.path} have {begun[group.path]} rows, its arrays {group.rows}")
    arrays = tuple(entry for entries in groups.values() for entry in entries.values())
    return Expanded(parts, arrays, tuple(dense), tuple(objects))


def _arrays_of(group: ArrayGroup, objects: list[ObjectEntry]) -> dict[str, ArrayEntry]:
    """The arrays of a group, whole, by name; their objects go to ``objects``."""
    entries = {
        name: ArrayEntry(
            path=array_path(group.path, name), dtype=one.dtype, codec=one.codec, chunk_rows=group.chunk_rows,
            shape=(group.rows,) if one.width is None else (group.rows, one.width),
            order=one.order if one.order is msgspec.UNSET else array_path(group.path, one.order),
            shards=one.shards, start=0, count=group.rows,
        )
        for name, one in group.arrays.items()
    }  # fmt: skip
    for name, entry in entries.items():
        stated, shards, chunks = group.arrays[name].objects, entry.shards, chunk_count(entry)
        if group.arrays[name].order not in (msgspec.UNSET, *group.arrays):  # its path may be that of another group's
            raise ValueError(
                f"the rows of array {entry.path} lie in the order of {entry.order!r}, no array of its group"
            )
        if shards is not msgspec.UNSET and not len(shards.sizes) == len(shards.digests) // 32 == chunks:
            raise ValueError(f"array {entry.path} has {len(shards.sizes)} chunks in shards, expected {chunks}")
        what = "chunks" if shards is msgspec.UNSET else "shards"
        if len(stated) != 1 + object_count(entry):
            raise ValueError(
                f"array {entry.path} has {len(stated)} objects, expected a document and {object_count(entry)} {what}"
            )
        found = zip(object_paths(entry), stated, strict=True)
        objects += [ObjectEntry(path=path, size=one.size, xxh3_128=one.xxh3_128) for path, one in found]
    return entries


def resolved(document: SegmentDocument) -> Manifest:
    """Return what readers make of a document that they have not checked yet. Pure; raises as `expand`."""
    same = {name: getattr(document, name) for name in _SAME_FIELDS}
    own = segment_name(document.base, document.txn)
    dense = {name: DenseEntry(**msgspec.structs.asdict(line), segment=own) for name, line in document.dense.items()}
    expanded = expand(document)
    objects = {entry.path: entry for entry in expanded.objects}
    if lost := [path for path in document.documents.values() if path not in objects]:
        raise ValueError(f"document {lost[0]} is not in the inventory")
    if both := document.documents.keys() & document.small.keys():
        raise ValueError(f"document {min(both)!r} is an object and in the manifest")
    documents = {name: DocumentEntry(own, objects[path]) for name, path in document.documents.items()}
    documents |= {name: DocumentEntry(own, text=bytes(text)) for name, text in document.small.items()}
    return Manifest(**same, **expanded._asdict(), dense=dense, documents=documents, recorded=tuple(document.tables))


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse a stored manifest and check what it states before anybody allocates by it.

    Raises
    ------
    CorruptStore, NewerFormat
    """
    return decode_text(unpack(data, where), where)


def decode_text(text: bytes, where: str) -> Manifest:
    """Return `decode_manifest` of the JSON text in what is stored."""
    try:
        document = _document_of(text, where)
    except CorruptStore:
        _check_format(decode_document(text, dict, where).get("format"), where)  # a newer one may look otherwise
        raise
    _check_format(document.format, where)
    return _checked(document, where)


def as_read(document: SegmentDocument, known: Mapping[str, TableSchema], where: str) -> Manifest:
    """Return `decode_text` of `text_of` a document of this process, of which not everything is parsed again.

    Parts are not, because what they consist of was made, or parsed from a receipt, by this library. Nor are schemas
    that are the same objects in ``known``, which were parsed before. All else may be as a caller gave it.
    """
    new = {name: schema for name, schema in document.tables.items() if known.get(name) is not schema}
    text = text_of(msgspec.structs.replace(document, parts=(), tables=new))
    parsed = _document_of(text, where)
    tables = {name: parsed.tables.get(name) or known[name] for name in sorted(document.tables)}
    return _checked(msgspec.structs.replace(parsed, parts=document.parts, tables=tables), where)


def _checked(document: SegmentDocument, where: str) -> Manifest:
    """Return the manifest of a document whose fields have their types; raises as `decode_manifest`."""
    try:
        manifest = resolved(document)
        problem = next(manifest_problems(manifest), None)
    except BadName as error:
        raise CorruptStore(f"{where}: {error}", path=where, found=error.found) from error
    except ValueError as error:
        raise CorruptStore(f"{where}: {error}; run `cnr verify`", path=where) from error
    if problem:
        raise CorruptStore(f"{where}: {problem}; run `cnr verify`", path=where)
    return manifest


class _SchemaTexts(SegmentDocument, frozen=True, kw_only=True):
    """A manifest of which the schemas are not parsed yet."""

    tables: dict[Name, msgspec.Raw]  # type: ignore[assignment]  # until `_document_of` has parsed them


# Built while the module is imported, as those of `documents`.
_TEXTS = msgspec.json.Decoder(_SchemaTexts)
_SCHEMA = msgspec.json.Decoder(TableSchema)


@lru_cache(maxsize=1 << 14)
def _schema_of(text: bytes) -> TableSchema:
    return _SCHEMA.decode(text)


def _document_of(text: bytes, where: str) -> SegmentDocument:
    """Parse a manifest. Tables with equal schemas share one object, of other manifests too, which is parsed once."""
    try:
        document = loads(text, _TEXTS)
        tables = {name: _schema_of(bytes(raw)) for name, raw in document.tables.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return decode_document(text, SegmentDocument, where)  # which says where in the document it is wrong
    return msgspec.structs.replace(document, tables=tables)


_OWN_FIELDS = ("dense", "documents", "recorded")
_SAME_FIELDS = tuple(name for name in Manifest.__struct_fields__ if name not in (*Expanded._fields, *_OWN_FIELDS))


def decode_segment(data: bytes, entry: ChainEntry, where: str) -> Manifest:
    """Parse and check the manifest that a chain entry names.

    Raises
    ------
    CorruptObject
        The bytes are others than the entry names.
    CorruptStore, NewerFormat
    """
    found = sha256(data)
    if found != entry.sha256:
        raise CorruptObject(
            f"{where} has another sha256 than its commit record names; it was altered, run `cnr verify`",
            path=where, expected=entry.sha256, found=found,
        )  # fmt: skip
    manifest = decode_manifest(data, where)
    problem = next(entry_problems(manifest, entry), None)
    if problem:
        raise CorruptStore(f"{where} {problem}; run `cnr verify`", path=where)
    return manifest


def _check_format(found: object, where: str) -> None:
    if isinstance(found, int) and found > MAJOR:
        raise NewerFormat(
            f"{where} has manifest format {found}, this library reads {MAJOR}; install a newer cnr-store",
            path=where, expected=MAJOR, found=found,
        )  # fmt: skip
