"""Documents as bytes: canonical JSON, digests, and parsing by type (spec, section 3.1). Pure.

Documents are parsed here, with strict types. The rest of the library does not validate them again.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeVar

import msgspec

from cnr_store.errors import CorruptStore
from cnr_store.format.limits import MAX_NESTING
from cnr_store.format.nesting import nesting_of
from cnr_store.format.records import (
    CommitRecord,
    Cursor,
    Hint,
    Identity,
    Overflow,
    ReaderLease,
    Receipt,
    RelayMarker,
    RelayTrims,
    SegmentDocument,
)
from cnr_store.types import JsonValue

DocumentType = TypeVar("DocumentType")


# Built while the module is imported: msgspec makes the type information of a Struct at its first use, and two threads
# that do so at once crash the interpreter (msgspec 0.22). `convert` uses the same information.
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        dict, Identity, CommitRecord, Overflow, Receipt, SegmentDocument, Hint, ReaderLease, Cursor, RelayMarker,
        RelayTrims,
    )
}  # fmt: skip


JSON: msgspec.json.Decoder[JsonValue] = msgspec.json.Decoder()
"""Decoder of plain JSON, for `loads`."""


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
    """Return the sha256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def loads(data: bytes, decoder: msgspec.json.Decoder[DocumentType], *, deepest: int = MAX_NESTING) -> DocumentType:
    """Parse a JSON document that nests at most ``deepest`` levels, independent of the depth of the caller's stack.

    Raises
    ------
    msgspec.MsgspecError, UnicodeDecodeError
        If it is not JSON, nests deeper, or is mistyped.
    """
    found = nesting_of(data, enough=deepest)
    if found > deepest:
        raise msgspec.DecodeError(f"it nests {found} levels deep, at most {deepest} are allowed")
    return decoder.decode(data)


def decode_document(data: bytes, kind: type[DocumentType], where: str) -> DocumentType:
    """Parse a JSON document as ``kind``; unknown fields are ignored.

    Raises
    ------
    CorruptStore
        If it is not JSON, or mistyped; names ``where``.
    """
    try:
        return loads(data, _DECODERS[kind])  # type: ignore[no-any-return]  # the table is typed by its keys
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptStore(f"{where} cannot be parsed: {error}; run `cnr verify`", path=where) from error


def _refuse_non_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be stored in a JSON document")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in inside:
        if type(item) not in _NOT_FLOATS:  # most items: skip the call
            _refuse_non_finite(item)


_NOT_FLOATS = frozenset({str, int, bool, type(None)})
