"""The fuzzer's changes to a store: a document with another content, or a damaged object.

Of a document every digest that covers it is made right again, from the inventory to the last record, so that only what
it says is wrong. A case is chosen by a seed alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from cnr_store.errors import CnrStoreError
from cnr_store.format import arrays
from cnr_store.format.layout import MANIFEST, array_path
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.records import ArrayEntry
from format_spec import vectors
from tests.faults.fuzz_stores import GOLDEN, Objects, Sample, golden, put_all, read_all

HUGE_BYTES = 3 << 30

KINDS: tuple[tuple[str, str], ...] = (
    (r"cnr\.json", "identity"),
    (r"relay\.json", "relay"),
    (r"relay/trims\.json", "trims"),
    (r"(branches/[^/]+/)?hint/latest\.json", "hint"),
    (r"hint/maintenance\.json", "maintenance note"),
    (r"leases/compact\.json", "compaction note"),
    (r"leases/readers/.*", "lease"),
    (r"leases/cursors/.*", "cursor"),
    (r"commits/.*", "record"),
    (r"branches/[^/]+/commits/.*", "record of a branch"),
    (r"state/.*", "side object"),
    (r"data/[^/]+/_segment\.json\.zst", "manifest"),
    (r"data/.*/_receipt\.json\.zst", "receipt"),
    (r".*zarr\.json", "zarr.json"),
    (r"data/.*\.json\.zst", "tree"),
    (r".*/c\.[0-9.]+", "chunk"),
)


def kind_of(key: str) -> str:
    return next((name for pattern, name in KINDS if re.fullmatch(pattern, key)), "other")


@dataclass
class Case:
    """One damaged store: its objects, the replacements of some of them, and a description of the change."""

    seed: int
    sample: Sample
    kind: str = ""
    what: str = ""
    is_damage: bool = False
    """Whether no digest was corrected: then only right values may be read."""
    objects: Objects = field(default_factory=dict)
    special: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def put(self, root: Path, keys: Iterable[str] | None = None) -> None:
        """Write the store, or some of its objects, into a folder."""
        chosen = self.objects if keys is None else {key: self.objects[key] for key in keys if key in self.objects}
        put_all(root, {key: data for key, data in chosen.items() if key not in self.special})
        for key in self.special if keys is None else self.special.keys() & set(keys):
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            self.special[key](root / key)


def make_case(seed: int, samples: list[Sample]) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    case = Case(seed, chance.choice(samples))
    case.objects = dict(case.sample.objects)
    by_kind: dict[str, list[str]] = {}
    for key in sorted(case.objects):
        by_kind.setdefault(kind_of(key), []).append(key)
    draw = chance.random()
    if draw < 0.15:
        weights = {"chunk": 3, "manifest": 2, "record": 2}
        _choose(chance, case, by_kind, weights)
        _damage(chance, case, by_kind)
    elif draw < 0.3:
        _choose(chance, case, by_kind, dict.fromkeys(by_kind.keys() - {"chunk"}, 0.0))
        _reencode(chance, case)
    elif draw < 0.4:
        _say_together(chance, case)
    else:
        weights = {"chunk": 0, "other": 0, "manifest": 24, "record": 12, "side object": 8, "tree": 8, "trims": 6}
        weights |= {"relay": 4, "compaction note": 2, "lease": 2, "cursor": 2}
        _choose(chance, case, by_kind, weights)
        _say_otherwise(chance, case, by_kind[case.kind])
    return case


def vector_case(name: str, folder: Path) -> Case:
    """Return the case of a negative vector of the specification; ``folder`` is for its files."""
    vector = json.loads((GOLDEN / "negative" / "vectors.json").read_text())[name]
    case = Case(0, golden(vector["store"]), "vector", name)
    put_all(folder, case.sample.objects)
    vectors.apply(folder, vector["patch"])
    case.objects = read_all(folder)
    return case


def _choose(chance: random.Random, case: Case, by_kind: dict[str, list[str]], weights: dict[str, int]) -> None:
    kinds = sorted(by_kind)
    (case.kind,) = chance.choices(kinds, [weights.get(kind, 1) for kind in kinds])
    case.what = chance.choice(by_kind[case.kind])


# Objects


def _damage(chance: random.Random, case: Case, by_kind: dict[str, list[str]]) -> None:
    case.is_damage = True
    key, data = case.what, case.objects[case.what]
    same = [one for one in by_kind[case.kind] if one != key] or sorted(case.objects.keys() - {key})
    names = [
        "truncate",
        "lengthen",
        "swap",
        "copy",
        "empty",
        "remove",
        "random",
        "folder",
        "link",
        "pipe",
        *["flip"] * 5,
    ]
    what = chance.choice([*names, "sparse"] if chance.random() < 0.1 else names)
    other = chance.choice(same)
    case.what = f"{what} {key}"
    if what == "flip" and data:
        at = chance.randrange(len(data))
        case.objects[key] = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    elif what == "truncate":
        case.objects[key] = data[: chance.randrange(len(data) or 1)]
    elif what == "lengthen":
        case.objects[key] = data + chance.choice([b"\n", b"\0", data, b"x" * 70_000])
    elif what in ("swap", "copy"):
        case.objects[key] = case.objects[other]
        if what == "swap":
            case.objects[other] = data
    elif what == "empty":
        case.objects[key] = b""
    elif what == "random":
        case.objects[key] = chance.randbytes(chance.randrange(2 * len(data) + 1))
    elif what == "remove":
        del case.objects[key]
    elif what == "sparse":
        case.special[key] = lambda path: (path.touch(), os.truncate(path, HUGE_BYTES))[0]
    elif what == "folder":
        case.special[key] = lambda path: path.mkdir()
    elif what == "pipe":
        case.special[key] = os.mkfifo
    elif what == "link":
        target = chance.choice(["/nowhere", "outside", Path(other).name, ".."])

        def link(path: Path) -> None:
            if target == "outside":
                (path.parent / "outside").write_bytes(data)
            path.symlink_to(target)

        case.special[key] = link


def _reencode(chance: random.Random, case: Case) -> None:
    """Other elements or bytes in a chunk, with a correct inventory; for a shard often with a correct manifest, too."""
    key = case.what
    segment, _, path = key.removeprefix("data/").partition("/")
    data = case.objects[key]
    entry = _entry_of(case.objects, segment, path)
    number = int(path.rpartition("/c.")[2].partition(".")[0])
    if entry is None or chance.random() < 0.3:
        what, case.objects[key] = _other_bytes(chance, case, data)
    elif entry.shards is msgspec.UNSET:
        what, case.objects[key] = _other_chunk(chance, case, entry, data, number)
    else:
        inside = arrays.chunks_in(entry, number)
        sizes = [entry.shards.sizes[k] for k in inside]
        starts = np.cumsum([0, *sizes])
        chunks = [data[starts[k] : starts[k + 1]] for k in range(len(sizes))]
        at = chance.randrange(len(chunks))
        what, chunks[at] = _other_chunk(chance, case, entry, chunks[at], inside[at])
        index = arrays.shard_index([len(chunk) for chunk in chunks], entry.shards.chunks)
        case.objects[key] = b"".join((*chunks, index if chance.random() < 0.9 else data[starts[-1] :]))
        if chance.random() < 0.8:
            what += " inside"
            _say_inside(case.objects, f"data/{segment}/{MANIFEST}", entry, inside[at], chunks[at])
    case.what = f"other {what} {key}"
    seal(case.sample.objects, case.objects, key)


def _other_bytes(chance: random.Random, case: Case, data: bytes) -> tuple[str, bytes]:
    at = chance.randrange(len(data))
    choices = (
        ("flip", data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]),
        ("truncate", data[:at]),
        ("lengthen", data + chance.randbytes(9)),
        ("empty", b""),
        ("random", chance.randbytes(chance.randrange(2 * len(data)))),
        ("swap", case.objects[chance.choice([one for one in sorted(case.objects) if kind_of(one) == "chunk"])]),
    )
    return chance.choice(choices)


def _other_chunk(chance: random.Random, case: Case, entry: ArrayEntry, data: bytes, index: int) -> tuple[str, bytes]:
    if chance.random() < 0.15:
        return _other_bytes(chance, case, data)
    block = np.zeros(arrays.chunk_shape(entry), entry.dtype)
    try:
        arrays.decode_chunk(entry, data, block, entry.path)
    except CnrStoreError:  # not of these samples
        raise AssertionError(entry.path) from None
    flat = block.reshape(-1)
    numbers = np.random.default_rng(case.seed)
    what = chance.choice(["element", "extreme", "extremes", "shuffle", "same", "reverse", "next"])
    at = chance.randrange(len(flat))
    info: Any = np.finfo(flat.dtype) if flat.dtype.kind == "f" else np.iinfo(flat.dtype)
    extreme = chance.choice([info.min, info.max, 0, 1, *([np.nan, np.inf] if flat.dtype.kind == "f" else [])])
    if what == "element":
        flat[at] = numbers.integers(0, 99)
    elif what == "extreme":
        flat[at] = extreme
    elif what == "extremes":
        flat[:] = extreme
    elif what == "shuffle":
        numbers.shuffle(flat)
    elif what == "same":
        flat[:] = flat[at]
    elif what == "reverse":
        flat[:] = flat[::-1].copy()
    else:
        flat[:] = np.roll(flat, 1)
    rows = min(entry.chunk_rows, entry.shape[0] - index * entry.chunk_rows)
    return what, arrays.encode_chunk(entry, block[:rows])


def _say_inside(objects: Objects, manifest: str, entry: ArrayEntry, index: int, chunk: bytes) -> None:
    """Correct the manifest's entry of a chunk inside a shard."""
    document = json.loads(vectors.text_of(manifest, objects[manifest]))
    for group in (*document["groups"], *document["dense_arrays"]):
        for name, array in group["arrays"].items():
            if array_path(group["path"], name) == entry.path:
                inside = array["shards"]
                inside["sizes"][index] = len(chunk)
                digests = inside["digests"]
                inside["digests"] = digests[: 32 * index] + _xxh3(chunk).decode() + digests[32 * index + 32 :]
    objects[manifest] = vectors.stored_as(manifest, msgspec.json.encode(document, order="sorted"))


