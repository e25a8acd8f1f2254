"""The walk of a row: which files run between `CheckpointManager.step()` and the first object of a delta.

``python -m tests.support.walk`` prints them with the functions called, and every call that returns upward.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from cnr_store.storage.local import LocalStorage
from cnr_store.training import CheckpointManager
from tests.support.rooms import GPU, LIBRARY, REPOSITORY


@dataclass(slots=True)
class Walk:
    """What ran, in the order in which it first ran.

    Attributes
    ----------
    files
        File to the functions of it that were called.
    returns
        Calls from an object A to another one B, and from there to A again: ``A.f > B.g > A.h``.
    """

    files: dict[str, list[str]] = field(default_factory=dict)
    returns: list[str] = field(default_factory=list)


def walk_of_a_row(url: str) -> Walk:
    """Return the walk of a delta of one table, which is trained by Adagrad, in a store at ``url`` on a disk."""
    found = Walk()
    recording = _Recording(found)
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with _profiled(recording), CheckpointManager(url, model=model, optimizer=optimizer, every_steps=2) as manager:
        for step in range(1, 7):
            optimizer.zero_grad()
            model(torch.randint(0, 1000, (8, 4))).sum().backward()
            optimizer.step()
            recording.is_on = step == 6
            manager.step()
            if step % 2 == 0:
                manager.wait_until_finished()
    return found


@dataclass(slots=True)
class _Recording:
    walk: Walk
    is_on: bool = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.is_on or not _is_ours(frame):
            return
        code = frame.f_code
        functions = self.walk.files.setdefault(str(Path(code.co_filename).relative_to(REPOSITORY)), [])
        name = code.co_qualname
        if name not in functions:
            functions.append(name)
            self._look_for_a_return(frame)
        if isinstance(_self_of(frame), LocalStorage) and code.co_name == "_put":
            self.is_on = False

    def _look_for_a_return(self, frame: FrameType) -> None:
        mine, between = _self_of(frame), ""
        caller = frame.f_back
        while mine is not None and caller is not None:
            other = _self_of(caller) if _is_ours(caller) else None
            if other is mine and between:
                self.walk.returns.append(f"{caller.f_code.co_qualname} > {between} > {frame.f_code.co_qualname}")
                return
            if other is not None and other is not mine and type(other).__module__.startswith("cnr_store"):
                between = caller.f_code.co_qualname
            caller = caller.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((f"{LIBRARY}/", f"{GPU}/"))


def _self_of(frame: FrameType) -> object:
    names = frame.f_code.co_varnames
    return frame.f_locals.get("self") if names and names[0] == "self" else None


@contextmanager
def _profiled(recording: _Recording) -> Iterator[None]:
    # Threads take the profile when they start: the manager's are made within.
    threading.setprofile(recording)
    sys.setprofile(recording)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        walk = walk_of_a_row(f"{folder}/store")
    lines = [f"{file}: {', '.join(functions)}" for file, functions in walk.files.items()]
    sys.stdout.write("\n".join([*lines, *walk.returns, f"{len(walk.files)} files, {len(walk.returns)} returns", ""]))
