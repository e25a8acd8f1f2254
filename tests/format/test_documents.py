"""Names, paths, canonical JSON and the rules of a record that the specification states in sections 2, 3 and 7."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.errors import BadName, DoesNotApply, VersionExpired
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import check_name, check_relative_path, encode_name
from cnr_store.format.records import Receipt, WriterInfo
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.store import open_segment
from cnr_store.write.commit_checks import check_receipts
from format_spec.generate_vectors import FLOATS
from format_spec.reader import documents


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=1)


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/..", "a/./b", "a b", "a\\b", "a/...", "ä", "a\n"])
def test_paths_that_leave_their_folder_are_refused(path: str) -> None:
    schema = documents.SCHEMAS["segment"].schema["$defs"]["ObjectEntry"]["properties"]["path"]
    assert not documents.Schema(schema).is_valid(path)
    with pytest.raises(BadName):
        check_relative_path(path)


@pytest.mark.parametrize("name", ["", "x" * 1025, "ü" * 513, "a\nb", "a\x7f", "\ud800"])
def test_names_that_cannot_be_names_are_refused(name: str) -> None:
    with pytest.raises(BadName):
        check_name(name)


def test_names_have_one_spelling() -> None:
    names = ["a", "A", "a/b", "a%2Fb", "..", ".", "...", "__a", "_a", "zarr.json", "ü", "%", "c/0"]

    spelled = [encode_name(name) for name in names]

    assert len(set(spelled)) == len(names)
    assert encode_name("..") == "%2E."
    assert encode_name("__a") == "%5F_a"
    assert encode_name("ü") == "%C3%BC"
    for text in spelled:
        check_relative_path(text)
    assert len(encode_name("ü" * 42)) == 252
    with pytest.raises(BadName, match="255"):
        encode_name("ü" * 43)


def test_canonical_json_has_one_form() -> None:
    document = {"b": [1, True, None, '/"\\\b\f\n\r\t\x01\x7fé\u2028'], "a": {"\U0001f600": 1, "\uffff": 2, "": -0.0}}

    data = canonical_json(document)

    assert data.decode() == documents.canonical(document)
    assert data.startswith('{"a":{"":-0.0,"\uffff":2,"\U0001f600":1},"b":[1,true,null,'.encode())
    assert json.loads(data) == document


def test_floats_have_one_spelling() -> None:
    random = np.random.default_rng(0).integers(0, 2**64, 2000, np.uint64).view(np.float64)
    values = [*FLOATS, *(float(x) for x in random if np.isfinite(x)), *(float(f"1.5e{e}") for e in range(-20, 25))]

    for value in values:
        assert canonical_json(value).decode() == documents.canonical(value)
        assert json.loads(canonical_json(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"x": -float("inf")}]])
def test_numbers_that_are_not_finite_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)


def test_the_65th_segment_of_a_chain_is_a_baseline(store: Store) -> None:
    values = np.zeros((2, 1), np.float32)
    with store.writer() as writer:
        with writer.begin(step=0) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))
        for step in range(1, 65):
            with writer.begin(step=step) as txn:
                if txn.kind == "delta":
                    txn.write_rows("t", np.asarray([0]), values[:1] + np.float32(step))

    lengths = [len(record.chain) for record in store.log(limit=3)]

    assert lengths == [1, 64, 63]


def test_a_receipt_from_another_state_does_not_apply(store: Store) -> None:
    with store.writer() as writer:
        for step in (1, 2):
            with writer.begin(step=step) as txn:
                if step == 1:
                    txn.write_table("t", np.ones((2, 2), np.float32), options=TableOptions(scale=1.0))
                else:
                    txn.write_rows("t", np.asarray([1]), np.full((1, 2), 5, np.float32))
    base, manifest = (open_segment(store, version).manifest for version in (2, 3))
    receipt = Receipt(
        txn=manifest.txn, rank=0, world=1, attempt=manifest.txn[:8], base=manifest.base, l0=manifest.l0,
        parts=manifest.parts, objects=manifest.objects,
    )  # fmt: skip
    stale = msgspec.structs.replace(receipt.parts[0], base_digest="0" * 16)

    check_receipts([receipt], txn=receipt.txn, world=1, l0=1, base=base)

    with pytest.raises(DoesNotApply):
        check_receipts([receipt], txn=receipt.txn, world=1, l0=2, base=base)
    with pytest.raises(DoesNotApply):
        check_receipts([msgspec.structs.replace(receipt, parts=(stale,))], txn=receipt.txn, world=1, l0=1, base=base)


def test_versions_are_found_by_time_and_expired_ones_refused_unless_tagged(store: Store) -> None:
    with store.writer() as writer:
        for step in (1, 2, 3):
            with writer.begin(step=step, kind="baseline") as txn:
                txn.write_table("t", np.full((1, 1), step, np.float32), options=TableOptions(scale=1.0))
    store.tag("kept", 2)
    when = dt.datetime.fromtimestamp((store.record(3).ts_ms + 0.5) / 1000, dt.UTC)
    found = store.snapshot(time=when).version
    head = store.head()
    draft = draft_after(head.record, "expire", WriterInfo(host="", lib="", run_id=""), floor=4, expired=(3,))
    store.internals.log.append(head, draft, rebase_expire)

    assert found == 3
    assert store.snapshot(version=2).table("t").read()[0, 0] == 1
    assert store.snapshot(version=4).step == 3
    for version in (1, 3):
        with pytest.raises(VersionExpired):
            store.snapshot(version=version)
