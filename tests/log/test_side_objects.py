"""Side objects on real stores: when they go, when they stay, and what does without them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import (
    CorruptStore,
    RetentionPolicy,
    Store,
    TableOptions,
    collect_garbage,
    repair_store,
    verify_store,
)
from cnr_store.errors import CorruptRecord, MissingObject, TransactionAborted
from cnr_store.format.commit_record import LogEntry, decode_record, sealed
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.layout import STATE, branch_prefix, state_key
from cnr_store.format.records import Overflow
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, draft_branch, rebase_tag
from cnr_store.log.side_objects import complete
from cnr_store.relay.relay import Relay
from cnr_store.storage import open_storage

ROWS = 4
LONG = "x" * 900


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Versions 2 and 3 hold 1.0 and 2.0."""
    with Store.create(str(tmp_path / "store"), fsync=False, threads=1) as store:
        save(store, 1.0, 2.0)
        yield store


def save(store: Store, *values: float) -> int:
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        for value in values:
            with writer.begin(int(value), kind="baseline") as txn:
                txn.write_table("t", np.full((ROWS, 2), value, np.float32), options=TableOptions(scale=1.0))
        return writer.head.record.v


def tag(store: Store, start: int, stop: int) -> None:
    for number in range(start, stop):
        store.tag(f"{number} {LONG}", 3)


def names(root: Path | Store) -> set[str]:
    root = Path(root.storage.path) if isinstance(root, Store) else root
    return {path.stem for path in (root / STATE).glob("*.json")}


def root_of(tmp_path: Path) -> Path:
    return tmp_path / "store"


def grow_old(root: Path, days: float = 8.0) -> None:
    for path in (root / STATE).glob("*"):
        stamp = time.time() - days * 86_400
        os.utime(path, (stamp, stamp))


def collect(store: Store, **options: Any) -> Any:
    options = {"policy": RetentionPolicy(keep_last=1), "grace_s": 0.0, "force": True, "dry_run": False, **options}
    return collect_garbage(store, **options)


def expired(store: Store) -> None:
    """Versions up to here expire, but for those with a name: a newer checkpoint is there."""
    save(store, 9.0)
    collect(store)


def test_what_only_expired_versions_named_goes_when_it_is_old(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 30)
    expired(store)
    before, tags = names(root_of(tmp_path)), store.tags()
    young = collect(store)
    assert names(root_of(tmp_path)) == before
    grow_old(root_of(tmp_path))

    report = collect(store)

    left = names(root_of(tmp_path))
    assert left == set(store.head().side_objects) < before
    assert (report.deleted_objects - young.deleted_objects, report.outcome) == (len(before - left), "collected")
    assert store.tags() == tags
    assert verify_store(store).is_sound


def test_untagging_and_two_collections_leave_nothing(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 30)
    for number in range(30):
        store.untag(f"{number} {LONG}")
    expired(store)
    grow_old(root_of(tmp_path))

    collect(store)

    assert names(root_of(tmp_path)) == set()
    assert store.tags() == {}


def test_a_dry_run_lists_side_objects_that_would_go_and_changes_nothing(store: Store, tmp_path: Path) -> None:
    """It said that there was nothing to do."""
    tag(store, 0, 30)
    store.tag("last", store.latest_version())
    for number in range(30):
        store.untag(f"{number} {LONG}")
    store.untag("last")
    save(store, 9.0)
    grow_old(root_of(tmp_path))
    before = {path: path.stat().st_size for path in root_of(tmp_path).rglob("*") if path.is_file()}

    planned = collect(store, dry_run=True)

    assert {path: path.stat().st_size for path in root_of(tmp_path).rglob("*") if path.is_file()} == before
    assert (planned.outcome, planned.deleted_objects) == ("planned", 0)
    done = collect(store)
    assert sorted(planned.side_objects) == sorted(done.side_objects)
    assert planned.side_object_bytes == done.side_object_bytes
    assert {state_key(name) for name in names(root_of(tmp_path))}.isdisjoint(done.side_objects)
    assert sum(size for path, size in before.items() if path.parent.name == "state") == done.side_object_bytes > 0
    again = collect(store, dry_run=True)
    assert (again.outcome, again.side_objects) == ("clean", ())


