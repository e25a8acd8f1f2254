"""The backend contract as a test class: what every storage must do to be usable for a store.

Subclass `StorageContract`, return a client of an empty root from ``make_storage``, and let pytest collect the
subclass. Each test checks one requirement; the ids are those of the spec's storage section.
"""

# The name of each test is its docstring.
# ruff: noqa: D102
from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from cnr_store.errors import BadInput, BadName
from cnr_store.storage import MAX_CREATE_BYTES, CreateOutcome, Storage

ESCAPES = (
    "..",
    "../outside",
    "data/../../outside",
    "data/./x",
    "/etc/passwd",
    "data//x",
    "data/",
    "",
    "data\\..\\x",
    "data/\x00",
    "data/x?versionId=1",
    "memory://other/x",
    "~/x",
    "*",
    "data/.tmp-x",
)
"""Keys that could lead outside the root, or that some backend interprets in another way."""


class StorageContract:
    """Requirements of `cnr_store.storage.Storage`, one test each.

    Attributes
    ----------
    writers, rounds
        Number of threads that create one key at once, and number of such keys.
    """

    writers: ClassVar[int] = 16
    rounds: ClassVar[int] = 10

    def make_storage(self) -> Storage:
        """Return a new client of the test's root, which is empty when the test starts."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self) -> Storage:
        """The first client of this test's root."""
        return self.make_storage()

    # Exclusive create (CNR-STO-1 to CNR-STO-5)

    def test_exclusive_create_has_one_winner_whose_content_stays(self, storage: Storage) -> None:
        clients = [storage, self.make_storage()]
        start = threading.Barrier(self.writers)

        def write(writer: int, key: str) -> tuple[CreateOutcome, bytes]:
            data = f"{key} by {writer}".encode()
            start.wait()
            return clients[writer % 2].create(key, data), data

        with ThreadPoolExecutor(self.writers) as pool:
            for race in range(self.rounds):
                key = f"commits/{race:020d}.json"
                results = list(pool.map(write, range(self.writers), [key] * self.writers))
                won = [data for outcome, data in results if outcome is CreateOutcome.CREATED]

                assert len(won) == 1, Counter(outcome for outcome, _ in results)
                assert storage.read(key) == won[0]

    def test_a_refused_create_says_exists_and_changes_nothing(self, storage: Storage) -> None:
        assert storage.create("commits/a.json", b"first") is CreateOutcome.CREATED

        assert storage.create("commits/a.json", b"second") is CreateOutcome.EXISTS
        assert storage.create("commits/a.json", b"first") is CreateOutcome.EXISTS
        assert self.make_storage().create("commits/a.json", b"third") is CreateOutcome.EXISTS
        assert storage.read("commits/a.json") == b"first"

    def test_create_is_refused_where_put_wrote(self, storage: Storage) -> None:
        storage.put("a", b"put")

        assert storage.create("a", b"created") is CreateOutcome.EXISTS
        assert storage.read("a") == b"put"

    def test_create_of_an_empty_object_is_exclusive_too(self, storage: Storage) -> None:
        assert storage.create("empty", b"") is CreateOutcome.CREATED

        assert storage.create("empty", b"") is CreateOutcome.EXISTS
        assert storage.create("empty", b"x") is CreateOutcome.EXISTS
        assert storage.read("empty") == b""

    def test_create_takes_64_kib_and_no_more(self, storage: Storage) -> None:
        data = random.Random(1).randbytes(MAX_CREATE_BYTES)

        assert storage.create("largest", data) is CreateOutcome.CREATED
        assert storage.read("largest") == data
        with pytest.raises(BadInput):
            storage.create("larger", data + b"x")
        assert storage.read("larger") is None

    def test_the_probe_passes_and_leaves_nothing(self, storage: Storage) -> None:
        storage.probe()

        assert list(storage.list_objects("")) == []

    # Reading (CNR-STO-6, CNR-STO-7)

    def test_an_absent_object_reads_as_none(self, storage: Storage) -> None:
        assert storage.read("commits/a.json") is None
        storage.put("data/x/y", b"y")

        assert storage.read("data/x") is None
        assert storage.read("data") is None
        assert storage.read("data/x/z") is None
        assert storage.read("data/x/z", start=1, stop=2) is None
        assert storage.read("data/x/z", start=1, stop=1) is None

    def test_ranges_are_half_open_and_clipped(self, storage: Storage) -> None:
        data = bytes(range(100))
        storage.put("ranges", data)

        for start, stop in [(0, 1), (10, 20), (99, 100), (90, 500), (0, 100), (0, 101), (5, 5), (100, 100)]:
            assert storage.read("ranges", start=start, stop=stop) == data[start:stop], (start, stop)
        assert storage.read("ranges", start=40) == data[40:]
        assert storage.read("ranges", stop=40) == data[:40]
        assert storage.read("ranges", start=100, stop=200) == b""
        assert storage.read("ranges", start=100) == b""
        assert storage.read("ranges", start=5000) == b""

    def test_a_range_that_is_none_is_bad_input(self, storage: Storage) -> None:
        for start, stop in [(-1, None), (3, 2), (None, -1)]:
            with pytest.raises(BadInput):
                storage.read("ranges", start=start, stop=stop)

    # Writing (CNR-STO-8)

    def test_put_overwrites_and_other_clients_see_it(self, storage: Storage) -> None:
        other = self.make_storage()
        storage.put("hint/latest.json", b"a longer first value")
        assert other.read("hint/latest.json") == b"a longer first value"

        storage.put("hint/latest.json", b"second")

        assert other.read("hint/latest.json") == b"second"
        assert storage.read("hint/latest.json") == b"second"

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        storage.put("data/empty", b"")

        assert storage.read("data/empty") == b""
        assert storage.read("data/empty", start=0, stop=1) == b""
        assert [(stat.key, stat.size_bytes) for stat in storage.list_objects("data")] == [("data/empty", 0)]

    def test_memoryviews_of_any_item_size_are_stored_as_their_bytes(self, storage: Storage) -> None:
        data = random.Random(2).randbytes(4096)

        storage.put("bytes", memoryview(data)[96:])
        storage.put("words", memoryview(data).cast("Q"))
        storage.put("strided", memoryview(data)[::2])
        storage.put("writable", memoryview(bytearray(data)))

        assert storage.read("bytes") == data[96:]
        assert storage.read("words") == data
        assert storage.read("strided") == data[::2]
        assert storage.read("writable") == data

    def test_a_stored_object_does_not_follow_the_buffer_it_came_from(self, storage: Storage) -> None:
        buffer = bytearray(b"before")
        storage.put("kept", memoryview(buffer))

        buffer[:] = b"behind"

        assert storage.read("kept") == b"before"

    def test_nine_mebibytes_come_back_whole_and_by_range(self, storage: Storage) -> None:
        data = random.Random(3).randbytes(9 * 1024 * 1024)

        storage.put("data/big", data)

        assert storage.read("data/big") == data
        assert storage.read("data/big", start=5_000_000, stop=5_000_100) == data[5_000_000:5_000_100]
        assert [stat.size_bytes for stat in storage.list_objects("data")] == [len(data)]

    def test_percent_escaped_names_stay_as_they_are(self, storage: Storage) -> None:
        key = "data/seg/r00000-0/model.ebc%2Fuser%3A0/add/rows/c.0"

        storage.put(key, b"rows")

        assert storage.read(key) == b"rows"
        assert storage.read(key.replace("%2F", "/").replace("%3A", ":").replace(":", "-")) is None
        assert [stat.key for stat in storage.list_objects("data/seg")] == [key]
        assert storage.list_folders("data/seg/r00000-0") == ["model.ebc%2Fuser%3A0"]

    # Listing (CNR-STO-9)

    def test_objects_are_listed_recursively_and_folders_one_level(self, storage: Storage) -> None:
        keys = ["cnr.json", "data/a/r0/x", "data/a/r0/y/z", "data/b/x", "data-other/x"]
        for size, key in enumerate(keys):
            storage.put(key, b"x" * size)

        assert sorted(stat.key for stat in storage.list_objects("")) == sorted(keys)
        assert sorted(stat.key for stat in storage.list_objects("data")) == keys[1:4]
        assert [(s.key, s.size_bytes) for s in storage.list_objects("data/b/")] == [("data/b/x", 3)]
        assert storage.list_folders("") == ["data", "data-other"]
        assert storage.list_folders("data") == storage.list_folders("data/") == ["a", "b"]
        assert storage.list_folders("data/b") == []

    def test_a_prefix_that_is_not_there_lists_nothing(self, storage: Storage) -> None:
        storage.put("data/a/x", b"x")

        for prefix in ["dat", "data/b", "data/a/x", "other/"]:
            assert list(storage.list_objects(prefix)) == [], prefix
            assert storage.list_folders(prefix) == [], prefix

    def test_listings_show_what_another_client_just_did(self, storage: Storage) -> None:
        other = self.make_storage()
        storage.put("data/a/x", b"x")
        assert storage.list_folders("data") == other.list_folders("data") == ["a"]
        assert len(list(storage.list_objects("data"))) == len(list(other.list_objects("data"))) == 1

        other.put("data/b/x", b"x")
        other.create("data/c/x", b"x")
        other.delete(["data/a/x"])

        assert [stat.key for stat in storage.list_objects("data")] == ["data/b/x", "data/c/x"]
        assert {"b", "c"} <= set(storage.list_folders("data"))

    def test_the_time_of_an_object_is_near_that_of_its_neighbour(self, storage: Storage) -> None:
        storage.put("a", b"")
        storage.put("b", b"")

        times = [stat.modified_ms for stat in storage.list_objects("")]

        if None not in times:
            first, second = [time or 0 for time in times]
            assert abs(first - second) < 600_000
            assert min(first, second) > 1_600_000_000_000  # milliseconds, not seconds

    # Deleting (CNR-STO-10)

    def test_delete_takes_absent_keys_and_is_idempotent(self, storage: Storage) -> None:
        keys = [f"data/a/{index}" for index in range(40)]
        for key in keys:
            storage.put(key, b"x")
        storage.put("data/kept", b"x")

        for _ in range(2):
            storage.delete([*keys, "data/never", "never/was"])

            assert [stat.key for stat in storage.list_objects("")] == ["data/kept"]
        storage.delete([])
        storage.delete(["data"])
        assert storage.read("data/kept") == b"x"
        assert storage.create("data/a/0", b"again") is CreateOutcome.CREATED

    # Names (CNR-STO-11)

    def test_no_key_leaves_the_root(self, storage: Storage) -> None:
        calls: list[Callable[[str], Any]] = [
            storage.read,
            lambda key: storage.put(key, b"x"),
            lambda key: storage.create(key, b"x"),
            lambda key: storage.delete(["fine", key]),
            lambda key: storage.sync_folders([key]),
        ]
        storage.put("fine", b"x")

        for key in ESCAPES:
            for call in calls:
                with pytest.raises(BadName):
                    call(key)
        for prefix in ["..", "data/..", "/", "/data", "data//", "*"]:
            with pytest.raises(BadName):
                storage.list_objects(prefix)
            with pytest.raises(BadName):
                storage.list_folders(prefix)
        assert [stat.key for stat in storage.list_objects("")] == ["fine"]

    # Threads and durability (CNR-STO-12, CNR-STO-13)

    def test_one_client_serves_many_threads(self, storage: Storage) -> None:
        def work(index: int) -> bytes | None:
            key = f"data/{index % 4}/{index}"
            storage.put(key, str(index).encode())
            assert any(stat.key == key for stat in storage.list_objects(f"data/{index % 4}"))
            return storage.read(key)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, range(32)))

        assert found == [str(index).encode() for index in range(32)]

    def test_syncing_folders_keeps_every_object(self, storage: Storage) -> None:
        storage.put("data/a/b/c", b"x")
        storage.put("top", b"x")

        storage.sync_folders(["data/a/b/c", "top"])
        storage.sync_folders([])

        assert storage.sweep("data") == 0
        assert storage.read("data/a/b/c") == b"x"
