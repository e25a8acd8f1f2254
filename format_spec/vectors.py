"""Damage a copy of a golden store as a negative vector says: how each vector of ``golden/negative`` is applied.

A vector is a JSON document::

    {"store": a golden case, "what": what is wrong, "patch": [operations], "kind": the error a library must raise,
     "at": "read" or "write", "reader": the kind the independent reader gives, or null where it must read the store}

Keys in operations may be patterns; ``@3/`` stands for the last segment of version 3's chain. ``reseal`` makes sizes,
digests and parent digests right again, so that only what the vector is about is wrong.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from format_spec.reader.documents import canonical


def apply(root: Path, patch: list[dict[str, Any]]) -> None:
    """Carry out the operations of a vector on the store at ``root``."""
    for operation in patch:
        arguments = {key: value for key, value in operation.items() if key != "op"}
        _OPERATIONS[operation["op"]](root, **arguments)


def find(root: Path, key: str) -> Path:
    """Return the one file that a key or pattern names."""
    if key.startswith("@"):
        version, _, rest = key[1:].partition("/")
        record = json.loads((root / f"commits/{int(version):020d}.json").read_bytes())
        key = f"data/{record['chain'][-1]['seg']}/{rest}"
    found = sorted(root.glob(key)) if "*" in key else [root / key]
    if len(found) != 1 or not found[0].is_file():
        raise LookupError(f"{key} names {found}")
    return found[0]


def text_of(key: str, data: bytes) -> bytes:
    """Return the JSON text of a stored document; those of segments are zstd frames."""
    return zstandard.decompress(data) if key.endswith(".zst") else data


def stored_as(key: str, text: bytes) -> bytes:
    """Return how a document's text is stored."""
    return zstandard.compress(text, 1) if key.endswith(".zst") else text


def _read(path: Path) -> Any:
    return json.loads(text_of(path.name, path.read_bytes()))


def _delete(root: Path, key: str) -> None:
    find(root, key).unlink()


def _truncate(root: Path, key: str, size: int) -> None:
    path = find(root, key)
    path.write_bytes(path.read_bytes()[:size])


def _flip(root: Path, key: str, offset: int) -> None:
    path = find(root, key)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def _swap(root: Path, key: str, other: str) -> None:
    first, second = find(root, key), find(root, other)
    a, b = first.read_bytes(), second.read_bytes()
    if len(a) != len(b) or a == b:
        raise LookupError(f"{key} and {other} have {len(a)} and {len(b)} bytes")
    first.write_bytes(b)
    second.write_bytes(a)


def _copy(root: Path, key: str, to: str) -> None:
    (root / to).write_bytes(find(root, key).read_bytes())


def _replace(root: Path, key: str, data: str) -> None:
    """Put other bytes, in hex digits, in the place of an object's."""
    find(root, key).write_bytes(bytes.fromhex(data))


def _append(root: Path, key: str, text: str) -> None:
    path = find(root, key)
    path.write_bytes(path.read_bytes() + text.encode())


def _set(root: Path, key: str, at: list[str | int], value: Any) -> None:
    path = find(root, key)
    document = _read(path)
    item = document
    for step in at[:-1]:
        item = item[step]
    item[at[-1]] = value
    path.write_bytes(stored_as(path.name, _sealed(document)))


def _nest(root: Path, key: str, at: list[str | int], levels: int) -> None:
    """Set a field to lists in each other."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    _set(root, key, at, value)


def _move(root: Path, key: str, at: list[str | int], to: str) -> None:
    """Rename a field beside itself; the old one becomes null."""
    path = find(root, key)
    document = _read(path)
    item = document
    for step in at[:-1]:
        item = item[step]
    item[to], item[at[-1]] = item[at[-1]], None
    path.write_bytes(stored_as(path.name, _sealed(document)))


def _sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a document, and a record's own check right again."""
    if "check" in document:
        document["check"] = xxhash.xxh3_128_hexdigest(canonical({**document, "check": ""}).encode())
    return canonical(document).encode()


def _elements(root: Path, key: str, codec: str, dtype: str, values: list[int], repeat: int = 1) -> None:
    """Replace a chunk by an encoding of other elements; the crc32c is not looked at by readers with an inventory."""
    array = np.tile(np.asarray(values, dtype), repeat)
    if codec == "gaps":
        array = np.diff(array, prepend=array.dtype.type(0))
    width = array.dtype.itemsize
    shifted = array.astype(np.uint64) + np.uint64(sum(128 << 8 * place for place in range(width)))
    planes = b"".join((shifted >> np.uint64(8 * place)).astype(np.uint8).tobytes() for place in range(width)[::-1])
    _frame(root, key, (planes + bytes(8) + bytes(width).rjust(8, b"\1")).hex())


def _frame(root: Path, key: str, content: str, repeat: int = 1) -> None:
    """Replace a chunk by a zstd frame of other bytes, in hex."""
    payload = zstandard.ZstdCompressor(level=3).compress(bytes.fromhex(content) * repeat)
    find(root, key).write_bytes(payload + b"\0\0\0\0")


def objects_of(manifest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return path and line of every object that a manifest lists, also as a part of an array."""
    groups = [*manifest.get("groups", []), *manifest.get("dense_arrays", [])]
    arrays = [(group["path"], *named) for group in groups for named in group["arrays"].items()]
    listed = [(item["path"], item) for item in manifest["objects"]]
    for group, name, array in arrays:
        place = f"{group}.{name.replace('/', '.')}"
        end = ".0" * (array["codec"] != "bytes" or array["width"] is not None)
        chunks = [f"c.{k}{end}" for k in range(len(array["objects"]) - 1)]  # or shards
        named = zip(["zarr.json", *chunks], array["objects"], strict=False)
        listed += [(f"{place}/{key}", item) for key, item in named]
    return listed


def _reseal(root: Path) -> None:
    """Make every inventory, chain entry and parent digest right again."""
    manifests = {}
    for path in sorted(root.glob("data/*/_segment.json.zst")):
        try:
            manifest = _read(path)
        except (ValueError, zstandard.ZstdError):  # of a vector about the frame
            manifests[path.parent.name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            continue
        listed = objects_of(manifest)
        for item_path, item in listed:
            stored = path.parent / item_path
            if stored.resolve().is_relative_to(path.parent.resolve()) and stored.is_file():
                data = stored.read_bytes()
                item |= {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        data = stored_as(path.name, canonical(manifest).encode())
        path.write_bytes(data)
        lists = (part.get(name) for part in manifest["parts"] for name in ("add", "set", "delete", "escape"))
        manifests[path.parent.name] = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_bytes": len(data) + sum(item["size"] for _, item in listed),
            "rows": sum(row_list["count"] for row_list in lists if row_list),
        }
    parent = hashlib.sha256((root / "cnr.json").read_bytes()).hexdigest()
    for path in sorted(root.glob("commits/*.json")):
        record = json.loads(path.read_bytes())
        record["parent_digest"] = parent
        for entry in record["chain"]:
            entry |= manifests.get(entry["seg"], {})
        data = _sealed(record)
        path.write_bytes(data)
        parent = hashlib.sha256(data).hexdigest()


_OPERATIONS = {
    "delete": _delete,
    "truncate": _truncate,
    "flip": _flip,
    "swap": _swap,
    "copy": _copy,
    "replace": _replace,
    "append": _append,
    "set": _set,
    "nest": _nest,
    "move": _move,
    "elements": _elements,
    "frame": _frame,
    "reseal": _reseal,
}
