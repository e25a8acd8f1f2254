"""The state of a version is the fold of its chain's manifests, and a delta states what it changes alone (CNR-DOC-24).

The slow reference is a model that keeps whole states: every table and tensor, after each save.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.format.chain_checks import chain_problems
from cnr_store.format.manifest_state import changes_of, with_state
from cnr_store.format.records import PartLine
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.verify import verify_store
from cnr_store.segment.reader import open_chain
from cnr_store.write.writer import Writer
from format_spec.reader.compare import compare
from tests.support.documents import segment_document

SCALE = TableOptions(scale=0.5)


class Model:
    """What the store must hold, told whole; some of it changes in each save."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tables: dict[str, Any] = {}
        self.dense: dict[str, Any] = {}
        self._numbers = itertools.count()

    def save(self, writer: Writer, step: int) -> None:
        """A delta, one behind the baseline, or a baseline."""
        chance = self.random.random
        base: Any = "baseline" if step > 2 and chance() < 0.2 else "head"
        kind: Any = "baseline" if step == 1 or chance() < 0.1 else "delta"
        with writer.begin(step, kind, base=base if kind == "delta" else "head") as txn:
            for name in [name for name in self.tables if chance() < 0.15]:
                txn.drop_table(name)
                del self.tables[name]
            for name, values in self.tables.items():
                rows = np.arange(len(values) if base == "baseline" else int(chance() < 0.4))
                values[rows] += 1
                txn.write_rows(name, rows, values[rows])
            name = f"t{next(self._numbers) % 6}"
            if name not in self.tables and name not in writer_tables(writer):
                values = self.random.integers(-9, 9, (self.random.integers(1, 9), 2)).astype(np.float32)
                txn.write_table(name, values, options=SCALE)
                self.tables[name] = values
            held = set(self.dense)
            for name in [name for name in held if chance() < 0.2]:
                txn.drop_dense(name)
                del self.dense[name]
            given = {
                name: np.full(3, self.random.integers(2), np.float32)
                for name in ("u", "v", "w")
                if chance() < 0.5 and (name in self.dense or name not in held)
            }
            txn.put_dense(given)
            self.dense |= given

    def check(self, store: Store) -> None:
        snapshot = store.snapshot()
        assert snapshot.tables.keys() == self.tables.keys()
        assert snapshot.dense.keys() == self.dense.keys()
        for name, values in self.tables.items():
            assert np.array_equal(snapshot.table(name).read(), values), name
        for name, tensor in self.dense.items():
            assert np.array_equal(snapshot.read_dense(name), tensor), name


def writer_tables(writer: Writer) -> set[str]:
    """Of the head: a table of the name of one that is dropped in the same save is not made in it here."""
    return set(writer._state.head_tables)


@pytest.mark.parametrize("seed", range(3))
def test_a_state_is_the_fold_of_what_manifests_state(tmp_path: Path, seed: int) -> None:
    store, model = Store.create(str(tmp_path / "store"), fsync=False, threads=1), Model(seed)
    with store.writer() as writer:
        for step in range(1, 21):
            model.save(writer, step)
            model.check(store)
            length = len(store.head().record.chain)
            if step % 4 == 0 and length > 2:
                compact_run(store, run=(1 if step % 8 else 0, length))
                model.check(store)
                writer.restore()

    assert verify_store(store, deep=True).is_sound
    assert compare(store.url) > 0


def saved(tmp_path: Path) -> Store:
    """Three tables and two tensors; then one row of one table and one of the tensors change."""
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            for name in "abc":
                txn.write_table(name, np.ones((4, 2), np.float32), options=SCALE)
            txn.put_dense({"v": np.zeros(3, np.float32), "w": np.zeros(3, np.float32)})
        with writer.begin(step=2) as txn:
            txn.write_rows("b", np.asarray([1]), np.full((1, 2), 3, np.float32))
            txn.put_dense({"v": np.zeros(3, np.float32), "w": np.ones(3, np.float32)})
    return store


