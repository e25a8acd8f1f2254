"""The random generators of a process as plain data: Python's, numpy's and torch's, without pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cnr_store.errors import CorruptStore


def capture_rng() -> dict[str, Any]:
    """Return the state of every global generator; CUDA generators only if CUDA is in use. Takes microseconds."""
    state: dict[str, Any] = {
        "python": _python_state(),
        # Much training code still draws from numpy's global generator.
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": _torch_state(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every global generator that ``state`` names; CUDA ones as far as this machine has devices.

    Raises
    ------
    CorruptStore
        One of them is no state of that generator; those before it are set.
    """
    try:
        _set_generators(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptStore(
            f"the saved state of the random generators cannot be set: {error!r}; restore another version, or make the "
            "manager with rng=False"
        ) from error


def _set_generators(state: Mapping[str, Any]) -> None:
    if "python" in state:
        saved = state["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss_next"]))
    if "numpy" in state:
        np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state:
        torch.set_rng_state(_torch_blob(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def _python_state() -> dict[str, Any]:
    # As one array: 625 numbers of a JSON list would be most of a small delta.
    version, words, gauss_next = random.getstate()
    return {"version": version, "words": np.asarray(words, np.uint32), "gauss_next": gauss_next}


_WORDS = slice(24, 24 + 8 * 624)
"""Where torch's state of 5,056 bytes has the words of its Mersenne Twister, behind seed, position and flags."""


def _torch_state(blob: torch.Tensor) -> Any:
    """Return torch's state without the upper half of each word, which is zero: these words alone do not compress."""
    data = blob.numpy()
    words = data[_WORDS].view("<u8") if len(data) == 5056 else np.ones(1, "<u8") << np.uint64(32)
    if np.any(words >> np.uint64(32)):
        return blob  # another layout than that of torch 1.6 to 2.x
    return {"words": words.astype("<u4"), "rest": np.delete(data, _WORDS)}


def _torch_blob(state: Any) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    words = state["words"].astype("<u8").view(np.uint8)
    return torch.from_numpy(np.insert(state["rest"], _WORDS.start, words).astype(np.uint8, copy=False))
