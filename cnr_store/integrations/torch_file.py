"""Reads a file of ``torch.save`` as weights only, so no code in the file runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cnr_store.errors import BadInput, NotFound
from cnr_store.runtime.local_files import failing_at


def load_torch_file(file: Path) -> Mapping[Any, Any]:
    """Return the dict that a file contains; its tensors are memory-mapped if the file's format allows it. Blocks.

    Raises
    ------
    NotFound
    BadInput
        It is not a torch file, it contains something else than a dict, or it does not load as weights only.
    AccessDenied, StorageFailure
        The file cannot be read.
    """
    with failing_at(file, "read"):
        if not file.is_file():
            raise NotFound(f"there is no file {file}", path=str(file))
        file.open("rb").close()  # torch would report an unreadable file as not a torch file
    content = _load(file)
    if not isinstance(content, Mapping):
        raise BadInput(f"{file} contains a {type(content).__name__}, expected a dict of tensors", path=str(file))
    return content


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - torch raises its own, zip and unpickling errors; the next attempt decides
        pass  # Files in the format before torch 1.6 cannot be memory-mapped.
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - what it is gets into the message
        pickled = re.search(r"GLOBAL (\S+)", str(error))
        what = (
            f"it has objects of {pickled[1]}"
            if pickled
            else f"it is no whole file of torch.save, {type(error).__name__}"
        )
        wanted = "save a state_dict of plain tensors"
        if not pickled:
            wanted += "; a safetensors file is one by its name, *.safetensors (or `cnr import --format`)"
        # Not with torch's own error: it is a page of advice to run the code in the file.
        raise BadInput(
            f"{file} does not load as weights only ({what}); {wanted}",
            path=str(file), found=pickled[1] if pickled else None,
        ) from None  # fmt: skip
