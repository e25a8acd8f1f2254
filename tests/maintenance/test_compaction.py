"""A compaction from start to end: every value that is read stays the same, also beside other processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import (
    BadInput,
    CompactionPolicy,
    CorruptStore,
    RetentionPolicy,
    StorageFailure,
    Store,
    collect_garbage,
    verify_store,
)
from cnr_store.errors import CommitStateUnknown, ReadOnlyStore
from cnr_store.format.documents import pack, sha256
from cnr_store.format.layout import MANIFEST, RECEIPT, segment_prefix
from cnr_store.log.author import writer_info
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.compaction.lease import LeasePlace
from cnr_store.storage import storage_from_filesystem
from cnr_store.write.writer import Writer
from format_spec.reader.compare import compare
from tests.support.compacted import Training, manifest_in, objects_in, write_in_halves_and_resize
from tests.support.documents import document_of
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
STORES = sorted(path.parent.name for path in GOLDEN.glob("*/store"))
ALL = (0, 4)
"""The chain of the fixture: a baseline and three deltas."""

QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=2)


# ---- what is read stays the same


@pytest.mark.parametrize("name", STORES)
def test_every_run_of_a_golden_store_reads_the_same_compacted(name: str, tmp_path: Path) -> None:
    chain = Store.open(str(GOLDEN / name / "store"), threads=1).head().record.chain
    runs = [(start, stop) for start in range(len(chain)) for stop in range(start + 2, len(chain) + 1)]
    assert runs or name == "one_shot" or len(chain) < 2
    for run in runs:
        root = tmp_path / f"{run[0]}-{run[1]}"
        shutil.copytree(GOLDEN / name / "store", root)
        with Store.open(str(root), fsync=False, threads=2) as store:
            before = store.snapshot()
            expected = bytes_of(before)

            report = compact_run(store, run=run)

            assert report.outcome == "committed"
            assert (report.chain_before, report.chain_after) == (len(chain), len(chain) - len(report.run) + 1)
            after = store.snapshot()
            assert bytes_of(after) == expected
            assert bytes_of(store.snapshot(version=before.version)) == expected
            assert (after.record.checkpoint, after.record.step) == (before.record.checkpoint, before.record.step)
            assert after.tables == before.tables
            found = verify_store(store, deep=True)
            assert found.is_sound, found.problems
        compare(root)


def test_the_report_counts_what_was_compacted(store: Store, training: Training) -> None:
    chain = store.head().record.chain

    report = compact_run(store, run=ALL)

    record = store.head().record
    merged = record.chain[0]
    assert (record.kind, report.version, report.url) == ("compact", record.v, store.url)
    assert report.run == tuple(entry.seg for entry in chain)
    assert (report.kind, report.l0, report.l1) == ("baseline", 0, 4)
    assert (report.bytes_in, report.rows_in) == (sum(e.size_bytes for e in chain), sum(e.rows for e in chain))
    assert (report.bytes_out, report.rows_out) == (merged.size_bytes, merged.rows) == (merged.size_bytes, 40 + 9 + 17)
    assert report.bytes_out == sum(map(len, objects_in(store, merged.seg).values())) - sum(
        len(data) for path, data in objects_in(store, merged.seg).items() if path.endswith(RECEIPT)
    )


def test_compacted_until_nothing_is_left_a_chain_is_as_the_policy_wants_it(store: Store) -> None:
    policy = CompactionPolicy(max_chain=3, fanout=2, max_restore_ratio=3)
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        for _ in range(9):
            training.delta(writer)
            while compact_run(store, policy=policy).outcome != "nothing":
                pass
            chain = store.head().record.chain
            assert len(chain) <= 3
            assert sum(entry.size_bytes for entry in chain) <= 3 * chain[0].size_bytes
            training.check()
    assert verify_store(store, deep=True).is_sound


def test_a_head_that_needs_nothing_costs_a_few_reads_and_no_write() -> None:
    files = FaultyFileSystem(IsolatedMemoryFileSystem())
    store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    with store.writer() as writer:
        Training(store).full(writer)
    files.calls.clear()

    assert compact_run(store).outcome == "nothing"

    assert files.count("write", "create", "delete", "list") == 0
    assert files.count("read") <= 3


def test_a_dry_run_says_what_would_be_compacted_and_writes_nothing(store: Store, training: Training) -> None:
    before = [stat.key for stat in store.storage.list_objects("")]

    report = compact_run(store, policy=CompactionPolicy(fanout=3, max_restore_ratio=9), dry_run=True)

    assert (report.outcome, report.kind, len(report.run), report.tasks) == ("planned", "delta", 3, 1)
    assert [stat.key for stat in store.storage.list_objects("")] == before


def test_a_run_that_is_none_is_refused(store: Store, training: Training) -> None:
    with pytest.raises(BadInput, match="at least two segments"):
        compact_run(store, run=(3, 5))


def test_a_store_that_can_only_be_read_is_not_compacted(store: Store, training: Training) -> None:
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), writer_features=("unheard_of",))
    store.internals.log.append(head, draft, rebase_expire)

    with pytest.raises(ReadOnlyStore, match="unheard_of"):
        compact_run(store, run=ALL)


def test_a_branch_is_compacted_in_its_own_log(store: Store, training: Training) -> None:
    expected = bytes_of(store.snapshot())
    branch = store.fork("trial")
    before = store.head()

    report = compact_run(branch, run=ALL)

    assert (report.outcome, len(branch.head().record.chain)) == ("committed", 1)
    assert store.head().digest == before.digest
    assert bytes_of(branch.snapshot()) == bytes_of(store.snapshot()) == expected


@pytest.mark.parametrize("num_rows", [0, 4, 6, 8])
def test_a_run_that_resizes_a_table_is_sound_compacted(store: Store, num_rows: int) -> None:
    """Regression: the base digest was of another number of rows, and verify reported damage."""
    write_in_halves_and_resize(store, num_rows)
    expected = bytes_of(store.snapshot())

    assert compact_run(store, run=(1, 3)).kind == "delta"

    assert bytes_of(store.snapshot()) == expected
    report = verify_store(store, deep=True)
    assert report.is_sound, report.problems


# ---- beside others


def at_first_task(action: Callable[[], Any]) -> Callable[[str, int, int], None]:
    """A progress callback that calls ``action`` once, after the first task."""
    left = [action]

    def progress(stage: str, done: int, total: int) -> None:
        if done and left:
            left.pop()()

    return progress


def test_a_live_writer_goes_on_before_during_and_after(store: Store) -> None:
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        training.delta(writer)
        training.delta(writer)

        during = compact_run(store, run=(0, 3), progress=at_first_task(lambda: training.delta(writer)))
        assert (during.outcome, during.chain_after) == ("committed", 2)
        training.check()
        training.delta(writer)
        training.check()
        training.delta(writer, before_commit=lambda: compact_run(store, run=(1, 3)))
        assert writer.is_synced
        training.check()
        training.full(writer)
        training.delta(writer)
        training.check()

    assert verify_store(store, deep=True).is_sound
    assert compare(store.url) > 0


def test_a_writer_keeps_its_mirrors_if_the_compacted_chain_does_not_open() -> None:
    """Regression: the save succeeded, but the next one required a restore of all tables."""
    files, down = IsolatedMemoryFileSystem(), False

    def fail_reads_of_manifests(call: Call) -> None:
        if down and call.operation == "read" and call.path.endswith(MANIFEST):
            raise OSError(5, "the backend is down")

    view = FaultyFileSystem(files, on_call=fail_reads_of_manifests)
    store = Store.create_on(storage_from_filesystem(view, "/root"), threads=1, retry=QUICK)
    training = Training(store)
    with store.writer() as writer:
        compact_behind(training, writer, files)
        down = True
        training.delta(writer)
        with pytest.raises(StorageFailure):
            writer.begin(training.step + 1)
        down = False
        training.delta(writer)

        assert [entry.kind for entry in store.head().record.chain] == ["baseline", "delta", "delta"]
        training.check()
    assert verify_store(store, deep=True).is_sound


def test_a_reply_cut_while_the_compacted_chain_is_opened_costs_nothing() -> None:
    """Regression: the cut reply was treated as a damaged manifest, and the mirrors were dropped."""
    files = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1, retry=QUICK)
    training = Training(store)
    with store.writer() as writer:
        path, whole = compact_behind(training, writer, files)
        files.pipe_file(path, whole[:100])
        training.delta(writer)
        files.pipe_file(path, whole)
        training.delta(writer)

        training.check()


def test_a_damaged_compacted_chain_is_refused_once_until_a_baseline() -> None:
    files = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1, retry=QUICK)
    training = Training(store)
    with store.writer() as writer:
        path, whole = compact_behind(training, writer, files)
        files.pipe_file(path, whole[:100])
        training.delta(writer)

        with pytest.raises(CorruptStore):
            writer.begin(training.step + 1)
        assert not writer.is_synced
        training.full(writer)
        training.delta(writer)
        training.check()


def compact_behind(training: Training, writer: Writer, files: IsolatedMemoryFileSystem) -> tuple[str, bytes]:
    """Save twice, and let another process compact both; return the key of the new manifest, and its bytes."""
    training.full(writer)
    training.delta(writer)
    with Store.open_on(storage_from_filesystem(files, "/root"), threads=1) as other:
        assert compact_run(other, run=(0, 2)).outcome == "committed"
        path = f"/root/{segment_prefix(other.head().record.chain[0].seg)}{MANIFEST}"
    return path, files.cat_file(path)


def test_a_restored_writer_goes_on_from_a_compacted_chain(store: Store, training: Training) -> None:
    compact_run(store, run=ALL)

    with store.writer() as writer:
        values = {name: np.zeros_like(array) for name, array in training.tables.items()}
        slots = {name: np.zeros_like(array) for name, array in training.slots.items()}
        writer.restore({name: {"values": values[name], "m": slots[name]} for name in values})
        assert all(values[name].tobytes() == training.tables[name].tobytes() for name in values)
        assert all(slots[name].tobytes() == training.slots[name].tobytes() for name in slots)
        training.delta(writer)

    training.check()
    assert [entry.kind for entry in store.head().record.chain] == ["baseline", "delta"]


def test_one_shot_deltas_go_on_from_a_compacted_baseline(store: Store) -> None:
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        training.delta(writer, base="baseline")
        assert compact_run(store, run=(0, 2)).outcome == "committed"
        training.delta(writer, base="baseline")
        training.delta(writer, base="baseline")

    training.check()
    assert len(store.head().record.chain) == 2


def test_a_compaction_behind_the_begin_of_a_save_is_gone_on_from(store: Store) -> None:
    """A one-shot delta applied to no chain then; a baseline may need segments that are deleted meanwhile."""
    training = Training(store)

    def compact_and_delete() -> None:
        assert compact_run(store, run=(0, 2)).outcome == "committed"
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True, dry_run=False
        )

    with store.writer() as writer:
        training.full(writer)
        training.delta(writer)
        training.delta(writer, base="baseline", before_commit=compact_and_delete)
        assert len(store.head().record.chain) == 2
        with writer.begin(training.step, "baseline"):
            compact_and_delete()

    snapshot = store.snapshot()
    assert [entry.kind for entry in snapshot.record.chain] == ["baseline"]
    assert snapshot.read_dense("bias").tobytes() == training.bias.tobytes()
    for name, values in training.tables.items():
        assert snapshot.table(name).read().tobytes() == values.tobytes()


def test_a_tag_that_lands_meanwhile_is_kept(store: Store, training: Training) -> None:
    before = store.latest_version()

    report = compact_run(store, run=ALL, progress=at_first_task(lambda: store.tag("good")))

    assert report.outcome == "committed"
    assert store.tags() == {"good": before}
    training.check()


@pytest.mark.parametrize("what", ["baseline", "rollback", "compact"])
def test_a_run_that_is_gone_is_given_up(store: Store, training: Training, what: str) -> None:
    first = store.head().record.v - 1

    def act() -> None:
        if what == "baseline":
            with store.writer() as writer:
                training.full(writer)
        elif what == "rollback":
            store.rollback(first)
        else:
            assert compact_run(store, run=(1, 4), force=True).outcome == "committed"

    report = compact_run(store, run=ALL, progress=at_first_task(act))

    assert (report.outcome, report.version) == ("abandoned", None)
    assert "no longer in the chain" in report.reason
    assert store.head().record.kind in ("baseline", "rollback", "compact")
    if what != "rollback":
        training.check()


def test_a_chain_replaced_and_deleted_while_it_is_read_is_given_up() -> None:
    """Regression: this was reported as damage, after which maintenance deletes nothing."""
    files = IsolatedMemoryFileSystem()
    other = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    training = Training(other)
    with other.writer() as writer:
        training.full(writer)
        training.delta(writer)
    left = [True]

    def replace_the_chain(call: Call) -> None:
        if left and call.path.endswith(MANIFEST):
            left.clear()
            assert compact_run(other, run=(0, 2)).outcome == "committed"
            policy = RetentionPolicy(keep_last=1)
            for _ in range(2):
                collect_garbage(other, policy=policy, grace_s=0, orphan_age_s=0, dry_run=False, force=True)

    view = FaultyFileSystem(files, on_call=replace_the_chain)
    store = Store.open_on(storage_from_filesystem(view, "/root"), threads=1)

    report = compact_run(store, run=(0, 2))

    assert (report.outcome, report.reason) == ("abandoned", "the chain was replaced while it was read")
    training.check()


def test_a_transaction_that_was_declared_dead_is_given_up(store: Store, training: Training) -> None:
    def abort() -> None:
        lease = LeasePlace(store.storage, store.internals.log).read()
        assert lease is not None
        head = store.head()
        draft = draft_after(head.record, "expire", writer_info(), aborted={lease.txn: 0})
        store.internals.log.append(head, draft, rebase_expire)

    report = compact_run(store, run=ALL, progress=at_first_task(abort))

    assert report.outcome == "abandoned"
    assert "marked for deletion" in report.reason
    again = compact_run(store, run=ALL)
    assert (again.outcome, again.reused_tasks) == ("committed", 0)
    training.check()


def test_a_death_that_was_forgotten_meanwhile_is_seen_all_the_same(store: Store, training: Training) -> None:
    """One record marks the transaction, the next one removes the mark. Both have to be read."""

    def abort() -> None:
        lease = LeasePlace(store.storage, store.internals.log).read()
        assert lease is not None
        for aborted in ({lease.txn: 0}, {}):
            head = store.head()
            draft = draft_after(head.record, "expire", writer_info(), aborted=aborted)
            store.internals.log.append(head, draft, rebase_expire)

    assert compact_run(store, run=ALL, progress=at_first_task(abort)).outcome == "abandoned"


def test_an_unknown_outcome_is_said_and_what_was_written_stays() -> None:
    inner = IsolatedMemoryFileSystem()
    quick = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)
    store = Store.create_on(storage_from_filesystem(inner, "/root"), threads=1, retry=quick)
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        training.delta(writer)
    calm = FaultyFileSystem(inner.fork())
    compact_run(Store.open_on(storage_from_filesystem(calm, "/root"), threads=1, retry=quick), run=(0, 2))
    commit = next(call.index for call in calm.calls if call.operation == "create" and "/commits/" in call.path)
    faulty = FaultyFileSystem(inner, fault=Fault(FaultKind.DELAYED_PUT, commit, calls=1000, delay_calls=2000))
    crashing = Store.open_on(storage_from_filesystem(faulty, "/root"), threads=1, retry=quick)

    with pytest.raises(CommitStateUnknown):
        compact_run(crashing, run=(0, 2))
    faulty.deliver_delayed()

    assert store.head().record.kind == "compact"
    training.check()
    assert compact_run(store).outcome == "nothing"


# ---- dense tensors


def test_a_delta_finds_the_tensors_of_a_segment_compacted_meanwhile(store: Store, training: Training) -> None:
    with store.writer() as writer:
        writer.restore()
        training.delta(writer, before_commit=lambda: compact_run(store, run=ALL))
        snapshot = store.snapshot()
        assert {entry.segment for entry in snapshot.dense.values()} == {snapshot.readers[0].name}
        assert snapshot.readers[1].own.dense == {}
        training.check()
        training.delta(writer)
        training.check()

    assert verify_store(store, deep=True).is_sound
    compare(store.url)
    assert compact_run(store, run=(0, 3)).outcome == "committed"
    training.check()


def test_a_compacted_delta_holds_the_tensors_that_its_run_held(store: Store, training: Training) -> None:
    training.bias = training.bias + 1
    with store.writer() as writer:
        writer.restore()
        with writer.begin(training.step) as txn:
            txn.put_dense({"bias": training.bias})
            txn.put_document("reader/0", {"at": training.step})
    length = len(store.head().record.chain)
    report = compact_run(store, run=(1, length))
    after = store.snapshot()

    assert report.kind == "delta"
    assert after.readers[1].own.dense.keys() == {"bias"}
    assert after.dense.keys() == {"bias", "weight"}
    training.check()


# ---- what does not add up


def test_a_run_that_leads_to_another_state_is_not_committed(store: Store, training: Training) -> None:
    """One delta is missing from the chain, and the next one claims the missing one's end state."""
    head = store.head()
    baseline, _, second, _ = head.record.chain
    behind = manifest_in(store, second.seg)
    parts = tuple(msgspec.structs.replace(part, base_digest=None) for part in behind.parts)
    moved = pack(document_of(msgspec.structs.replace(behind, l0=baseline.l1, parts=parts)))
    store.storage.put(segment_prefix(second.seg) + MANIFEST, moved)
    chain = (baseline, msgspec.structs.replace(second, l0=baseline.l1, sha256=sha256(moved)))
    draft = draft_after(head.record, "compact", writer_info(), chain=chain, checkpoint=second.l1)
    before = store.internals.log.append(head, draft, rebase_expire)

    with pytest.raises(CorruptStore, match="merges to state digest"):
        compact_run(store, run=(0, 2))

    assert store.head().digest == before.digest