def _entry_of(objects: Objects, segment: str, path: str) -> ArrayEntry | None:
    manifest = decode_manifest(objects[f"data/{segment}/{MANIFEST}"], segment)
    entries = [*manifest.dense_arrays, *manifest.arrays]
    folder = path.rpartition("/c.")[0]
    return next((entry for entry in entries if entry.path == folder), None)


# Documents

_RAW = (
    "1e400", "-1e400", "NaN", "Infinity", "-0.0", "1" + "0" * 400, "0001", '"\\ud800"', '"\\u0000"', "\xff", "",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 7, 64, 65, 2**31 - 1, 2**31, 2**32, 2**50, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    -(2**31),
)  # fmt: skip
_FLOATS = (0.0, -0.0, 0.5, -1.5, 1e308, 5e-324, 1e-40, 1.7e38, 3.5e38)
_TEXTS = (
    "", "x", "../../x", "/etc/passwd", "a/../b", "..", ".", "a//b", "a\nb", "x" * 300, "x" * 1025, "ü" * 513, "%",
    "zarr.json", MANIFEST, "float32", "int64", "delta", "baseline", "init", "close", "rollback", "digits", "gaps",
    "bytes",
    "hashed", "dense", "0" * 64, "f" * 32, "0" * 16, "0" * 8, "G" * 16, "0" * 20 + "-" + "0" * 32, "lattice",
    "raw", "affine",
)  # fmt: skip
_EDGES = (0, 1, 2, 2**31 - 1, 2**31, 2**50, 2**53 - 2, 2**53 - 1, 2**53, 2**63 - 1)
_ARRAYS = ("groups", "parts", "arrays", "shards", "order")
"""Fields of a manifest that hold the places of rows; they are chosen more often."""
_NUMBER = re.compile(rb'"([a-z_0-9]+)":(-?[0-9]+)(?=[,}])')
_CHANGES = (
    *["value"] * 6, *["near"] * 5, *["beside"] * 2, "remove", "shape", "everywhere", "key", "deep", "raw",
)  # fmt: skip


