"""What a relay deletes, and which version it copies next: plans compared with their definitions."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord, RelayTrims, WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.log.retention import Holds, LiveVersion, RetentionPolicy
from cnr_store.relay.mirroring import first_version, next_live, versions_of_channels
from cnr_store.relay.trimming import base_of, plan_trim

INIT = draft_init(WriterInfo(host="", lib="", run_id=""))
GRACE_MS = 1000
NEWEST = 30
versions_of = st.integers(0, NEWEST)


def segment(number: int) -> str:
    """A segment that was begun at that version."""
    return f"{number:020d}-{number:032x}"


def head_of(floor: int = 0, kept: frozenset[int] = frozenset(), expired: frozenset[int] = frozenset()) -> CommitRecord:
    return msgspec.structs.replace(
        INIT, v=NEWEST, floor=floor, kept=tuple(sorted(kept)), expired=tuple(sorted(expired - {NEWEST}))
    )


@given(versions_of, versions_of, st.frozensets(versions_of), st.frozensets(versions_of), versions_of)
def test_the_next_version_to_copy_is_the_first_that_is_live(
    start: int, floor: int, kept: frozenset[int], expired: frozenset[int], channel: int
) -> None:
    head = msgspec.structs.replace(head_of(floor, kept, expired), channels={"serving": channel})

    live = [version for version in range(start, NEWEST) if is_live(head, version)]

    assert next_live(head, start) == min(live, default=NEWEST)
    assert next_live(msgspec.structs.replace(head, kind="close"), start) == NEWEST


def test_a_relay_never_begins_at_position_0() -> None:
    head = msgspec.structs.replace(head_of(), channels={"serving": 0, "next": 7})

    assert first_version(head, None, 0) == 1
    assert first_version(head_of(), None, 0) == NEWEST
    assert first_version(head, None, 5) == 5
    assert first_version(head, 0, 0) == 1
    assert first_version(head, 12, 0) == 12
    assert first_version(INIT, None, 0) is None
    assert versions_of_channels(head, 3) == (7,)
    assert versions_of_channels(msgspec.structs.replace(head, expired=(7,)), 1) == ()


@given(
    st.lists(st.frozensets(st.integers(0, NEWEST - 1), min_size=1, max_size=4), min_size=1, max_size=10),
    st.integers(1, 4),
    st.frozensets(versions_of),
    st.dictionaries(versions_of, st.integers(0, 3000)),
    st.frozensets(versions_of, max_size=3),
    st.frozensets(versions_of, max_size=3),
    st.integers(0, 3000),
)
def test_nothing_goes_that_is_needed_or_may_be_on_its_way(
    chains: list[frozenset[int]],
    keep_last: int,
    others: frozenset[int],
    noted: dict[int, int],
    leased: frozenset[int],
    cursors: frozenset[int],
    now_ms: int,
) -> None:
    first = NEWEST + 1 - len(chains)
    versions = [
        LiveVersion(first + n, n, n, tuple(segment(number) for number in sorted(chain)))
        for n, chain in enumerate(chains)
    ]
    holds = Holds(dict.fromkeys(leased, "leased"), {f"c{version}": version for version in cursors})
    listed = {name for version in versions for name in version.chain} | {segment(number) for number in others}
    notes = RelayTrims(pending_delete={segment(number): due_ms for number, due_ms in noted.items()})
    policy = RetentionPolicy(keep_last=keep_last)

    plan = plan_trim(head_of(), versions, policy, holds, notes, listed, {segment(3)}, now_ms, GRACE_MS)

    pending_delete = plan.notes.pending_delete
    going = set(plan.going)
    needed = {name for version in versions if version.version not in going for name in version.chain} | {segment(3)}
    assert NEWEST not in going
    assert going.isdisjoint(leased)
    assert not [version for version in going if any(version >= cursor for cursor in cursors)]
    assert len(versions) - len(going) >= min(keep_last, len(versions))
    assert needed.isdisjoint(pending_delete)
    assert pending_delete.keys() <= listed
    # Every other segment is on its way out, but one that may be on its way in.
    for name in listed - needed - pending_delete.keys():
        assert base_of(name) >= plan.notes.floor
        assert name not in notes.pending_delete
    for name, due_ms in pending_delete.items():
        assert due_ms == notes.pending_delete.get(name, now_ms + GRACE_MS)
    assert set(plan.due) == {name for name, due_ms in pending_delete.items() if due_ms <= now_ms}
    # A second plan behind the first changes nothing, and no grace begins anew.
    left = [version for version in versions if version.version not in going]
    again = plan_trim(head_of(), left, policy, holds, plan.notes, listed, {segment(3)}, now_ms + 1, GRACE_MS)
    assert again.going == ()
    assert again.notes == plan.notes
