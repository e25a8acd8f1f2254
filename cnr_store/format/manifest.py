"""Manifests: bytes to checked manifest, and what one says of its segment (spec, sections 3.5 and 4). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cnr_store.errors import BadName, CorruptObject, CorruptStore, NewerFormat
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.manifest_checks import entry_problems, manifest_problems
from cnr_store.format.packed import unpack
from cnr_store.format.records import (
    MAJOR,
    ChainEntry,
    Manifest,
    PartEntry,
)
from cnr_store.types import Rectangle


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


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse a stored manifest and check what it says before anybody allocates by it.

    Raises
    ------
    CorruptStore, NewerFormat
    """
    text = unpack(data, where)
    try:
        manifest = decode_document(text, Manifest, where)
    except CorruptStore:
        _check_format(decode_document(text, dict, where).get("format"), where)  # a newer one may look otherwise
        raise
    _check_format(manifest.format, where)
    try:
        problem = next(manifest_problems(manifest), None)
    except BadName as error:
        raise CorruptStore(f"{where}: {error}", path=where, found=error.found) from error
    if problem:
        raise CorruptStore(f"{where}: {problem}; run `cnr verify`", path=where)
    return manifest


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
