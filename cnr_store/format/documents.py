"""Documents as bytes: canonical JSON, digests, packing for segments, and parsing by type (spec, section 3.1). Pure.

Documents are parsed here, with strict types. The rest of the library does not validate them again. Before anything
parses one, its bytes tell how deep it nests (spec, section 3.6): parsers recurse, so how deep a document they can parse
depends on how deep the caller's stack is already. What one caller reads and another refuses would be a commit to the
one and damage to the other, so the limit is far below what any of them can parse.

Documents of segments are stored as one zstd frame that states its size, which is looked at before anything of it is
decompressed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from numcodecs.zstd import Zstd

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_NESTING, MAX_SEPARATORS
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
    data = msgspec.json.encode(document, order="sorted")
    if b"null" in data:  # which a number that is not finite becomes: this call raises then, and None is no error
        json.dumps(msgspec.to_builtins(document), allow_nan=False)
    return data


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


def decode_document(
    data: bytes, kind: type[DocumentType], where: str, advice: str = "run `cnr verify`"
) -> DocumentType:
    """Parse a JSON document as ``kind``; unknown fields are ignored.

    Raises
    ------
    CorruptStore
        If it is not JSON, or mistyped; names ``where``, and gives ``advice``.
    """
    try:
        return loads(data, _DECODERS[kind])  # type: ignore[no-any-return]  # the table is typed by its keys
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptStore(f"{where} cannot be parsed: {error}; {advice}", path=where) from error


_BLOCK_BYTES = 1 << 20
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(sorted({*range(256)} - {*b'[]{}"'}))
_STEP = np.zeros(256, np.int32)
_STEP[[*b"[{"]] = 1
_STEP[[*b"]}"]] = -1


def nesting_of(data: bytes, enough: int) -> int:
    """Return how many objects and arrays of a JSON document are open at once, at most; 0 if not more than ``enough``.

    Of bytes that are no JSON it is some number. Memory: some MiB.

    >>> nesting_of(b'{"a":[[1],"[[[["]}', enough=1)
    3
    """
    if _count_of(b"[{", data) <= enough:
        return 0
    depth = deepest = start = 0
    is_text = False
    while start < len(data):
        stop = start + _BLOCK_BYTES
        while data[stop - 1 : stop] == b"\\":  # an escape is not cut
            stop += 1
        block, start = data[start:stop], stop
        if b"\\" in block:
            block = _ESCAPE.sub(b"", block)
        # Of texts without brackets nothing is left but two quotes, which stand beside each other.
        marks = block.translate(None, _NO_MARKS)
        brackets = marks if is_text else marks.replace(b'""', b"")
        if is_text or b'"' in brackets:
            pieces = marks.split(b'"')
            brackets = b"".join(pieces[is_text::2])
            is_text ^= len(pieces) % 2 == 0
        depth, reached = _deepest(brackets, depth)
        deepest = max(deepest, reached)
    return deepest


def _deepest(brackets: bytes, depth: int) -> tuple[int, int]:
    """Return the depth after these brackets and the greatest one, at least 0, from a depth before them."""
    if not brackets:
        return depth, 0
    depths = depth + np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)])
    return int(depths[-1]), max(0, int(depths.max()))


def nests_deeper(value: Any, limit: int) -> bool:
    """Return whether dicts, lists and tuples lie in each other deeper than ``limit``, or one lies in itself.

    >>> nests_deeper({"a": [1]}, 2), nests_deeper({"a": [1]}, 1)
    (False, True)
    """
    level: list[Iterable[Any]] = [[value]]
    for _ in range(limit + 1):
        level = [
            item.values() if isinstance(item, dict) else item
            for items in level
            for item in items
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return False
    return True


_LEVEL = 1
"""Of manifests of 300 and 1,000 tables level 3 makes 1.2 times the bytes, level 9 as many in 8 to 20 times the time."""


def pack(document: Any) -> bytes:
    """Return the stored bytes of a document; raises as `text_of`."""
    return compressed(text_of(document))


def compressed(text: bytes) -> bytes:
    """Return the stored bytes of a document with this JSON text."""
    return bytes(Zstd(level=_LEVEL).encode(text))


def text_of(document: Any) -> bytes:
    """Return the JSON text of a document.

    A number that is not finite becomes null. Trees have none (`document_tree.encode`), and `write_manifest` parses what
    it stores, where a number may not be null; to look at each value takes longer than all else that is done here.

    Raises
    ------
    BadInput
        As JSON it has more bytes than `MAX_MANIFEST_BYTES`, or more values than readers take (`MAX_SEPARATORS`).
    """
    text = msgspec.json.encode(document, order="sorted")
    if len(text) > MAX_MANIFEST_BYTES:
        raise BadInput(
            f"a document would have {len(text)} bytes, and readers take at most {MAX_MANIFEST_BYTES}; store less in it",
            expected=MAX_MANIFEST_BYTES, found=len(text),
        )  # fmt: skip
    if (found := _separators(text)) > MAX_SEPARATORS:
        raise BadInput(
            f"a document would have {found} commas and brackets, and readers take at most {MAX_SEPARATORS}; store "
            "many numbers as arrays, not in lists",
            expected=MAX_SEPARATORS, found=found,
        )  # fmt: skip
    return text


def unpack(data: bytes | memoryview, where: str) -> bytes:
    """Return the JSON text of a document as it is stored.

    Raises
    ------
    CorruptStore
        It is no zstd frame of a stated size of at most `MAX_MANIFEST_BYTES`, and that alone, or has more values than
        `MAX_SEPARATORS` allows; names ``where``.
    """
    size = content_size(memoryview(data))
    if size is None or size > MAX_MANIFEST_BYTES:
        raise CorruptStore(
            f"{where} is no document of a segment: expected one zstd frame that states at most {MAX_MANIFEST_BYTES} "
            f"bytes, found {'none' if size is None else size}; run `cnr verify`",
            path=where, expected=MAX_MANIFEST_BYTES, found=size,
        )  # fmt: skip
    try:
        text = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptStore(f"{where} is no zstd frame: {error}; run `cnr verify`", path=where) from error
    if (found := _separators(text)) > MAX_SEPARATORS:
        raise CorruptStore(
            f"{where} has {found} commas and brackets, at most {MAX_SEPARATORS} are read; run `cnr verify`",
            path=where, expected=MAX_SEPARATORS, found=found,
        )  # fmt: skip
    return text


def _separators(text: bytes) -> int:
    return _count_of(b",[{", text)


def _count_of(marks: bytes, text: bytes) -> int:
    """Return how many bytes of a text are one of these. Not by `bytes.count`: where they are dense, it is slow."""
    blocks = [np.frombuffer(text[at : at + _BLOCK_BYTES], np.uint8) for at in range(0, len(text), _BLOCK_BYTES)]
    return sum(int(np.count_nonzero(block == mark)) for block in blocks for mark in marks)


def content_size(frame: memoryview) -> int | None:
    """Return the content size in a zstd frame header (RFC 8878, section 3.1.1), None if it states none."""
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError:
        return None
    return None if size < 0 else size
