"""Branches: a fork has a log of its own, shares what was there, and ends for good."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cnr_store import (
    BadInput,
    Conflict,
    CorruptStore,
    Store,
    TableOptions,
    Writer,
    export_snapshot,
    import_tensors,
    verify_store,
)
from cnr_store.errors import (
    BadName,
    BranchExists,
    BranchNotFound,
    CorruptRecord,
    Fenced,
    ReadOnlyStore,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.commit_record import encode_record
from cnr_store.format.layout import BRANCHES, DATA, branch_prefix, commit_key, hint_key
from cnr_store.format.records import Pin
from cnr_store.format.sizes import segment_sizes
from cnr_store.log import branches
from cnr_store.log.author import writer_info
from cnr_store.log.branches import Branch
from cnr_store.log.rebase import draft_after, draft_branch, rebase_expire, rebase_fence

ROWS, DIM = 6, 2


def save(writer: Writer, step: int, row: int, value: float) -> int:
    with writer.begin(step) as txn:
        txn.write_rows("t", np.array([row]), np.full((1, DIM), value, np.float32))
    return writer.head.record.v


def column(store: Store) -> list[float]:
    return [float(value) for value in store.snapshot().table("t").read()[:, 0]]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Steps 1 to 3: zeros, then row 0 is 1 and row 1 is 2."""
    url = f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path / "store")
    made = Store.create(url)
    with made.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=1.0))
        save(writer, 2, 0, 1)
        save(writer, 3, 1, 2)
    return made


def objects(store: Store, prefix: str = "") -> dict[str, bytes | None]:
    return {item.key: store.storage.read(item.key) for item in store.storage.list_objects(prefix)}


def uuid_of(store: Store, name: str) -> str:
    return branches.find_branch(store.head().record, name).uuid


def test_a_branch_has_the_state_of_its_fork_point_and_copies_nothing(store: Store) -> None:
    point = store.snapshot(step=2)
    data = objects(store, DATA)

    branch = store.fork("trial", point.version)

    assert column(branch) == [1, 0, 0, 0, 0, 0]
    assert (branch.branch, store.branch) == ("trial", None)
    assert (branch.snapshot().step, branch.latest_version()) == (2, 0)
    assert objects(store, DATA) == data


def test_record_zero_of_a_branch_names_branch_version_and_digest(store: Store) -> None:
    point = store.internals.log.read(store.snapshot(step=2).version)
    assert point is not None

    branch = store.fork("trial", point.record.v)
    first = branch.record(0)

    assert (first.kind, first.name, first.target) == ("fork", uuid_of(store, "trial"), point.record.v)
    assert first.parent_digest == point.digest
    assert first.ts_ms > point.record.ts_ms
    source = point.record
    assert (first.chain, first.checkpoint, first.step) == (source.chain, source.checkpoint, source.step)
    assert (first.epoch, first.tags, first.channels, first.pins, first.floor) == (0, {}, {}, {}, 0)


def test_branch_and_store_go_on_apart(store: Store) -> None:
    branch = store.fork("trial", store.snapshot(step=2).version)

    with store.writer() as main, branch.writer() as other:
        main.restore()
        other.restore()
        save(main, 4, 2, 7)
        save(other, 3, 3, 8)
        save(main, 5, 2, 9)
        save(other, 4, 4, 5)

    assert column(store) == [1, 2, 9, 0, 0, 0]
    assert column(branch) == [1, 0, 0, 8, 5, 0]
    assert column(Store.open(store.url, branch="trial")) == column(branch)
    assert [record.kind for record in branch.log()] == ["delta", "delta", "fence", "fork"]


def test_everything_that_a_store_does_works_on_a_branch(store: Store) -> None:
    branch = store.fork("trial")
    with branch.writer() as writer:
        writer.restore()
        seen = branch.head()
        kept = save(writer, 4, 5, 4)
        news = branch.poll(seen)
        save(writer, 5, 5, 5)
    branch.tag("good", kept)
    branch.set_channel("serving")
    branch.rollback(kept)

    assert news is not None
    assert news.record.v == kept
    assert column(branch) == [1, 2, 0, 0, 0, 4]
    assert branch.snapshot(tag="good").step == 4
    assert branch.snapshot(channel="serving").table("t").read()[5, 0] == 5
    assert branch.snapshot(step=3).version == 0, "by its step the fork point's state is found too"
    assert branch.uuid == store.uuid
    assert (store.tags(), store.channels()) == ({}, {})
    assert column(store) == [1, 2, 0, 0, 0, 0]


