"""The mirror of hashed keys: deltas hold differences, whatever comes, goes, fails or is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, CorruptStore, Store, TableOptions, Writer, verify_store
from cnr_store.errors import DoesNotApply
from cnr_store.maintenance.compaction import compact_run
from cnr_store.read.table_reader import replay_keyed
from cnr_store.segment.shards import Shard
from cnr_store.write.keyed_mirrors import mirrored_arrays
from format_spec.reader.compare import compare
from tests.support.ranks import ThreadRank, on_ranks
from tests.write.many_ranks import new_files, open_store

DIM = 3
OPTIONS = TableOptions(scale=0.5, slot_bits="exact", nonfinite="escape")
Rows = dict[int, float]


def save(writer: Writer, step: int, rows: Rows, gone: Any = (), options: TableOptions = OPTIONS, **how: Any) -> None:
    with writer.begin(step, **how) as txn:
        if "h" not in txn.tables:
            txn.create_table("h", dim=DIM, options=options, slots={"m": "row"})
        own = {key: row for key, row in rows.items() if writer.keys.holds(np.asarray([key]))[0]}
        keys = np.asarray(sorted(own), np.int64)
        values = np.repeat(np.asarray([own[int(key)] for key in keys], np.float32), DIM).reshape(-1, DIM)
        txn.write_rows("h", keys, values, slots={"m": values[:, 0].copy()})
        gone = np.asarray(sorted(gone), np.int64)
        if len(gone := gone[writer.keys.holds(gone)]):
            txn.delete_rows("h", gone)


def digests(store: Store) -> list[str | None]:
    """Return the state digests of the newest parts."""
    return [part.state_digest for part in store.snapshot().manifests[-1].parts_of["h"]]


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
        assert codes < writer.mirror_bytes < 2 * codes + 100 * 6000

    assert held(store) == rows


def test_places_of_evicted_keys_are_used_again(store: Store) -> None:
    with store.writer() as writer:
        save(writer, 0, dict.fromkeys(range(1000), 1.0))
        before = writer.mirror_bytes
        for step in range(1, 20):
            first = 1000 * step
            save(writer, step, dict.fromkeys(range(first, first + 1000), 1.0), gone=range(first - 1000, first))
        save(writer, 20, dict.fromkeys(range(19_000, 20_000), 2.0))

        assert lists(store) == {"add": 1000}
        assert writer.mirror_bytes <= 1.1 * before
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

        assert (lists(store), writer.mirror_bytes) == ({"set": 1}, 0)


def test_the_independent_reader_agrees(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer:
        save(writer, 0, {key: float(key) for key in range(-20, 20)})
        save(writer, 1, {3: 1.0, 4: float("nan"), 50: 2.0}, gone=[7])
        save(writer, 2, {3: 2.0, 4: 1.0, 7: 1.0, 50: 3.0})

    assert compare(tmp_path / "s") == 9


STEPS: list[tuple[Rows, set[int]]] = [
    (dict.fromkeys(range(-8, 8), 1.0), set()),
    ({1: 2.0, 2: float("nan"), 30: 1.0, 31: 5.0}, {3, 4, 99}),
    ({1: 2.0, 2: 3.0, 3: 7.5, 31: float("inf")}, {30}),
    ({}, {1, 31}),
    ({1: 1.0}, set()),
    ({1: 3.0, 2: -3.0}, set()),
    ({1: -3.0, 2: 3.0}, set()),
]
"""Admissions, updates and none, exact rows that come and go, evictions, also of absent keys, and readmissions.

