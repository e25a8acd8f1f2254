r"""Single fields of documents as types: numbers with their ranges, digests, names and paths with their patterns.

The JSON Schemas of the specification are generated from these, so every reader uses the same limits. A pattern ends in
`END`, because in Python ``$`` alone also matches before a final line feed. The schemas have ``$`` there, which is
enough in ECMA-262, and no other look-around: many libraries of regular expressions have none.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from cnr_store.format.limits import (
    MAX_CHUNK_ROWS,
    MAX_DIM,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_FLOAT32,
    MAX_INTEGER,
    MAX_OBJECT_BYTES,
    MAX_SHARD_CHUNKS,
    MAX_SHIFT,
)

END = r"$(?!\n)"
_PART = r"\.*[A-Za-z0-9_%-][A-Za-z0-9._%-]*"
PATH_PATTERN = rf"^{_PART}(/{_PART})*{END}"
"""A relative path: parts of safe characters joined by ``/``, none of them dots only."""

SEGMENT_PATTERN = rf"^[0-9]{{20}}-[0-9a-f]{{32}}{END}"

Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
"""A number that cannot be negative: versions, sizes, steps, times in ms."""

Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NumRows = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
Shift = Annotated[int, Meta(ge=0, le=MAX_SHIFT)]
ChunkRows = Annotated[int, Meta(ge=1, le=MAX_CHUNK_ROWS)]
ObjectSize = Annotated[int, Meta(ge=0, le=MAX_OBJECT_BYTES)]
ShardChunks = Annotated[int, Meta(ge=2, le=MAX_SHARD_CHUNKS)]
RowNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A row id or key: any int64."""

Float32 = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
"""A number that is finite as a float32."""

Sha256 = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{64}}{END}")]
Hex32 = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{32}}{END}")]
"""A uuid, a transaction, or an xxh3-128."""

Hex32s = Annotated[str, Meta(pattern=rf"^([0-9a-f]{{32}})*{END}")]
"""Several xxh3-128, joined."""

PartDigest = Annotated[str, Meta(extra_json_schema={"pattern": rf"^[0-9a-f]{{16}}{END}"})]
"""A state digest. Those of all parts are looked at together: msgspec calls a function of Python for each pattern, which
takes five times as long as all else that is parsed of a manifest. `manifest_checks` does."""

Hex8 = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{8}}{END}")]
BranchOrNone = Annotated[str, Meta(pattern=rf"^([0-9a-f]{{32}})?{END}")]
"""The uuid of a branch, or empty for the store's own log."""

SegmentName = Annotated[str, Meta(pattern=SEGMENT_PATTERN)]
"""The name of a segment."""

KeyPath = Annotated[str, Meta(pattern=PATH_PATTERN)]
KnownPath = Annotated[str, Meta(extra_json_schema={"pattern": PATH_PATTERN})]
"""A path of which `manifest` looks whether it is one of those that are listed."""

_NAME_PATTERN = rf"^[^\x00-\x1f\x7f]+{END}"
Name = Annotated[str, Meta(min_length=1, max_length=1024, pattern=_NAME_PATTERN)]
"""Table, slot, tensor, tag, channel or branch; `layout.check_name` checks its length: at most 1,024 bytes of UTF-8."""

TableName = Annotated[str, Meta(min_length=1, max_length=1024, extra_json_schema={"pattern": _NAME_PATTERN})]
"""A `Name` of which `manifest_checks` looks at the characters, of all tables together."""

_NODE = r"[^/\x00-\x1f\x7f]+"
DocumentName = Annotated[str, Meta(pattern=rf"^{_NODE}(/{_NODE})*{END}")]
"""Parts joined by ``/``, each a `Name`."""

ArrayName = Annotated[str, Meta(pattern=rf"^([a-z0-9_]+|slots/[^\x00-\x1f\x7f]+){END}")]
"""An array of a group: ``rows``, ``codes``, ``slots/<slot>`` ...; an array of dense tensors has its dtype as name."""

Text = Annotated[str, Meta(pattern=rf"^[^\x00-\x1f\x7f]*{END}")]
"""Text for people, without control characters."""

Feature = Annotated[str, Meta(pattern=rf"^[a-z0-9_]{{1,64}}{END}")]

ArrayDtype = Literal[
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]
TensorDtype = Literal[
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "bool",
]  # fmt: skip
Shape = Annotated[tuple[NumRows, ...], Meta(max_length=MAX_DIMENSIONS)]
ArrayShape = Annotated[tuple[NumRows, ...], Meta(min_length=1, max_length=2)]
