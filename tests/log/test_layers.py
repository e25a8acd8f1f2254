"""The lists of records in layers: what they hold, how much is written, and how many a record names."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from cnr_store.format.commit_record import Layer, LogEntry
from cnr_store.format.documents import canonical_json
from cnr_store.format.limits import MAX_CHANGES_BYTES, MAX_INLINE_BYTES, MAX_LAYERS
from cnr_store.format.records import CommitRecord, Lists, Pin, WriterInfo
from cnr_store.log.layers import merge_lists, split_lists
from cnr_store.log.rebase import draft_init

EMPTY = draft_init(WriterInfo(host="h", lib="l", run_id="r"))


class Log:
    """Records of one log, each written behind the one before and read again."""

    def __init__(self) -> None:
        self.layers: tuple[Layer, ...] = ()
        self.written: list[int] = []
        self.most_layers = 0

    def write(self, version: int, **lists: object) -> CommitRecord:
        record = msgspec.structs.replace(EMPTY, v=version, kind="fence" if version else "init", **lists)
        sent, self.layers, side_object = split_lists(record, self.layers, "")
        self.written += [] if side_object is None else [len(side_object)]
        self.most_layers = max(self.most_layers, len(self.layers))
        if version % 20 == 1:
            assert merge_lists(LogEntry(sent, ""), self.layers).record == record
        return sent


def test_short_lists_stand_in_the_record_alone() -> None:
    log = Log()

    sent = log.write(9, tags={"a": 1}, kept=(1, 2), floor=3, expired=(5,))

    assert (sent.tags, sent.kept, sent.expired, sent.state) == ({"a": 1}, (1, 2), (5,), None)
    assert not sent.removed


def test_every_list_grows_shrinks_and_changes_in_layers() -> None:
    log = Log()
    many = range(400)
    lists = {
        "tags": {f"tag {n}": n for n in many}, "channels": {f"channel {n}": n for n in many},
        "pins": {f"{n:032x}": Pin(version=n, name=f"b{n}") for n in many}, "kept": tuple(range(0, 400, 2)),
        "expired": tuple(range(401, 800)), "aborted": {f"{n:032x}": n for n in many},
    }  # fmt: skip
    log.write(1001, floor=400, **lists)
    fewer = {name: type(entries)(list(entries)[1:]) for name, entries in lists.items() if isinstance(entries, tuple)}
    fewer |= {name: dict(list(entries.items())[1:]) for name, entries in lists.items() if isinstance(entries, dict)}
    fewer["tags"]["tag 5"] = 6

    sent = log.write(1021, floor=400, **fewer)

    assert len(log.written) == 1
    assert sent.tags == {"tag 5": 6}
    assert sent.removed.tags == ("tag 0",)
    assert (sent.removed.kept, sent.removed.expired) == ((0,), (401,))


def test_what_is_written_grows_with_what_changes() -> None:
    log, tags = Log(), {}
    for number in range(800):
        tags[f"a tag with a rather long name {number}"] = 1
        log.write(number + 1, tags=dict(tags))
    whole, grown = len(canonical_json(tags)), sum(log.written)
    for number in range(800):
        del tags[f"a tag with a rather long name {number}"]
        log.write(number + 801, tags=dict(tags))

    assert grown < 5 * whole  # of lists that each record wrote whole it was 400 times as much
    assert sum(log.written) < 8 * whole
    assert log.most_layers <= 6
    assert log.layers == ()  # Nothing is left, so nothing is named.


def test_a_record_holds_little_and_each_layer_is_half_of_the_one_below() -> None:
    log, tags = Log(), {}
    for number in range(900):
        tags[f"a tag with a rather long name {number}"] = 1
        if number % 3 == 0:
            del tags[f"a tag with a rather long name {number // 2}"]
        sent = log.write(number + 1, tags=dict(tags))
        sizes = [layer.size_bytes for layer in log.layers]
        own = canonical_json(Lists(tags=sent.tags, removed=sent.removed))
        assert len(own) < (MAX_CHANGES_BYTES if sizes else MAX_INLINE_BYTES) + 100
        assert all(2 * above <= below for below, above in pairwise(sizes))
        assert not sizes or sizes[-1] > MAX_CHANGES_BYTES
        assert len(sizes) <= MAX_LAYERS


def test_names_that_come_and_go_at_the_limit_are_not_rewritten_each_time() -> None:
    log, tags = Log(), {f"tag {number:04d}": 1 for number in range(540)}
    for number in range(200):
        changed = {**tags, **{f"more {n}": 1 for n in range(5)}} if number % 2 else tags
        log.write(number + 1, tags=changed)

    assert len(log.written) <= 1


def test_layers_that_hold_most_of_the_format_are_few_enough() -> None:
    assert MAX_CHANGES_BYTES << (MAX_LAYERS - 1) >= 64 * 1024 * 1024
