"""Each thing that a manifest may not say is refused by itself: of one segment, and of those of a chain (CNR-DOC-8, 9).

Manifests are made by hand here, from plain documents; what real ones are refused for is in tests/format/test_negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec
import pytest
import xxhash

from cnr_store.errors import CorruptObject, CorruptStore, NewerFormat
from cnr_store.format.chain_checks import chain_problems, record_problems
from cnr_store.format.documents import pack, sha256
from cnr_store.format.layout import segment_name
from cnr_store.format.manifest import decode_manifest, decode_segment, resolved
from cnr_store.format.manifest_checks import manifest_problems
from cnr_store.format.manifest_state import with_state
from cnr_store.format.records import ChainEntry, Manifest, SegmentDocument, WriterInfo
from cnr_store.log.rebase import draft_after, draft_init

Document = dict[str, Any]
WRITER = "r00000-0123abcd"
ADDED, PLACED, READER = f"{WRITER}.add-0", f"{WRITER}.set-0", f"{WRITER}/reader.json"


def group(path: str, rows: int, arrays: dict[str, tuple[str, int | None]], *, chunk_rows: int = 4) -> Document:
    """Arrays of a dtype and a width, one-dimensional without; floats are stored as they are."""

    def array(dtype: str, width: int | None) -> Document:
        size, codec = (36, "bytes") if dtype == "float32" else (40, "gaps" if dtype == "int64" else "digits")
        objects = [{"size": size, "xxh3_128": "a" * 32} for _ in range(1 - (-rows // chunk_rows))]
        return {"dtype": dtype, "width": width, "codec": codec, "objects": objects}

    found = {name: array(*kind) for name, kind in arrays.items()}
    return {"path": path, "rows": rows, "chunk_rows": chunk_rows, "arrays": found}


ADD_ARRAYS: dict[str, tuple[str, int | None]] = {
    "rows": ("int64", None), "codes": ("int16", 2), "slots/m": ("int16", None)
}  # fmt: skip


def manifest() -> Document:
    """A table of 16 x 2 in two parts, with a slot: 8 rows added, 4 of another part set; a hashed table; two tensors."""
    schema: Document = {"num_rows": 16, "dim": 2, "dtype": "float32", "encoding": {"encoding": "lattice", "scale": 0.5}}
    bits = {"encoding": "float_bits", "mantissa_bits": 7}
    schema["slots"] = {"m": {"kind": "row", "dtype": "float32", "encoding": bits, "mirror": True}}
    raw = {"num_rows": 0, "dim": 2, "dtype": "float32", "keys": "hashed", "encoding": {"encoding": "raw"}}
    tensor = {"path": "dense.float32", "offset": 0, "dtype": "float32", "shape": [2, 3]}
    digests = {"base_digest": "1" * 16, "state_digest": "2" * 16}
    added = {"group": ADDED, "count": 8, "first": [0, 5], "last": [3, 9]}
    placed = {"group": PLACED, "count": 4, "first": [10], "last": [13]}
    return {
        "format": 1, "txn": "c" * 32, "base": 7, "kind": "delta", "l0": 1, "l1": 2, "step": 20,
        "tables": {"t": schema, "h": raw},
        "parts": [
            {"table": "t", "rows": [0, 10], "columns": [0, 2], "add": added, **digests},
            {"table": "t", "rows": [10, 16], "columns": [0, 2], "set": placed, **digests},
            {"table": "h", "rows": [0, 0], "columns": [0, 2]},
        ],
        "groups": [group(ADDED, 8, ADD_ARRAYS), group(PLACED, 4, ADD_ARRAYS)],
        "dense": {
            "w": {**tensor, "digest": "d" * 32},
            "none": {**tensor, "offset": 6, "shape": [0, 3], "digest": xxhash.xxh3_128_hexdigest(b"")},
        },
        "dense_arrays": [group("dense", 8, {"float32": ("float32", None)}, chunk_rows=8)],
        "documents": {"reader": READER},
        "objects": [{"path": READER, "size": 2, "xxh3_128": "b" * 32}],
    }  # fmt: skip


def changed(**changes: Any) -> Document:
    """The manifest with values at paths like ``parts.0.add.first``; ``...`` takes a value away."""
    document = manifest()
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place: Any = document
        for part in parents:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value(place[last]) if callable(value) else value
    return document


def test_the_manifest_that_the_others_are_made_of_is_sound() -> None:
    decode_manifest(pack(manifest()), "here")


@pytest.mark.parametrize("changes", [{"tables.t.fill": 1e300}, {"tables.t.slots.m.fill": -1e39}])
def test_a_fill_that_is_no_finite_float32_is_refused(changes: Document) -> None:
    with pytest.raises(CorruptStore, match=r"3\.4028"):
        decode_manifest(pack(changed(**changes)), "here")


RAW = msgspec.Raw(b"1")
LARGE = {"num_rows": 1 << 40, "dim": 1 << 20}
COARSE = {"encoding": "lattice", "scale": 1e38}
ADD, SET, ADD_GROUP = "parts.0.add", "parts.1.set", "groups.0"
NAMED_ALIKE = group(f"{ADDED}.slots.x", 4, {**ADD_ARRAYS, "m": ("int16", None)})
"""A group with an array at the path of slot ``x.m`` of the other group, with fewer rows."""
CASES: list[tuple[Document, str]] = [
    ({"objects": lambda old: [*old, old[0]]}, "an object is listed twice"),
    ({"objects": lambda old: [*old, old[0] | {"path": f"{ADDED}.codes/c.1.0"}]}, "an object is listed twice"),
    ({"tables.t": lambda old: {**old, **LARGE}}, r"table 't' has shape \(1099511627776, 1048576\)"),
    ({"tables.h": lambda old: {**old, "num_rows": 3}}, "hashed keys and 3 rows"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 1e-300}}, "has scale 1e-300"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 1e38}}, "has scale 1e[+]38"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 2.0**-110}, "tables.t.shift": 20}, "and shift 20"),
    ({"tables": lambda old: {**old, "u": old["t"] | {"encoding": COARSE}}}, r"'u' has scale 1e[+]38"),
    ({"tables": lambda old: {**old, "u": {**old["t"], **LARGE}}}, r"table 'u' has shape \(1099511627776, 1048576\)"),
    ({"tables.t.slots.m.encoding": {"encoding": "lattice", "scale": 1e-300}}, "has scale 1e-300"),
    ({"tables.t.slots.m.encoding.mantissa_bits": 8, "tables.t.slots.m.dtype": "float16"}, "8 mantissa bits"),
    ({"tables.t.slots.m.encoding": {"encoding": "affine", "bits": 4}}, "Invalid value 'affine'"),
    ({"tables.t.encoding": {"encoding": "raw"}}, "of a table without differences has add rows"),
    ({"tables.t.encoding": {"encoding": "float_bits", "mantissa_bits": 7}, "tables.t.shift": 1}, "and no scale"),
    ({"parts.0.table": "other"}, "unknown table 'other'"),
    ({"tables": lambda old: {**old, "a\n": old["h"]}}, "control character"),
    ({"parts.0.state_digest": "2" * 15}, "state digest '2{15}'"),
    ({"parts.1.state_digest": "2" * 15 + "A"}, "state digest '2{15}A'"),
    ({"parts.1.base_digest": ""}, "state digest ''"),
    ({"parts.1.rows": [9, 16]}, "two parts of table 't' overlap at row 9"),
    ({"parts.1.rows": [10, 15]}, "do not make it up"),
    ({"parts.0.columns": [0, 3]}, r"columns \(0, 3\) of 2"),
    ({"parts.1.rows": [10, 17]}, r"rows \(10, 17\) of 16"),
    ({"parts.2.columns": [0, 1]}, "of a hashed table"),
    ({f"{ADD}.group": f"{WRITER}.add-1"}, "which is no group of arrays"),
    ({f"{ADD}.count": 7}, "lists of group .*add-0 have 7 rows, its arrays 8"),
    ({f"{ADD_GROUP}.rows": 7}, "lists of group .*add-0 have 8 rows, its arrays 7"),
    ({"groups.1.path": ADDED}, "group of arrays is listed twice"),
    ({"groups": [group(ADDED, 12, ADD_ARRAYS)], f"{SET}.group": ADDED}, "holds set and add rows"),
    ({f"{ADD_GROUP}.arrays.rows": ...}, "lacks array 'rows'"),
    ({f"{ADD_GROUP}.arrays.codes": ...}, "lacks array 'codes'"),
    ({f"{ADD_GROUP}.arrays.codes.dtype": "int8"}, "array 'codes' is int8"),
    ({f"{ADD_GROUP}.arrays.codes.width": 1}, r"array 'codes' is int16 \(8, 1\)"),
    ({f"{ADD}.first": [0]}, "1 and 2 chunk ranges for 2 chunks"),
    ({f"{ADD}.last": [3]}, "2 and 1 chunk ranges for 2 chunks"),
    ({f"{ADD}.first": [0, 3]}, "chunk 1 covers rows 3 to 9 out of order"),
    ({f"{ADD}.last": [3, 7]}, "chunk 1 covers rows 5 to 7 out of order"),
    ({f"{ADD}.last": [3, 10]}, r"holds rows outside \(0, 10\)"),
    ({f"{SET}.first": [9]}, r"holds rows outside \(10, 16\)"),
    ({"groups.1.arrays.codes.order": "slots/m"}, "lie in the order of"),
    ({f"{ADD_GROUP}.arrays.codes.order": "rows"}, "lie in the order of"),
    ({f"{ADD_GROUP}.arrays.codes.order": "slots/other"}, "lie in the order of"),
    ({f"{ADD_GROUP}.arrays.codes.order": "slots/x.m", "groups.1": NAMED_ALIKE, f"{SET}.group": NAMED_ALIKE["path"]},
     "lie in the order of"),
    ({f"{ADD_GROUP}.arrays.codes.width": 1 << 20, f"{ADD_GROUP}.arrays.codes.dtype": "int32"},
     "chunks of 16777216 bytes"),
    ({f"{ADD_GROUP}.rows": 1 << 50}, "has 3 objects, expected a document and 281474976710656 chunks"),
    ({"dense_arrays.0.rows": 1000}, "has 2 objects, expected a document and 125 chunks"),
    ({f"{ADD_GROUP}.arrays.codes.objects": lambda old: old[1:]}, "add-0.codes has 2 objects, expected"),
    ({f"{ADD_GROUP}.arrays.codes.objects.1.size": 3}, "has 3 bytes, expected 4 to"),
    ({"dense_arrays.0.arrays.float32.objects.1.size": 35}, "has 35 bytes, expected 36 to 36"),
    ({f"{ADD_GROUP}.arrays.codes.objects.1.size": 9000}, "has 9000 bytes, expected 4 to"),
    ({"dense.w.offset": 3}, "is not in array dense.float32 at offset 3"),
    ({"dense.w.dtype": "int32"}, "int32 of shape .* is not in array"),
    ({"dense.w.path": "dense/other"}, "is not in array dense/other"),
    ({"dense.none.digest": "d" * 32}, "dense tensor 'none' of shape"),
    ({"dense.v": {**manifest()["dense"]["w"], "offset": 2}}, "'v' has elements of array dense.float32 that another"),
    ({"dense.v": {**manifest()["dense"]["w"], "offset": 5, "shape": [2]}}, "'v' has elements of array dense.float32"),
    ({"dense.none.shape": [1 << 50, 1 << 50, 0]}, "dense tensor 'none' of shape"),
    ({"dense.w.shape": [1 << 30, 1 << 30]}, "dense tensor 'w' of shape"),
    ({"documents.reader": "r00000-0123abcd/other.json"}, "is not in the inventory"),
    ({"dropped": ["t"]}, "'t' is both dropped and there"),
    ({"ended": ["w"]}, "'w' is both dropped and there"),
    ({"kind": "baseline", "dropped": ["other"]}, "a baseline drops what no state has"),
    ({"kind": "baseline", "ended": ["other"]}, "a baseline drops what no state has"),
    ({"kind": "baseline", "kept_documents": ["other"]}, "a baseline keeps documents of no state"),
    ({"kept_documents": ["reader"]}, "kept twice, or kept and stored"),
    ({"kept_documents": ["other"], "small": {"other": RAW}}, "kept twice, or kept and stored"),
    ({"small": {"reader": RAW}}, "'reader' is an object and in the manifest"),
    ({"small": {"a//b": RAW}}, "matching regex"),
    ({"kept_documents": ["other", "other"]}, "kept twice, or kept and stored"),
]  # fmt: skip


def problems_of(document: Document) -> list[str]:
    """All that is wrong, or the one thing that makes the rest meaningless."""
    try:
        return list(manifest_problems(resolved(msgspec.convert(document, SegmentDocument))))
    except ValueError as error:
        return [str(error)]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[" ".join(changes) for changes, _ in CASES])
def test_a_manifest_that_contradicts_itself_is_refused(changes: Document, message: str) -> None:
    document = changed(**changes)

    problems = problems_of(document)

    assert any(re.search(message, problem) for problem in problems), problems
    with pytest.raises(CorruptStore):
        decode_manifest(pack(document), "here")


def entry_of(document: Document, **changes: Any) -> tuple[bytes, ChainEntry]:
    data = pack(document)
    named: Document = {
        "seg": segment_name(document["base"], document["txn"]), "sha256": sha256(data), "rows": 12, "size_bytes": 1000,
        **{key: document[key] for key in ("kind", "l0", "l1")},
    }  # fmt: skip
    return data, ChainEntry(**(named | changes))


def test_a_manifest_is_the_one_that_its_chain_entry_describes() -> None:
    assert decode_segment(*entry_of(manifest()), "here") == decode_manifest(pack(manifest()), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seg": segment_name(8, "c" * 32)}, "and base 7"),
        ({"l1": 3}, "is delta 1 to 2, its chain entry has delta 1 to 3"),
        ({"kind": "baseline"}, "is delta 1 to 2, its chain entry has baseline"),
        ({"rows": 11}, "has 12 rows"),
        ({"size_bytes": 10}, "its chain entry has 12 in 10"),
    ],
)
def test_a_manifest_of_another_chain_entry_is_refused(changes: Document, message: str) -> None:
    with pytest.raises(CorruptStore, match=message):
        decode_segment(*entry_of(manifest(), **changes), "here")


def test_a_manifest_with_another_digest_than_its_entry_names_is_refused() -> None:
    _, entry = entry_of(manifest())

    with pytest.raises(CorruptObject, match="another sha256"):
        decode_segment(pack(changed(step=21)), entry, "here")
    with pytest.raises(NewerFormat):
        decode_manifest(pack(changed(format=2)), "here")


def chain_of(*changes: Callable[[Document], Any]) -> list[Manifest]:
    """A baseline, which ends where the manifest starts, and one manifest behind it; each changed. With their states."""
    before = manifest()
    before.update(kind="baseline", txn="b" * 32, l0=0, l1=1)
    for part in before["parts"][:2]:
        part.update(base_digest=None, state_digest="1" * 16)
    after = manifest()
    documents = [before, after]
    for document, change in zip(documents, changes, strict=True):
        change(document)
    return states_of([decode_manifest(pack(document), "here") for document in documents])


def states_of(manifests: list[Manifest]) -> list[Manifest]:
    return list(accumulate(manifests, with_state))


def as_it_is(document: Document) -> None:
    pass


def test_the_chain_that_the_others_are_made_of_is_sound() -> None:
    assert list(chain_problems(chain_of(as_it_is, as_it_is))) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (as_it_is, lambda new: new["parts"][0].update(base_digest="3" * 16), "starts from state digest 3333"),
        (lambda old: old["parts"][1].update(state_digest="3" * 16), as_it_is, "ends with 3333"),
        (as_it_is, lambda new: new["tables"]["t"]["encoding"].update(scale=0.25), "within generation 1"),
        (as_it_is, lambda new: new["tables"]["t"].update(generation=0), "begins again in generation 0, after 1"),
        (lambda old: old["tables"]["t"].update(shift=2), lambda new: new["tables"]["t"].update(shift=1), "goes back"),
        (as_it_is, lambda new: new["tables"]["t"].update(shift=9), "goes from 0 to 9 within one chain"),
        (as_it_is, lambda new: new.update(dropped=["other"]), "'other' is dropped, and the state before does not"),
        (as_it_is, lambda new: new.update(ended=["t"]), "'t' is dropped, and the state before does not"),
        (as_it_is, lambda new: new.update(kept_documents=["t"]), "document 't' is kept, and the state before does not"),
    ],
)
def test_manifests_that_contradict_each_other_are_refused(before: Any, after: Any, message: str) -> None:
    assert message in " ".join(found.message for found in chain_problems(chain_of(before, after)))


def test_a_table_that_comes_back_has_another_generation() -> None:
    before, after = chain_of(as_it_is, as_it_is)
    without = manifest()
    without.update(txn="e" * 32, parts=[], groups=[], tables={}, dropped=["t"])
    between = decode_manifest(pack(without), "here")

    problems = [found.message for found in chain_problems(states_of([before, between, after]))]

    assert "table 't' begins again in generation 1, after 1" in problems


def test_a_record_says_of_its_segment_what_that_says_of_itself() -> None:
    last = decode_manifest(pack(manifest()), "here")
    writer = WriterInfo(host="h", lib="l", run_id="r")
    record = draft_after(draft_init(writer), "delta", writer, step=20)

    assert list(record_problems(record, last)) == []
    assert len(list(record_problems(draft_after(record, "delta", writer, step=21), last))) == 1