def test_tensors_leave_one_branch_and_enter_another(store: Store, tmp_path: Path) -> None:
    first, second = store.fork("first"), store.fork("second", store.snapshot(step=1).version)
    with first.writer() as writer:
        writer.restore()
        save(writer, 4, 5, 4)
    file = tmp_path / "state.safetensors"

    export_snapshot(first.snapshot(), file)
    report = import_tensors(second, file, tables=["t"], options=TableOptions(scale=1.0))

    assert column(second) == column(first) == [1, 2, 0, 0, 0, 4]
    assert report.version == second.latest_version()
    assert segment_sizes(second.snapshot().manifests[0]).codes > 0
    assert column(store) == [1, 2, 0, 0, 0, 0]


def test_names_of_the_store_do_not_carry_over(store: Store) -> None:
    store.tag("good")
    store.set_channel("serving")
    store.fork("first")

    branch = store.fork("second")

    assert (branch.tags(), branch.channels(), branch.record(0).pins) == ({}, {}, {})
    assert set(branch.branches()) == {"first", "second"}, "branches are the store's, whoever asks"


def test_unknown_fields_and_features_go_with_the_state(store: Store) -> None:
    head = store.head()
    newer = msgspec.structs.replace(
        head.record, v=head.record.v + 1, kind="expire", parent_digest=head.digest, writer_features=("flavours",)
    )
    store.storage.create(commit_key(newer.v), encode_record(newer, {"flavour": [1]}))
    point = store.internals.log.latest()

    branch = branches.fork(store.internals.log, point, point, "trial", writer_info())
    first = branches.log_of(store.internals.log, branch).read(0)

    assert first is not None
    assert first.record.writer_features == ("flavours",)
    assert first.extra == {"flavour": [1]}


def test_a_fork_of_an_empty_store_is_an_empty_branch(tmp_path: Path) -> None:
    branch = Store.create(str(tmp_path / "empty")).fork("trial")

    assert branch.snapshot().is_empty
    with branch.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((2, 2), np.float32), options=TableOptions(scale=1.0))
    assert branch.snapshot().table("t").read().sum() == 4


def test_what_cannot_be_forked_is_refused_and_pins_nothing(store: Store) -> None:
    branch = store.fork("trial")

    with pytest.raises(BranchExists):
        store.fork("trial")
    with pytest.raises(VersionNotFound):
        store.fork("other", 1_000)
    with pytest.raises(BadName):
        store.fork("")
    for never in (0, -1, float("nan"), float("inf"), 1e300, dt.timedelta(days=1)):
        with pytest.raises(BadInput, match="ttl_s"):
            store.fork("other", ttl_s=never)
    with pytest.raises(BadInput, match="store's own log"):
        branch.fork("other")

    assert set(store.branches()) == {"trial"}


def test_an_expired_version_cannot_be_forked(store: Store) -> None:
    gone = store.snapshot(step=1).version
    expire(store, expired=(gone,))

    with pytest.raises(VersionExpired):
        store.fork("trial", gone)

    assert store.branches() == {}


def expire(store: Store, **changes: object) -> None:
    head = store.head()
    store.internals.log.append(head, draft_after(head.record, "expire", writer_info(), **changes), rebase_expire)


def test_the_fork_point_stays_below_the_floor_until_the_branch_is_dropped(store: Store) -> None:
    point = store.snapshot(step=1).version
    store.fork("trial", point)

    expire(store, floor=store.latest_version())
    assert store.snapshot(point).step == 1

    store.drop_branch("trial")
    with pytest.raises(VersionExpired):
        store.snapshot(point)


def test_two_forks_of_one_name_at_once_are_one(store: Store) -> None:
    late = Store.open(store.url)
    before = late.head()
    late.head = lambda: before  # type: ignore[method-assign]  # it has not seen what comes now
    store.fork("trial", store.snapshot(step=1).version)

    with pytest.raises(BranchExists):
        late.fork("trial")
    other = late.fork("other")

    assert set(store.branches()) == {"trial", "other"}
    assert other.snapshot().step == 3


