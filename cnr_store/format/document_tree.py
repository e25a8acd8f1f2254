"""Nested plain data as JSON and back, exactly and without pickle: reader state, RNG state, scalars.

What JSON cannot hold becomes an object with one key that starts with ``$`` (spec, section 4.7): ``$tuple``, ``$dict``,
``$int``, ``$float``, ``$bytes``, ``$array``, ``$scalar``, ``$tensor``. Everything else is plain JSON. Nothing in a
document is executed or looked up by name.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, CorruptStore

MAX_DEPTH = 64
MAX_BYTES = 16 * 1024 * 1024
"""Most bytes of one tree. Larger arrays belong in dense tensors, which are chunked and compressed."""

_MAX_JSON_INT = 2**53 - 1
"""Beyond it a reader that parses numbers as doubles would round."""

_NODE_BYTES = 8
"""Bytes that each node counts for, so that a million empty lists also reach the limit."""

_DTYPE = re.compile(r"[|<>](?:b1|[iu][1248]|f[248]|c(?:8|16)|[SU][1-9][0-9]{0,6}|[mM]8(?:\[[0-9A-Za-z/]{1,16}\])?)")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A leaf that is no plain data, as an array and the name of its type (for example ``torch.bfloat16``)."""

    array: npt.NDArray[Any]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """What `encode` has returned of a tree, for whoever would encode it again."""

    document: Any


Default = Callable[[Any], TensorLeaf | None]
"""Converts a leaf that is no plain data to an array; None if it cannot."""

TensorHook = Callable[[TensorLeaf], Any]
"""Converts a `TensorLeaf` back."""


def encode(
    value: Any, default: Default | None = None, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH
) -> Any:
    """Return ``value`` as builtins that JSON holds; `decode` gives an equal tree with equal types. No I/O.

    Takes dict (any keys, order kept), list, tuple, None, bool, int, float, str, bytes, numpy arrays and scalars, and
    leaves that ``default`` converts. An OrderedDict is decoded as a dict, an array in C order. Of an `EncodedTree` it
    returns the document.

    Raises
    ------
    BadInput
        A leaf has another type, is not valid Unicode or is nested too deep, or the tree is too large; names its path.

    Examples
    --------
    >>> encode({"shape": (2, 3), "step": 3})
    {'shape': {'$tuple': [2, 3]}, 'step': 3}
    """
    if isinstance(value, EncodedTree):
        return value.document
    return _Encoder(default, max_bytes, max_depth).encode(value, "$", 0)