def test_what_does_not_change_is_not_stated(tmp_path: Path) -> None:
    store = saved(tmp_path)
    document, last = segment_document(store), store.snapshot().manifests[-1]

    assert (set(document["tables"]), set(document["dense"])) == ({"b"}, {"w"})
    assert [part["table"] for part in document["parts"]] == ["b"]
    assert (set(last.tables), set(last.dense), set(last.parts_of)) == ({"a", "b", "c"}, {"v", "w"}, {"a", "b", "c"})
    assert [part.base_digest == part.state_digest for part in last.parts] == [True, True, False]  # "b" is last

    parts = [PartLine(**{name: getattr(part, name) for name in PLACE}) for part in last.parts]
    assert changes_of(last, last.tables, parts, last.dense) == ({}, (), (), ())
    other = msgspec.structs.replace(last.tables["a"], fill=1.0)
    assert changes_of(last, last.tables | {"a": other}, parts, last.dense).tables == {"a": other}
    moved = [msgspec.structs.replace(part, state_digest="0" * 16) for part in parts]
    assert set(changes_of(last, last.tables, moved, last.dense).tables) == {"a", "b", "c"}
    assert changes_of(last, {"a": last.tables["a"]}, parts, ["v"]) == ({}, ("b", "c"), (), ("w",))
    assert changes_of(None, last.tables, parts, last.dense) == (last.tables, (), tuple(parts), ())


PLACE = ("table", "rows", "columns", "base_digest", "state_digest")


def test_drops_of_what_is_not_there_are_refused(tmp_path: Path) -> None:
    snapshot = saved(tmp_path).snapshot()
    first, own = snapshot.readers[0].manifest, snapshot.readers[1].own

    def problems(**changes: Any) -> list[str]:
        return [
            one.message for one in chain_problems([first, with_state(first, msgspec.structs.replace(own, **changes))])
        ]

    assert problems() == problems(dropped=("a",)) == problems(ended=("v",)) == []
    assert len(problems(dropped=("v",))) == len(problems(ended=("a",))) == 1


def test_a_segment_is_laid_behind_each_chain_anew(tmp_path: Path) -> None:
    """One that two versions share, behind a run and behind what the run was compacted to, has the state of each."""
    store = saved(tmp_path)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=3) as txn:
            txn.write_rows("c", np.asarray([2]), np.full((1, 2), 4, np.float32))
        before = store.snapshot()
        assert compact_run(store, run=(0, 2)).outcome == "committed"
        after = store.snapshot()

    shared = type(after)(store.storage, store.head(), after.workers, known=before.known_readers)

    for snapshot in (after, shared):
        assert {entry.segment for entry in snapshot.dense.values()} == {snapshot.readers[0].name}
        assert snapshot.read_dense("w").tolist() == [1, 1, 1]
    assert {entry.segment for entry in before.dense.values()} == {reader.name for reader in before.readers[:2]}


def test_segments_that_were_sound_are_checked_behind_another_chain(tmp_path: Path) -> None:
    store = saved(tmp_path)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=3) as txn:
            txn.write_rows("b", np.asarray([1]), np.full((1, 2), 5, np.float32))
    snapshot = store.snapshot()
    first, _, last = store.head().record.chain

    with pytest.raises(CorruptStore, match="starts from state digest"):
        open_chain(store.storage, (first, last), snapshot.workers, known=snapshot.known_readers)


def test_a_one_shot_delta_states_tensors_that_its_baseline_has_otherwise(tmp_path: Path) -> None:
    store = saved(tmp_path)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=3, base="baseline") as txn:
            txn.write_rows("b", np.asarray([1]), np.full((1, 2), 5, np.float32))

    assert store.snapshot().read_dense("w").tolist() == [1, 1, 1]
    assert set(segment_document(store)["dense"]) == {"w"}


def test_a_delta_that_is_missing_between_two_is_found_by_their_digests(tmp_path: Path) -> None:
    store = saved(tmp_path)
    snapshot = store.snapshot()
    first, own = snapshot.readers[0].manifest, snapshot.readers[1].own
    moved = tuple(msgspec.structs.replace(part, base_digest=part.state_digest) for part in own.parts)

    found = list(chain_problems([first, with_state(first, msgspec.structs.replace(own, parts=moved))]))

    assert [one.table for one in found] == ["b"]