def _say_otherwise(chance: random.Random, case: Case, alike: list[str]) -> None:
    key = case.what
    try:
        document = json.loads(vectors.text_of(key, case.objects[key]))
    except ValueError:  # a superseded position
        case.objects[key] = chance.randbytes(9)
        case.what = f"random {key}"
        seal(case.sample.objects, case.objects, key)
        return
    raws: dict[str, str] = {}
    done = []
    beside = chance.choice(alike) if case.kind != "record" else None
    other = None if beside is None else json.loads(vectors.text_of(beside, case.objects[beside]) or b"{}")
    left = 1 if chance.random() < 0.8 else chance.randrange(2, 5)
    before = data = _text(document, raws)
    for _ in range(20):
        holder, step, path = _walk(chance, document)
        what = _change(chance, document, holder, step, other, path, raws)
        data = _text(document, raws)
        if data != before:
            done.append(f"{'/'.join(map(str, path))} {what}")
            before, left = data, left - 1
        if not left:
            break
    case.objects[key] = vectors.stored_as(key, data)
    case.what = f"{key}: {'; '.join(done)}"[:300]
    seal(case.sample.objects, case.objects, key, keeps_check=any(one.startswith("check ") for one in done))


def _say_together(chance: random.Random, case: Case) -> None:
    """Change a number in every record and manifest that has it, so that they stay consistent."""
    case.kind = "records and manifests"
    keys = sorted(key for key in case.objects if kind_of(key) in ("record", "record of a branch", "manifest"))
    texts = {key: vectors.text_of(key, case.objects[key]) for key in keys}
    name, old = chance.choice(sorted(set(_NUMBER.findall(b"".join(texts.values())))))
    new = str(chance.choice([*_EDGES, _near(chance, int(old))])).encode()
    case.what = f"{name.decode()} = {old.decode()} is {new.decode()[:40]} everywhere"
    said = re.compile(rb'"%s":%s(?=[,}])' % (name, old))
    for key in keys:
        before = dict(case.objects)
        text = vectors.text_of(key, before[key])
        if (data := said.sub(b'"%s":%s' % (name, new), text)) != text:
            case.objects[key] = vectors.stored_as(key, data)
            seal(before, case.objects, key)


