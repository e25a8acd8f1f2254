"""Rules of rows that every reader holds by itself, though no digest tells that they are broken.

CNR-ROW-2: a difference to a row that has no codes. CNR-SEG-10: a row in two lists of a segment. CNR-ENC-7: a sum of
codes that leaves int32. The stores are those of
the negative vectors, without the state digests that save a reader of whole tables.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import ChunkCache, CorruptStore, Store, verify_store
from cnr_store.changes.stream import changes
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving.rows.served_table import row_kind
from cnr_store.serving.rows.shards import HashShard
from cnr_store.serving.update.loading import load_table
from cnr_store.serving.update.update_tables import ServeAs
from format_spec import vectors
from tests.support.consumers import Consumer

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "negative" / "vectors.json").read_text())
TABLE = "user"


@dataclass(frozen=True)
class Damaged:
    """A store in which the delta of ``version`` says of ``row`` what it may not; ``says``: a reader's words for it."""

    store: Store
    version: int
    row: int
    says: str

    @property
    def chain_length(self) -> int:
        return len(self.store.record(self.version).chain)


TOUCHING = [
    {"op": "elements", "key": "@4/r*.set-0.rows/c.0.0", "codec": "gaps", "dtype": "int64", "values": [3, 4, 9]},
    {"op": "set", "key": "@4/_segment.json.zst", "at": ["parts", 0, "set", "first"], "value": [3]},
]
"""The one row that is added to is the first of those that are set."""

LARGEST, SMALLEST = 2**31 - 1, -(2**31)
TOO_LARGE = [
    {
        "op": "elements", "key": "@4/r*.add-0.codes/c.0.0", "codec": "digits", "dtype": "int32",
        "values": [LARGEST, LARGEST, SMALLEST, LARGEST],
    },
    {"op": "set", "key": "@4/_segment.json.zst", "at": ["groups", 0, "arrays", "codes", "dtype"], "value": "int32"},
]  # fmt: skip
"""Differences that lead out of int32 from codes of either sign."""

ADDS, TWICE = "row {row} of table 'user' has an add", "row {row} of table 'user' is in two row lists"
# The patch of the store "rows", the version of the delta, the row, and what a reader says of it.
CASES: dict[str, tuple[Any, int, int, str]] = {
    "add after escape": (VECTORS["add_after_escape"]["patch"], 3, 9, ADDS),
    "add after delete": (VECTORS["add_after_delete"]["patch"], 4, 0, ADDS),
    "add to absent": (VECTORS["add_to_absent_row"]["patch"], 6, 13, ADDS),
    "in two lists": (VECTORS["row_in_two_lists"]["patch"], 4, 3, TWICE),
    "where two lists touch": (TOUCHING, 4, 3, TWICE),
    "beyond int32": (TOO_LARGE, 4, 3, "codes of table 'user' leave their range"),
}