def test_a_dry_run_spares_young_side_objects_and_those_of_the_head(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 30)
    expired(store)

    assert collect(store, dry_run=True).side_objects == ()
    grow_old(root_of(tmp_path))
    planned = collect(store, dry_run=True)

    assert planned.outcome == "planned"
    assert (
        set(planned.side_objects)
        == {state_key(name) for name in names(root_of(tmp_path)) - set(store.head().side_objects)}
        > set()
    )


def test_a_dry_run_lists_what_only_expiring_versions_need(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 30)
    save(store, 9.0)
    named = {state_key(name) for name in store.head().side_objects}
    for number in range(30):
        store.untag(f"{number} {LONG}")
    save(store, 10.0)
    grow_old(root_of(tmp_path))

    planned = collect(store, dry_run=True)

    assert named
    assert named <= set(planned.side_objects) == set(collect(store).side_objects)


def test_what_a_live_version_names_stays(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 30)
    named = set(store.head().side_objects)
    store.tag("kept", store.latest_version())
    expired(store)
    for number in range(30):
        store.untag(f"{number} {LONG}")
    grow_old(root_of(tmp_path))

    collect(store)

    assert named <= names(root_of(tmp_path))
    assert len(store.record(store.tags()["kept"]).tags) == 30


@pytest.mark.parametrize(("ahead", "stays"), [(0, False), (1, True), (5, True)])
def test_what_was_put_for_a_record_that_may_come_stays(store: Store, tmp_path: Path, ahead: int, stays: bool) -> None:
    """A writer may have been held up for weeks between its side object and its record."""
    collect(store)
    put = canonical_json(Overflow(v=store.latest_version() + ahead, branch="", tags={"a": 1}))
    store.storage.put(state_key(sha256(put)), put)
    grow_old(root_of(tmp_path))

    collect(store)

    assert (sha256(put) in names(root_of(tmp_path))) == stays


def test_what_cannot_be_read_or_is_no_side_object_stays(store: Store, tmp_path: Path) -> None:
    for key in (state_key("a" * 64), f"{STATE}notes.txt"):
        store.storage.put(key, b"{")
    grow_old(root_of(tmp_path))

    collect(store)

    assert {path.name for path in (root_of(tmp_path) / STATE).glob("*")} == {f"{'a' * 64}.json", "notes.txt"}


def test_side_objects_of_a_branch_go_when_it_has_been_dropped(store: Store, tmp_path: Path) -> None:
    branch = store.fork("trial")
    for number in range(12):
        branch.tag(f"{number} {LONG}", 0)
    named = set(branch.head().side_objects)
    grow_old(root_of(tmp_path))
    collect(store)
    assert named <= names(root_of(tmp_path))
    assert len(branch.tags()) == 12

    store.drop_branch("trial")
    collect(store)
    grow_old(root_of(tmp_path))
    collect(store)

    assert names(root_of(tmp_path)) == set()
    assert verify_store(store).is_sound


def test_side_objects_of_a_branch_that_is_being_forked_stay(store: Store, tmp_path: Path) -> None:
    """Its first record is there, and its pin is not yet."""
    point = store.head()
    log = store.internals.log.below(branch_prefix("b" * 32))
    log.append_first(draft_branch(point.record, "b" * 32, writer_info()), point)
    put = canonical_json(Overflow(v=0, branch="b" * 32, tags={"a": 1}))
    store.storage.put(state_key(sha256(put)), put)
    grow_old(root_of(tmp_path))

    collect(store)

    assert sha256(put) in names(root_of(tmp_path))


