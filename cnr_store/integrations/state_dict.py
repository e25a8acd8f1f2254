"""Loads tensors from a file of ``torch.save`` as weights only, so no code in the file runs.

torch is imported when a file is read, not with this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnr_store.errors import BadDtype, BadInput, MissingDependency, NotFound
from cnr_store.runtime.local_files import failing_at
from cnr_store.transfer.safetensors_file import DTYPE_NAMES, Tensor, TensorFile
from cnr_store.types import JsonValue

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class StateDict:
    """The content of a file: tensors and plain values by dotted name, and the names of all other values."""

    tensors: TensorFile
    scalars: dict[str, JsonValue]
    ignored: tuple[str, ...]


def load_state_dict(path: str | Path) -> StateDict:
    """Open a torch file of tensors in nested dicts and lists; keys are joined by dots. Blocks.

    Tensors are memory-mapped if the file's format allows it.

    Raises
    ------
    NotFound
    MissingDependency
        torch is not installed.
    BadInput
        It is not a torch file, or it does not load as weights only; or two joined names are equal.
    BadDtype
        A tensor that a store does not support (complex, quantized, sparse, float8).
    AccessDenied, StorageFailure
        The file cannot be read.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            'reading a torch file needs torch; pip install "cnr-store[train]"', found="torch"
        ) from error
    file = Path(path)
    with failing_at(file, "read"):
        if not file.is_file():
            raise NotFound(f"there is no file {file}", path=str(file))
        file.open("rb").close()  # torch would report an unreadable file as not a torch file
    content = _load(torch, file)
    if not isinstance(content, Mapping):
        raise BadInput(f"{file} contains a {type(content).__name__}, expected a dict of tensors", path=str(file))
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JsonValue] = {}
    ignored: list[str] = []
    seen: set[str] = set()
    for name, value in _leaves(content, "", 0):
        if name in seen:
            raise BadInput(f"{file} contains two values with the name {name!r}", path=str(file), found=name)
        seen.add(name)
        if isinstance(value, torch.Tensor):
            tensors[name] = _tensor(torch, name, value)
        elif value is None or isinstance(value, bool | int | str) or _is_finite(value):
            scalars[name] = value
        else:
            ignored.append(name)
    return StateDict(TensorFile(tensors), scalars, tuple(ignored))


def _load(torch: Any, file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - torch raises its own, zip and unpickling errors; the next attempt decides
        pass  # Files in the format before torch 1.6 cannot be memory-mapped.
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first_line = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"{file} does not load as weights only ({first_line}); save a state_dict of plain tensors",
            path=str(file),
        ) from error


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise BadInput(f"values are nested more than {MAX_DEPTH} deep at {name[:80]!r}", found=depth)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}", depth + 1)
    else:
        yield name, value


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _tensor(torch: Any, name: str, value: Any) -> Tensor:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or dtype not in DTYPE_NAMES:
        raise BadDtype(
            f"tensor {name!r} is {value.layout} {dtype}, which a store does not support",
            expected=sorted(DTYPE_NAMES), found=dtype,
        )  # fmt: skip
    plain = value.detach().contiguous()
    if dtype == "bfloat16":
        plain = plain.view(torch.uint16)
    elif dtype == "bool":
        plain = plain.view(torch.uint8)
    return Tensor(dtype, plain.numpy())
