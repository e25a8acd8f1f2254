"""Each thing that the fields of a commit record may not say of each other is refused by itself (spec, CNR-DOC-8)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cnr_store.errors import CorruptRecord
from cnr_store.format.commit_record import check_statements, decode_record, encode_record, is_live
from cnr_store.format.layout import segment_name
from cnr_store.format.records import ChainEntry, CommitRecord, Pin, Superseded, WriterInfo
from cnr_store.log.rebase import draft_after, draft_init

WRITER = WriterInfo(host="h", lib="0.1.0", run_id="r")


def segment(number: int, l0: int, l1: int, kind: str = "delta") -> ChainEntry:
    name = segment_name(number, f"{number:032x}")
    entry = ChainEntry(seg=name, sha256="0" * 64, kind="delta", l0=l0, l1=l1, size_bytes=1, rows=1)
    return msgspec.structs.replace(entry, kind=kind)


BASELINE, SECOND, THIRD = segment(1, 0, 1, "baseline"), segment(2, 1, 2), segment(3, 2, 3)


def delta(**changes: Any) -> CommitRecord:
    """Version 9: a baseline and two deltas."""
    record = draft_after(draft_init(WRITER), "delta", WRITER, chain=(BASELINE, SECOND, THIRD), checkpoint=3, step=300)
    record = msgspec.structs.replace(record, v=9, commit_uuid="c" * 32, store_uuid="5" * 32, parent_digest="d" * 64)
    return msgspec.structs.replace(record, **changes)


def rollback(**changes: Any) -> CommitRecord:
    return delta(kind="rollback", target=4, **changes)


def test_the_record_that_the_others_are_made_of_is_sound() -> None:
    check_statements(delta())
    check_statements(rollback())
    check_statements(rollback(supersedes=Superseded(torn=("d" * 64,), follows="e" * 64)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (delta(chain=(BASELINE, SECOND, segment(3, 2, 2)), checkpoint=2), "chain that breaks at position 2"),
        (delta(chain=(BASELINE, SECOND, segment(3, 1, 3))), "chain that breaks at position 2"),
        (delta(chain=(segment(1, 0, 1), SECOND, THIRD)), "does not start with a baseline"),
        (delta(chain=(segment(1, 1, 2, "baseline"), THIRD)), "does not start with a baseline"),
        (delta(chain=(BASELINE, SECOND, segment(3, 2, 3, "baseline"))), "a second baseline at position 2"),
        (delta(chain=(BASELINE, SECOND, segment(2, 2, 3))), "a segment twice in its chain"),
        (delta(checkpoint=4), "is at checkpoint 4, its chain ends at 3"),
        (delta(kind="baseline"), "has kind baseline and a chain of 3 segments"),
        (delta(kind="compact", chain=(), checkpoint=0), "has kind compact and a chain of 0 segments"),
        (delta(kind="init"), "has kind init, which cannot be at its position"),
        (delta(v=0), "has kind delta, which cannot be at its position"),
        (delta(kind="tag", target=4), "has kind tag, name None"),
        (delta(kind="tag", name="t"), "has kind tag, name 't' and target None"),
        (delta(kind="rollback"), "has kind rollback"),
        (delta(kind="rollback", target=9), "has target 9, which is not before it"),
        (delta(floor=10), "has floor 10, which is after it"),
        (delta(floor=5, kept=(5,)), "keeps version 5"),
        (delta(tags={"t": 10}), "names version 10"),
        (delta(channels={"c": 10}), "names version 10"),
        (delta(pins={"b" * 32: Pin(version=10, name="b")}), "names version 10"),
        (delta(expired=(10,)), "names version 10"),
        (delta(tags={"t": 1}, channels={"t": 1}), "as a tag and as a channel"),
        (rollback(supersedes=Superseded(torn=("a" * 64,), follows="e" * 64)), "supersedes positions that are not"),
        (rollback(supersedes=Superseded(torn=("d" * 64,) * 9, follows="e" * 64)), "supersedes positions that are not"),
        (delta(supersedes=Superseded(torn=("d" * 64,), follows="e" * 64)), "supersedes positions that are not"),
    ],
)
def test_statements_that_contradict_each_other_are_refused(record: CommitRecord, message: str) -> None:
    with pytest.raises(CorruptRecord, match=message):
        check_statements(record)


def test_a_record_says_which_position_it_is_at_and_what_its_digest_is() -> None:
    data = encode_record(delta())

    assert decode_record(data, 9).record == delta()
    with pytest.raises(CorruptRecord, match="copied to the wrong log position"):
        decode_record(data, 8)
    with pytest.raises(CorruptRecord, match="another digest than its field check"):
        decode_record(data.replace(b'"step":300', b'"step":301'), 9)


@pytest.mark.parametrize(
    "named", [{"tags": {"t": 4}}, {"channels": {"c": 4}}, {"kept": (4,), "floor": 6}, {"floor": 4}]
)
def test_a_version_that_expired_by_name_is_not_live_whatever_names_it(named: dict[str, Any]) -> None:
    assert is_live(delta(**named), 4)
    assert not is_live(delta(**named, expired=(4,)), 4)
