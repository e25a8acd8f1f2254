"""The plan of a collection, from logs only: marks in every log, marks that are removed, lists that are cleaned up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import segment_name
from cnr_store.format.records import WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.log.retention import LiveVersion, RetentionPolicy
from cnr_store.maintenance.gc.logs import LogVersions, referenced_segments
from cnr_store.maintenance.gc.plan import (
    CLEAN_UP_AT,
    CollectionPlan,
    FolderAge,
    Times,
    due_segments,
    missing_segments,
    plan_clean_up,
    plan_collection,
    unexplained,
)

DAY_MS = 86_400_000
NOW = 100 * DAY_MS
TIMES = Times(grace_ms=DAY_MS, orphan_age_ms=7 * DAY_MS, now_ms=NOW)
LAST = RetentionPolicy(keep_last=1)


def segment(number: int) -> str:
    return segment_name(number, f"{number:032x}")


def txn(number: int) -> str:
    return f"{number:032x}"


def log(chains: Sequence[Sequence[int]], branch: str = "", *, is_closed: bool = False, **fields: Any) -> LogVersions:
    """A log with one checkpoint per version, with these segments by number."""
    versions = tuple(
        LiveVersion(version, version + 1, version, tuple(segment(number) for number in chain))
        for version, chain in enumerate(chains)
    )
    head = msgspec.structs.replace(
        draft_init(WriterInfo(host="h", lib="0", run_id="r")), v=versions[-1].version, **fields
    )
    return LogVersions(branch, f"branch {branch}"[:12], LogEntry(head, ""), versions, is_closed)


def plan(logs: Sequence[LogVersions], folders: Sequence[int], **options: Any) -> CollectionPlan:
    listed = {segment(number) for number in folders}
    ages = {name: FolderAge(30 * DAY_MS, 1) for name in unexplained(logs, listed)}
    settings: dict[str, Any] = {
        "ages": ages, "sizes": {}, "policy": LAST, "holds": {}, "held": set(), "times": TIMES, "batch": 1000,
    }  # fmt: skip
    return plan_collection(logs, listed, **{**settings, **options})


def named(found: CollectionPlan, branch: str = "") -> set[str]:
    """The transactions that the last planned record of a log marks."""
    return set([step for step in found.steps if step.branch == branch][-1].aborted)


def test_a_chain_is_all_that_a_version_refers_to() -> None:
    view = log([[1], [1, 2], [3]])

    assert referenced_segments(view.versions) == {segment(1), segment(2), segment(3)}


def test_what_only_versions_that_go_have_is_named_for_a_day() -> None:
    found = plan([log([[1], [1, 2], [3]])], [1, 2, 3])

    (step,) = found.steps
    assert (step.floor, step.kept, step.aborted) == (2, (), {txn(1): NOW + DAY_MS, txn(2): NOW + DAY_MS})


def test_a_segment_that_another_log_needs_stays() -> None:
    main, trial = log([[1], [1, 2], [3]]), log([[1, 2], [1, 2, 4]], "b" * 32)

    found = plan([main, trial], [1, 2, 3, 4])

    assert [step.aborted for step in found.steps] == [{}, {}]
    assert {report.name for report in found.segments if report.state == "stays"} == {segment(n) for n in (1, 2, 3, 4)}


def test_what_goes_is_named_in_every_log_before_it_is_due() -> None:
    main, trial = log([[1], [2]]), log([[3], [4]], "b" * 32)

    found = plan([main, trial], [1, 2, 3, 4])

    assert named(found) == named(found, "b" * 32) == {txn(1), txn(3)}
    over = {txn(1): NOW, txn(3): NOW}
    half = [log([[2]], aborted=over), log([[4]], "b" * 32, aborted={txn(3): NOW})]
    assert due_segments(half, {segment(1), segment(3)}, set(), NOW) == [segment(3)]


def test_a_branch_that_ended_gives_its_segments_up_in_the_other_logs() -> None:
    main, ended = log([[1]]), log([[1], [1, 2], [3]], "b" * 32, is_closed=True)

    found = plan([main, ended], [1, 2, 3])

    assert {step.branch for step in found.steps} == {""}
    assert named(found) == {txn(2), txn(3)}


def test_a_log_that_is_newer_than_a_name_takes_it_over_with_its_time() -> None:
    main, trial = log([[2]], aborted={txn(1): NOW - 5}), log([[2]], "b" * 32)

    found = plan([main, trial], [1, 2])

    (step,) = found.steps
    assert (step.branch, step.aborted) == ("b" * 32, {txn(1): NOW - 5})


def test_a_name_that_another_log_has_committed_is_taken_back() -> None:
    """One of two logs marked an orphan, and a writer of the other committed it before that log's mark."""
    main, trial = log([[1]], aborted={txn(2): NOW}), log([[2]], "b" * 32)

    found = plan([main, trial], [1, 2])

    (step,) = found.steps
    assert (step.branch, step.aborted) == ("", {})
    assert due_segments([main, trial], {segment(1), segment(2)}, set(), NOW) == []


