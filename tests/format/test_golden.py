"""The promise of the format: every committed store reads as the arrays beside it say, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cnr_store import Snapshot, Store
from cnr_store.errors import BranchNotFound
from cnr_store.format import document_tree
from cnr_store.format.documents import text_of
from cnr_store.format.manifest import as_read, decode_text
from cnr_store.format.records import Manifest, SegmentDocument, TableSchema
from format_spec import generate_golden

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
VERSIONS = [
    (case, int(v)) for case in CASES for v in json.loads((GOLDEN / case / "expected.json").read_text())["versions"]
]


def expected(case: str, version: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / case / "expected.json").read_text())["versions"][str(version)]
    return found


def load(case: str, entry: Any) -> np.ndarray[Any, Any]:
    if isinstance(entry, str):
        loaded: np.ndarray[Any, Any] = np.load(GOLDEN / case / "expected" / entry)
        return loaded
    return np.frombuffer(bytes.fromhex(entry["hex"]), entry["dtype"]).reshape(entry["shape"])


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def open_case(case: str, version: int) -> Snapshot:
    return Store.open(str(GOLDEN / case / "store"), threads=1).snapshot(version=version)


def test_there_are_golden_stores_and_they_are_small() -> None:
    assert len(CASES) >= 7

    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 600_000


@pytest.mark.parametrize(("case", "version"), VERSIONS)
def test_tables_and_slots_read_as_expected(case: str, version: int) -> None:
    snapshot = open_case(case, version)
    held = expected(case, version)["tables"]

    assert sorted(snapshot.tables) == sorted(held)
    for table, arrays in held.items():
        view = snapshot.table(table)
        if view.schema.keys == "hashed":
            keys, values = view.read_all(slots=True)
            found = {"keys": keys, **values}
        else:
            found = {n: view.read(slot=None if n == "values" else n) for n in ["values", *view.schema.slots]}
        assert sorted(found) == sorted(arrays)
        for name, entry in arrays.items():
            assert same_bits(found[name], load(case, entry)), (table, name)


@pytest.mark.parametrize(("case", "version"), VERSIONS)
def test_dense_tensors_documents_and_scalars_read_as_expected(case: str, version: int) -> None:
    snapshot = open_case(case, version)
    held = expected(case, version)

    assert sorted(snapshot.dense) == sorted(held["dense"])
    for name, entry in held["dense"].items():
        assert same_bits(snapshot.read_dense(name), load(case, entry)), name
    assert {name: document_tree.encode(snapshot.read_document(name)) for name in snapshot.documents} == held[
        "documents"
    ]
    assert snapshot.scalars == held["scalars"]


@pytest.mark.parametrize("case", CASES)
def test_the_whole_log_of_a_golden_store_is_sound(case: str) -> None:
    store = Store.open(str(GOLDEN / case / "store"), threads=1)

    versions = [record.v for record in store.log()]

    assert versions == list(range(store.latest_version(), -1, -1))


def test_row_ranges_and_single_rows_of_a_golden_store_equal_the_whole() -> None:
    view = open_case("rows", 7).table("user")
    whole = view.read()
    rows = np.asarray([13, 0, 7, 7, 2])

    assert same_bits(view.read(3, 11), whole[3:11])
    assert same_bits(view.read_rows(rows), whole[rows])


def test_a_step_after_a_rollback_and_a_tag_find_their_versions() -> None:
    store = Store.open(str(GOLDEN / "lattice" / "store"), threads=1)

    assert store.snapshot(tag="best").version == 2
    assert store.snapshot(step=100).version == 7  # the rollback, newer than the baseline
    assert store.snapshot(step=300).version == 4
    assert store.snapshot(version=7).record.kind == "rollback"


def test_a_side_object_holds_the_tags_that_a_record_has_no_room_for() -> None:
    store = Store.open(str(GOLDEN / "overflow" / "store"), threads=1)

    on_disk = json.loads((GOLDEN / "overflow" / "store" / "commits" / f"{16:020d}.json").read_bytes())

    assert sorted(store.tags()) == sorted(f"{index % 10}" * (1000 + index) for index in range(12) if index != 3)
    assert [len(name) for name in on_disk["state"]] == [64, 64]
    assert on_disk["tags"] == {}
    assert on_disk["removed"] == {"tags": ["3" * 1003]}


def test_a_one_shot_delta_takes_the_place_of_the_one_before() -> None:
    store = Store.open(str(GOLDEN / "one_shot" / "store"), threads=1)

    second, third = store.record(3).chain, store.record(4).chain

    assert len(second) == len(third) == 2
    assert second[0] == third[0]
    assert second[1] != third[1]


def test_a_branch_reads_as_expected_and_its_tags_are_its_own() -> None:
    store = Store.open(str(GOLDEN / "branches" / "store"), threads=1)
    trial = store.on_branch("trial")
    held = json.loads((GOLDEN / "branches" / "expected.json").read_text())["branches"]["trial"]

    for version, arrays in held.items():
        found = trial.snapshot(int(version)).table("t").read()
        assert same_bits(found, load("branches", arrays["tables"]["t"]["values"]))
    assert len(held) == 2
    assert (list(trial.tags()), list(store.tags())) == (["best"], [])
    assert trial.snapshot(tag="best").version == max(map(int, held))
    assert store.snapshot(channel="serving").step == 2


def test_a_new_branch_reads_as_its_fork_point_and_a_dropped_one_is_gone() -> None:
    store = Store.open(str(GOLDEN / "branches" / "store"), threads=1)

    forked = store.on_branch("new")

    assert same_bits(forked.snapshot().table("t").read(), store.snapshot(channel="serving").table("t").read())
    assert sorted(store.branches()) == ["new", "trial"]
    with pytest.raises(BranchNotFound):
        store.on_branch("gone")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Manifest, Manifest]]]:
    """The golden stores written anew; of each manifest what its writer went on with, and what a reader makes of it."""
    folder, manifests = tmp_path_factory.mktemp("golden"), list[tuple[Manifest, Manifest]]()

    def as_both(document: SegmentDocument, known: Mapping[str, TableSchema], where: str) -> Manifest:
        manifest = as_read(document, known, where)
        manifests.append((manifest, decode_text(text_of(document), where)))
        return manifest

    with mock.patch("cnr_store.segment.writer.as_read", as_both):
        generate_golden.generate(folder)
    return folder, manifests


@pytest.mark.parametrize("case", generate_golden.CASES)
def test_the_generator_still_writes_the_golden_stores(generated: tuple[Path, object], case: str) -> None:
    written, golden = (
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (generated[0] / case, GOLDEN / case)
    )

    assert written == golden


def test_a_writer_goes_on_with_the_manifest_that_a_reader_parses(
    generated: tuple[Path, list[tuple[Manifest, Manifest]]],
) -> None:
    pairs = generated[1]

    assert len(pairs) > 30
    for own, parsed in pairs:
        assert own == parsed
        assert [*own.tables] == [*parsed.tables]  # which dicts do not compare
        assert repr(own) == repr(parsed)  # nor types that are equal: True and 1, a list and its subclass
