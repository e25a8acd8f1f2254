"""Copies of objects in memory: what a put records, and what a checked read does with them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from cnr_store.errors import MissingObject
from cnr_store.format.layout import segment_of_rows
from cnr_store.storage import Storage, object_digest, open_storage, read_inside, read_verified
from cnr_store.storage.copies import ObjectCopies

KEY = "data/some/c.0"
DATA = bytes(range(100))


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Storage:
    found = open_storage(f"memory://{request.node.name}")
    found.copies = ObjectCopies(lambda key: "/c." in key, 150)
    return found


def copies_of(storage: Storage) -> ObjectCopies:
    assert storage.copies is not None
    return storage.copies


def given(storage: Storage, data: bytes = DATA) -> None:
    copies_of(storage).give({KEY: np.frombuffer(data, np.uint8)})


def whole(storage: Storage) -> bytes | memoryview:
    return read_verified(storage, KEY, size_bytes=len(DATA), digest=object_digest(DATA))


def test_a_read_of_a_copy_does_not_copy_it_again(storage: Storage) -> None:
    data = np.frombuffer(DATA, np.uint8)
    copies_of(storage).give({KEY: data})

    [piece] = read_inside(storage, KEY, 10, [(20, object_digest(DATA[10:30]))])

    assert piece == DATA[10:30]
    assert np.shares_memory(np.frombuffer(piece, np.uint8), data)


def test_puts_of_chosen_keys_are_recorded_as_far_as_there_is_room(storage: Storage) -> None:
    storage.put(KEY, DATA)
    storage.put("data/some/c.1", DATA)  # 200 bytes would be too many
    storage.put("data/some/c.2", memoryview(DATA)[:50])
    storage.put("data/some/zarr.json", b"{}")

    taken = copies_of(storage).take_written()

    assert {key: data.tobytes() for key, data in taken.items()} == {KEY: DATA, "data/some/c.2": DATA[:50]}
    assert copies_of(storage).take_written() == {}
    assert storage.read("data/some/c.1") == DATA


def test_checked_reads_take_what_was_given_and_no_other_read_does(storage: Storage) -> None:
    given(storage)

    pieces = [(10, object_digest(DATA[30:40])), (20, object_digest(DATA[40:60]))]
    assert whole(storage) == DATA
    assert read_inside(storage, KEY, 30, pieces) == [DATA[30:40], DATA[40:60]]
    assert copies_of(storage).read_bytes == 130
    assert storage.read(KEY) is None
    copies_of(storage).give({})
    with pytest.raises(MissingObject):
        whole(storage)


@pytest.mark.parametrize("wrong", [DATA[:-1], DATA[:-1] + b"!", DATA[::-1]], ids=["short", "changed", "swapped"])
def test_a_copy_that_is_not_what_the_inventory_says_is_not_used(
    storage: Storage, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage.put(KEY, DATA)
    given(storage, wrong)

    with caplog.at_level(logging.WARNING):
        assert whole(storage) == DATA
        assert read_inside(storage, KEY, 90, [(10, object_digest(DATA[90:]))]) == [DATA[90:]]

    assert copies_of(storage).read_bytes == 0
    assert ("is read instead" in caplog.text) == (len(wrong) == len(DATA))


def test_objects_with_rows_are_told_from_all_others() -> None:
    segment = f"{0:020d}-{'0' * 32}"
    assert segment_of_rows(f"data/{segment}/r00000-da9c6661.add-0.codes/c.0.0") == segment
    assert segment_of_rows(f"data/{segment}/r00000-da9c6661.dense.float32/c.0") is None
    assert segment_of_rows(f"data/{segment}/r00000-da9c6661.add-0.codes/zarr.json") is None
    assert segment_of_rows(f"data/{segment}/_segment.json.zst") is None
    assert segment_of_rows(f"commits/{segment}/c.0") is None
