"""The mirror of hashed keys: deltas hold differences, whatever comes, goes, fails or is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions, Writer, verify_store
from format_spec.reader.compare import compare
from tests.write.many_ranks import new_files, open_store

DIM = 3
OPTIONS = TableOptions(scale=0.5, slot_bits="exact", nonfinite="escape")
Rows = dict[int, float]


def save(writer: Writer, step: int, rows: Rows, gone: Any = (), **how: Any) -> None:
    with writer.begin(step, **how) as txn:
        if "h" not in txn.tables:
            txn.create_table("h", dim=DIM, options=OPTIONS, slots={"m": "row"})
        own = {key: row for key, row in rows.items() if writer.keys.holds(np.asarray([key]))[0]}
        keys = np.asarray(sorted(own), np.int64)
        values = np.repeat(np.asarray([own[int(key)] for key in keys], np.float32), DIM).reshape(-1, DIM)
        txn.write_rows("h", keys, values, slots={"m": values[:, 0].copy()})
        gone = np.asarray(sorted(gone), np.int64)
        if len(gone := gone[writer.keys.holds(gone)]):
            txn.delete_rows("h", gone)


def lists(store: Store) -> dict[str, int]:
    """How many rows of each operation the newest segment has."""
    manifest, found = store.snapshot().manifests[-1], dict[str, int]()
    for part in manifest.parts:
        for operation in ("add", "set", "delete", "escape"):
            if (one := getattr(part, operation)) is not None:
                found[operation] = found.get(operation, 0) + one.count
    return found


def held(store: Store) -> Rows:
    keys, arrays = store.snapshot().table("h").read_all(slots=True)
    assert np.array_equal(arrays["values"][:, 0], arrays["m"], equal_nan=True)
    return dict(zip(keys.tolist(), arrays["m"].tolist(), strict=True))


@pytest.fixture
def store() -> Any:
    with open_store(new_files()) as store:
        yield store


@pytest.mark.parametrize("mode", ["memory", "mmap"])
def test_known_keys_are_differences_and_others_are_set(store: Store, mode: Any) -> None:
    with store.writer(mirror=mode) as writer:
        save(writer, 0, dict.fromkeys(range(10), 1.0))
        assert lists(store) == {"set": 10}
        save(writer, 1, {1: 2.0, 2: 3.0, 20: 1.0}, gone=[5])
        assert lists(store) == {"add": 2, "set": 1, "delete": 1}
        save(writer, 2, {2: 3.0, 5: 4.0, 20: 1.5, 1: np.nan})  # 2 is as it was; 5 comes back
        assert lists(store) == {"add": 1, "set": 1, "escape": 1}
        save(writer, 3, {1: 0.5, 20: 2.0})  # exact rows have no codes to differ from
        assert lists(store) == {"add": 1, "set": 1}

    found = held(store)
    assert (found[1], found[2], found[5], found[20], len(found)) == (0.5, 3.0, 4.0, 2.0, 11)
    assert verify_store(store, deep=True).is_sound


def test_a_table_grows_beyond_its_first_room(store: Store) -> None:
    rows: Rows = {}
    with store.writer() as writer:
        for step in range(6):
            new = {key: float(key % 7) for key in range(step * 1000, (step + 1) * 1000)}
            moved = {key: row + 1 for key, row in rows.items() if key % 3 == 0}
            save(writer, step, new | moved)
            rows |= new | moved
            expected = {"set": 1000} | ({"add": len(moved)} if moved else {})
            assert lists(store) == expected
        codes = 2 * DIM * 6000 + 4 * 6000
        assert codes < writer.mirror_nbytes < 2 * codes + 100 * 6000

    assert held(store) == rows


def test_places_of_evicted_keys_are_used_again(store: Store) -> None:
    with store.writer() as writer:
        save(writer, 0, dict.fromkeys(range(1000), 1.0))
        before = writer.mirror_nbytes
        for step in range(1, 20):
            first = 1000 * step
            save(writer, step, dict.fromkeys(range(first, first + 1000), 1.0), gone=range(first - 1000, first))
        save(writer, 20, dict.fromkeys(range(19_000, 20_000), 2.0))

        assert lists(store) == {"add": 1000}
        assert writer.mirror_nbytes <= 1.1 * before
    assert held(store) == dict.fromkeys(range(19_000, 20_000), 2.0)


def test_a_save_that_is_given_up_leaves_the_mirror(store: Store) -> None:
    with store.writer() as writer:
        save(writer, 0, {1: 1.0, 2: 2.0})
        txn = writer.begin(1)
        txn.write_rows(
            "h", np.asarray([1, 3]), np.full((2, DIM), 9, np.float32), slots={"m": np.full(2, 9, np.float32)}
        )
        txn.delete_rows("h", np.asarray([2]))
        txn.abort()
        save(writer, 1, {1: 4.0, 2: 5.0, 3: 6.0})

        assert lists(store) == {"add": 2, "set": 1}
    assert held(store) == {1: 4.0, 2: 5.0, 3: 6.0}


def test_without_a_mirror_all_rows_are_set(store: Store) -> None:
    with store.writer(mirror="none") as writer:
        save(writer, 0, {1: 1.0})
        save(writer, 1, {1: 2.0})

        assert (lists(store), writer.mirror_nbytes) == ({"set": 1}, 0)


def test_the_independent_reader_agrees(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer:
        save(writer, 0, {key: float(key) for key in range(-20, 20)})
        save(writer, 1, {3: 1.0, 4: float("nan"), 50: 2.0}, gone=[7])
        save(writer, 2, {3: 2.0, 4: 1.0, 7: 1.0, 50: 3.0})

    assert compare(tmp_path / "s") == 9
