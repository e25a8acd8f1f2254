"""Reads a folder that `torch.distributed.checkpoint` (DCP) wrote, without its process group and without pickle.

The tensors are files of ``torch.save`` and are loaded as weights only. The index, ``.metadata``, is a pickle: it is
parsed as plain records, opcode by opcode, and nothing that it names is imported or called.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cnr_store.errors import BadInput, CnrStoreError, NotFound, Unsupported
from cnr_store.runtime.local_files import failing_at

INDEX = ".metadata"


@dataclass(slots=True, eq=False)
class PickledObject:
    """What a pickle would have made: the name of a class or function, its arguments, and its state."""

    maker: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes of an object that has them."""
        return self.state if isinstance(self.state, dict) else {}


def load_dcp(folder: Path) -> dict[Any, Any]:
    """Return the state dict of a DCP checkpoint, nested as it was saved, with whole tensors in host memory. Blocks.

    Raises
    ------
    NotFound
        It has no ``.metadata``, or a file is missing.
    BadInput
        A file is damaged, or contains more than tensors and plain values.
    Unsupported
        The tensors were transformed (compressed) by an extension of DCP.
    AccessDenied, StorageFailure
    """
    with failing_at(folder, "read"):
        try:
            index = (folder / INDEX).read_bytes()
            content: dict[Any, Any] = _nested(*_contents(folder, index))
            return content
        except FileNotFoundError as error:
            raise NotFound(f"a file of the checkpoint is missing: {error.filename}", path=str(folder)) from error
        except CnrStoreError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BadInput(f"{folder} is not a whole DCP checkpoint: {error}", path=str(folder)) from error


def _contents(folder: Path, index: bytes) -> tuple[dict[str, Any], Mapping[str, Sequence[Any]]]:
    """Return the values by flat name, and the place of each in the nested state dict."""
    fields = parse_pickle(index).fields
    stored: dict[str, list[tuple[tuple[int, ...] | None, Mapping[str, Any]]]] = {}
    for key, info in fields["storage_data"].items():
        offset = key.fields.get("offset")
        stored.setdefault(key.fields["fqn"], []).append((None if offset is None else _size(offset), info.fields))
    values = {}
    for name, about in fields["state_dict_metadata"].items():
        pieces = stored[name]
        if about.maker.endswith(".BytesStorageMetadata"):
            values[name] = _load(folder, pieces[0][1])
        else:
            values[name] = _whole(name, about.fields, [(offset or (), _load(folder, info)) for offset, info in pieces])
    return values, fields.get("planner_data") or {}


def _load(folder: Path, info: Mapping[str, Any]) -> Any:
    """Return one value of a data file: a piece of a tensor, or what is no tensor."""
    if info.get("transform_descriptors"):
        found = info["transform_descriptors"]
        raise Unsupported(f"{folder} was written with extensions {found}; load it with torch", found=found)
    name, start, length = info["relative_path"], info["offset"], info["length"]
    if Path(name).name != name:
        raise ValueError(f"its index names the file {name!r}, which is not in the folder")
    path = folder / name
    if not 0 <= start <= start + length <= path.stat().st_size:
        raise ValueError(f"{name} ends before byte {start + length}; copy the checkpoint again")
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"{name}, byte {start}, does not load as weights only ({first_line})") from error


def _whole(name: str, about: Mapping[str, Any], pieces: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    size = _size(about["size"])
    if len(pieces) == 1 and pieces[0][1].shape == size:
        return pieces[0][1]
    # Each element is there once, so the size is that of what was read.
    if sum(piece.numel() for _, piece in pieces) != math.prod(size):
        raise ValueError(f"pieces of tensor {name!r} are missing")
    whole = torch.empty(size, dtype=pieces[0][1].dtype, device="cpu")
    for offset, piece in pieces:
        whole[tuple(slice(start, start + width) for start, width in zip(offset, piece.shape, strict=True))] = piece
    return whole


def _nested(values: Mapping[str, Any], places: Mapping[str, Sequence[Any]]) -> Any:
    """Return the nested dicts and lists; the keys of dicts are text in a place, those of lists are numbers."""
    nested: dict[Any, Any] = {}
    for name, value in values.items():
        *outer, last = places.get(name, (name,))
        inside: dict[Any, Any] = nested
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = value
    return _with_lists(nested)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    is_list = bool(items) and all(isinstance(key, int) for key in items)
    return [items[key] for key in sorted(items)] if is_list else items


def _size(value: Any) -> tuple[int, ...]:
    """Return a pickled `torch.Size`."""
    size = tuple(value.arguments[0]) if isinstance(value, PickledObject) else tuple(value)
    if not all(isinstance(length, int) and length >= 0 for length in size):
        raise ValueError(f"its index has the size {size}")
    return size


_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def parse_pickle(data: bytes) -> PickledObject:
    """Return what a pickle describes, as plain values and `PickledObject`. Imports and calls nothing.

    Raises
    ------
    ValueError, LookupError, TypeError
        It is no pickle, or has opcodes that records of numbers and text do not need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(argument.replace(" ", "."))
        elif name not in ("PROTO", "FRAME", "STOP"):
            _combine(name, stack)
    [found] = stack
    if not isinstance(found, PickledObject):
        raise TypeError(f"its index is a {type(found).__name__}, not the record of a checkpoint")
    return found


def _combine(name: str, stack: list[Any]) -> None:
    """Replace what is on top of the stack by what an opcode makes of it."""
    if name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        items = _marked(stack)
        stack.append(tuple(items))
    elif name == "STACK_GLOBAL":
        module, attribute = stack.pop(-2), stack.pop()
        stack.append(f"{module}.{attribute}")
    elif name in ("NEWOBJ", "REDUCE"):
        maker, arguments = stack.pop(-2), stack.pop()
        stack.append(PickledObject(maker, arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif name in ("APPEND", "APPENDS"):
        items = _marked(stack) if name == "APPENDS" else [stack.pop()]
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        stack[-1].update(_pairs(items))
    else:
        raise ValueError(f"its index has the opcode {name}, which records of numbers and text do not need")


def _marked(stack: list[Any]) -> list[Any]:
    start = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _pairs(items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)