def test_a_fork_does_not_disturb_an_open_writer(store: Store) -> None:
    with store.writer() as writer:
        writer.restore()
        Store.open(store.url).fork("trial")
        save(writer, 4, 3, 4)

    assert column(store) == [1, 2, 0, 4, 0, 0]
    assert set(store.branches()) == {"trial"}


def forked(store: Store, name: str = "trial", expires_ms: int | None = None) -> Branch:
    head = store.head()
    return branches.fork(store.internals.log, head, head, name, writer_info(), expires_ms=expires_ms)


def test_a_fork_that_died_before_its_pin_is_no_branch_and_can_be_repeated(store: Store) -> None:
    head = store.head()
    begun = store.internals.log.below(branch_prefix("b" * 32))
    begun.append_first(draft_branch(head.record, "b" * 32, writer_info()), head)

    with pytest.raises(BranchNotFound):
        store.on_branch("trial")
    assert column(store.fork("trial")) == [1, 2, 0, 0, 0, 0]
    assert list(store.branches()) == ["trial"]


def test_a_branch_that_lost_its_first_record_is_not_begun_anew(store: Store) -> None:
    branch = store.fork("trial")
    with branch.writer() as writer:
        writer.restore()
        save(writer, 4, 3, 4)
    prefix = branch_prefix(uuid_of(store, "trial"))
    store.storage.delete([commit_key(0, prefix)])
    before = objects(store)

    assert column(Store.open(store.url, branch="trial")) == [1, 2, 0, 4, 0, 0], "what is left can be read"
    store.storage.delete([hint_key(prefix)])
    with pytest.raises(CorruptStore, match=r"position 0 .*drop the branch"):
        Store.open(store.url, branch="trial").snapshot()
    with pytest.raises(CorruptStore, match=r"position 0 .*drop the branch"):
        store.on_branch("trial").writer()

    before.pop(hint_key(prefix))
    assert objects(store) == before


def test_logs_that_were_mixed_up_are_refused(store: Store) -> None:
    store.fork("one")
    store.fork("two")
    one, two = (commit_key(0, branch_prefix(uuid_of(store, name))) for name in ("one", "two"))
    data = store.storage.read(one)
    assert data is not None

    store.storage.put(two, data)

    assert store.on_branch("one").latest_version() == 0
    with pytest.raises(CorruptRecord, match="mixed with") as refused:
        store.on_branch("two")
    assert refused.value.path == two
    with pytest.raises(CorruptRecord, match="mixed with"):
        store.drop_branch("two")
    assert store.on_branch("one").head().record.kind == "fork", "nobody's log was ended for another's"
    assert store.internals.log.below(branch_prefix(uuid_of(store, "two"))).latest().record.kind == "fork"


def test_a_hostile_branch_uuid_leaves_no_folder(store: Store) -> None:
    head = store.head()
    pins = {"../x": Pin(version=1, name="trial")}
    draft = draft_after(head.record, "fork", writer_info(), name="../x", target=1, pins=pins)
    with pytest.raises(BadInput, match="pins"):
        store.internals.log.append(head, draft, rebase_expire)
    forged = msgspec.structs.replace(head.record, v=head.record.v + 1, parent_digest=head.digest, pins=pins)
    store.storage.create(commit_key(forged.v), encode_record(forged))

    with pytest.raises(CorruptRecord, match="pins"):
        store.internals.log.latest()
    with pytest.warns(RuntimeWarning, match="pins"), pytest.raises(BranchNotFound):
        store.on_branch("trial")


def test_a_branch_that_is_not_there_is_named(store: Store) -> None:
    store.fork("trial")

    for attempt in (store.on_branch, store.drop_branch, lambda name: Store.open(store.url, branch=name)):
        with pytest.raises(BranchNotFound, match="'trial'"):
            attempt("other")


