"""One test per bug that was found: named for what the user saw."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cnr_store import BadInput, CorruptStore, RetentionPolicy, Store, TableOptions, verify_store
from cnr_store.errors import BadShape, DoesNotApply, NotAStore
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.gc import collect_garbage
from cnr_store.serving import Loader
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from format_spec import vectors
from tests.support.compacted import write_in_halves_and_resize
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=1)


def test_shrinking_a_table_with_a_mirror_commits(store: Store) -> None:
    """A delta that cut rows was refused as DoesNotApply: its digest was compared after the cut, not before."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))

        with writer.begin(step=2) as txn:
            txn.resize_table("t", 4)

        with writer.begin(step=3) as txn:
            txn.resize_table("t", 5)
            txn.write_rows("t", np.asarray([0, 4]), values[[1, 2]])

    assert np.array_equal(store.snapshot(version=3).table("t").read(), values[:4])
    assert np.array_equal(store.snapshot().table("t").read(), values[[1, 1, 2, 3, 2]])


def test_a_dense_tensor_without_dimensions_keeps_its_shape(store: Store) -> None:
    """A scalar parameter came back with shape (1,)."""
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.put_dense({"temperature": np.asarray(0.5, np.float32)})

    found = store.snapshot().read_dense("temperature")

    assert found.shape == ()
    assert found == np.float32(0.5)


@pytest.mark.parametrize("name", ["receipt", "zarr", "reader/receipt", "document-0", f"{'ü' * 512}/{'x' * 1024}"])
def test_a_document_may_have_the_name_of_an_object_of_the_format(store: Store, name: str) -> None:
    """A document ``_receipt`` was overwritten by the receipt, and the version could not be read."""
    with store.writer() as writer:
        for step in (1, 2):
            with writer.begin(step=step) as txn:
                txn.put_document(name, {"position": 3})
    compact_run(store, run=(0, 2))  # whose tasks put receipts

    assert store.snapshot().read_document(name) == {"position": 3}


def test_a_table_may_be_named_like_the_receipt(store: Store) -> None:
    values = np.ones((2, 2), np.float32)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("receipt.json.zst", values, options=TableOptions(scale=1.0))
        with writer.begin(step=2) as txn:
            txn.write_rows("receipt.json.zst", np.asarray([1]), values[1:])
    compact_run(store, run=(0, 2))

    assert np.array_equal(store.snapshot().table("receipt.json.zst").read(), values)


def test_a_failed_baseline_that_dropped_its_mirror_needs_a_restore_first(store: Store) -> None:
    values = np.ones((4, 2), np.float32)
    writer = store.writer()
    with writer.begin(1) as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))
    txn = writer.begin(2, "baseline")
    txn.write_table("t", values + 1)
    txn.abort()

    with pytest.raises(DoesNotApply):
        writer.begin(3)

    writer.restore()
    with writer.begin(3) as txn:
        txn.write_rows("t", np.asarray([1]), values[:1] + 2)
    assert store.snapshot().manifests[-1].parts[0].state_digest is not None


def test_opening_a_store_whose_first_record_was_deleted_writes_nothing(store: Store, tmp_path: Path) -> None:
    """`Store.open` put a new first record into the hole, which hid the damage and broke the digest chain for good."""
    store.tag("a", 0)
    first = tmp_path / "store" / "commits" / f"{0:020d}.json"
    first.unlink()

    Store.open(str(tmp_path / "store")).close()

    assert not first.exists()


def test_a_full_keeps_the_rows_of_a_hashed_table(store: Store) -> None:
    """A full refused hashed tables (so a store that had one could never begin a new chain), or lost their rows."""
    keys, values = np.asarray([-5, 3, 10**15]), np.arange(6, dtype=np.float32).reshape(3, 2)
    with store.writer() as writer:
        for step in (1, 2):
            with writer.begin(step=step, kind="baseline") as txn:
                if step == 1:
                    txn.create_table("h", dim=2, options=TableOptions(scale=1.0))
                txn.write_rows("h", keys, values + step)

    found, arrays = store.snapshot().table("h").read_all()

    assert np.array_equal(found, keys)
    assert np.array_equal(arrays["values"], values + 2)