def lose_lists_of(store: Store, root: Path, version: int) -> LogEntry:
    """A record whose side objects were collected, as an old one's are; those that the newest names stay."""
    entry = store.internals.log.read(version)
    assert entry is not None
    for name in {*entry.side_objects} - {*store.head().side_objects}:
        (root / state_key(name)).unlink()
    bare = Store.open(store.url).internals.log.read(version)
    assert bare is not None
    assert bare.record.state is not None
    return bare


def test_an_old_version_reads_without_its_lists(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 12)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(3, kind="baseline") as txn:
            txn.write_table("t", np.zeros((ROWS, 2), np.float32), options=TableOptions(scale=1.0))
        with writer.begin(4) as txn:
            txn.write_rows("t", np.arange(4), np.full((4, 2), [[1], [2], [30], [40]], np.float32))
        version = writer.head.record.v
    before = store.snapshot(version)
    tables = before.tables
    tag(store, 12, 40)
    lose_lists_of(store, root_of(tmp_path), version)

    with Store.open(store.url) as again:
        assert np.array_equal(again.snapshot(version).table("t").read(), before.table("t").read())
        assert verify_store(again, all_versions=True, deep=True).is_sound
        back = again.rollback(version)
        assert again.snapshot(back).tables == tables
        assert len(again.tags()) == 40
        assert again.fork("trial", version).snapshot().tables == tables


def test_what_meets_lists_that_are_gone_is_not_committed(store: Store, tmp_path: Path) -> None:
    """A process that slept for weeks: that its transaction was given up may have stood in lists that are gone."""
    asleep = Store.open(store.url)
    head = asleep.head()
    tag(store, 0, 40)
    lose_lists_of(store, root_of(tmp_path), head.record.v + 10)
    newest = store.latest_version()

    draft = draft_after(head.record, "tag", writer_info(), name="late", target=3, tags={"late": 3})
    with pytest.raises(TransactionAborted):
        asleep.internals.log.append(head, draft, rebase_tag)

    assert store.latest_version() == newest


def test_a_reader_that_was_overtaken_by_a_collection_looks_again(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 20)
    other = Store.open(store.url)
    log, version = other.internals.log, store.latest_version()
    real, calls = log._bytes_at, []

    def overtaken(position: int) -> bytes | None:
        data = real(position)
        if position == version + 1 and data is None and not calls:
            calls.append(position)  # behind this look the store goes on, and the side objects go
            tag(store, 20, 60)
            lose_lists_of(store, root_of(tmp_path), version)
        return data

    log._bytes_at = overtaken  # type: ignore[method-assign]

    assert log.latest() == store.head()
    assert calls


def test_side_objects_that_are_no_layers_are_refused(store: Store) -> None:
    """Each has at most half the bytes of the one before it: what a record makes a reader take is bounded."""
    layers = [canonical_json(Overflow(v=1, branch="", tags={"a" * 100: 0, f"{n}": 0})) for n in range(2)]
    for data in layers:
        store.storage.put(state_key(sha256(data)), data)
    state = tuple(map(sha256, layers))

    with pytest.raises(CorruptStore, match=state[1]):
        complete(store.storage, LogEntry(msgspec.structs.replace(store.head().record, state=state), ""), {})


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"tags": {"a": 99}}, "names version 99, which is after it"),
        ({"kept": (2,)}, "keeps version 2, which is not below its floor"),
        ({"expired": (99,)}, "names version 99, which is after it"),
        ({"tags": {"both": 3}}, "both"),
    ],
)
def test_side_objects_that_contradict_their_record_are_refused(
    store: Store, lists: dict[str, Any], message: str
) -> None:
    """What a record says itself is sound here; only with its side objects it says what cannot be (CNR-LOG-61)."""
    store.set_channel("both", 3)
    data = canonical_json(Overflow(v=1, branch="", **lists))
    store.storage.put(state_key(sha256(data)), data)
    record = msgspec.structs.replace(store.head().record, state=(sha256(data),))

    with pytest.raises(CorruptRecord, match=message):
        complete(store.storage, LogEntry(record, ""), {})


