"""Which versions of a log stay: every rule by itself, and the lists over long logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from cnr_store.errors import BadInput
from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord, Pin, WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.log.retention import NO_HOLDS, Holds, LiveVersion, RetentionPlan, RetentionPolicy, plan_retention

ONE = RetentionPolicy(keep_last=1)


def head(version: int, **fields: Any) -> CommitRecord:
    first = draft_init(WriterInfo(host="h", lib="0", run_id="r"))
    return msgspec.structs.replace(first, v=version, **fields)


def log(*checkpoints: int, start: int = 0) -> list[LiveVersion]:
    """One version per number: a full of that checkpoint, or (0) a record without a state of its own."""
    versions: list[LiveVersion] = []
    logical = 0
    chain: tuple[str, ...] = ()
    for version, checkpoint in enumerate(checkpoints, start):
        if checkpoint:
            logical, chain = checkpoint, (f"segment {version}",)
        versions.append(LiveVersion(version, logical, ts_ms=1000 * version, chain=chain))
    return versions


def plan(
    versions: Sequence[LiveVersion], policy: RetentionPolicy, holds: Holds = NO_HOLDS, now_ms: int = 0, **fields: Any
) -> RetentionPlan:
    return plan_retention(head(versions[-1].version, **fields), versions, policy, holds, now_ms)


def staying(planned: RetentionPlan) -> list[int]:
    return [verdict.version for verdict in planned.verdicts if verdict.stays]


def reason(planned: RetentionPlan, version: int) -> str:
    return next(verdict.reason for verdict in planned.verdicts if verdict.version == version)


def live_after(record: CommitRecord, planned: RetentionPlan, versions: Iterable[LiveVersion]) -> list[int]:
    expired = msgspec.structs.replace(record, floor=planned.floor, kept=planned.kept)
    return [one.version for one in versions if is_live(expired, one.version)]


def test_the_newest_checkpoints_stay_and_the_floor_is_the_first_of_them() -> None:
    planned = plan(log(1, 2, 3, 4, 5), RetentionPolicy(keep_last=2))

    assert (staying(planned), planned.floor, planned.kept) == ([3, 4], 3, ())


def test_only_the_newest_version_of_a_checkpoint_counts_and_stays() -> None:
    compacted = log(1, 2, 3, 3, 4)

    planned = plan(compacted, RetentionPolicy(keep_last=3))

    assert (staying(planned), planned.floor, planned.kept) == ([1, 3, 4], 3, (1,))
    assert reason(planned, 2) == "version 3 has the same checkpoint number, 3, and is newer"


def test_records_without_a_state_of_their_own_stay_with_their_neighbour() -> None:
    planned = plan(log(1, 0, 2, 0, 0, 3, 0), RetentionPolicy(keep_last=2))

    assert (staying(planned), planned.floor, planned.kept) == ([2, 3, 4, 5, 6], 2, ())


def test_the_commit_of_a_state_stands_for_records_after_it_below_the_floor() -> None:
    planned = plan(log(1, 0, 0, 2, 3), RetentionPolicy(keep_last=1, keep_every=1), floor=3, kept=(0, 1, 2))

    assert (staying(planned), planned.kept) == ([0, 3, 4], (0,))
    assert reason(planned, 1) == "version 0 has the same state"


def test_every_nth_checkpoint_stays() -> None:
    planned = plan(log(*range(1, 11)), RetentionPolicy(keep_last=1, keep_every=4))

    assert staying(planned) == [3, 7, 9]
    assert planned.kept == (3, 7)


def test_versions_of_the_last_seconds_stay_superseded_ones_too() -> None:
    planned = plan(log(1, 2, 3, 3, 4), RetentionPolicy(keep_last=1, keep_within_s=2.0), now_ms=4000)

    assert staying(planned) == [2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tags": {"best": 1}}, "tag 'best'"),
        ({"channels": {"serving": 1}}, "channel 'serving'"),
        ({"pins": {"b" * 32: Pin(version=1, name="trial")}}, "branch 'trial' begins here"),
    ],
)
def test_what_has_a_name_stays_and_is_listed_so_that_its_end_is_seen(fields: dict[str, Any], why: str) -> None:
    planned = plan(log(1, 2, 3, 4), ONE, **fields)

    assert (staying(planned), planned.kept) == ([1, 3], (1,))
    assert reason(planned, 1) == why


def test_a_version_that_lost_its_name_goes() -> None:
    planned = plan([*log(2, start=1), *log(4, start=3)], ONE, floor=3, kept=(1,))

    assert (staying(planned), planned.going, planned.kept) == ([3], (1,), ())


def test_a_named_version_that_the_policy_keeps_too_outlives_its_name() -> None:
    planned = plan(log(1, 2, 3, 3, 4), RetentionPolicy(keep_last=3), tags={"best": 1})

    assert planned.kept == (1,)


def test_a_leased_version_stays() -> None:
    planned = plan(log(1, 2, 0, 3, 4), ONE, Holds({2: "leased by host:7"}, {}))

    assert (staying(planned), planned.kept) == ([2, 4], (2,))
    assert reason(planned, 2) == "leased by host:7"


def test_everything_from_the_lowest_cursor_on_stays() -> None:
    planned = plan(log(1, 2, 3, 3, 4, 5), ONE, Holds({}, {"far": 4, "near": 2}))

    assert (staying(planned), planned.floor) == ([2, 3, 4, 5], 2)
    assert reason(planned, 2) == "cursor 'near' has not passed it"


def test_a_cursor_keeps_its_own_version_below_a_gap_too() -> None:
    planned = plan([*log(1, 0, 2), *log(3, 4, start=5)], ONE, Holds({}, {"slow": 1}), floor=3, kept=(0, 1, 2))

    assert 1 in staying(planned)


def test_a_log_without_a_checkpoint_loses_only_what_came_before_its_state() -> None:
    planned = plan(log(0, 0, 0), ONE)

    assert (staying(planned), planned.floor, planned.going) == ([0, 1, 2], 0, ())


def test_positions_before_the_first_checkpoint_go() -> None:
    planned = plan(log(0, 0, 1), RetentionPolicy())

    assert staying(planned) == [2]
    assert reason(planned, 0) == "nothing was saved yet"


def test_the_floor_never_goes_back() -> None:
    planned = plan(log(1, 2, 3), RetentionPolicy(keep_last=3), floor=2, kept=(0, 1))

    assert (planned.floor, planned.kept, planned.going) == (2, (0, 1), ())


def test_a_checkpoint_after_a_rollback_supersedes_the_abandoned_one() -> None:
    """`checkpoint` counts on from the target, so 3 comes twice."""
    planned = plan(log(1, 2, 3, 2, 3), RetentionPolicy(keep_last=2))

    assert staying(planned) == [3, 4]


def test_the_lists_stay_small_over_a_hundred_thousand_versions() -> None:
    checkpoints = [step // 4 + 1 if step % 4 == 0 else 0 for step in range(100_000)]
    versions = log(*checkpoints)
    record = head(versions[-1].version, tags={"first": 2})

    planned = plan_retention(record, versions, RetentionPolicy(keep_last=5, keep_every=1000), NO_HOLDS, 0)

    assert len(planned.kept) == 24 + 1
    assert live_after(record, planned, versions) == staying(planned)


@pytest.mark.parametrize("rules", [{"keep_last": 0}, {"keep_within_s": -1.0}, {"keep_every": 0}])
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        RetentionPolicy(**rules)