def test_a_dropped_branch_is_gone_and_its_name_is_free(store: Store) -> None:
    branch = store.fork("trial", store.snapshot(step=1).version)
    with branch.writer() as writer:
        writer.restore()
        save(writer, 4, 3, 4)
    head = store.latest_version()

    store.drop_branch("trial")

    assert store.branches() == {}
    assert store.latest_version() == head + 1
    with pytest.raises(BranchNotFound):
        Store.open(store.url, branch="trial")
    assert column(store) == [1, 2, 0, 0, 0, 0]
    assert column(store.fork("trial")) == [1, 2, 0, 0, 0, 0]


USES: dict[str, Callable[[Store], object]] = {
    "snapshot": lambda branch: branch.snapshot(),
    "snapshot of a version": lambda branch: branch.snapshot(0),
    "writer": lambda branch: branch.writer(),
    "tag": lambda branch: branch.tag("t"),
    "channel": lambda branch: branch.set_channel("c"),
    "rollback": lambda branch: branch.rollback(0),
}


@pytest.mark.parametrize("use", USES)
def test_a_store_on_a_dropped_branch_says_so(store: Store, use: str) -> None:
    branch = store.fork("trial")
    store.drop_branch("trial")
    log = objects(store, BRANCHES)

    with pytest.raises(BranchNotFound, match=r"'trial' of .* was dropped"):
        USES[use](branch)

    assert objects(store, BRANCHES) == log


def test_a_writer_of_a_dropped_branch_is_fenced_and_nobody_can_take_over(store: Store) -> None:
    branch = store.fork("trial")
    with branch.writer() as zombie:
        zombie.restore()
        save(zombie, 4, 3, 4)
        stale = branch.head()
        store.drop_branch("trial")
        end, *before = branch.log()
        log = [end.v, *(record.v for record in before)]
        assert (end.kind, end.epoch) == ("close", stale.record.epoch + 1)

        with pytest.raises(Fenced, match="dropped"):
            save(zombie, 5, 3, 5)

    branch.head = lambda: stale  # type: ignore[method-assign]  # a writer that looked before the branch was dropped
    with pytest.raises(BranchNotFound):
        branch.writer()
    del branch.head
    assert [record.v for record in branch.log()] == log


def test_a_drop_that_died_half_way_is_finished_by_the_next(store: Store) -> None:
    branch = store.fork("trial")
    branches._close_log(branch.internals.log, writer_info())

    with pytest.raises(BranchNotFound, match="was dropped"):
        store.on_branch("trial").snapshot()
    with pytest.raises(BranchExists):
        store.fork("trial")
    closed = branch.latest_version()
    store.drop_branch("trial")

    assert store.branches() == {}
    assert branch.latest_version() == closed, "it is closed once"


def test_a_branch_that_lost_its_log_is_only_unpinned(store: Store) -> None:
    branch = store.fork("trial")
    store.storage.delete(list(objects(store, BRANCHES)))

    store.drop_branch("trial")

    assert store.branches() == {}
    assert objects(store, BRANCHES) == {}, "nothing can follow what is lost, so there is nothing to close"
    with pytest.raises(CorruptStore, match="position 0"):
        branch.snapshot()


def test_closing_a_branch_twice_changes_nothing(store: Store) -> None:
    store.fork("trial")
    uuid = uuid_of(store, "trial")
    branches.close_branch(store.internals.log, uuid, writer_info())
    before = objects(store)

    branches.close_branch(store.internals.log, uuid, writer_info())

    assert objects(store) == before


def test_a_branch_whose_time_is_over_cannot_be_opened_and_can_be_dropped(store: Store) -> None:
    forked(store, expires_ms=1)

    with pytest.raises(VersionExpired, match="expired"):
        store.on_branch("trial")
    with pytest.raises(VersionExpired, match="expired"):
        Store.open(store.url, branch="trial")
    with pytest.raises(BranchExists):
        store.fork("trial")
    store.drop_branch("trial")

    assert store.branches() == {}


def test_a_branch_says_when_it_ends(store: Store) -> None:
    before = time.time_ns() // 1_000_000
    store.fork("short", ttl_s=3_600)
    after = time.time_ns() // 1_000_000
    store.fork("long")
    short, long = (branches.find_branch(store.head().record, name) for name in ("short", "long"))

    end = short.pin.expires_ms
    assert end is not None
    assert before <= end - 3_600_000 <= after
    assert not short.is_expired(end - 1)
    assert short.is_expired(end)
    assert not long.is_expired(2**62)
    assert store.on_branch("short").branch == "short"