def test_names_without_a_folder_leave_with_the_next_record_and_cause_none() -> None:
    quiet = plan([log([[1]], aborted={txn(9): NOW})], [1])
    busy = plan([log([[1], [2]], aborted={txn(9): NOW})], [1, 2])

    assert quiet.steps == ()
    assert named(busy) == {txn(1)}


def test_many_names_of_gone_folders_are_a_reason_for_a_record() -> None:
    gone = {txn(100 + number): NOW for number in range(CLEAN_UP_AT)}
    view = log([[1]], aborted={**gone, txn(50): NOW})

    (step,) = plan_clean_up([view], {segment(1), segment(50)})

    assert step.aborted == {txn(50): NOW}
    assert plan_clean_up([log([[1]], aborted=dict(list(gone.items())[1:]))], {segment(1)}) == ()


def test_what_a_reader_holds_is_given_up_and_not_deleted() -> None:
    view = log([[2]], aborted={txn(1): NOW})

    found = plan([view], [1, 2], held={segment(1)})

    assert found.steps == ()
    assert {report.name: report.state for report in found.segments} == {segment(1): "waiting", segment(2): "stays"}
    assert due_segments([view], {segment(1), segment(2)}, {segment(1)}, NOW) == []
    assert due_segments([view], {segment(1), segment(2)}, set(), NOW) == [segment(1)]


def test_a_segment_is_due_when_its_time_is_over_and_not_before() -> None:
    view = log([[2]], aborted={txn(1): NOW})

    assert due_segments([view], {segment(1)}, set(), NOW - 1) == []


def test_what_is_needed_is_never_due_whatever_is_named() -> None:
    view = log([[1]], aborted={txn(1): 0})

    assert due_segments([view], {segment(1)}, set(), NOW) == []


def test_folders_of_nobody_are_given_up_by_age() -> None:
    ages = {segment(8): FolderAge(7 * DAY_MS, 5), segment(9): FolderAge(7 * DAY_MS - 1, 5)}

    found = plan([log([[1]])], [1, 8, 9], ages=ages)

    assert named(found) == {txn(8)}
    assert {report.name: report.state for report in found.segments}[segment(9)] == "young"


def test_unreferenced_folders_without_times_go_only_if_no_age_is_asked_for() -> None:
    ages = {segment(9): FolderAge(None, 5)}

    assert plan([log([[1]])], [1, 9], ages=ages).steps == ()
    at_once = Times(grace_ms=0, orphan_age_ms=0, now_ms=NOW)
    assert named(plan([log([[1]])], [1, 9], ages=ages, times=at_once)) == {txn(9)}


def test_a_folder_with_the_transaction_of_a_needed_segment_is_left() -> None:
    twin = segment_name(77, txn(1))

    assert unexplained([log([[1]])], {segment(1), twin}) == []
    found = plan_collection(
        [log([[1]])], {segment(1), twin},
        ages={}, sizes={}, policy=LAST, holds={}, held=set(), times=TIMES, batch=10,
    )  # fmt: skip
    assert found.steps == ()


def test_many_names_are_split_over_records_that_each_keep_versions_whole() -> None:
    view = log([[number] for number in range(1, 11)], kept=(), floor=0)

    found = plan([view], list(range(1, 11)), batch=4)

    assert [(step.floor, len(step.aborted)) for step in found.steps] == [(4, 4), (8, 8), (9, 9)]
    assert set(found.steps[0].aborted) == {txn(number) for number in range(1, 5)}


def test_orphans_are_divided_over_records_too() -> None:
    found = plan([log([[1]])], list(range(1, 12)), batch=4)

    assert [len(step.aborted) for step in found.steps] == [4, 8, 10]


def test_a_segment_of_a_version_that_stays_and_is_not_listed_is_missing() -> None:
    view = log([[1], [2]])

    assert missing_segments(plan([view], [1]), [view], {segment(1)}) == [segment(2)]
    assert missing_segments(plan([view], [2]), [view], {segment(2)}) == []


def test_a_log_of_many_checkpoints_is_deleted_but_for_the_newest() -> None:
    chains = [list(range(max(1, version - version % 50), version + 2)) for version in range(2000)]

    found = plan([log(chains)], range(1, 2001), policy=RetentionPolicy(keep_last=3), ages={})

    (step,) = found.steps[-1:]
    assert (step.floor, len(step.aborted)) == (1997, 1949)
