"""`verify_store` finds every kind of damage; one sample store is damaged and repaired object by object."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import Store, TableOptions, repair_store, verify_store
from cnr_store.errors import VersionNotFound
from cnr_store.format import arrays
from cnr_store.format.commit_record import decode_record, encode_record
from cnr_store.format.documents import pack, unpack
from cnr_store.format.layout import RECEIPT, segment_key
from cnr_store.format.records import Manifest, PartEntry, Receipt
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.verify.log import list_positions
from cnr_store.maintenance.verify.states import FailedReplay, check_states
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader, in_chain
from format_spec import vectors
from format_spec.vectors import find
from tests.support.documents import document_of
from tests.tools.sample_store import Forgery, build_store, flip, forge_head, key_of, object_files

NEWEST = "commits/00000000000000000006.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "store"
    build_store(root).close()
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def problems_by_path(root: Path, *, deep: bool = False) -> dict[str, tuple[int, ...]]:
    with Store.open(str(root), threads=1) as store:
        report = verify_store(store, deep=deep, threads=1)
    return {problem.path: problem.versions for problem in report.problems}


def damaged(root: Path, damage: Callable[[bytes], bytes | None]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The problems that are found if one object is damaged, for each object but the identity."""
    found = {}
    for path in object_files(root):
        key = key_of(root, path)
        if key == "cnr.json":
            continue
        data = path.read_bytes()
        bad = damage(data)
        if bad is None:
            path.unlink()
        else:
            path.write_bytes(bad)
        found[key] = problems_by_path(root)
        path.write_bytes(data)
    return found


def test_sound_store_has_no_problems(sound: Path) -> None:
    with Store.open(str(sound)) as store:
        report = verify_store(store, deep=True)

    assert report.problems == ()
    assert report.is_sound
    assert (report.head, report.versions) == (6, (3, 6))
    assert report.segments == 4
    assert report.objects == len(object_files(sound / "data")) - 1  # data/zarr.json


def test_flipped_bit_in_any_object_is_named(root: Path) -> None:
    found = damaged(root, flip)

    silent = {key for key, problems in found.items() if key not in problems} - {"hint/latest.json"}  # may be stale
    assert silent == set()
    assert all(problems.keys() <= {key} for key, problems in found.items() if key.startswith("data/"))


def test_deep_check_names_a_bad_object_once(root: Path) -> None:
    for name in ("rows", "codes"):
        chunk = next(root.glob(f"data/*3-*/*add-0.{name}/c.0*"))
        chunk.write_bytes(flip(chunk.read_bytes()))

    with Store.open(str(root)) as store:
        report = verify_store(store, deep=True)

    assert len(report.problems) == 2
    assert {problem.kind for problem in report.problems} == {"corrupt_object"}


