"""Documents of segments as stored: canonical JSON in one zstd frame that states its size (spec, section 3.1). Pure.

A frame's size is looked at before anything of it is decompressed. Nobody else reads or makes such bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zstandard
from numcodecs.zstd import Zstd

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_SEPARATORS

_LEVEL = 1
"""Of manifests of 300 and 1,000 tables level 3 makes 1.2 times the bytes, level 9 as many in 8 to 20 times the time."""


def pack(document: Any) -> bytes:
    """Return the stored bytes of a document.

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
    return bytes(Zstd(level=_LEVEL).encode(text))


def unpack(data: bytes, where: str) -> bytes:
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
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def content_size(frame: memoryview) -> int | None:
    """Return the content size in a zstd frame header (RFC 8878, section 3.1.1), None if it states none."""
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError:
        return None
    return None if size < 0 else size