def test_first_manifests_decoded_on_two_threads_at_once_do_not_crash(store: Store) -> None:
    """A new process that opened a chain could crash (SIGSEGV): two threads built type information."""
    with store.writer() as writer:
        for step in range(1, 4):
            with writer.begin(step) as txn:
                if txn.kind == "baseline":
                    txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    program = f"""
import sys, threading
from cnr_store.format.manifest import decode_manifest
from cnr_store.store import Store
store = Store.open({store.url!r})
data = [store.storage.read(f"data/{{entry.seg}}/_segment.json.zst") for entry in store.head().record.chain]
sys.setswitchinterval(1e-6)
gate = threading.Barrier(8)
def decode(index):
    gate.wait()
    decode_manifest(data[index % len(data)], "m")
threads = [threading.Thread(target=decode, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_half_moved_mirror_is_nobodys_state(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After MemoryError in the mirror's move, a one-shot delta was acknowledged and could not be read."""
    values = np.ones((4, 2), np.float32)
    writer = store.writer()
    with writer.begin(1) as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))
    txn = writer.begin(2)
    txn.write_rows("t", np.asarray([1]), values[:1] + 1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.write.staged_tables.apply_rows", fail)
        with pytest.raises(MemoryError):
            txn.commit()

    assert not writer.is_synced
    assert store.snapshot().step == 2
    with pytest.raises(DoesNotApply):
        writer.begin(3, base="baseline")


def test_a_failed_full_keeps_no_stale_mirror(store: Store) -> None:
    values = np.ones((4, 2), np.float32)
    writer = store.writer()
    with writer.begin(1) as txn:
        txn.write_table("a", values, options=TableOptions(scale=1.0))
        txn.write_table("b", values, options=TableOptions(scale=1.0))
    txn = writer.begin(2, "baseline")
    txn.write_table("a", values)

    txn.abort()

    assert writer.mirror_bytes == 0


def test_mapped_mirrors_leave_no_files_behind(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "mirrors"
    folder.mkdir()
    writer = store.writer(mirror="mmap", mirror_folder=str(folder))

    for step in range(1, 4):
        with writer.begin(step, "baseline") as txn:
            txn.write_table("t", np.full((64, 2), step, np.float32), options=TableOptions(scale=1.0))

    assert writer.mirror_bytes == 256
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    writer.close()


def test_a_document_too_deep_to_parse_is_corruption_not_a_crash(store: Store) -> None:
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
        txn.put_document("reader/0", {"a": "long" * 1000})
    reader = store.snapshot().readers[-1]
    deep = vectors.stored_as("reader/0.json.zst", b"[" * 200_000 + b"]" * 200_000)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(type(reader), "read_object", lambda self, path: deep)

    with monkey.context(), pytest.raises(CorruptStore, match="cannot be parsed"):
        reader.read_document("reader/0")
    monkey.undo()


def test_a_refused_restore_leaves_no_state_that_was_rolled_back(store: Store) -> None:
    """The head had moved, the mirrors had not: the next baseline committed what the rollback had taken back."""
    writer = store.writer()
    with writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    with writer.begin(2) as txn:
        txn.write_rows("t", np.arange(4), np.full((4, 2), 2, np.float32))
    unfinished = writer.begin(3)
    unfinished.write_rows("t", np.asarray([0]), np.full((1, 2), 3, np.float32))
    store.rollback(2)

    with pytest.raises(BadShape):
        writer.restore({"t": {"values": np.empty((3, 2), np.float32)}})

    assert not writer.is_synced
    with pytest.raises(BadInput, match="has ended"):
        unfinished.commit()
    assert writer.begin(3, "baseline").needs_whole_tables == ["t"]


def test_a_refused_refinement_of_one_shard_leaves_the_others_as_they_were(store: Store) -> None:
    """The shards before it kept codes of the finer scale: their next rows were committed and could not be read."""
    tiles = [Rectangle((0, 4), (0, 2)), Rectangle((4, 8), (0, 2))]
    parts = [np.full((4, 2), 3, np.float32), np.full((4, 2), 2**20, np.float32)]
    writer = store.writer(shards={"t": tiles})
    with writer.begin(1) as txn:
        txn.declare_tables({"t": [Declaration(part, {}, TableOptions(scale=1.0)) for part in parts]})
        for tile, part in zip(tiles, parts, strict=True):
            txn.write_table("t", part, rectangle=tile)
    writer.restore()

    with writer.begin(2) as txn:
        with pytest.raises(BadInput, match="cannot be refined"):
            txn.refine_scale("t", 4)
        for tile, part in zip(tiles, parts, strict=True):
            txn.write_rows("t", np.asarray([tile.rows[0]]), part[:1] + 2, rectangle=tile)

    expected = np.concatenate(parts)
    expected[[0, 4]] += 2
    assert np.array_equal(store.snapshot().table("t").read(), expected)


def test_a_table_without_rows_does_not_make_every_save_a_full(store: Store) -> None:
    """Its one-dimensional slot seemed to be cut into other column shards than in the store."""
    tile = Rectangle((0, 0), (0, 4))
    writer = store.writer(shards={"empty": [tile]})
    with writer.begin(1) as txn:
        values, slots = np.empty((0, 4), np.float32), {"m": np.empty(0, np.float32)}
        txn.declare_tables({"empty": [Declaration(values, slots, TableOptions(scale=1.0))]})
        txn.write_table("empty", values, slots=slots)

    assert writer.begin(2).kind == "delta"


HALVES = [Rectangle((0, 2), (0, 2)), Rectangle((2, 4), (0, 2))]


@pytest.mark.parametrize("order", ["in a delta", "in a delta, after its rows", "after a shard", "and a shard left out"])
def test_a_table_that_was_declared_out_of_order_is_never_committed(order: str, store: Store) -> None:
    """The commit was acknowledged; the table could not be read, had another scale, or lacked rows."""
    values = np.full((2, 2), 3, np.float32)
    old, new = ([Declaration(values, {}, TableOptions(scale=scale))] * 2 for scale in (1.0, 0.25))
    writer = store.writer(shards={"t": HALVES, "u": HALVES})
    with writer.begin(1) as txn:
        txn.declare_tables({"t": old})
        for tile in HALVES:
            txn.write_table("t", values, rectangle=tile)
    txn = writer.begin(2)

    def save() -> None:
        if order == "in a delta, after its rows":
            txn.write_rows("t", np.asarray([0]), values[:1] + 2, rectangle=HALVES[0])
        if order.startswith("in a delta"):
            txn.declare_tables({"t": new})
        txn.declare_tables({"u": old})
        txn.write_table("u", values, rectangle=HALVES[0])
        if order == "after a shard":
            txn.declare_tables({"u": new})
        txn.commit()

    with pytest.raises(BadInput, match=r"begin a baseline|before writing|not written"):
        save()
    txn.abort()

    assert np.array_equal(store.snapshot().table("t").read(), np.full((4, 2), 3))
    assert store.snapshot().step == 1


def test_a_compaction_whose_work_was_given_up_and_deleted_is_abandoned() -> None:
    """It raised MissingObject for its own receipt, as if the store had lost data."""
    files, is_deleted = IsolatedMemoryFileSystem(), [False]
    other = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    with other.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", np.zeros((4, 2), np.float32), options=TableOptions(scale=1.0))
        for step in (1, 2):
            with writer.begin(step) as txn:
                txn.write_rows("t", np.arange(4), np.full((4, 2), step, np.float32))

    def at_call(call: Call) -> None:
        if call.operation == "read" and call.path.endswith(".receipt.json.zst") and not is_deleted[0]:
            is_deleted[0] = True
            collect_garbage(other, grace_s=0, orphan_age_s=0, dry_run=False, force=True)

    store = Store.open_on(storage_from_filesystem(FaultyFileSystem(files, on_call=at_call), "/root"), threads=1)

    report = compact_run(store, run=(0, 3))

    assert is_deleted[0]
    assert report.outcome == "abandoned"
    assert "marked for deletion" in report.reason
    assert np.array_equal(other.snapshot().table("t").read(), np.full((4, 2), 2))


def test_chunks_of_exact_rows_are_no_larger_than_those_of_codes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks had up to 2^20 rows of any width: no reader accepts a chunk of so many wide rows."""
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 64)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", np.full((8, 8), np.nan, np.float32), options=TableOptions(scale=1.0, nonfinite="escape"))

    escape = store.snapshot().readers[0].manifest.parts[0].escape

    assert escape is not None
    assert escape.arrays["values"].chunk_rows == 2
    assert np.isnan(store.snapshot().table("t").read()).all()


def test_a_save_that_cannot_follow_a_compaction_keeps_the_writers_state() -> None:
    """The writer stood at the new head with the old chain's state: its next delta was refused as DoesNotApply.

    Then a save that a look at the log would have served failed for want of that look, in the training's own thread.
    """
    files = IsolatedMemoryFileSystem()
    values = np.zeros((4, 2), np.float32)
    other = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    fs = FaultyFileSystem(files)
    store = Store.open_on(storage_from_filesystem(fs, "/root"), threads=1)
    writer = store.writer()
    with writer.begin(0) as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))
    for step in (1, 2, 3):
        values[step] = step
        with writer.begin(step) as txn:
            txn.write_rows("t", np.asarray([step]), values[[step]])
    assert compact_run(other, run=(0, 3)).outcome == "committed"
    before, incomplete = writer.head.record.v, writer.begin(4, kind="baseline")
    # Behind the newest record and the one that is not there yet: the manifest of the compacted segment.
    fs.arm(Fault(FaultKind.FAIL_BEFORE, at=len(fs.calls) + 2))

    with pytest.raises(BadInput):
        incomplete.commit(user={"no JSON": object()})  # type: ignore[dict-item]
    assert fs.hits
    incomplete.abort()
    assert writer.head.record.v == before
    with writer.begin(4) as txn:
        txn.write_rows("t", np.asarray([0]), values[[3]])

    assert np.array_equal(store.snapshot().table("t").read(), values[[3, 1, 2, 3]])


def test_a_save_whose_chain_was_compacted_away_is_not_called_corrupt() -> None:
    """A one-shot delta reads which rows the chain changed: it raised MissingObject, "run `cnr verify`".

    It is so where the log cannot be read when the save asks it for compactions.
    """
    files = IsolatedMemoryFileSystem()
    values = np.zeros((4, 2), np.float32)
    other = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    fs = FaultyFileSystem(files)
    store = Store.open_on(storage_from_filesystem(fs, "/root"), threads=1)
    writer = store.writer()
    with writer.begin(0) as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))
    rows = np.asarray([0, 2])  # a gap between them, or their ids need no object
    for step in (1, 2, 3):
        values[rows] = step
        with writer.begin(step) as txn:
            txn.write_rows("t", rows, values[rows])

    txn = writer.begin(4, base="baseline")
    txn.write_rows("t", rows, values[rows])
    assert compact_run(other, run=(1, 4)).outcome == "committed"
    policy = RetentionPolicy(keep_last=1)
    collect_garbage(other, policy=policy, grace_s=0.0, orphan_age_s=86_400.0, dry_run=False, force=True)
    fs.arm(Fault(FaultKind.FAIL_BEFORE, at=len(fs.calls)))
    with pytest.raises(DoesNotApply, match="compacted and deleted"):
        txn.commit()
    txn.abort()
    with writer.begin(4, base="baseline") as again:
        again.write_rows("t", rows, values[rows])

    assert len(store.head().record.chain) == 2
    assert np.array_equal(store.snapshot().table("t").read(), values)


def test_rows_of_the_table_that_had_the_name_before_are_not_read(store: Store) -> None:
    """If a hashed table is dropped and created in one save, the chain still has the keys of the old one."""
    options = TableOptions(scale=1.0)
    with store.writer() as writer:
        for step, keys in enumerate(([2, 77], [5])):
            with writer.begin(step) as txn:
                if step:
                    txn.drop_table("t")
                txn.create_table("t", dim=2, options=options)
                txn.write_rows("t", np.asarray(keys), np.ones((len(keys), 2), np.float32))

    assert len(store.head().record.chain) == 2
    assert store.snapshot().table("t").read_all()[0].tolist() == [5]


def test_a_save_refers_to_dense_tensors_where_compaction_has_put_them(store: Store) -> None:
    """It read them from the segment that was compacted, and failed as DoesNotApply once that was deleted."""
    values = np.zeros((4, 2), np.float32)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))
            txn.put_dense({"w": np.arange(3, dtype=np.float32)})
        with writer.begin(step=2) as txn:
            txn.write_rows("t", np.asarray([1]), values[[1]] + 1)
        late = writer.begin(step=3)
        assert compact_run(store, run=(0, 2)).outcome == "committed"
        late.write_rows("t", np.asarray([2]), values[[2]] + 2)
        late.commit()
        policy = RetentionPolicy(keep_last=1)
        collect_garbage(store, policy=policy, grace_s=0.0, orphan_age_s=86_400.0, dry_run=False, force=True)
        time.sleep(0.002)  # the collection deletes what was given up before its own millisecond
        collect_garbage(store, policy=policy, grace_s=0.0, orphan_age_s=86_400.0, dry_run=False, force=True)
        with writer.begin(step=4) as txn:
            txn.write_rows("t", np.asarray([3]), values[[3]] + 3)

    assert store.snapshot().dense["w"].segment == store.head().record.chain[0].seg
    assert store.snapshot().read_dense("w").tolist() == [0, 1, 2]


def test_a_scale_is_not_refined_beyond_what_the_codes_of_the_chain_allow(store: Store) -> None:
    """A row that had once been large, in a chain refined by 10 halvings, made an acknowledged save unreadable."""
    values = np.full((3, 2), 2.0**21, np.float32)
    rows = np.arange(3)

    def refine(step: int, halvings: int) -> None:
        with store.writer() as writer:
            writer.restore()
            with writer.begin(step=step) as txn:
                txn.refine_scale("t", halvings)

    with store.writer() as writer:
        with writer.begin(step=0) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))
        for step, sign in ((1, -1), (2, 1)):
            with writer.begin(step=step) as txn:
                txn.write_rows("t", rows, sign * values)
        with writer.begin(step=3) as txn:
            txn.write_rows("t", rows, np.ones((3, 2), np.float32))

    with pytest.raises(BadInput, match="9 halvings apart"):
        refine(4, 9)
    refine(4, 8)
    with pytest.raises(BadInput, match="compact"):
        refine(5, 1)
    assert np.array_equal(store.snapshot().table("t").read(), np.ones((3, 2)))
    compact_run(store, run=(1, 5))
    assert np.array_equal(store.snapshot().table("t").read(), np.ones((3, 2)))
    compact_run(store, run=(0, 2))
    refine(5, 8)

    assert np.array_equal(store.snapshot().table("t").read(), np.ones((3, 2)))


def test_a_table_of_two_parts_is_cut_to_the_size_of_the_first(store: Store) -> None:
    """The save was refused as DoesNotApply, and again after each restore: a part was compared with the whole table."""
    values = write_in_halves_and_resize(store, 4)

    assert np.array_equal(store.snapshot().table("t").read(), values[:4])
    assert verify_store(store, deep=True).is_sound


def test_a_name_passes_from_a_dense_table_to_a_hashed_one_in_one_save(store: Store) -> None:
    """Its keys were added to the mirror of the earlier table: unreadable add rows, and an IndexError."""
    options = TableOptions(scale=1.0)
    with store.writer() as writer:
        with writer.begin(step=0) as txn:
            txn.write_table("t", np.ones((6, 2), np.float32), options=options)
        for step, keys in enumerate(([2, 77], [3, 78]), start=1):
            with writer.begin(step, "baseline" if step == 1 else "delta") as txn:
                if step == 1:
                    txn.drop_table("t")
                    txn.create_table("t", dim=2, options=options)
                txn.write_rows("t", np.asarray(keys), np.full((2, 2), step, np.float32))

    keys, arrays = store.snapshot().table("t").read_all()
    assert keys.tolist() == [2, 3, 77, 78]
    assert arrays["values"][:, 0].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("part", ["store", "snapshot", "table", "loader"])
def test_what_belongs_to_a_process_says_so_when_it_is_pickled(store: Store, part: str) -> None:
    """A regression: pickling failed with "cannot pickle '_queue.SimpleQueue' object"."""
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("user", np.zeros((2, 2), np.float32))
    with Loader(store) as loader:
        snapshot = store.snapshot()
        parts = {"store": store, "snapshot": snapshot, "table": snapshot.table("user"), "loader": loader}

        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="be pickled or copied: send the URL"):
                copied(parts[part])


def test_a_folder_without_its_identity_names_what_else_it_has(store: Store, tmp_path: Path) -> None:
    """A regression: a copy without ``cnr.json`` was called no store, whatever else it had."""
    (tmp_path / "store" / "cnr.json").unlink()

    with pytest.raises(NotAStore, match=r"no cnr.json, but commits/, .*: it was deleted or not copied"):
        Store.open(store.url)