def test_truncated_object_is_named(root: Path) -> None:
    found = damaged(root, lambda data: data[: len(data) // 2])

    assert {key for key, problems in found.items() if key not in problems} == set()


def test_missing_object_is_named(root: Path) -> None:
    found = damaged(root, lambda data: None)

    # The hint may be absent; without the newest record the hint is ahead.
    silent = {key for key, problems in found.items() if key not in problems}
    assert silent == {NEWEST, "hint/latest.json"}
    assert "hint/latest.json" in found[NEWEST]


def test_save_beside_a_check_leaves_no_problem_of_the_hint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> list[int]:
        found = list_positions(*arguments)
        with Store.open(str(root)) as writing:
            writing.tag("meanwhile")
        return found

    monkeypatch.setattr("cnr_store.maintenance.verify.log.list_positions", slow)

    assert problems_by_path(root) == {}


def test_problem_lists_the_versions_it_hurts(root: Path) -> None:
    baseline = next(root.glob("data/*/*set-0.codes/c.0.0"))
    baseline.write_bytes(flip(baseline.read_bytes()))
    delta = next(p for p in root.glob("data/*4-*/r*.delete-0.rows/c.0.0"))
    delta.write_bytes(flip(delta.read_bytes()))

    found = problems_by_path(root)

    assert found == {key_of(root, baseline): (2, 3, 4, 5, 6), key_of(root, delta): (5, 6)}


@pytest.mark.parametrize("damage", ["flipped", "of another transaction"])
def test_receipt_that_differs_hurts_no_version(root: Path, damage: str) -> None:
    with Store.open(str(root), fsync=False) as store:
        compact_run(store, run=(0, 4))
    receipt = next(root.glob("data/*/*.receipt.json.zst"))
    data = receipt.read_bytes()
    receipt.write_bytes(
        flip(data, 0) if damage == "flipped" else pack({**json.loads(unpack(data, "")), "txn": "0" * 32})
    )

    assert problems_by_path(root) == {key_of(root, receipt): ()}


def test_a_document_in_a_manifest_that_no_encoder_writes_is_named(root: Path) -> None:
    key = key_of(root, find(root, "@2/_segment.json.zst"))
    change = {"op": "set", "key": key, "at": ["small", "reader/0"], "value": {"$int": "seven"}}
    vectors.apply(root, [change, {"op": "reseal"}])

    assert problems_by_path(root, deep=True) == {key: (2, 3, 4, 5, 6)}


def test_a_receipt_of_the_committer_is_no_problem_if_it_agrees(root: Path) -> None:
    """Other writers may write one in each segment."""
    with Store.open(str(root), fsync=False) as store:
        before = store.snapshot()
        document, segment = document_of(before.manifests[-1]), before.record.chain[-1].seg
        writer = document.groups[0].path.split(".")[0]
        receipt = Receipt(
            txn=document.txn, rank=0, world=1, attempt=writer[7:], base=document.base, l0=document.l0,
            parts=document.parts, groups=document.groups, dense_arrays=document.dense_arrays, objects=document.objects,
        )  # fmt: skip
        store.storage.put(segment_key(segment, f"{writer}.{RECEIPT}"), pack(receipt))
        report = verify_store(store, deep=True)

        assert report.problems == ()
        assert (
            report.objects == len([p for p in object_files(root / "data") if not p.name.endswith(RECEIPT)]) - 1
        )  # data/zarr.json
        assert np.array_equal(store.snapshot().table("user").read(), before.table("user").read())


def test_swapped_chunks_of_equal_size_are_both_named(tmp_path: Path) -> None:
    root = tmp_path / "store"
    options = TableOptions(encoding="affine", bits=8)
    with Store.create(str(root), fsync=False) as store, store.writer() as writer, writer.begin(step=1) as txn:
        for name, seed in (("a", 1), ("b", 2)):
            values = np.random.default_rng(seed).normal(size=(40, 8)).astype(np.float32)
            txn.write_table(name, values[:, : 8 - seed], options=options)
    first, second = (next(root.glob(f"data/*/*set-{k}.codes/c.0.0")) for k in (0, 1))
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)

    first.write_bytes(two)
    second.write_bytes(one)

    assert problems_by_path(root).keys() == {key_of(root, first), key_of(root, second)}


def test_torn_newest_record_is_named_and_the_rest_is_still_read(root: Path) -> None:
    (root / NEWEST).write_bytes((root / NEWEST).read_bytes()[:100])
    chunk = next(root.glob("data/*/*set-0.codes/c.0.0"))
    chunk.write_bytes(flip(chunk.read_bytes()))

    with Store.open(str(root)) as store:
        report = verify_store(store)

    assert report.head == 5
    assert {(p.kind, p.path) for p in report.problems} == {
        ("corrupt_record", NEWEST), ("corrupt_object", key_of(root, chunk)),
    }  # fmt: skip


@pytest.mark.parametrize("version", [0, 1, 3])
def test_hole_in_the_log_is_named(root: Path, version: int) -> None:
    key = f"commits/{version:020d}.json"
    (root / key).unlink()

    with Store.open(str(root)) as store:
        report = verify_store(store)

    assert [(p.kind, p.path, p.versions) for p in report.problems] == [("missing_object", key, (version,))]


def test_records_of_another_store_point_to_the_identity(root: Path) -> None:
    identity = root / "cnr.json"
    text = identity.read_text()
    uuid = msgspec.json.decode(text)["store_uuid"]
    identity.write_text(text.replace(uuid, "0" * 32))

    assert problems_by_path(root).keys() == {"cnr.json"}


def test_damage_outside_the_asked_version_is_not_read(root: Path) -> None:
    delta = next(p for p in root.glob("data/*4-*/r*.delete-0.rows/c.0.0"))
    delta.write_bytes(flip(delta.read_bytes()))

    with Store.open(str(root)) as store:
        assert verify_store(store, version=4).is_sound
        assert not verify_store(store, version=5).is_sound
        with pytest.raises(VersionNotFound):
            verify_store(store, version=99)


def test_every_version_reads_what_a_rollback_left_behind(root: Path) -> None:
    with Store.open(str(root)) as store:
        store.rollback(2)
    delta = next(p for p in root.glob("data/*4-*/r*.delete-0.rows/c.0.0"))
    delta.write_bytes(flip(delta.read_bytes()))

    with Store.open(str(root)) as store:
        assert verify_store(store).is_sound
        report = verify_store(store, all_versions=True)

    assert [(p.path, p.versions) for p in report.problems] == [(key_of(root, delta), (5, 6))]


def test_progress_reaches_its_total(sound: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    with Store.open(str(sound)) as store:
        verify_store(store, deep=True, progress=lambda stage, done, total: seen.update({stage: (done, total)}))

    assert seen.keys() == {"objects", "states"}
    assert all(done == total > 0 for done, total in seen.values())


# Forged segments: every digest is right, and still the content cannot be.


def last_add(root: Path) -> None:
    """Commit one more delta with add rows only, so that the head's own segment can be forged."""
    values = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    with Store.open(str(root), fsync=False) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(step=50) as txn:
            txn.write_rows("user", np.asarray([20, 40, 60]), values, slots={"momentum1": np.ones(3, np.float32)})


def the_add_part(manifest: Manifest) -> PartEntry:
    return next(part for part in manifest.parts if part.add is not None)


def forged_problems(root: Path, change: Callable[[Manifest, Forgery], Manifest]) -> list[tuple[str, str]]:
    last_add(root)
    with Store.open(str(root), fsync=False) as store:
        forge_head(store, change)
        shallow = verify_store(store)
        deep = verify_store(store, deep=True)
    assert {p.path for p in shallow.problems} <= {p.path for p in deep.problems}
    return [(p.kind, p.message) for p in deep.problems]


def test_repeated_row_with_valid_digests_is_found(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        part = the_add_part(manifest)
        assert part.add is not None
        forgery.write(part.add.arrays["rows"], np.asarray([20, 20, 60]))
        return manifest

    found = forged_problems(root, change)

    assert any("repeats" in message for _, message in found)
    assert {kind for kind, _ in found} == {"corrupt_object"}


def test_add_after_delete_is_found(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        part = the_add_part(manifest)
        assert part.add is not None
        forgery.write(part.add.arrays["rows"], np.asarray([20, 60, 200]))
        forged = msgspec.structs.replace(part, add=msgspec.structs.replace(part.add, last=(200,)))
        return msgspec.structs.replace(manifest, parts=tuple(forged if p is part else p for p in manifest.parts))

    found = forged_problems(root, change)

    assert len(found) == 1
    assert found[0][0] == "corrupt_store"
    assert "row 200 of table 'user' has an add" in found[0][1]


def test_codes_of_another_state_are_found_by_the_state_digest(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        array = the_add_part(manifest).add.arrays["codes"]  # type: ignore[union-attr]
        forgery.write(array, forgery.read(array) + np.asarray(1, array.dtype))
        return manifest

    found = forged_problems(root, change)

    assert len(found) == 1
    assert "has state digest" in found[0][1]


def test_delta_that_starts_from_another_state_is_found(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        part = the_add_part(manifest)
        forged = msgspec.structs.replace(part, base_digest="0" * 16)
        return msgspec.structs.replace(manifest, parts=tuple(forged if p is part else p for p in manifest.parts))

    found = forged_problems(root, change)

    assert [message for _, message in found if "starts from state digest" in message]


def test_a_table_that_changes_its_form_is_not_replayed(tmp_path: Path) -> None:
    """Codes of six columns were written to memory for one: the check goes on past contradictions of manifests."""
    golden = Path(vectors.__file__).parent / "golden"
    vector = json.loads((golden / "negative" / "vectors.json").read_text())["slot_kind_changes"]
    root = Path(shutil.copytree(golden / vector["store"] / "store", tmp_path / "store"))
    vectors.apply(root, vector["patch"])

    with Store.open(str(root), threads=1) as store, Workers(1) as workers:
        chain = store.record(9).chain
        readers = in_chain([SegmentReader.open(store.storage, entry) for entry in chain])
        found = [*check_states(readers, workers, lambda _: None)]

    failed = [one for one in found if isinstance(one, FailedReplay)]
    assert len(failed) == 1
    assert "'user' changes its shape, encoding or slots within generation 1" in str(failed[0].error)


def test_row_in_two_lists_of_a_part_is_found(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        part = the_add_part(manifest)
        assert part.add is not None
        twice, added = forgery.copy_list(part.add, "set")
        forged = msgspec.structs.replace(part, set=twice)
        parts = tuple(forged if p is part else p for p in manifest.parts)
        return msgspec.structs.replace(manifest, parts=parts, arrays=(*manifest.arrays, *added))

    found = forged_problems(root, change)

    assert any("is in both add and set" in message for _, message in found)


def test_document_that_shows_another_array_than_the_manifest_is_found(root: Path) -> None:
    def change(manifest: Manifest, forgery: Forgery) -> Manifest:
        array = the_add_part(manifest).add.arrays["codes"]  # type: ignore[union-attr]
        other = msgspec.structs.replace(array, dtype="int32")
        forgery._new[f"{array.path}/zarr.json"] = arrays.array_document(other)
        return manifest

    found = forged_problems(root, change)

    assert any("differs from the manifest in ['attributes', 'chunk_grid', 'shape']" in message for _, message in found)


def test_escape_rows_and_resizes_have_the_stated_digests(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.float32).reshape(20, 2)
    with Store.create(str(tmp_path / "s"), fsync=False) as store:
        with store.writer() as writer:
            with writer.begin(step=1) as txn:
                txn.write_table("t", values, options=TableOptions(scale=0.5, nonfinite="escape"))
            for step, rows, size in ((2, [1, 2], 20), (3, [2, 3], 30), (4, [1, 29], 30), (5, [2], 12)):
                with writer.begin(step=step) as txn:
                    txn.resize_table("t", size)
                    block = np.full((len(rows), 2), np.nan if step % 2 == 0 else 1.0, np.float32)
                    txn.write_rows("t", np.asarray(rows), block)
        report = verify_store(store, deep=True)

    assert report.problems == ()


def test_names_of_versions_that_have_expired_are_problems_of_the_head(root: Path) -> None:
    rewrite_head(root, tags={"good": 3}, channels={"gone": 4}, expired=(4,))

    with Store.open(str(root)) as store:
        report = verify_store(store)

    said = [problem.message for problem in report.problems if "names version" in problem.message]
    assert len(said) == 1
    assert "channel 'gone' names version 4, which has expired" in said[0]


def test_a_segment_that_may_be_deleted_and_is_needed_is_a_problem(root: Path) -> None:
    segment = next(path.name for path in root.glob("data/*4-*"))
    rewrite_head(root, aborted={segment.rpartition("-")[2]: 1})

    with Store.open(str(root)) as store:
        report = verify_store(store)

    hurt = [problem for problem in report.problems if segment in problem.path]
    assert [problem.versions for problem in hurt] == [(5, 6)]
    assert report.restorable == (4, 3, 2)


def test_versions_that_no_problem_hurts_are_restorable_newest_first(root: Path) -> None:
    with Store.open(str(root)) as store:
        assert verify_store(store, deep=True).restorable == (6, 5, 4, 3, 2)
        chunk = next(root.glob("data/*3-*/r*.add-0.codes/c.0.0"))
        chunk.write_bytes(flip(chunk.read_bytes()))

        report = verify_store(store, deep=True)

    assert report.restorable == (3, 2)


def test_a_version_that_was_not_read_whole_is_not_called_restorable(root: Path) -> None:
    with Store.open(str(root)) as store:
        assert verify_store(store, version=3).restorable == (3, 2)


def test_segments_that_no_version_needs_are_counted_and_are_no_problem(root: Path) -> None:
    orphan = root / "data" / f"{6:020d}-{'a' * 32}"
    orphan.mkdir(parents=True)
    (orphan / f"r00000-aaaaaaaa.{RECEIPT}").write_bytes(b"{}")

    with Store.open(str(root)) as store:
        report = verify_store(store)

    assert (report.unreferenced, report.is_sound) == (1, True)


def rewrite_head(root: Path, **changes: object) -> None:
    """Replace the newest record by another well-formed one."""
    raw = (root / NEWEST).read_bytes()
    record = decode_record(raw, 6).record
    (root / NEWEST).write_bytes(encode_record(msgspec.structs.replace(record, **changes)))


def test_an_altered_store_uuid_is_named_though_a_position_is_superseded(root: Path) -> None:
    (root / f"commits/{7:020d}.json").write_bytes(b"{")
    with Store.open(str(root)) as store:
        repair_store(store, dry_run=False)
    identity = (root / "cnr.json").read_bytes()
    at = identity.index(b'"store_uuid":"') + 14
    other = b"1" if identity[at : at + 1] == b"0" else b"0"
    (root / "cnr.json").write_bytes(identity[:at] + other + identity[at + 1 :])

    assert "cnr.json" in problems_by_path(root)


def test_an_altered_time_of_creation_is_named(root: Path) -> None:
    identity = (root / "cnr.json").read_bytes()
    at = identity.index(b'"created_ms":') + 20  # not the first digit, which may not be 0
    (root / "cnr.json").write_bytes(identity[:at] + bytes([identity[at] ^ 1]) + identity[at + 1 :])

    assert problems_by_path(root) == {"cnr.json": ()}


def test_an_altered_word_of_the_newest_record_is_named(root: Path) -> None:
    """No later record has the newest record's digest; its own ``check`` shows the damage."""
    data = (root / NEWEST).read_bytes()
    at = data.index(b'"host":"') + 8
    (root / NEWEST).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    assert NEWEST in problems_by_path(root)