@pytest.fixture(scope="module")
def root_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the store of a case is: made once, and read by many tests."""

    @cache
    def root_of_case(case: str) -> Path:
        root = tmp_path_factory.mktemp("damaged") / "store"
        shutil.copytree(GOLDEN / "rows" / "store", root)
        vectors.apply(root, [*CASES[case][0], *_without_digests(root), {"op": "reseal"}])
        return root

    return root_of_case


@pytest.fixture(params=sorted(CASES))
def damaged(request: pytest.FixtureRequest, root_of: Callable[[str], Path]) -> Iterator[Damaged]:
    _, version, row, says = CASES[request.param]
    with Store.open(str(root_of(request.param)), threads=1) as store:
        yield Damaged(store, version, row, says.format(row=row))


def _without_digests(root: Path) -> list[dict[str, Any]]:
    return [
        {"op": "set", "key": str(path.relative_to(root)), "at": ["parts", number, name], "value": None}
        for path in root.glob("data/*/_segment.json.zst")
        for number in range(len(json.loads(vectors.text_of(path.name, path.read_bytes()))["parts"]))
        for name in ("base_digest", "state_digest")
    ]


def look_up(at: Damaged) -> None:
    at.store.snapshot(version=at.version).table(TABLE).read_rows(np.asarray([1, at.row]))


def look_up_through_a_cache(at: Damaged) -> None:
    view = at.store.snapshot(version=at.version, cache=ChunkCache(1 << 20)).table(TABLE)
    view.read_rows(np.asarray([1]))
    view.read_rows(np.asarray([at.row]))


def look_up_a_slot(at: Damaged) -> None:
    view = at.store.snapshot(version=at.version).table(TABLE)
    view.read_rows(np.asarray([at.row]), slot=min(view.schema.slots))


def read_the_row_as_a_range(at: Damaged) -> None:
    at.store.snapshot(version=at.version).table(TABLE).read(at.row, at.row + 1)


def read_the_table(at: Damaged) -> None:
    at.store.snapshot(version=at.version).table(TABLE).read()


def restore_a_writer(at: Damaged) -> None:
    at.store.writer().restore()


def load_a_table(at: Damaged, holding: ServeAs) -> None:
    snapshot = at.store.snapshot(version=at.version)
    kind = row_kind(snapshot.tables[TABLE], holding.served, holding.kept_as)
    load_table(snapshot.readers, TABLE, kind, snapshot.workers, shard=holding.shard)


def apply_the_delta(at: Damaged, holding: ServeAs) -> None:
    consumer = Consumer(holding, np.random.default_rng(0))
    entries = [at.store.internals.log.read(version) for version in range(2, at.version + 1)]
    for entry in entries[:-1]:
        consumer.go(at.store, [entry])
    consumer.go(at.store, [entries[-1]])


def stream_the_change(at: Damaged) -> None:
    list(changes(at.store, since=at.version - 1, tables=[TABLE]))


def stream_the_change_through_a_mirror(at: Damaged) -> None:
    list(changes(at.store, since=at.version - 1, tables=[TABLE], mirror="memory"))


def stream_the_whole_table(at: Damaged) -> None:
    list(changes(at.store, tables=[TABLE]))


def merge_from_the_baseline(at: Damaged) -> None:
    compact_run(at.store, run=(0, at.chain_length))


READERS: list[Callable[[Damaged], None]] = [
    look_up, look_up_through_a_cache, read_the_row_as_a_range, read_the_table, restore_a_writer,
    stream_the_change, stream_the_change_through_a_mirror, stream_the_whole_table, merge_from_the_baseline,
]  # fmt: skip
HOLDINGS = [ServeAs(), ServeAs(kept_as="codes"), ServeAs("float16"), ServeAs(shard=HashShard(0, 1))]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_reader_refuses_a_row_that_breaks_a_rule(damaged: Damaged, read: Callable[[Damaged], None]) -> None:
    with pytest.raises(CorruptStore, match=damaged.says):
        read(damaged)


@pytest.mark.parametrize("damaged", sorted(CASES.keys() - {"beyond int32"}), indirect=True)
def test_a_reader_of_a_slot_alone_refuses_such_a_row_too(damaged: Damaged) -> None:
    with pytest.raises(CorruptStore, match=damaged.says):
        look_up_a_slot(damaged)


@pytest.mark.parametrize("holding", HOLDINGS, ids=str)
@pytest.mark.parametrize("act", [load_a_table, apply_the_delta], ids=lambda act: act.__name__)
def test_a_loader_refuses_a_row_that_breaks_a_rule(
    damaged: Damaged, act: Callable[[Damaged, ServeAs], None], holding: ServeAs
) -> None:
    with pytest.raises(CorruptStore, match=damaged.says):
        act(damaged, holding)


def test_a_deep_check_finds_a_row_that_breaks_a_rule(damaged: Damaged) -> None:
    report = verify_store(damaged.store, deep=True)

    found = [problem for problem in report.problems if damaged.says in problem.message]
    assert found
    assert damaged.version in found[0].versions


def test_a_row_that_breaks_a_rule_hurts_no_other_row(damaged: Damaged) -> None:
    before, after = (damaged.store.snapshot(version=v).table(TABLE) for v in (damaged.version - 1, damaged.version))

    assert after.read_rows(np.asarray([1])).tobytes() == before.read_rows(np.asarray([1])).tobytes()
