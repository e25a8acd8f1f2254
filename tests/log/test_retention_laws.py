"""Laws of retention over random logs: exactly what the plan says stays is live, and planning again changes nothing."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord, Pin, WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.log.retention import Holds, LiveVersion, RetentionPolicy, plan_retention

Log = tuple[CommitRecord, list[LiveVersion], Holds]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """A log as random appends, rollbacks, compactions and earlier expiries left it."""
    steps = draw(st.lists(st.sampled_from(["data", "compact", "rollback", "other"]), min_size=1, max_size=30))
    versions = [LiveVersion(0, 0, 0, ())]
    for version, step in enumerate(steps, 1):
        before = versions[-1]
        logical, chain = before.checkpoint, before.chain
        if step == "data":
            logical, chain = logical + 1, (*chain, f"s{version}")
        elif step == "compact" and chain:
            chain = (f"s{version}",)
        elif step == "rollback":
            target = draw(st.sampled_from(versions))
            logical, chain = target.checkpoint, target.chain
        versions.append(LiveVersion(version, logical, before.ts_ms + draw(st.integers(1, 5)), chain))
    numbers = st.sampled_from([one.version for one in versions])
    some = st.lists(numbers, max_size=3)
    record = msgspec.structs.replace(
        draft_init(WriterInfo(host="h", lib="0", run_id="r")),
        v=versions[-1].version,
        tags={f"t{v}": v for v in draw(some)},
        channels={f"c{v}": v for v in draw(some)},
        pins={f"{v:032x}": Pin(version=v, name=f"b{v}") for v in draw(some)},
        floor=draw(numbers),
        kept=tuple(sorted(set(draw(some)))),
    )
    live = [one for one in versions if is_live(record, one.version)]
    alive = st.lists(st.sampled_from([one.version for one in live]), max_size=2)
    holds = Holds(dict.fromkeys(draw(alive), "a lease"), {f"k{v}": v for v in draw(alive)})
    return record, live, holds


policies = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 4),
    keep_within_s=st.none() | st.floats(0, 0.1),
)


@given(logs(), policies)
def test_what_the_plan_says_is_what_its_record_does(log: Log, policy: RetentionPolicy) -> None:
    record, live, holds = log
    now_ms = live[-1].ts_ms

    plan = plan_retention(record, live, policy, holds, now_ms)

    after = msgspec.structs.replace(record, floor=plan.floor, kept=plan.kept)
    staying = [verdict.version for verdict in plan.verdicts if verdict.stays]
    assert [one.version for one in live if is_live(after, one.version)] == staying
    assert plan.floor >= record.floor
    assert [verdict.version for verdict in plan.verdicts] == [one.version for one in live]


@given(logs(), policies)
def test_whatever_is_named_held_or_newest_stays(log: Log, policy: RetentionPolicy) -> None:
    record, live, holds = log

    plan = plan_retention(record, live, policy, holds, live[-1].ts_ms)

    named = {*record.tags.values(), *record.channels.values(), *(pin.version for pin in record.pins.values())}
    from_cursor = min(holds.cursors.values(), default=record.v)
    newest = {one.checkpoint: one for one in live if one.chain}
    needed = sorted(newest.values(), key=lambda one: one.version)[-policy.keep_last :]
    going = set(plan.going)
    assert not going & {record.v, *named, *holds.leases}
    assert not {version for version in going if version >= from_cursor}
    states = {one.chain for one in live if one.version not in going}
    assert {one.chain for one in needed} <= states
    if policy.keep_every is not None:
        assert {one.chain for one in newest.values() if one.checkpoint % policy.keep_every == 0} <= states


@given(logs(), policies)
def test_planning_again_changes_nothing(log: Log, policy: RetentionPolicy) -> None:
    record, live, holds = log
    now_ms = live[-1].ts_ms
    plan = plan_retention(record, live, policy, holds, now_ms)

    expire = msgspec.structs.replace(record, v=record.v + 1, floor=plan.floor, kept=plan.kept)
    left = [one for one in live if is_live(expire, one.version)]
    left.append(_behind(left[-1], expire.v))
    again = plan_retention(expire, left, policy, holds, now_ms)

    assert (again.going, again.floor, again.kept) == ((), plan.floor, plan.kept)


@given(logs(), policies)
def test_the_list_grows_with_what_stays_not_with_the_log(log: Log, policy: RetentionPolicy) -> None:
    record, live, holds = log

    plan = plan_retention(record, live, policy, Holds(holds.leases, {}), live[-1].ts_ms)

    if policy.keep_within_s is None and policy.keep_every is None:
        named = {*record.tags.values(), *record.channels.values(), *(pin.version for pin in record.pins.values())}
        assert len(plan.kept) <= policy.keep_last + len(holds.leases) + len(named)


def _behind(before: LiveVersion, version: int) -> LiveVersion:
    return LiveVersion(version, before.checkpoint, before.ts_ms + 1, before.chain)
