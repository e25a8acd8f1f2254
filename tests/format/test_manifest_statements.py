"""Each thing that a manifest may not say is refused by itself: of one segment, and of those of a chain (CNR-DOC-8, 9).

Manifests are made by hand here, from plain documents; what real ones are refused for is in tests/format/test_negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import xxhash

from cnr_store.errors import CorruptObject, CorruptStore, NewerFormat
from cnr_store.format.chain_checks import chain_problems, find_dense, record_problems
from cnr_store.format.documents import sha256
from cnr_store.format.layout import segment_name
from cnr_store.format.manifest import decode_manifest, decode_segment
from cnr_store.format.manifest_checks import manifest_problems
from cnr_store.format.packed import pack
from cnr_store.format.records import ChainEntry, Manifest, WriterInfo
from cnr_store.log.rebase import draft_after, draft_init

Document = dict[str, Any]
PART = "r00000-0123abcd/t"


def _codec_of(dtype: str) -> str:
    return "gaps" if dtype == "int64" else "digits" if dtype.startswith("int") else "bytes"


def array(path: str, dtype: str, shape: list[int], *, chunk_rows: int = 4, codec: str | None = None) -> Document:
    return {"path": path, "dtype": dtype, "shape": shape, "chunk_rows": chunk_rows, "codec": codec or _codec_of(dtype)}


def objects_of(one: Document, size: int = 40) -> Iterator[Document]:
    chunks = -(-one["shape"][0] // one["chunk_rows"])
    suffix = "/0" if len(one["shape"]) == 2 or one["codec"] != "bytes" else ""
    for path in (f"{one['path']}/zarr.json", *(f"{one['path']}/c/{k}{suffix}" for k in range(chunks))):
        yield {"path": path, "size": size, "xxh3_128": "a" * 32}


def row_list(operation: str, arrays: Document, first: list[int], last: list[int]) -> Document:
    named = {name: {**one, "path": f"{PART}/{operation}/{name}"} for name, one in arrays.items()}
    return {"count": named["rows"]["shape"][0], "first": first, "last": last, "arrays": named}


def manifest() -> Document:
    """A table of 16 x 2 in two parts, with a slot: 8 rows added, 4 of another part set; a hashed table; two tensors."""
    schema: Document = {"num_rows": 16, "dim": 2, "dtype": "float32", "encoding": {"encoding": "lattice", "scale": 0.5}}
    bits = {"encoding": "float_bits", "mantissa_bits": 7}
    schema["slots"] = {"m": {"kind": "row", "dtype": "float32", "encoding": bits, "mirror": True}}
    codes = {"codes": array("", "int16", [8, 2]), "slots/m": array("", "int16", [8])}
    added = row_list("add", {"rows": array("", "int64", [8]), **codes}, [0, 5], [3, 9])
    codes = {"codes": array("", "int16", [4, 2]), "slots/m": array("", "int16", [4])}
    placed = row_list("set", {"rows": array("", "int64", [4]), **codes}, [10], [13])
    raw = {"num_rows": 0, "dim": 2, "dtype": "float32", "keys": "hashed", "encoding": {"encoding": "raw"}}
    pack = array("dense/float32", "float32", [8], chunk_rows=8, codec="bytes")
    tensor = {"segment": "", "path": "dense/float32", "offset": 0, "dtype": "float32", "shape": [2, 3]}
    digests = {"base_digest": "1" * 16, "state_digest": "2" * 16}
    return {
        "format": 1, "txn": "c" * 32, "base": 7, "kind": "delta", "l0": 1, "l1": 2, "step": 20,
        "tables": {"t": schema, "h": raw},
        "parts": [
            {"table": "t", "folder": PART, "rows": [0, 10], "columns": [0, 2], "add": added, **digests},
            {"table": "t", "folder": PART, "rows": [10, 16], "columns": [0, 2], "set": placed, **digests},
            {"table": "h", "folder": "r00000-0123abcd/h", "rows": [0, 0], "columns": [0, 2]},
        ],
        "dense": {
            "w": {**tensor, "digest": "d" * 32},
            "none": {**tensor, "offset": 6, "shape": [0, 3], "digest": xxhash.xxh3_128_hexdigest(b"")},
        },
        "dense_arrays": [pack],
        "documents": {"reader": "r00000-0123abcd/reader.json"},
        "objects": [
            *(one for listed in (added, placed) for each in listed["arrays"].values() for one in objects_of(each)),
            *objects_of(pack, size=36),
            {"path": "r00000-0123abcd/reader.json", "size": 2, "xxh3_128": "b" * 32},
        ],
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


LARGE = {"num_rows": 1 << 40, "dim": 1 << 20}
ADD, SET = "parts.0.add", "parts.1.set"
CASES: list[tuple[Document, str]] = [
    ({"objects": lambda old: [*old, old[0]]}, "an object is listed twice"),
    ({"tables.t": lambda old: {**old, **LARGE}}, r"table 't' has shape \(1099511627776, 1048576\)"),
    ({"tables.h": lambda old: {**old, "num_rows": 3}}, "hashed keys and 3 rows"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 1e-300}}, "has scale 1e-300"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 1e38}}, "has scale 1e[+]38"),
    ({"tables.t.encoding": {"encoding": "lattice", "scale": 2.0**-110}, "tables.t.shift": 20}, "and shift 20"),
    ({"tables.t.slots.m.encoding.mantissa_bits": 8, "tables.t.slots.m.dtype": "float16"}, "8 mantissa bits"),
    ({"tables.t.slots.m.encoding": {"encoding": "affine", "bits": 4}}, "slot 'm' of table 't' is affine"),
    ({"parts.0.table": "other"}, "unknown table 'other'"),
    ({"parts.1.rows": [9, 16]}, "two parts of table 't' overlap at row 9"),
    ({"parts.1.rows": [10, 15]}, "do not make it up"),
    ({"parts.0.columns": [0, 3]}, r"columns \(0, 3\) of 2"),
    ({"parts.1.rows": [10, 17]}, r"rows \(10, 17\) of 16"),
    ({"parts.2": lambda old: {**old, "add": manifest()["parts"][0]["add"]}}, "of a hashed table"),
    ({f"{ADD}.arrays.rows": ...}, "has no rows"),
    ({f"{ADD}.arrays.codes": ...}, "lacks array 'codes'"),
    ({f"{ADD}.arrays.codes.dtype": "int8"}, "array 'codes' is int8"),
    ({f"{ADD}.arrays.codes.shape": [8, 1]}, r"array 'codes' is int16 \(8, 1\)"),
    ({f"{ADD}.arrays.slots/m.shape": [7]}, "the list has 8 rows"),
    ({f"{ADD}.arrays.slots/m.chunk_rows": 8}, "the list has 8 rows"),
    ({f"{ADD}.arrays.codes.path": "elsewhere/codes"}, "is not in the part's folder"),
    ({f"{ADD}.first": [0]}, "1 and 2 chunk ranges for 2 chunks"),
    ({f"{ADD}.last": [3]}, "2 and 1 chunk ranges for 2 chunks"),
    ({f"{ADD}.first": [0, 3]}, "chunk 1 covers rows 3 to 9 out of order"),
    ({f"{ADD}.last": [3, 7]}, "chunk 1 covers rows 5 to 7 out of order"),
    ({f"{ADD}.last": [3, 10]}, r"holds rows outside \(0, 10\)"),
    ({f"{SET}.first": [9]}, r"holds rows outside \(10, 16\)"),
    ({f"{SET}.arrays.codes.path": f"{PART}/set/rows"}, "is another array too"),
    ({f"{SET}.arrays.codes.order": f"{PART}/set/slots/m"}, "lie in the order of"),
    ({f"{ADD}.arrays.codes.order": f"{PART}/add/rows"}, "lie in the order of"),
    ({f"{ADD}.arrays.codes.order": f"{PART}/set/slots/m"}, "lie in the order of"),
    ({f"{ADD}.arrays.codes.shape": [8, 1 << 20], f"{ADD}.arrays.codes.dtype": "int32"}, "chunks of 16777216 bytes"),
    ({f"{ADD}.arrays.codes.shape": [1 << 50, 2]}, "claims 2251799813685248 elements"),
    ({"dense_arrays.0.shape": [1000]}, "claims 125 chunks, the inventory has"),
    ({"objects": lambda old: [one for one in old if not one["path"].endswith("add/codes/c/1/0")]},
     "chunk 1 of array .*add/codes is not in the inventory"),
    ({"objects": lambda old: [one for one in old if one["path"] != "dense/float32/zarr.json"]},
     "array dense/float32 has no document in the inventory"),
    ({"objects.0.size": 3, "objects.1.size": 3}, "has 3 bytes, expected 4 to"),
    ({"objects": lambda old: [one | {"size": 35} if one["path"] == "dense/float32/c/0" else one for one in old]},
     "has 35 bytes, expected 36 to 36"),
    ({"objects": lambda old: [one | {"size": 9000} if one["path"].endswith("add/codes/c/0/0") else one for one in old]},
     "has 9000 bytes, expected 4 to"),
    ({"dense.w.offset": 3}, "is not in array dense/float32 at offset 3"),
    ({"dense.w.dtype": "int32"}, "int32 of shape .* is not in array"),
    ({"dense.w.path": "dense/other"}, "is not in array dense/other"),
    ({"dense.none.digest": "d" * 32}, "dense tensor 'none' of shape"),
    ({"dense.w.shape": [1 << 30, 1 << 30]}, "dense tensor 'w' of shape"),
    ({"documents.reader": "r00000-0123abcd/other.json"}, "is not in the inventory"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[" ".join(changes) for changes, _ in CASES])
def test_a_manifest_that_contradicts_itself_is_refused(changes: Document, message: str) -> None:
    document = changed(**changes)

    problems = list(manifest_problems(msgspec.convert(document, Manifest)))

    assert any(re.search(message, problem) for problem in problems), problems
    with pytest.raises(CorruptStore):
        decode_manifest(pack(document), "here")


def entry_of(document: Document, **changes: Any) -> tuple[bytes, ChainEntry]:
    data = pack(document)
    named: Document = {
        "seg": segment_name(document["base"], document["txn"]), "sha256": sha256(data), "rows": 12, "bytes": 1000,
        **{key: document[key] for key in ("kind", "l0", "l1")},
    }  # fmt: skip
    return data, ChainEntry(**(named | changes))


def test_a_manifest_is_the_one_that_its_chain_entry_describes() -> None:
    assert decode_segment(*entry_of(manifest()), "here") == decode_manifest(pack(manifest()), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seg": segment_name(8, "c" * 32)}, "begun at version 7"),
        ({"l1": 3}, "says delta 1 to 2, its chain entry says delta 1 to 3"),
        ({"kind": "baseline"}, "says delta 1 to 2, its chain entry says baseline"),
        ({"rows": 11}, "has 12 rows"),
        ({"bytes": 10}, "its chain entry says 12 in 10"),
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


def chain_of(*changes: Callable[[Document], Any]) -> tuple[list[str], list[Manifest]]:
    """A baseline, which ends where the manifest starts, and one manifest behind it; each changed."""
    before = manifest()
    before.update(kind="baseline", txn="b" * 32, l0=0, l1=1)
    for part in before["parts"][:2]:
        part.update(base_digest=None, state_digest="1" * 16)
    after = manifest()
    after["dense"]["w"] = {**before["dense"]["w"], "segment": segment_name(7, "b" * 32)}
    documents = [before, after]
    for document, change in zip(documents, changes, strict=True):
        change(document)
    names = [segment_name(document["base"], document["txn"]) for document in documents]
    return names, [decode_manifest(pack(document), "here") for document in documents]


def as_it_is(document: Document) -> None:
    pass


def test_the_chain_that_the_others_are_made_of_is_sound() -> None:
    assert list(chain_problems(*chain_of(as_it_is, as_it_is))) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (as_it_is, lambda new: new["parts"][0].update(base_digest="3" * 16), "starts from state digest 3333"),
        (lambda old: old["parts"][1].update(state_digest="3" * 16), as_it_is, "ends with 3333"),
        (as_it_is, lambda new: new["tables"]["t"]["encoding"].update(scale=0.25), "within generation 1"),
        (as_it_is, lambda new: new["tables"]["t"].update(generation=0), "begins again in generation 0, after 1"),
        (lambda old: old["tables"]["t"].update(shift=2), lambda new: new["tables"]["t"].update(shift=1), "goes back"),
        (as_it_is, lambda new: new["tables"]["t"].update(shift=9), "goes from 0 to 9 within one chain"),
        (as_it_is, lambda new: new["dense"]["w"].update(segment=f"{9:020d}-{'9' * 32}", digest="e" * 32), "not in the"),
        (as_it_is, lambda new: new["dense"]["w"].update(digest="e" * 32), "as it is referenced"),
        (as_it_is, lambda new: new["dense"]["w"].update(shape=[3, 2]), "as it is referenced"),
        (lambda old: old["dense"].pop("w"), as_it_is, "as it is referenced"),
    ],
)
def test_manifests_that_contradict_each_other_are_refused(before: Any, after: Any, message: str) -> None:
    assert message in " ".join(found.message for found in chain_problems(*chain_of(before, after)))


def test_a_table_that_comes_back_has_another_generation() -> None:
    names, (before, after) = chain_of(as_it_is, as_it_is)
    without = manifest()
    without.update(txn="e" * 32, parts=without["parts"][2:], tables={"h": without["tables"]["h"]})
    between = decode_manifest(pack(without), "here")
    names = [names[0], segment_name(7, "e" * 32), names[1]]

    problems = [found.message for found in chain_problems(names, [before, between, after])]

    assert "table 't' begins again in generation 1, after 1" in problems


def test_a_tensor_whose_segment_was_compacted_is_found_by_its_bytes_alone() -> None:
    compacted = f"{9:020d}-{'9' * 32}"
    names, manifests = chain_of(as_it_is, lambda new: new["dense"]["w"].update(segment=compacted))
    other_names, others = chain_of(as_it_is, lambda new: new["dense"]["w"].update(segment=compacted, digest="e" * 32))

    assert find_dense(names, manifests, "w") == (0, manifests[0].dense["w"])
    assert find_dense(other_names, others, "w") is None


def test_a_record_says_of_its_segment_what_that_says_of_itself() -> None:
    last = decode_manifest(pack(manifest()), "here")
    writer = WriterInfo(host="h", lib="l", run_id="r")
    record = draft_after(draft_init(writer), "delta", writer, step=20)

    assert list(record_problems(record, last)) == []
    assert len(list(record_problems(draft_after(record, "delta", writer, step=21), last))) == 1
