"""The keys of a store's objects, and which names are allowed in them (spec, section 2). Pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Collection

from cnr_store.errors import BadName
from cnr_store.format.fields import PATH_PATTERN, SEGMENT_PATTERN

IDENTITY = "cnr.json"
ROOT_GROUP = "zarr.json"
DATA_GROUP = "data/zarr.json"
HINT = "hint/latest.json"
LAST_MAINTENANCE = "hint/maintenance.json"
RELAY = "relay.json"
RELAY_TRIMS = "relay/trims.json"
COMMITS = "commits/"
BRANCHES = "branches/"
DATA = "data/"
STATE = "state/"
LEASES = "leases/"
READER_LEASES = "leases/readers/"
CURSORS = "leases/cursors/"
COMPACTION_LEASE = "leases/compact.json"
FOLDERS = (COMMITS, STATE, "hint/", BRANCHES, DATA, LEASES, "relay/")
"""The folders that a store or a relay writes below its root. Other names there are never touched."""

MANIFEST = "_segment.json.zst"
RECEIPT = "receipt.json.zst"
"""What follows a writer's name and a dot in the path of its receipt."""

MAX_NAME_BYTES = 1024
"""Longest table, tensor or slot name in UTF-8 bytes."""

MAX_NODE_BYTES = 255
"""Longest path component that every file system allows."""

