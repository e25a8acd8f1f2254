"""What becomes of a draft behind each kind of intervening record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import msgspec
import pytest

from cnr_store.errors import (
    BranchExists,
    BranchNotFound,
    Conflict,
    DoesNotApply,
    Fenced,
    TagExists,
    TagNotFound,
    TransactionAborted,
    VersionExpired,
)
from cnr_store.format.commit_record import LogEntry, check_statements, is_live
from cnr_store.format.layout import segment_name
from cnr_store.format.records import ChainEntry, CommitRecord, Pin, RecordKind, WriterInfo
from cnr_store.log.rebase import (
    draft_after,
    draft_init,
    rebase_channel,
    rebase_compact,
    rebase_data,
    rebase_expire,
    rebase_fence,
    rebase_fork,
    rebase_rollback,
    rebase_succession,
    rebase_tag,
    rebase_untag,
    replace_run,
)

WRITER = WriterInfo(host="h", lib="0.1.0", run_id="r")
OTHER = WriterInfo(host="other", lib="0.1.0", run_id="r2")
MINE = "f" * 32

COMMUTING: list[RecordKind] = ["compact", "tag", "untag", "channel", "expire", "fork"]
OPEN = [kind for kind in get_args(RecordKind) if kind != "close"]


def segment(number: int, l0: int, l1: int) -> ChainEntry:
    return ChainEntry(
        seg=segment_name(number, f"{number:032x}"),
        sha256="0" * 64,
        kind="baseline" if l0 == 0 else "delta",
        l0=l0,
        l1=l1,
        size_bytes=1,
        rows=1,
    )


def own_segment(l0: int, l1: int) -> ChainEntry:
    return msgspec.structs.replace(segment(9, l0, l1), seg=segment_name(9, MINE))


def pin(version: int, name: str = "") -> Pin:
    return Pin(version=version, name=name or f"of {version}")


def head_record(**changes: Any) -> CommitRecord:
    """Version 9, epoch 2: a baseline and three deltas."""
    chain = (segment(1, 0, 1), segment(2, 1, 2), segment(3, 2, 3), segment(4, 3, 4))
    record = draft_after(draft_init(OTHER), "delta", OTHER, chain=chain, checkpoint=4, step=400, epoch=2)
    record = msgspec.structs.replace(
        record,
        v=9,
        tags={"old": 3},
        floor=2,
        expired=(5,),
        pins={"b": pin(6)},
    )
    return msgspec.structs.replace(record, **changes)


def delta_draft(head: CommitRecord) -> CommitRecord:
    own = own_segment(head.checkpoint, head.checkpoint + 1)
    return draft_after(
        head,
        "delta",
        WRITER,
        chain=(*head.chain, own),
        checkpoint=head.checkpoint + 1,
        step=500,
        user={"note": 1},
    )


def after(head: CommitRecord, kind: RecordKind, **changes: Any) -> LogEntry:
    """The next record, as another process wrote it."""
    record = draft_after(head, kind, OTHER, **changes)
    return LogEntry(msgspec.structs.replace(record, v=head.v + 1), "d" * 64)


def test_draft_carries_everything_over_but_what_is_the_records_own() -> None:
    head = head_record(aborted={"a" * 32: 5}, writer_features=("w",), user={"x": 1}, name="n", target=1)

    draft = draft_after(head, "tag", WRITER, name="t", target=9)

    carried = ("chain", "tags", "pins", "floor", "expired", "aborted", "checkpoint", "step", "epoch")
    assert all(getattr(draft, field) == getattr(head, field) for field in (*carried, "writer_features"))
    assert (draft.name, draft.target, draft.user) == ("t", 9, {})
    assert draft.writer == WRITER


@pytest.mark.parametrize("kind", COMMUTING)
def test_delta_follows_records_that_leave_the_state_alone(kind: RecordKind) -> None:
    head = head_record()
    draft = delta_draft(head)
    changes = {"tags": {"new": 9}, "floor": 3, "expired": (5, 6), "aborted": {"a" * 32: 0}, "pins": {}}

    moved = rebase_data(draft, after(head, kind, **changes), txn=MINE)

    assert {name: getattr(moved, name) for name in changes} == changes
    assert (moved.chain, moved.user) == (draft.chain, draft.user)
    assert (moved.kind, moved.checkpoint, moved.step, moved.epoch) == ("delta", 5, 500, 2)
    assert moved.writer == WRITER


def test_delta_is_put_on_a_compacted_chain() -> None:
    head = head_record()
    merged = (segment(7, 0, 3), segment(4, 3, 4))

    moved = rebase_data(delta_draft(head), after(head, "compact", chain=merged), txn=MINE)

    assert moved.chain == (*merged, own_segment(4, 5))
    check_statements(msgspec.structs.replace(moved, v=99))


def test_one_shot_delta_keeps_replacing_the_earlier_one() -> None:
    head = head_record(chain=(segment(1, 0, 1), segment(4, 1, 4)))
    own = own_segment(1, 5)
    draft = draft_after(head, "delta", WRITER, chain=(head.chain[0], own), checkpoint=5)

    moved = rebase_data(draft, after(head, "tag"), txn=MINE)

    assert moved.chain == (head.chain[0], own)
    check_statements(msgspec.structs.replace(moved, v=99))


def test_one_shot_delta_does_not_apply_to_a_new_baseline() -> None:
    head = head_record(chain=(segment(1, 0, 1), segment(4, 1, 4)))
    draft = draft_after(head, "delta", WRITER, chain=(head.chain[0], own_segment(1, 5)), checkpoint=5)

    with pytest.raises(DoesNotApply) as refused:
        rebase_data(draft, after(head, "compact", chain=(segment(7, 0, 4),)), txn=MINE)

    assert (refused.value.expected, refused.value.found) == (1, [4])


def test_full_replaces_whatever_chain_is_there() -> None:
    head = head_record()
    draft = draft_after(head, "baseline", WRITER, chain=(own_segment(0, 5),), checkpoint=5)

    moved = rebase_data(draft, after(head, "compact", chain=(segment(7, 0, 4),)), txn=MINE)

    assert moved.chain == (own_segment(0, 5),)


@pytest.mark.parametrize("kind", ["baseline", "delta", "rollback"])
@pytest.mark.parametrize("mine", ["baseline", "delta", "rollback"])
def test_training_states_conflict(mine: RecordKind, kind: RecordKind) -> None:
    head = head_record()
    draft = msgspec.structs.replace(delta_draft(head), kind=mine, target=3)
    rebase: Callable[..., CommitRecord] = rebase_rollback if mine == "rollback" else partial(rebase_data, txn=MINE)

    with pytest.raises(Conflict) as refused:
        rebase(draft, after(head, kind))

    assert type(refused.value) is Conflict
    assert (refused.value.version, refused.value.found) == (10, kind)


@pytest.mark.parametrize("kind", get_args(RecordKind))
def test_higher_epoch_fences_data_whatever_the_record_is(kind: RecordKind) -> None:
    head = head_record()

    with pytest.raises(Fenced) as by_data:
        rebase_data(delta_draft(head), after(head, kind, epoch=3), txn=MINE)
    with pytest.raises(Fenced):
        rebase_rollback(msgspec.structs.replace(delta_draft(head), target=3), after(head, kind, epoch=3))

    assert (by_data.value.expected, by_data.value.found) == (2, 3)


def test_fence_of_the_same_epoch_stops_too() -> None:
    head = head_record()

    with pytest.raises(Fenced):
        rebase_data(delta_draft(head), after(head, "fence"), txn=MINE)


def test_aborted_transaction_stops_its_data_and_its_compaction() -> None:
    head = head_record()
    expired = after(head, "expire", aborted={"a" * 32: 0, MINE: 0})

    with pytest.raises(TransactionAborted):
        rebase_data(delta_draft(head), expired, txn=MINE)
    with pytest.raises(TransactionAborted):
        rebase_compact(
            draft_after(head, "compact", WRITER),
            expired,
            merged=own_segment(0, 3),
            run=[entry.seg for entry in head.chain[:3]],
        )


@pytest.mark.parametrize("kind", OPEN)
def test_fence_follows_anything_one_epoch_up(kind: RecordKind) -> None:
    head = head_record()
    newest = after(head, kind, epoch=7, chain=(segment(7, 0, 4),), tags={"n": 9})
    draft = draft_after(head, "fence", WRITER, epoch=head.epoch + 1)

    moved = rebase_fence(draft, newest)

    assert (moved.kind, moved.epoch, moved.chain, moved.tags) == ("fence", 8, newest.record.chain, {"n": 9})


@pytest.mark.parametrize("kind", OPEN)
def test_fence_of_a_loaded_state_follows_maintenance_alone(kind: RecordKind) -> None:
    head = head_record()
    newest = after(head, kind, epoch=head.epoch, tags={"n": 9})
    draft = draft_after(head, "fence", WRITER, epoch=head.epoch + 1)

    if kind in ("fence", "baseline", "delta", "rollback", "init"):
        with pytest.raises(Conflict, match=rf"continued from .* commit record {newest.record.v} \({kind}\)"):
            rebase_succession(draft, newest)
    else:
        moved = rebase_succession(draft, newest)
        assert (moved.kind, moved.epoch, moved.tags) == ("fence", head.epoch + 1, {"n": 9})


def tag_draft(head: CommitRecord, name: str, target: int) -> CommitRecord:
    return draft_after(head, "tag", WRITER, name=name, target=target, tags={**head.tags, name: target})


@pytest.mark.parametrize("kind", OPEN)
def test_tag_follows_anything_and_takes_its_epoch(kind: RecordKind) -> None:
    head = head_record()
    newest = after(head, kind, epoch=7, tags={"theirs": 8})

    moved = rebase_tag(tag_draft(head, "mine", 9), newest)

    assert moved.tags == {"theirs": 8, "mine": 9}
    assert (moved.epoch, moved.chain, moved.target) == (7, head.chain, 9)


def test_tag_of_another_version_does_not_move() -> None:
    head = head_record()

    with pytest.raises(TagExists) as refused:
        rebase_tag(tag_draft(head, "t", 9), after(head, "tag", tags={"t": 8}))

    assert (refused.value.expected, refused.value.found) == (9, 8)


def test_same_tag_twice_is_one_tag() -> None:
    head = head_record()

    assert rebase_tag(tag_draft(head, "t", 9), after(head, "tag", tags={"t": 9})).tags == {"t": 9}


@pytest.mark.parametrize("changes", [{"floor": 4}, {"expired": (3,)}])
@pytest.mark.parametrize("rebase", [rebase_tag, rebase_channel, rebase_fork, rebase_rollback])
def test_target_that_expired_meanwhile_is_refused(
    rebase: Callable[[CommitRecord, LogEntry], CommitRecord], changes: dict[str, Any]
) -> None:
    head = head_record(tags={})
    draft = msgspec.structs.replace(tag_draft(head, "t", 3), pins={"t": pin(3)})

    with pytest.raises(VersionExpired) as refused:
        rebase(draft, after(head, "expire", tags={}, pins={}, **changes))

    assert refused.value.version == 3


@pytest.mark.parametrize("keeper", [{"kept": (3,)}, {"channels": {"c": 3}}, {"pins": {"b": Pin(version=3, name="x")}}])
def test_target_below_the_floor_that_something_keeps_is_taken(keeper: dict[str, Any]) -> None:
    head = head_record(tags={})

    assert rebase_tag(tag_draft(head, "t", 3), after(head, "expire", tags={}, floor=4, **keeper)).tags == {"t": 3}


@pytest.mark.parametrize(
    ("rebase", "draft"),
    [
        (rebase_fence, draft_after(head_record(), "fence", WRITER, epoch=3)),
        (rebase_tag, tag_draft(head_record(), "t", 9)),
        (rebase_channel, draft_after(head_record(), "channel", WRITER, name="c", target=9)),
        (rebase_channel, draft_after(head_record(), "channel", WRITER, name="c")),
        (rebase_fork, draft_after(head_record(), "fork", WRITER, name="x" * 32, target=9, pins={"x" * 32: pin(9)})),
    ],
)
def test_nothing_follows_the_end_of_a_branch(rebase: Callable[..., CommitRecord], draft: CommitRecord) -> None:
    end = after(head_record(), "close", epoch=3)

    with pytest.raises(BranchNotFound) as refused:
        rebase(draft, end)

    assert refused.value.version == 10
    with pytest.raises(BranchNotFound):
        draft_after(end.record, "fence", WRITER, epoch=4)
    with pytest.raises(Fenced):
        rebase_data(delta_draft(head_record()), end, txn=MINE)
    assert not is_live(end.record, 9)


def test_untag_removes_its_name_alone() -> None:
    head = head_record()
    draft = draft_after(head, "untag", WRITER, name="old", tags={})

    assert rebase_untag(draft, after(head, "tag", tags={"old": 3, "new": 9})).tags == {"new": 9}
    with pytest.raises(TagNotFound):
        rebase_untag(draft, after(head, "untag", tags={}))


def test_fork_adds_its_pin() -> None:
    head = head_record()
    draft = draft_after(head, "fork", WRITER, name="branch", target=8, pins={**head.pins, "branch": pin(8)})

    moved = rebase_fork(draft, after(head, "fork", pins={"b": pin(6), "c": pin(7)}))

    assert moved.pins == {"b": pin(6), "c": pin(7), "branch": pin(8)}


def test_fork_of_a_name_that_was_taken_meanwhile_is_refused() -> None:
    head = head_record()
    draft = draft_after(head, "fork", WRITER, name="branch", target=8, pins={"branch": pin(8, "trial")})

    with pytest.raises(BranchExists):
        rebase_fork(draft, after(head, "fork", pins={"c": pin(7, "trial")}))


def test_a_channel_moves_behind_another_move_of_it_and_keeps_the_others() -> None:
    head = head_record(channels={"serving": 3})
    draft = draft_after(head, "channel", WRITER, name="serving", target=8, channels={"serving": 8})

    moved = rebase_channel(draft, after(head, "channel", channels={"serving": 7, "canary": 9}))

    assert moved.channels == {"serving": 8, "canary": 9}


def test_a_channel_without_target_is_removed() -> None:
    head = head_record(channels={"serving": 3})
    draft = draft_after(head, "channel", WRITER, name="serving", channels={})

    assert rebase_channel(draft, after(head, "tag", channels={"serving": 3, "canary": 9})).channels == {"canary": 9}


def test_tags_and_channels_do_not_share_a_name() -> None:
    head = head_record()
    channel = draft_after(head, "channel", WRITER, name="x", target=8, channels={"x": 8})
    tag = draft_after(head, "tag", WRITER, name="x", target=8, tags={"x": 8})

    with pytest.raises(TagExists):
        rebase_channel(channel, after(head, "tag", tags={"x": 9}))
    with pytest.raises(TagExists):
        rebase_tag(tag, after(head, "channel", channels={"x": 9}))


def test_rollback_keeps_its_targets_state_behind_a_compaction() -> None:
    head = head_record()
    draft = draft_after(head, "rollback", WRITER, target=7, chain=head.chain[:2], checkpoint=2, step=200)

    moved = rebase_rollback(draft, after(head, "compact", chain=(segment(7, 0, 4),)))

    assert (moved.chain, moved.checkpoint, moved.step) == (head.chain[:2], 2, 200)
    assert moved.target == 7
    check_statements(msgspec.structs.replace(moved, v=99))


def test_compaction_is_spliced_into_a_chain_that_grew() -> None:
    head = head_record()
    merged, run = own_segment(1, 3), [entry.seg for entry in head.chain[1:3]]
    draft = draft_after(head, "compact", WRITER, chain=replace_run(head, merged, run))
    grown = (*head.chain, segment(5, 4, 5))

    moved = rebase_compact(draft, after(head, "delta", chain=grown, checkpoint=5, epoch=3), merged=merged, run=run)

    assert moved.chain == (head.chain[0], merged, head.chain[3], grown[-1])
    assert (moved.checkpoint, moved.epoch) == (5, 3)
    check_statements(msgspec.structs.replace(moved, v=99))


@pytest.mark.parametrize(
    "chain",
    [
        (),
        (segment(8, 0, 4),),
        (segment(1, 0, 1), segment(8, 1, 3), segment(4, 3, 4)),
        (segment(1, 0, 1), segment(2, 1, 2), segment(8, 2, 4)),
        (segment(1, 0, 1), segment(2, 1, 2), segment(8, 2, 3), segment(4, 3, 4)),  # of the same length and span
    ],
)
def test_compaction_whose_run_is_gone_is_abandoned(chain: tuple[ChainEntry, ...]) -> None:
    head = head_record()
    merged, run = own_segment(1, 3), [entry.seg for entry in head.chain[1:3]]

    newer = after(head, "baseline", chain=chain)
    with pytest.raises(Conflict):
        rebase_compact(draft_after(head, "compact", WRITER), newer, merged=merged, run=run)


def test_merged_segment_must_span_its_run() -> None:
    head = head_record()

    with pytest.raises(Conflict):
        replace_run(head, own_segment(1, 4), [entry.seg for entry in head.chain[1:3]])
    with pytest.raises(Conflict):
        replace_run(head, own_segment(1, 3), [])


@pytest.mark.parametrize("kind", get_args(RecordKind))
def test_expiry_is_planned_again_behind_anything(kind: RecordKind) -> None:
    head = head_record()

    with pytest.raises(Conflict, match="plan it again"):
        rebase_expire(draft_after(head, "expire", WRITER), after(head, kind))


def test_features_of_both_sides_gate_the_moved_record() -> None:
    head = head_record()
    draft = msgspec.structs.replace(delta_draft(head), reader_features=("a",), writer_features=("x",))

    moved = rebase_data(draft, after(head, "tag", reader_features=("b",), writer_features=("x", "y")), txn=MINE)

    assert (moved.reader_features, moved.writer_features) == (("a", "b"), ("x", "y"))
