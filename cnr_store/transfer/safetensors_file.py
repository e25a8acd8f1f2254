"""Reads and writes safetensors files in pieces, so that a whole table is never in memory.

The safetensors package writes from memory only. The format is eight bytes of header length, a JSON header and raw
little-endian data (https://github.com/huggingface/safetensors, section "Format"). Tests compare these functions with
the package in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, NotFound
from cnr_store.format.documents import nesting_of
from cnr_store.runtime.local_files import failing_at
from cnr_store.runtime.records import converter

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

_MAX_NESTING = 8
"""A header has three levels."""

DTYPE_NAMES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
"""Logical dtype to the format's name for it."""

_LOGICAL = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CARRIERS = {"bool": "uint8", "bfloat16": "uint16"}
_ALIGNMENT = 8


def carrier_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that stores a logical dtype: bfloat16 as uint16 bits, bool as uint8."""
    return np.dtype(_CARRIERS.get(dtype, dtype))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: name, logical dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * carrier_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that is sliced by rows without loading it: logical dtype, and elements in the carrier dtype."""

    dtype: str
    values: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An opened file: its tensors, in memory-mapped arrays, and the strings of its metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


Pieces = Callable[[TensorSpec], Iterable[npt.NDArray[Any]]]
"""The elements of a tensor in order, in pieces of its carrier dtype."""


def write_safetensors(path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str], pieces: Pieces) -> None:
    """Write a file from pieces, largest dtypes first, so that every tensor is aligned. Blocks.

    Raises
    ------
    BadInput
        Two tensors have one name.
    AccessDenied, StorageFailure
        The file cannot be written.
    """
    ordered = sorted(specs, key=lambda spec: (-carrier_dtype(spec.dtype).itemsize, spec.name))
    names = [spec.name for spec in ordered]
    repeated = next((a for a, b in pairwise(sorted(names)) if a == b), None)
    if repeated is not None or "__metadata__" in names:
        raise BadInput(
            f"two tensors of the file would have the name {repeated or '__metadata__'!r}; write them separately",
            found=repeated,
        )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in ordered:
        span = [offset, offset + spec.size_bytes]
        header[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    with failing_at(path, "written"), path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for spec in ordered:
            for piece in pieces(spec):
                out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)


def open_safetensors(path: Path) -> TensorFile:
    """Memory-map a file and return its tensors. Every offset is checked before any data is read.

    Raises
    ------
    NotFound
    BadInput
        It is not a safetensors file, or it has a dtype that a store does not support.
    AccessDenied, StorageFailure
    """
    with failing_at(path, "read"):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                    raise BadInput(f"{path} is not a safetensors file: it has no header", path=str(path))
                header = file.read(length)
            raw = np.memmap(path, np.uint8, "r")
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}", path=str(path)) from error
    try:
        if nesting_of(header, enough=_MAX_NESTING) > _MAX_NESTING:
            raise msgspec.DecodeError("its header is nested too deeply")
        document = msgspec.json.decode(header, type=dict[str, Any])
        metadata = _metadata_of(document.pop("__metadata__", {}))
        entries = _entries_of(document)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a safetensors file: {error}", path=str(path)) from error
    data = raw[8 + length :]
    return TensorFile({name: _tensor(path, name, entry, data) for name, entry in entries.items()}, metadata)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_metadata_of = converter(dict[str, str])
_entries_of = converter(dict[str, _Entry])


def _tensor(path: Path, name: str, entry: _Entry, data: npt.NDArray[np.uint8]) -> Tensor:
    dtype = _LOGICAL.get(entry.dtype)
    if dtype is None:
        raise BadInput(
            f"tensor {name!r} of {path} has dtype {entry.dtype}, which a store does not support", found=entry.dtype
        )
    start, stop = entry.data_offsets
    spec = TensorSpec(name, dtype, entry.shape)
    if any(n < 0 for n in entry.shape) or not 0 <= start <= stop <= len(data) or stop - start != spec.size_bytes:
        raise BadInput(
            f"tensor {name!r} of {path} has bytes [{start}, {stop}) of {len(data)} for {dtype} {entry.shape}; "
            "the file was cut short or altered",
            path=str(path), expected=spec.size_bytes, found=stop - start,
        )  # fmt: skip
    carrier = carrier_dtype(dtype)
    block = data[start:stop]
    if start % carrier.itemsize or (stop - start) % carrier.itemsize:
        block = block.copy()
    return Tensor(dtype, block.view(carrier).reshape(entry.shape))