_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_POSITION = re.compile(r"commits/([0-9]{20})\.json")
_STATE = re.compile(r"state/([0-9a-f]{64})\.json")
_BRANCH = re.compile(r"[0-9a-f]{32}")
_SEGMENT = re.compile(SEGMENT_PATTERN)
_RELATIVE_PATH = re.compile(PATH_PATTERN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def commit_key(version: int, prefix: str = "") -> str:
    """Return the key of a log position: ``commits/<20 digits>.json``, below ``prefix`` (`branch_prefix`)."""
    return f"{prefix}{COMMITS}{version:020d}.json"


def commit_version(key: str, prefix: str = "") -> int | None:
    """Return the version of a record's key in the log below ``prefix``, or None if ``key`` is no log position."""
    match = _POSITION.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    return int(match.group(1)) if match else None


def hint_key(prefix: str = "") -> str:
    """Return the key of the hint of the log below ``prefix``."""
    return f"{prefix}{HINT}"


def is_branch_name(name: str) -> bool:
    """Return whether ``name`` is the folder name of a branch's log, its uuid."""
    return _BRANCH.fullmatch(name) is not None


def branch_prefix(branch: str) -> str:
    """Return ``branches/<uuid>/``, where the log of a branch is; ``branch`` is 32 hex digits."""
    if not is_branch_name(branch):
        raise BadName(f"{branch[:80]!r} is not the uuid of a branch; expected 32 hex digits", found=branch[:80])
    return f"{BRANCHES}{branch}/"


def branch_of(prefix: str) -> str:
    """Return the uuid of the branch whose log is below ``prefix``; empty for the store's own log."""
    return prefix.removeprefix(BRANCHES).rstrip("/")


def segment_name(base: int, txn: str) -> str:
    """Return the folder name of a segment: ``<base20>-<txn>``; ``txn`` is 32 hex digits."""
    name = f"{base:020d}-{txn}"
    check_segment_name(name)
    return name


def is_segment_name(name: str) -> bool:
    """Return whether ``name`` is a segment folder name."""
    return _SEGMENT.fullmatch(name) is not None


def check_segment_name(name: str) -> None:
    """Raise `BadName` unless ``name`` is a segment folder name; it may come from an untrusted record."""
    if not is_segment_name(name):
        raise BadName(f"{name[:80]!r} is not a segment name; expected <20 digits>-<32 hex digits>", found=name[:80])


def segment_prefix(name: str) -> str:
    """Return ``data/<segment>/``."""
    check_segment_name(name)
    return f"{DATA}{name}/"


def segment_key(name: str, path: str) -> str:
    """Return the key of an object inside a segment; raises `BadName` for a path that could leave it."""
    check_relative_path(path)
    return f"{segment_prefix(name)}{path}"


def check_relative_path(path: str) -> None:
    """Raise `BadName` unless ``path`` is a plain relative path of safe characters without dot segments."""
    if not _RELATIVE_PATH.fullmatch(path):
        raise BadName(f"path {path[:120]!r} in a manifest is not a plain relative path", found=path[:120])


def segment_of_rows(key: str) -> str | None:
    """Return the segment of an object that has rows of tables; None for dense tensors, documents and all else."""
    root, _, rest = key.partition("/")
    segment, _, path = rest.partition("/")
    array, is_chunk, _ = path.partition("/c.")
    is_of_rows = f"{root}/" == DATA and is_chunk and array.split(".")[1:2] != ["dense"]
    return segment if is_of_rows and is_segment_name(segment) else None


def state_key(digest: str) -> str:
    """Return the key of the side object with this sha256."""
    key = f"{STATE}{digest}.json"
    if state_digest_of(key) is None:
        raise BadName(f"{digest[:80]!r} is not a sha256 digest", found=digest[:80])
    return key


def state_digest_of(key: str) -> str | None:
    """Return the sha256 in a side object's key; None for any other key."""
    match = _STATE.fullmatch(key)
    return None if match is None else match[1]


def reader_lease_key(lease: str) -> str:
    """Return ``leases/readers/<uuid>.json``; ``lease`` is 32 hex digits."""
    return f"{READER_LEASES}{lease}.json"


def cursor_key(name: str) -> str:
    """Return ``leases/cursors/<name>.json``, with ``<name>.json`` encoded by `encode_name`."""
    return f"{CURSORS}{encode_name(f'{name}.json')}"


def writer_name(rank: int, attempt: str) -> str:
    """Return how the paths of one writer's objects begin in a segment: ``r00000-<attempt8>``.

    A dot and a name follow.
    """
    return f"r{rank:05d}-{attempt}"


def document_path(writer: str, number: int) -> str:
    """Return the path of a writer's document that is an object; ``number`` counts these from 0."""
    return f"{writer}.document-{number}.json.zst"


def encode_name(name: str) -> str:
    """Return ``name`` as one Zarr node name: percent-encoded to ``[A-Za-z0-9._-]`` and ``%``.

    In names that are reserved by Zarr v3 (dots only, a ``__`` prefix, ``zarr.json``) the first character is encoded
    too. So every non-empty name has a node name, and no two names have the same one.

    >>> encode_name("model.ebc/user:0")
    'model.ebc%2Fuser%3A0'
    """
    check_name(name)
    encoded = percent_encoded(name)
    if set(encoded) == {"."} or encoded.startswith("__") or encoded == ROOT_GROUP:
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    if len(encoded) > MAX_NODE_BYTES:
        raise BadName(
            f"name {name[:80]!r}... has {len(encoded)} bytes as a path; at most {MAX_NODE_BYTES} fit a file name",
            expected=MAX_NODE_BYTES, found=len(encoded),
        )  # fmt: skip
    return encoded


def percent_encoded(name: str) -> str:
    """Return ``name`` with each UTF-8 byte outside ``[A-Za-z0-9._-]`` as ``%XX``."""
    return "".join(chr(b) if chr(b) in _SAFE else f"%{b:02X}" for b in name.encode())


def array_path(group: str, name: str) -> str:
    """Return the path of an array of a group: ``<group>.<name>``, ``<group>.slots.<slot>`` of a slot.

    Raises
    ------
    BadName
        It is no path, or its last part is longer than a file name may be.
    """
    head, _, slot = name.partition("/")
    path = f"{group}.{head}.{percent_encoded(slot)}" if slot else f"{group}.{head}"
    check_relative_path(path)
    node = path.rpartition("/")[2]
    if len(node) > MAX_NODE_BYTES:
        raise BadName(
            f"array {name[:80]!r} has {len(node)} bytes as a path; at most {MAX_NODE_BYTES} fit a file name",
            expected=MAX_NODE_BYTES, found=len(node),
        )  # fmt: skip
    return path


def rank_tensor(rank: int, name: str) -> str:
    """Return the name of a dense tensor that one rank of a training writes for itself (spec, CNR-RNK-5)."""
    return f"rank/{rank}/{name}"


def is_rank_tensor(name: str) -> bool:
    """Return whether a dense tensor belongs to one rank, and to one version alone."""
    return name.startswith("rank/")


def check_names(names: Collection[str]) -> None:
    """Call `check_name` of all: at once where they are plain."""
    joined = "".join(names)
    is_plain = joined.isascii() and not _CONTROL.search(joined)
    if names and not (is_plain and min(map(len, names)) > 0 and max(map(len, names)) <= MAX_NAME_BYTES):
        for name in names:
            check_name(name)


def check_name(name: str) -> None:
    """Raise `BadName` unless ``name`` can name a table, tensor, slot, tag, channel or branch."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadName(f"name {name!r} is not valid Unicode", found=name) from error
    if not 0 < size <= MAX_NAME_BYTES:
        raise BadName(f"a name has 1 to {MAX_NAME_BYTES} bytes, found {size}", expected=MAX_NAME_BYTES, found=size)
    if _CONTROL.search(name):
        raise BadName(f"name {name!r} has a control character", found=name)