def test_a_newest_record_without_its_lists_is_damage(store: Store, tmp_path: Path) -> None:
    tag(store, 0, 12)
    (name, *_) = store.head().side_objects
    (root_of(tmp_path) / state_key(name)).unlink()

    with Store.open(store.url) as again:
        with pytest.raises(MissingObject, match=name):
            again.head()
        report = verify_store(again)

    assert [(problem.kind, problem.path) for problem in report.problems] == [("missing_object", state_key(name))]


@pytest.mark.parametrize("damage", ["gone", "altered"])
def test_a_repair_finds_names_again_whose_side_object_is_lost(store: Store, tmp_path: Path, damage: str) -> None:
    tag(store, 0, 40)
    store.untag(f"7 {LONG}")
    store.set_channel("serving", 3)
    store.set_channel("gone", 3)
    store.drop_channel("gone")
    store.fork("trial", 3)
    newest = save(store, 5.0)
    before = store.head().record
    for name in store.head().side_objects:
        path = root_of(tmp_path) / state_key(name)
        path.write_bytes(b"{}") if damage == "altered" else path.unlink()

    with Store.open(store.url) as again:
        with pytest.raises(CorruptStore):
            again.head()
        report = repair_store(again, dry_run=False)
        after = again.head().record

        assert [action.kind for action in report.actions] == ["rollback"]
        assert (report.target, report.torn, report.lost) == (newest, (), ())
        assert (after.tags, after.channels) == (before.tags, before.channels)
        assert [pin.version for pin in after.pins.values()] == [3]
        assert after.pins.keys() == before.pins.keys()
        assert (after.chain, after.step) == (before.chain, before.step)
        assert repair_store(again, dry_run=True).actions == ()
        assert {problem.path for problem in verify_store(again).problems} <= {
            state_key(name) for name in names(root_of(tmp_path))
        }


def test_a_branch_whose_lists_are_lost_is_dropped(store: Store, tmp_path: Path) -> None:
    branch = store.fork("trial")
    for number in range(30):
        branch.tag(f"{number} {LONG}", 0)
    for name in branch.head().side_objects:
        (root_of(tmp_path) / state_key(name)).unlink()

    store.drop_branch("trial")

    assert store.branches() == {}


def relayed(store: Store, target: Path, **options: Any) -> None:
    Relay(store, open_storage(str(target)), **options).advance()


def test_a_relay_goes_past_versions_whose_lists_are_gone(store: Store, tmp_path: Path) -> None:
    relayed(store, tmp_path / "copy")
    tag(store, 0, 30)
    expired(store)
    grow_old(root_of(tmp_path))
    collect(store)

    relayed(store, tmp_path / "copy")

    with Store.open(str(tmp_path / "copy")) as copy:
        assert copy.head().record == store.head().record
        assert verify_store(copy).is_sound
    assert names(tmp_path / "copy") == set(store.head().side_objects)


def test_a_relay_lets_side_objects_go_that_its_newest_record_does_not_name(store: Store, tmp_path: Path) -> None:
    relayed(store, tmp_path / "copy")
    tag(store, 0, 30)
    policy = RetentionPolicy(keep_last=1)
    relayed(store, tmp_path / "copy", policy=policy)
    more = names(tmp_path / "copy")
    assert more > set(store.head().side_objects)
    grow_old(tmp_path / "copy")
    tag(store, 30, 31)

    relayed(store, tmp_path / "copy", policy=policy)

    assert names(tmp_path / "copy") == set(store.head().side_objects)
    with Store.open(str(tmp_path / "copy")) as copy:
        assert copy.tags() == store.tags()
        assert np.array_equal(copy.snapshot(3).table("t").read(), store.snapshot(3).table("t").read())


def test_a_record_that_takes_away_and_names_no_side_object_is_refused(store: Store) -> None:
    raw = msgspec.to_builtins(store.head().record) | {"removed": {"tags": ["a"]}}

    with pytest.raises(CorruptRecord, match="removes entries from lists"):
        decode_record(sealed(raw), raw["v"])