def test_a_writer_of_the_store_and_one_of_a_branch_do_not_fence_each_other(store: Store) -> None:
    branch = store.fork("trial")

    with store.writer() as main, branch.writer() as other:
        main.restore()
        other.restore()
        with branch.writer() as newer:
            newer.restore()
            with pytest.raises(Conflict):
                save(other, 4, 3, 4)
            save(main, 4, 3, 4)
            save(newer, 4, 4, 4)

    assert column(store) == [1, 2, 0, 4, 0, 0]
    assert column(branch) == [1, 2, 0, 0, 4, 0]


def test_a_torn_record_of_a_branch_hurts_that_branch_alone(store: Store) -> None:
    branch = store.fork("trial")
    prefix = branch_prefix(uuid_of(store, "trial"))
    store.storage.put(commit_key(1, prefix), b'{"v":')

    with pytest.warns(RuntimeWarning, match="serving version 0"):
        assert column(branch) == [1, 2, 0, 0, 0, 0]
    with pytest.raises(CorruptRecord) as torn:
        branch.writer()

    assert torn.value.version == 1
    with store.writer() as writer:
        writer.restore()
        save(writer, 4, 3, 4)


def test_a_branch_with_torn_records_is_dropped_and_fences_its_writer(store: Store) -> None:
    branch = store.fork("trial")
    with branch.writer() as writer:
        writer.restore()
        newest = save(writer, 4, 3, 4)
        for version in (newest + 1, newest + 2):
            store.storage.put(commit_key(version, branch.internals.log.prefix), b'{"v":')

        store.drop_branch("trial")

        with pytest.raises(Fenced):
            save(writer, 5, 3, 5)
    end = branch.head().record
    assert (end.kind, end.v, store.branches()) == ("close", newest + 3, {})
    assert end.supersedes is not None
    assert len(end.supersedes.torn) == 2
    assert [record.v for record in branch.log()] == [newest + 3, *range(newest, -1, -1)]


def test_a_branch_that_lost_its_first_record_can_be_dropped(store: Store) -> None:
    branch = store.fork("trial")
    with branch.writer() as writer:
        writer.restore()
        save(writer, 4, 3, 4)
    store.storage.put(commit_key(0, branch.internals.log.prefix), b'{"v":')

    store.drop_branch("trial")

    assert (branch.head().record.kind, store.branches()) == ("close", {})


def test_a_branch_of_a_newer_library_is_not_dropped(store: Store) -> None:
    branch = store.fork("trial")
    head = branch.head()
    draft = draft_after(head.record, "fence", writer_info(), writer_features=("from_the_future",))
    branch.internals.log.append(head, draft, rebase_fence)

    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        store.drop_branch("trial")

    assert list(store.branches()) == ["trial"]


def test_a_torn_record_of_the_store_does_not_keep_a_branch_from_training(store: Store) -> None:
    store.fork("trial")
    store.storage.put(commit_key(store.latest_version() + 1), b'{"v":')

    with pytest.warns(RuntimeWarning, match="serving version"):
        branch = Store.open(store.url, branch="trial")
    with branch.writer() as writer:
        writer.restore()
        save(writer, 4, 3, 4)

    assert column(branch) == [1, 2, 0, 4, 0, 0]


def messages(store: Store) -> list[str]:
    return [problem.message for problem in verify_store(store).problems]


def test_verify_names_what_follows_the_end_of_a_branch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = store.fork("trial")
    branches._close_log(branch.internals.log, writer_info())
    assert messages(branch) == []
    monkeypatch.setattr("cnr_store.log.rebase._check_goes_on", lambda record: None)
    head = branch.head()
    branch.internals.log.append(head, draft_after(head.record, "fence", writer_info(), epoch=2), rebase_expire)

    assert any("follows the record that closed its branch" in message for message in messages(branch))


def test_verify_names_a_pin_that_went_before_its_branch_ended(store: Store) -> None:
    store.fork("trial")
    assert messages(store) == []

    expire(store, pins={})

    assert any("expire record" in message and "pins" in message for message in messages(store))
