"""Where the rows of a table lie. Refuses memory that was freed or replaced since its changes were marked.

Why this module exists: another library may take a table's memory away for a while. TorchRec's memory stashing frees it
after a lookup, and the parameter has other memory until the backward pass. A copy made meanwhile would have what that
memory happens to have, or read memory that is gone. Nothing here reads an element or waits for a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, ge, is_

import torch

from cnr_store.errors import MemoryMoved

Tensors = Callable[[], Sequence[torch.Tensor]]
"""The tensors that the training writes, as they are now; always as many, in one order."""


def needed_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes the storage of a strided tensor must have for its elements."""
    if tensor.is_contiguous():
        return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes if tensor.nbytes else 0
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def check_held(tensor: torch.Tensor, name: str) -> None:
    """Return if a tensor's memory is there; one that is not strided has none of its own.

    Raises
    ------
    MemoryMoved
        Its storage was resized, so its elements must not be read or written.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return
    found, needed = tensor.untyped_storage().nbytes(), needed_bytes(tensor)
    if found < needed:
        raise _moved(name, f"was freed: its storage has {found} of {needed} bytes", needed, found)


class TableMemory:
    """The storages that hold a table's rows, as they were when they were last accepted.

    Storages are compared by identity: one that is freed and allocated again by its owner is the same, wherever it lies.
    They are kept alive until others are accepted, so that no other storage can be taken for them.

    Parameters
    ----------
    table
        For messages.
    tensors
        Strided ones; a tuple if they are always the same objects.
    is_fixed
        Others hold views of these storages, so that no other storages are ever accepted.
    """

    __slots__ = ("_is_fixed", "_table", "_tensors", "held", "needed", "own", "together")

    def __init__(self, table: str, tensors: Tensors | tuple[torch.Tensor, ...], *, is_fixed: bool) -> None:
        self._table, self._is_fixed = table, False
        self.together: Callable[[], Memories | None] = lambda: None
        self.own = tensors if isinstance(tensors, tuple) else None
        self._tensors = tensors
        self.accept()
        self._is_fixed = is_fixed

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors, as they are now."""
        return self._tensors if isinstance(self._tensors, tuple) else self._tensors()

    def accept(self) -> None:
        """Take the present storages as the table's: their owner has replaced them."""
        if self._is_fixed:
            return
        if (together := self.together()) is not None:
            together.forget()
        tensors = self.tensors()
        self.held = [tensor.untyped_storage() for tensor in tensors]
        self.needed = [needed_bytes(tensor) for tensor in tensors]

    def check(self) -> None:
        """Return if the rows lie where they were.

        Raises
        ------
        MemoryMoved
        """
        for tensor, held, needed in zip(self.tensors(), self.held, self.needed, strict=True):
            now = tensor.untyped_storage()
            if now._cdata != held._cdata:
                raise _moved(self._table, "was replaced by other memory", held.nbytes(), now.nbytes())
            if now.nbytes() < needed:
                problem = f"was freed: its storage has {now.nbytes()} of {needed} bytes"
                raise _moved(self._table, problem, needed, now.nbytes())


class Memories:
    """The memory of many tables: `TableMemory.check` of all, where none moved in a few calls of C for a thousand."""

    def __init__(self, memories: Sequence[TableMemory]) -> None:
        self._memories = memories
        own = [*map(attrgetter("own"), memories)]
        self._tensors = [*chain.from_iterable(own)] if all(own) else None
        self._known: tuple[list[torch.UntypedStorage], list[int]] | None = None
        for one in memories:
            one.together = weakref.ref(self)  # a circle would keep tables until the next garbage collection

    def forget(self) -> None:
        """Keep no storage: a table has others now."""
        self._known = None

    def check(self) -> None:
        """Return if the rows of all tables lie where they were.

        Raises
        ------
        MemoryMoved
        """
        if self._known is None:
            self._known = (
                [*chain.from_iterable(map(attrgetter("held"), self._memories))],
                [*chain.from_iterable(map(attrgetter("needed"), self._memories))],
            )
        tensors, (held, needed) = self._tensors, self._known
        if tensors is None:
            tensors = [*chain.from_iterable(one.tensors() for one in self._memories)]
        # Torch gives a storage one object of Python as long as it is held.
        is_same = len(tensors) == len(held) and all(map(is_, map(torch.Tensor.untyped_storage, tensors), held))
        if not is_same or not all(map(ge, map(torch.UntypedStorage.nbytes, held), needed)):
            for one in self._memories:
                one.check()


def memory_of(table: str, weight: torch.Tensor | None, tensors: Tensors | None) -> TableMemory | None:
    """Return the memory of a table that has ``tensors``, else its weight; None if nothing is known of that."""
    if tensors is not None:
        return TableMemory(table, tensors, is_fixed=True)
    if weight is None or weight.layout is not torch.strided or type(weight.data) is not torch.Tensor:
        return None  # another tensor behind it has the elements
    return TableMemory(table, (weight,), is_fixed=False)


def _moved(name: str, problem: str, expected: int, found: int) -> MemoryMoved:
    return MemoryMoved(
        f"the memory of {name!r} {problem}, as memory stashing does between forward and backward; its rows cannot be "
        "used now. Save or restore when it is back in its place. If you have replaced it for good, call "
        "tracker.mark_all(table) and save again, or, for a table that a library shards, or where all tables moved, as "
        "model.to() makes them, create a new manager",
        table=name, expected=expected, found=found,
    )  # fmt: skip
