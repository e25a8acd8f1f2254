"""How one state becomes another, planned from two records or from all records between them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import ChainEntry, Superseded, WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.serving.update.update_plan import (
    Apply,
    Compare,
    Reread,
    Same,
    follows_directly,
    plan_path,
    plan_update,
)

WRITER = WriterInfo(host="h", lib="l", run_id="r")
COMMUTING = ("compact", "tag", "untag", "channel", "expire", "fork")


def segment(name: str, l0: int = 0, l1: int = 1, *, sha256: str = "") -> ChainEntry:
    """A baseline is named in capitals."""
    kind: Any = "baseline" if name.isupper() else "delta"
    return ChainEntry(seg=name, sha256=sha256, kind=kind, l0=l0, l1=l1, size_bytes=1, rows=1)


def chain(names: str) -> tuple[ChainEntry, ...]:
    return tuple(segment(name, 0 if k == 0 else k, k + 1) for k, name in enumerate(names))


def log(*records: tuple[Any, str], first: int = 0) -> list[LogEntry]:
    """Consecutive records of (kind, chain)."""
    entries: list[LogEntry] = []
    for index, (kind, names) in enumerate(records):
        record = msgspec.structs.replace(
            draft_init(WRITER),
            v=first + index, kind=kind, chain=chain(names), checkpoint=len(names), store_uuid="s",
            parent_digest=entries[-1].digest if entries else f"before {first}",
        )  # fmt: skip
        entries.append(LogEntry(record, f"digest of {first + index}: {kind} {names}"))
    return entries


def move_of(held: tuple[Any, str], *then: tuple[Any, str]) -> Any:
    entries = log(held, *then)
    return plan_update(entries[0], entries[-1])


def test_the_same_chain_is_the_same_state_however_far_apart_in_the_log() -> None:
    assert move_of(("delta", "Ba"), ("fence", "Ba")) == Same()
    assert move_of(("delta", "Ba"), ("delta", "Bab"), ("rollback", "Ba")) == Same()
    assert move_of(("init", ""), ("fence", "")) == Same()


@pytest.mark.parametrize("kind", COMMUTING)
def test_a_record_that_leaves_the_state_is_a_move_without_reading(kind: str) -> None:
    assert move_of(("delta", "Bab"), (kind, "Bab")) == Same()


def test_a_compaction_right_after_is_the_same_state_under_another_chain() -> None:
    assert move_of(("delta", "Bab"), ("compact", "C")) == Same()
    assert move_of(("delta", "Babc"), ("compact", "Bmc")) == Same()


def test_a_compaction_further_on_tells_only_of_the_common_segments() -> None:
    assert move_of(("delta", "Bab"), ("tag", "Bab"), ("compact", "Bm")) == Reread(
        chain("B"), chain("Bab")[1:], chain("Bm")[1:]
    )
    assert move_of(("delta", "Bab"), ("tag", "Bab"), ("compact", "C")) == Compare()


def test_deltas_behind_the_held_chain_are_applied_in_order() -> None:
    assert move_of(("baseline", "B"), ("delta", "Ba")) == Apply(chain("Ba")[1:])
    assert move_of(("baseline", "B"), ("delta", "Ba"), ("tag", "Ba"), ("delta", "Bab"), ("delta", "Babc")) == Apply(
        chain("Babc")[1:]
    )


def test_a_one_shot_delta_replaces_the_one_before() -> None:
    assert move_of(("delta", "Ba"), ("delta", "Bb")) == Reread(chain("B"), chain("Ba")[1:], chain("Bb")[1:])
    assert move_of(("delta", "Bab"), ("delta", "Bc")) == Reread(chain("B"), chain("Bab")[1:], chain("Bc")[1:])


def test_a_full_begins_anew_whether_or_not_it_has_the_same_scale() -> None:
    assert move_of(("delta", "Ba"), ("baseline", "C")) == Compare()
    assert move_of(("delta", "Ba"), ("baseline", "C"), ("delta", "Cd")) == Compare()


def test_a_rollback_takes_deltas_back() -> None:
    assert move_of(("delta", "Bab"), ("rollback", "Ba")) == Reread(chain("Ba"), chain("Bab")[2:], ())
    assert move_of(("delta", "Ca"), ("rollback", "B")) == Compare()


def test_a_delta_of_the_same_number_after_a_rollback_is_another_delta() -> None:
    entries = log(("delta", "Bab"), ("rollback", "Ba"), ("delta", "Bac"))

    assert entries[0].record.checkpoint == entries[2].record.checkpoint
    assert plan_update(entries[0], entries[2]) == Reread(chain("Ba"), chain("Bab")[2:], chain("Bac")[2:])


def test_forth_and_back_is_the_same_state_again() -> None:
    entries = log(("delta", "Bab"), ("rollback", "B"), ("rollback", "Bab"))

    assert plan_update(entries[0], entries[1]) == Reread(chain("B"), chain("Bab")[1:], ())
    assert plan_update(entries[1], entries[2]) == Apply(chain("Bab")[1:])
    assert plan_update(entries[0], entries[2]) == Same()


def test_going_back_to_an_older_version_is_a_move_like_any_other() -> None:
    entries = log(("baseline", "B"), ("delta", "Ba"), ("delta", "Bab"))
    assert plan_update(entries[2], entries[0]) == Reread(chain("B"), chain("Bab")[1:], ())


def test_the_first_full_of_an_empty_store_and_the_way_back_are_compared() -> None:
    assert move_of(("init", ""), ("baseline", "B")) == Compare()
    assert move_of(("baseline", "B"), ("rollback", "")) == Compare()


def test_a_branch_begins_with_the_state_of_its_fork_point() -> None:
    point = log(("baseline", "B"), ("delta", "Ba"))[1]
    (first, then) = log(("fork", "Ba"), ("delta", "Bax"))

    assert not follows_directly(point, first)
    assert plan_update(point, first) == Same()
    assert plan_update(point, then) == Apply(chain("Bax")[2:])


def test_records_of_another_log_do_not_follow_directly_at_any_position() -> None:
    held = log(("delta", "Bab"), first=4)[0]
    other = log(("baseline", "X"), ("compact", "Y"), first=4)[1]

    stranger = LogEntry(msgspec.structs.replace(other.record, parent_digest=held.digest, store_uuid="t"), "x")

    assert plan_update(held, other) == Compare()
    assert plan_update(held, stranger) == Compare()


def test_torn_positions_between_two_records_do_not_count() -> None:
    held, target = log(("delta", "Ba"), ("compact", "C"))
    torn = Superseded(follows=held.digest, torn=("t1", "t2"))
    target = LogEntry(msgspec.structs.replace(target.record, v=3, parent_digest="t2", supersedes=torn), "x")

    assert follows_directly(held, target)
    assert plan_update(held, target) == Same()


def test_a_segment_of_the_same_name_and_another_digest_is_not_shared() -> None:
    held, target = log(("delta", "Ba"), ("delta", "Bab"))
    altered = (segment("B", sha256="other"), *target.record.chain[1:])
    target = LogEntry(msgspec.structs.replace(target.record, chain=altered), target.digest)
    assert plan_update(held, target) == Compare()


def test_a_path_tells_more_than_its_ends() -> None:
    entries = log(
        ("delta", "Ba"), ("compact", "C"), ("delta", "Cb"), ("tag", "Cb"), ("delta", "Cbc"), ("compact", "D")
    )  # fmt: skip

    assert plan_update(entries[0], entries[-1]) == Compare()
    assert plan_path(entries) == Apply((chain("Cb")[1], chain("Cbc")[2]))
    assert plan_path(entries[:2]) == Same()
    assert plan_path(entries[:1]) == Same()


def test_a_path_with_other_records_is_planned_from_the_last_chain_held() -> None:
    entries = log(("delta", "Ba"), ("compact", "C"), ("delta", "Cb"), ("delta", "Cc"))
    assert plan_update(entries[0], entries[-1]) == Compare()
    assert plan_path(entries) == Apply(chain("Cc")[1:])
    assert plan_path(log(("delta", "Ba"), ("delta", "Bab"), ("baseline", "X"))) == Compare()


def test_a_path_with_a_gap_is_no_path() -> None:
    entries = log(("delta", "Ba"), ("delta", "Bab"), ("compact", "Bm"))
    assert plan_path(entries) == Apply(chain("Bab")[2:])
    assert plan_path([entries[0], entries[2]]) == Reread(chain("B"), chain("Ba")[1:], chain("Bm")[1:])


def test_every_path_of_deltas_and_compactions_is_its_steps_in_order() -> None:
    entries = log(
        ("baseline", "B"), ("delta", "Ba"), ("compact", "C"), ("delta", "Cb"), ("delta", "Cbc"), ("compact", "Cm")
    )  # fmt: skip
    for start in range(len(entries)):
        for stop in range(start + 1, len(entries) + 1):
            steps = [plan_update(a, b) for a, b in pairwise(entries[start:stop])]
            deltas = tuple(one for step in steps if isinstance(step, Apply) for one in step.new)
            assert plan_path(entries[start:stop]) == (Apply(deltas) if deltas else Same())