From 3.0 to -3.0 the bits of an exact float differ by more than an int32 holds.
"""


@pytest.mark.parametrize(
    "options", [OPTIONS, TableOptions.exact(nonfinite="escape"), TableOptions(max_error=0.01, nonfinite="escape")]
)
def test_the_digest_of_touched_keys_is_that_of_all_keys(store: Store, options: TableOptions) -> None:
    with store.writer() as writer:
        for step, (rows, gone) in enumerate(STEPS):
            save(writer, step, rows, gone, options=options)
            mirror, snapshot = writer.mirrors.keyed(Shard("h")), store.snapshot()
            assert mirror is not None
            plan, names = snapshot.plan("h"), mirrored_arrays(snapshot.tables["h"])
            keys, codes = replay_keyed(snapshot.readers, plan, names, snapshot.workers)
            read = codes.digest_by_key(keys, snapshot.workers)
            assert digests(store) == [f"{mirror.digest:016x}"] == [f"{read:016x}"]

    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_the_digest_does_not_depend_on_who_owns_which_key() -> None:
    files, sums = new_files(), []
    for step, (world, rule) in enumerate([(1, "modulo"), (3, "hash"), (2, "modulo"), (2, "hash")]):

        def work(rank: ThreadRank) -> None:
            with open_store(files) as store, store.writer(ranks=rank, shards={}, key_rule=rule) as writer:  # noqa: B023
                if step:  # noqa: B023
                    writer.restore()
                save(writer, step, {} if step else dict.fromkeys(range(-20, 20), 1.0))  # noqa: B023

        on_ranks(world, work)
        with open_store(files) as store:
            parts = [int(one or "", 16) for one in digests(store)]
            assert len(parts) == world
            sums.append(sum(parts) % 2**64)

    assert len(set(sums)) == 1


def test_a_wrong_digest_is_found_by_whoever_reads_all_keys(store: Store) -> None:
    with store.writer() as writer:
        save(writer, 0, dict.fromkeys(range(10), 1.0))
        save(writer, 1, {4: 2.0})
        mirror = writer.mirrors.keyed(Shard("h"))
        assert mirror is not None
        assert mirror.digest is not None
        mirror.digest += 1
        save(writer, 2, {4: 3.0, 5: 2.0}, base="baseline")  # which names no state that it starts from

        with pytest.raises(CorruptStore, match="'h' decodes to state digest"):
            store.snapshot().table("h").read_all(slots=True)
        with pytest.raises(CorruptStore, match="'h' decodes to state digest"):
            writer.restore()
        with pytest.raises(CorruptStore, match="merges to state digest"):
            compact_run(store, run=(0, 2))
    assert not verify_store(store, deep=True).is_sound


def test_a_delta_to_another_state_is_not_committed(store: Store) -> None:
    with store.writer() as writer:
        save(writer, 0, dict.fromkeys(range(10), 1.0))
        mirror = writer.mirrors.keyed(Shard("h"))
        assert mirror is not None
        assert mirror.digest is not None
        mirror.digest += 1

        with pytest.raises(DoesNotApply, match="starts from state digest"):
            save(writer, 1, {4: 2.0})


def test_compacted_keys_have_the_digest_of_their_chain(store: Store) -> None:
    with store.writer() as writer:
        for step, (rows, gone) in enumerate(STEPS):
            save(writer, step, rows, gone)
        before = digests(store)

        compact_run(store, run=(1, 3))
        assert (digests(store), len(store.head().record.chain)) == (before, len(STEPS) - 1)
        compact_run(store, run=(0, len(STEPS) - 1))
        assert digests(store) == before
        save(writer, len(STEPS), {1: 4.0})

        assert lists(store) == {"add": 1}
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_keys_beyond_the_limit_are_set_rows(store: Store) -> None:
    limit, rows = 60_000, Rows()
    with store.writer(keyed_mirror_bytes=limit) as writer:
        for step in range(8):
            new = {key: float(key % 7) for key in range(step * 300, (step + 1) * 300)}
            moved = {key: row + 1 for key, row in rows.items()}
            save(writer, step, new | moved)
            rows |= new | moved
            assert writer.mirror_bytes <= limit
        known = lists(store)["add"]
        assert lists(store) == {"add": known, "set": len(rows) - known}
        assert 300 < known < len(rows)
        assert digests(store) == [None]
        save(writer, 8, {}, gone=range(300))
        save(writer, 9, dict.fromkeys(range(2000, 2290), 9.5))
        save(writer, 10, dict.fromkeys(range(2000, 2290), 1.5))
        assert lists(store) == {"add": 290}, "the places of evicted keys are taken"
        rows = {key: row for key, row in rows.items() if key >= 300} | dict.fromkeys(range(2000, 2290), 1.5)
        assert held(store) == rows

        writer.restore()
        assert writer.mirror_bytes <= limit
        save(writer, 11, {key: row + 1 for key, row in rows.items()})
        assert 300 < lists(store)["add"] < len(rows)
        save(writer, 12, dict.fromkeys(range(50), 1.0), kind="baseline")
        save(writer, 13, dict.fromkeys(range(50), 2.0))
        assert (lists(store), digests(store)[0] is None) == ({"add": 50}, False)
    assert held(store) == dict.fromkeys(range(50), 2.0)
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_a_mirror_whose_codes_grow_wider_than_its_limit_begins_anew(store: Store) -> None:
    keys = np.arange(1200)
    with store.writer(keyed_mirror_bytes=90_000) as writer:
        for step, value in enumerate([1, 2, 20_000, 20_001, 20_002, 3]):  # from the third on beyond int16 codes
            with writer.begin(step) as txn:
                if not step:
                    txn.create_table("h", dim=16, options=OPTIONS)
                txn.write_rows("h", keys, np.full((1200, 16), value, np.float32))
            assert writer.mirror_bytes <= 90_000
            if step in (1, 2):
                assert lists(store) == {"add": 1200}
            elif step == 3:
                assert lists(store) == {"set": 1200}
            elif step:
                assert 0 < lists(store)["add"] < 1200

    assert (store.snapshot().table("h").read_all()[1]["values"] == 3).all()
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_a_limit_below_zero_is_refused(store: Store) -> None:
    with pytest.raises(BadInput, match="keyed_mirror_bytes"):
        store.writer(keyed_mirror_bytes=-1)