def _walk(chance: random.Random, document: Any) -> tuple[Any, Any, list[Any]]:
    """Choose a place level by level, so that long lists do not dominate; prefer places with content."""
    holder, step, at, path = None, None, document, []
    while isinstance(at, dict | list) and at and (holder is None or chance.random() < 0.85):
        steps = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        filled = [3 if isinstance(at[one], dict | list) and at[one] else 1 for one in steps]
        (step,) = chance.choices(
            steps, [9 if one in _ARRAYS else weight for one, weight in zip(steps, filled, strict=True)]
        )
        path.append(step)
        holder, at = at, at[step]
    return holder, step, path


def _change(
    chance: random.Random, document: Any, holder: Any, step: Any, other: Any, path: list[Any], raws: dict[str, str]
) -> str:
    if holder is None:
        return "empty"
    old = holder[step]
    draw = chance.choice(_CHANGES)
    if draw == "near" and isinstance(old, bool | int | float | str | list):
        new = _near(chance, old)
    elif draw == "remove":
        del holder[step]
        return "removed"
    elif draw == "key" and isinstance(holder, dict):
        name = chance.choice([*_TEXTS, "unknown", "$tuple", f"@@{len(raws)}@@"])
        if name.startswith("@@"):
            raws[name] = json.dumps(step)
        holder[name] = old
        if chance.random() < 0.5:
            del holder[step]
        return f"is also {name[:40]!r}"
    elif draw == "beside":  # what another document, or another place of this one, says
        source = other if other is not None and chance.random() < 0.5 else document
        beside, place, _ = _walk(chance, source)
        try:
            for one in path:
                beside, place, source = source, one, source[one]
        except (KeyError, IndexError, TypeError):
            pass
        new = None if beside is None else msgspec.json.decode(msgspec.json.encode(beside[place]))
    elif draw == "everywhere" and isinstance(old, int | str):
        new = chance.choice(_TEXTS) if isinstance(old, str) else _near(chance, old)
        _replace(document, old, new)
        return f"everywhere {str(new)[:40]!r}"
    elif draw == "shape" and isinstance(old, dict | list):
        new = chance.choice([[], {}, list(old), {"a": old}, [old], [old, old]])
    elif draw == "deep":
        mark = f"@@{len(raws)}@@"
        levels = chance.choice([33, 64, 65, 100, 5000, 200_000])
        raws[f'"{mark}"'] = chance.choice(["[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels])
        new = mark
    elif draw == "raw":
        mark = f"@@{len(raws)}@@"
        raws[f'"{mark}"'] = chance.choice(_RAW)
        new = mark
    else:
        same = {bool: [True, False], int: _NUMBERS, float: (*_FLOATS, *_NUMBERS), str: _TEXTS}.get(type(old), [None])
        pool = same if chance.random() < 0.7 else [None, True, [], {}, *_NUMBERS, *_FLOATS, *_TEXTS, "x" * 100_000]
        new = chance.choice(list(pool))
    holder[step] = new
    return f"= {str(new)[:60]!r}"


def _near(chance: random.Random, old: Any) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return chance.choice([old + 1, old - 1, 2 * old, -old, old + 2**31, old * 2**40, old // 2])
    if isinstance(old, float):
        return chance.choice([old * 2, -old, old / 2, old * 1e300, int(old) if abs(old) < 1e300 else 0])
    if isinstance(old, str):
        at = chance.randrange(len(old) or 1)
        zero = old[:at] + "0" + old[at + 1 :]
        return chance.choice([old[:-1], old + "x", old.upper(), zero, old + "\n", "../" + old, old + "/x"])
    many = old * 300 if len(old) < 50 else old[:1]
    return chance.choice([old[:-1], old[1:], old + old, old[::-1], old + old[:1], many])


def _replace(at: Any, old: Any, new: Any) -> None:
    for step, value in list(at.items() if isinstance(at, dict) else enumerate(at)):
        if type(value) is type(old) and value == old:
            at[step] = new
        elif isinstance(value, dict | list):
            _replace(value, old, new)


def _text(document: Any, raws: dict[str, str]) -> bytes:
    """The document in canonical form, except for values that JSON cannot represent."""
    try:
        data = msgspec.json.encode(document, order="sorted")
    except (OverflowError, ValueError, TypeError):
        data = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    for mark, raw in raws.items():
        data = data.replace(mark.encode() if mark.startswith('"') else json.dumps(mark).encode(), raw.encode("latin-1"))
    return data


# Digests

_CHECK = re.compile(rb'"check":"[0-9a-f]{32}"')
_LISTS = ("add", "set", "delete", "escape")


def seal(before: Objects, objects: Objects, key: str, *, keeps_check: bool = False) -> None:
    """Correct every digest that covers a changed object: in inventories, chain entries, parents and checks.

    A digest is a text that stands for one document alone, so an old one is replaced by the new one wherever it stands.
    """
    renamed: dict[bytes, bytes] = {}
    entry: tuple[re.Pattern[bytes], bytes] | None = None
    if key.startswith("data/") and key != "data/zarr.json":
        segment, _, path = key.removeprefix("data/").partition("/")
        manifest = f"data/{segment}/{MANIFEST}"
        if path != MANIFEST:
            _seal_inventory(objects, manifest, path, objects[key])
        _rename(renamed, before[manifest], objects[manifest])
        entry = _chain_entry(segment, objects[manifest])
    elif kind_of(key) == "side object":
        _rename(renamed, before[key], objects[key])
        data = objects.pop(key)
        objects[f"state/{hashlib.sha256(data).hexdigest()}.json"] = data
    elif key == "cnr.json":
        _rename(renamed, before[key], objects[key])
    records = [one for one in objects if "record" in kind_of(one)]
    for one in sorted(records, key=lambda record: (record.startswith("branches/"), record)):
        data = objects[one]
        for old, new in renamed.items():
            data = data.replace(old, new)
        if entry is not None:
            data = entry[0].sub(entry[1], data)
        if data != before[one] and not (keeps_check and one == key):
            blank = _CHECK.sub(b'"check":""', data, count=1)
            data = data if blank == data else _CHECK.sub(b'"check":"%s"' % _xxh3(blank), data, count=1)
        objects[one] = data
        _rename(renamed, before[one], data)


def _rename(renamed: dict[bytes, bytes], old: bytes, new: bytes) -> None:
    if old != new:
        renamed[hashlib.sha256(old).hexdigest().encode()] = hashlib.sha256(new).hexdigest().encode()


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(data).encode()


def _seal_inventory(objects: Objects, manifest: str, path: str, data: bytes) -> None:
    document = json.loads(vectors.text_of(manifest, objects[manifest]))
    for listed, line in vectors.objects_of(document):
        if listed == path:
            line |= {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
            objects[manifest] = vectors.stored_as(manifest, msgspec.json.encode(document, order="sorted"))


def _chain_entry(segment: str, data: bytes) -> tuple[re.Pattern[bytes], bytes] | None:
    """Return a pattern of a segment's chain entries, and its replacement with the manifest's numbers."""
    try:
        manifest = json.loads(vectors.text_of(MANIFEST, data))
        size = len(data) + sum(int(one["size"]) for _, one in vectors.objects_of(manifest))
        lists = (part.get(name) for part in manifest["parts"] for name in _LISTS)
        rows = sum(int(one["count"]) for one in lists if one)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, RuntimeError):
        return None
    pattern = rb'"rows":[0-9]+,("seg":"' + segment.encode() + b'","sha256":"[0-9a-f]+"),"size_bytes":[0-9]+'
    return re.compile(pattern), rb'"rows":%d,\1,"size_bytes":%d' % (rows, size)
