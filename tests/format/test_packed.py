"""Documents of segments as stored: one zstd frame that states its size, refused before memory is taken for it."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.format import document_tree
from cnr_store.format.documents import canonical_json, content_size, pack, unpack
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_SEPARATORS
from format_spec.reader import documents

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=9), inside, max_size=4),
)
SIZES = [(0x20, 1), (0x60, 2), (0xA0, 4), (0xE0, 8)]
"""Descriptors of frames of a single segment, and how many bytes their content size has."""


@given(st.dictionaries(st.text(max_size=9), TREES, max_size=4), st.integers(0, 70_000))
def test_what_is_packed_is_unpacked_again(document: dict[str, object], more: int) -> None:
    document["more"] = "x" * more

    stored = pack(document)

    assert unpack(stored, "here") == canonical_json(document) == documents.unzstd(stored, "here")
    assert json.loads(unpack(stored, "here")) == document
    assert content_size(memoryview(stored)) == len(canonical_json(document))


@pytest.mark.parametrize(("descriptor", "width"), SIZES[2:])
@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES + 1, 2**32 - 1])
def test_a_frame_is_refused_before_memory_is_taken_for_it(descriptor: int, width: int, size: int) -> None:
    frame = bytes([0x28, 0xB5, 0x2F, 0xFD, descriptor]) + size.to_bytes(width, "little") + b"\1\0\0"

    tracemalloc.start()
    with pytest.raises(CorruptStore, match="here"):
        unpack(frame, "here")
    with pytest.raises(documents.Refused):
        documents.unzstd(frame, "here")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20


@pytest.mark.parametrize(("descriptor", "width"), SIZES)
def test_a_frame_that_holds_another_size_than_it_states_is_refused(descriptor: int, width: int) -> None:
    size = 300 - 256 * (width == 2) if width > 1 else 44
    text = b"7" * (300 if width > 1 else 44)
    block = (1 | len(text) << 3).to_bytes(3, "little") + text  # the last one, raw
    frame = bytes([0x28, 0xB5, 0x2F, 0xFD, descriptor]) + size.to_bytes(width, "little") + block

    assert unpack(frame, "here") == text
    skippable = bytes.fromhex("502a4d18") + bytes(4)
    smaller = frame[:5] + (size - 1).to_bytes(width, "little") + block
    for other in (frame[:-1], frame + b"x", frame + frame, frame + skippable, smaller):
        with pytest.raises(CorruptStore, match="here"):
            unpack(other, "here")
        with pytest.raises(documents.Refused):
            documents.unzstd(other, "here")


@pytest.mark.parametrize("value", [b"0,", b"[],", b"{},"])
def test_values_are_counted_before_memory_is_taken_for_them(value: bytes) -> None:
    separators = value.count(b",") + value.count(b"[") + value.count(b"{")
    most = value * ((MAX_SEPARATORS - 1) // separators)
    bomb = zstandard.compress(b"[" + most + value + b"0]", 1)

    assert len(bomb) < 10_000
    assert unpack(zstandard.compress(b"[" + most[:-1] + b"]", 1), "here") == b"[" + most[:-1] + b"]"
    with pytest.raises(CorruptStore, match="here has 167772"):
        unpack(bomb, "here")
    with pytest.raises(documents.Refused):
        documents.unzstd(bomb, "here")


@pytest.mark.parametrize("value", [(), [], "", 1.5, b"", {1: 2}, np.int8(1), np.zeros((0, 3), np.float32), 2**60])
def test_a_tree_that_is_not_too_large_has_not_too_many_values(value: object) -> None:
    bound = 1 << 14
    with pytest.raises(BadInput, match="exceeds 16384 bytes") as raised:
        document_tree.encode([value] * bound, max_bytes=bound)
    count = int(re.findall("[0-9]+", str(raised.value.path))[0])

    text = canonical_json(document_tree.encode([value] * count, max_bytes=bound))

    assert sum(map(text.count, (b",", b"[", b"{"))) * (document_tree.MAX_BYTES // bound) <= MAX_SEPARATORS


@pytest.mark.parametrize("frame", [b"", b"{}", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00"])
def test_what_states_no_size_is_refused(frame: bytes) -> None:
    with pytest.raises(CorruptStore, match="here"):
        unpack(frame, "here")


def test_a_document_that_no_reader_would_take_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.documents.MAX_MANIFEST_BYTES", 100)

    with pytest.raises(BadInput, match="at most 100"):
        pack({"a": "x" * 100})


def test_a_document_of_more_values_than_readers_take_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.documents.MAX_SEPARATORS", 100)

    with pytest.raises(BadInput, match="102 commas and brackets"):
        pack({"a": [0] * 101})