def decode(document: Any, tensor_hook: TensorHook | None = None, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the tree of a document of `encode`; without a hook tensors become arrays. No I/O.

    Arrays are new and writable.

    Raises
    ------
    CorruptStore
        The document is not one that `encode` writes; names the path.
    """
    return _Decoder(tensor_hook, max_depth).decode(document, "$", 0)


class _Encoder:
    def __init__(self, default: Default | None, max_bytes: int, max_depth: int) -> None:
        self._default = default
        self._max_depth = max_depth
        self._max_bytes = max_bytes
        self._bytes = 0

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > self._max_depth:
            raise BadInput(
                f"{path} is nested deeper than {self._max_depth} levels (or contains itself)",
                path=path,
                expected=self._max_depth,
            )
        self._count(_NODE_BYTES, path)
        # By exact type: numpy's float64 is a float, an IntEnum an int, a namedtuple a tuple; decoding would lose that.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return self._int(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is str:
            return self._str(value, path)
        if kind is bytes:
            self._count(len(value), path)
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind in (dict, OrderedDict):
            return self._dict(value, path, depth)
        if kind is np.ndarray:
            return {"$array": self._array(value, path)}
        if isinstance(value, np.generic):
            return {"$scalar": self._array(np.asarray(value), path)}
        leaf = self._default(value) if self._default is not None else None
        if leaf is None:
            raise BadInput(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored; use dict, list, tuple, "
                "numbers, str, bytes or arrays",
                path=path,
                found=f"{kind.__module__}.{kind.__qualname__}",
            )
        return {"$tensor": {**self._array(leaf.array, path), "kind": leaf.kind}}

    def _is_own_form(self, value: Any) -> bool:
        """Whether `encode` returns a leaf as it is, which is counted then: so it is of most, and takes no path."""
        kind, size = type(value), _NODE_BYTES
        if kind is str and value.isascii():
            size += len(value)
        elif kind is float:
            if not -math.inf < value < math.inf:
                return False
        elif not (value is None or kind is bool or (kind is int and -_MAX_JSON_INT <= value <= _MAX_JSON_INT)):
            return False
        if self._bytes + size > self._max_bytes:
            return False
        self._bytes += size
        return True

    def _int(self, value: int, path: str) -> Any:
        if abs(value) <= _MAX_JSON_INT:
            return value
        digits = hex(value)
        self._count(len(digits), path)
        return {"$int": digits}

    def _str(self, value: str, path: str) -> str:
        try:
            self._count(len(value) if value.isascii() else len(value.encode()), path)
        except UnicodeEncodeError as error:
            raise BadInput(f"{path} is not valid Unicode", path=path) from error
        return value

    def _items(self, values: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
        is_deep = depth >= self._max_depth
        return [
            value if not is_deep and self._is_own_form(value) else self.encode(value, f"{path}[{index}]", depth + 1)
            for index, value in enumerate(values)
        ]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        is_deep = depth >= self._max_depth
        if _is_object([*value]):
            self._str("".join(value), path)
            return {
                key: item if not is_deep and self._is_own_form(item) else self.encode(item, f"{path}.{key}", depth + 1)
                for key, item in value.items()
            }
        pairs = []
        for key, item in value.items():
            pair = [key, item]
            if is_deep or not self._is_own_form(key):
                pair[0] = self.encode(key, f"key {path}[{key!r:.80}]", depth + 1)
            if is_deep or not self._is_own_form(item):
                pair[1] = self.encode(item, f"{path}[{key!r:.80}]", depth + 1)
            pairs.append(pair)
        return {"$dict": pairs}

    def _array(self, array: npt.NDArray[Any], path: str) -> dict[str, Any]:
        if not _DTYPE.fullmatch(array.dtype.str):
            raise BadInput(
                f"{path} is an array of dtype {array.dtype}, which cannot be stored; use numbers or strings",
                path=path,
                found=str(array.dtype),
            )
        self._count(array.nbytes, path)
        return {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "data": base64.b64encode(array.tobytes()).decode(),
        }

    def _count(self, size: int, path: str) -> None:
        self._bytes += size
        if self._bytes > self._max_bytes:
            raise BadInput(
                f"at {path} the tree exceeds {self._max_bytes} bytes; store large arrays as dense tensors",
                path=path,
                expected=self._max_bytes,
            )


def _is_object(keys: list[Any]) -> bool:
    """Whether a dict can be a JSON object, which canonical JSON sorts: its keys are text, in order, and no tags."""
    if not {*map(type, keys)} <= {str} or keys != sorted(keys):
        return False
    return "$" not in "".join(keys) or not any(key.startswith("$") for key in keys)


class _Decoder:
    def __init__(self, tensor_hook: TensorHook | None, max_depth: int) -> None:
        self._tensor_hook = tensor_hook
        self._max_depth = max_depth

    def decode(self, document: Any, path: str, depth: int) -> Any:
        if depth > self._max_depth:
            raise _corrupt(path, f"is nested deeper than {self._max_depth} levels")
        if isinstance(document, list):
            return self._items(document, path, depth)
        if not isinstance(document, dict):
            if document is not None and not isinstance(document, (bool, int, float, str)):
                raise _corrupt(path, f"is a {type(document).__name__}")
            return document
        if not any(key.startswith("$") for key in document):
            return {key: self.decode(item, f"{path}.{key}", depth + 1) for key, item in document.items()}
        if len(document) != 1:
            raise _corrupt(path, "has a tag and other keys")
        [(tag, content)] = document.items()
        return self._tagged(tag, content, path, depth)

    def _tagged(self, tag: str, content: Any, path: str, depth: int) -> Any:
        match tag, content:
            case "$tuple", list():
                return tuple(self._items(content, path, depth))
            case "$dict", list():
                return self._dict(content, path, depth)
            case "$int", str():
                return _int(content, path)
            case "$float", str() if content in _FLOATS:
                return _FLOATS[content]
            case "$bytes", str():
                return _bytes(content, path)
            case "$array", dict():
                return _array(content, path)
            case "$scalar", dict() if content.get("shape") == []:
                return _array(content, path)[()]
            case "$tensor", dict() if isinstance(content.get("kind"), str):
                array = _array(content, path)
                return array if self._tensor_hook is None else self._tensor_hook(TensorLeaf(array, content["kind"]))
            case _:
                raise _corrupt(path, f"has the unknown or malformed tag {tag[:40]!r}")

    def _items(self, documents: list[Any], path: str, depth: int) -> list[Any]:
        return [self.decode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(documents)]

    def _dict(self, pairs: list[Any], path: str, depth: int) -> dict[Any, Any]:
        decoded: dict[Any, Any] = {}
        for index, pair in enumerate(pairs):
            where = f"{path}[{index}]"
            if not isinstance(pair, list) or len(pair) != 2:
                raise _corrupt(where, "is no pair of key and value")
            key = self.decode(pair[0], f"key {where}", depth + 1)
            try:
                is_new = key not in decoded
                decoded[key] = self.decode(pair[1], where, depth + 1)
            except TypeError as error:
                raise _corrupt(where, f"has a {type(key).__name__} as its key") from error
            if not is_new:
                raise _corrupt(where, "repeats a key")
        return decoded


def _int(digits: str, path: str) -> int:
    # Hexadecimal: linear in its length, where a long decimal is quadratic and CPython refuses it.
    if not re.fullmatch(r"-?0x[0-9a-f]+", digits):
        raise _corrupt(path, "is no integer")
    return int(digits, 16)


def _bytes(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise _corrupt(path, "is not base64") from error


def _array(content: dict[str, Any], path: str) -> npt.NDArray[Any]:
    name, shape, text = content.get("dtype"), content.get("shape"), content.get("data")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise _corrupt(path, f"has dtype {str(name)[:40]!r}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _corrupt(path, "has no shape")
    if not isinstance(text, str):
        raise _corrupt(path, "has no data")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise _corrupt(path, f"has dtype {name!r}") from error
    data = _bytes(text, path)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _corrupt(path, f"has {len(data)} bytes for shape {shape} of {name}")
    try:
        # A bytearray is writable; frombuffer does not accept empty data.
        return np.ndarray(tuple(shape), dtype, bytearray(data)) if data else np.ndarray(tuple(shape), dtype)
    except (ValueError, OverflowError) as error:
        raise _corrupt(path, f"has shape {str(shape)[:80]}") from error


def _corrupt(path: str, problem: str) -> CorruptStore:
    return CorruptStore(f"{path} of a stored tree {problem}; run `cnr verify`", path=path)
