"""Objects are read back only as the inventory describes them."""

from __future__ import annotations

import numpy as np
import pytest

from cnr_store.errors import CorruptObject, MissingObject
from cnr_store.storage import Storage, object_digest, open_storage, read_verified


@pytest.fixture
def storage(tmp_path: object) -> Storage:
    return open_storage(str(tmp_path), fsync=False)


DATA = bytes(range(256)) * 4


def test_the_digest_is_xxh3_128_of_the_bytes() -> None:
    assert object_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert object_digest(memoryview(DATA)) == object_digest(bytearray(DATA)) == object_digest(DATA)
    assert object_digest(np.frombuffer(DATA, np.int32).data) == object_digest(DATA)


def test_an_object_that_matches_is_returned(storage: Storage) -> None:
    storage.put("data/x", DATA)
    storage.put("data/empty", b"")

    assert read_verified(storage, "data/x", size_bytes=len(DATA), digest=object_digest(DATA)) == DATA
    assert read_verified(storage, "data/empty", size_bytes=0, digest=object_digest(b"")) == b""


@pytest.mark.parametrize("stored", [DATA[:-1], b"", DATA + b"x", DATA * 9], ids=["short", "empty", "longer", "long"])
def test_a_wrong_size_is_corrupt(storage: Storage, stored: bytes) -> None:
    storage.put("data/x", stored)

    with pytest.raises(CorruptObject) as caught:
        read_verified(storage, "data/x", size_bytes=len(DATA), digest=object_digest(DATA))

    assert caught.value.path == "data/x"
    assert caught.value.expected == len(DATA)
    assert "'data/x'" in str(caught.value)


@pytest.mark.parametrize("bit", [0, 8 * 500 + 3, 8 * len(DATA) - 1])
def test_one_flipped_bit_is_corrupt(storage: Storage, bit: int) -> None:
    flipped = bytearray(DATA)
    flipped[bit // 8] ^= 1 << bit % 8
    storage.put("data/x", flipped)  # type: ignore[arg-type]

    with pytest.raises(CorruptObject) as caught:
        read_verified(storage, "data/x", size_bytes=len(DATA), digest=object_digest(DATA))

    assert caught.value.expected == object_digest(DATA)
    assert caught.value.found == object_digest(bytes(flipped))


def test_a_missing_object_is_named(storage: Storage) -> None:
    with pytest.raises(MissingObject) as caught:
        read_verified(storage, "data/x", size_bytes=1, digest=object_digest(b"x"))

    assert caught.value.path == "data/x"


def test_a_larger_object_is_not_read_whole(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("data/x", DATA * 100)
    sizes: list[int] = []
    read = storage.read

    def recording(key: str, *, start: int | None = None, stop: int | None = None) -> bytes | None:
        data = read(key, start=start, stop=stop)
        sizes.append(len(data or b""))
        return data

    monkeypatch.setattr(storage, "read", recording)
    with pytest.raises(CorruptObject):
        read_verified(storage, "data/x", size_bytes=len(DATA), digest=object_digest(DATA))

    assert sizes == [len(DATA) + 1]
