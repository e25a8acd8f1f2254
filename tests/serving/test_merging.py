"""Overlays of many tables that are merged by one call: the rows are those that each merge by itself writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cnr_store.serving.rows import merging
from cnr_store.serving.rows.memory import ANONYMOUS
from cnr_store.serving.rows.merging import Merge, merge_into, merge_target
from cnr_store.serving.rows.served_table import BaseTable, ServedTable
from cnr_store.serving.rows.shards import HashShard
from cnr_store.types import RowRange
from tests.support.served_rows import held_table, overlay_of, schema_of

FULL = {row: row for row in range(40)}
RANGE = {row: row for row in range(7, 23)}
CHANGES: Mapping[int, int | None] = {9: 90, 22: 91, 7: 92, 15: 93}
HELD: dict[str, tuple[Mapping[int, int], Mapping[int, int | None], dict[str, Any]]] = {
    "words of 4 bytes": (FULL, CHANGES, {}),
    "words of 8 bytes": (FULL, CHANGES, {"dim": 4}),
    "int8": (FULL, CHANGES, {"served": "int8"}),
    "codes": (FULL, CHANGES, {"kept_as": "codes"}),
    "a range": (RANGE, CHANGES, {"shard": RowRange(7, 23)}),
    "no rows": (FULL, {}, {}),
    "rows that go": (FULL, {**CHANGES, 3: None}, {}),
    "rows that are absent": ({5: 5}, CHANGES, {}),
    "by key": ({row: row for row in range(40)}, {**CHANGES, 100: 4, 5: None}, {"keys": "hashed"}),
    "a hash shard": ({}, {}, {"shard": HashShard(0, 2)}),
    "no overlay": (FULL, {}, {}),
}  # fmt: skip


def tables() -> dict[str, ServedTable]:
    made = {}
    for name, (model, changes, options) in HELD.items():
        schema = schema_of(**{key: options[key] for key in options if key in ("dim", "keys")})
        more = {key: value for key, value in options.items() if key not in ("dim", "keys")}
        base = held_table(model, schema, name=name, **more)
        made[name] = ServedTable(base, None if name == "no overlay" else overlay_of(changes, base))
    return made


def content(base: BaseTable) -> Any:
    keys = None if base.index is None else sorted(zip(*(one.tolist() for one in base.index.entries()), strict=True))
    return base.rows.tobytes(), None if base.status is None else base.status.tobytes(), keys, base.num_rows


def test_overlays_merged_together_are_those_merged_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {}
    for name, table in tables().items():
        if table.overlay is not None:
            target = merge_target(table.base, table.overlay, ANONYMOUS)
            merge_into(target, table.overlay)
            expected[name] = content(target.base)
    alone: list[str] = []
    monkeypatch.setattr(
        merging, "merge_target", lambda base, *more: alone.append(base.name) or merge_target(base, *more)
    )

    found = tables()
    merge = Merge(found.values(), ANONYMOUS)
    before = {name: content(table.base) for name, table in tables().items()}
    untouched = {name: content(table.base) for name, table in found.items()}
    merge.write()

    assert untouched == before, "nothing is written before"
    assert {name: content(base) for name, base in merge.bases.items()} == expected
    assert sorted(alone) == sorted(("rows that go", "rows that are absent", "by key", "a hash shard"))


def test_a_merge_takes_the_schema_of_the_overlay() -> None:
    base = held_table(FULL, schema_of())
    overlay = overlay_of(CHANGES, held_table(FULL, schema_of(fill=7.0)))

    merge = Merge([ServedTable(base, overlay)], ANONYMOUS)
    merge.write()

    assert merge.bases["t"].schema is overlay.schema
    assert merge.bases["t"].rows is base.rows
