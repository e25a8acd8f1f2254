"""Which records a copy has: one per state, in order, at rising times that are the source's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import ChainEntry, CommitRecord, RecordKind, WriterInfo
from cnr_store.transfer.copy_plan import distinct_states, plan_records, record_times

HERE = WriterInfo(host="here:1", lib="", run_id="")
THERE = WriterInfo(host="there:1", lib="", run_id="")


def chain_of(*names: int) -> tuple[ChainEntry, ...]:
    return tuple(
        ChainEntry(
            seg=f"{0:020d}-{name:032x}", sha256="0" * 64, kind="delta" if at else "baseline", l0=at, l1=at + 1,
            size_bytes=1, rows=1,
        )
        for at, name in enumerate(names)
    )  # fmt: skip


def record(v: int, kind: RecordKind, *names: int, ts_ms: int = 0, **fields: object) -> LogEntry:
    made = CommitRecord(
        v=v, kind=kind, commit_uuid="", store_uuid="", parent_digest="", epoch=v, checkpoint=len(names),
        step=10 * len(names), ts_ms=ts_ms, chain=chain_of(*names), writer=THERE, **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    return LogEntry(made, "", {"future": v})


LOG = [
    record(0, "init", ts_ms=1),
    record(1, "fence", ts_ms=2),
    record(2, "baseline", 1, ts_ms=3, user={"message": "first"}),
    record(3, "tag", 1, ts_ms=4),
    record(4, "delta", 1, 2, ts_ms=5),
    record(5, "compact", 3, ts_ms=6),
    record(6, "rollback", 1, ts_ms=7),
]


def test_each_state_is_one_record_with_the_versions_that_have_it() -> None:
    states = distinct_states(LOG)

    assert [(state.entry.record.v, state.versions) for state in states] == [
        (2, (2, 3)),
        (4, (4,)),
        (5, (5,)),
        (6, (6,)),
    ]


def test_records_have_the_sources_fields_and_names_are_numbered_anew() -> None:
    states = distinct_states(LOG)
    head = record(7, "channel", 1, tags={"b": 2, "a": 5, "gone": 1}, channels={"serving": 3}).record

    planned = plan_records(states, record_times(states, 100), head, HERE)

    drafts = [item.draft for item in planned]
    assert [draft.kind for draft in drafts] == ["baseline", "delta", "baseline", "baseline", "tag", "tag", "channel"]
    assert [draft.ts_ms for draft in drafts[:4]] == [3, 5, 6, 7]
    assert [item.extra for item in planned[:4]] == [{"future": 2}, {"future": 4}, {"future": 5}, {"future": 6}]
    assert drafts[0].user == {"message": "first"}
    assert {draft.writer.host for draft in drafts[:4]} == {"there:1"}
    assert [draft.chain for draft in drafts[:4]] == [state.entry.record.chain for state in states]
    assert drafts[-1].tags == {"b": 1, "a": 3}
    assert drafts[-1].channels == {"serving": 1}
    assert drafts[-1].chain == drafts[3].chain


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(100, 10**6))
def test_times_rise_and_are_the_sources_where_those_rise(times: list[int], now_ms: int) -> None:
    states = distinct_states(record(at, "baseline", at, ts_ms=ts_ms) for at, ts_ms in enumerate(times, start=1))

    found = record_times(states, now_ms)

    assert found == sorted(set(found))
    assert all(mine <= min(now_ms, theirs) for mine, theirs in zip(found, times, strict=True))
    if times == sorted(set(times)) and times[-1] <= now_ms:
        assert found == times
