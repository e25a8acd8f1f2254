"""Staged rows in the background: encoded on their device, copied to the host, and checked there.

Runs on a transfer's thread, beside the training; it touches copies only. Where codes are not valid, the floats are
delivered instead: they are still in the staging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cnr_store.types import RowIds
from cnr_store_gpu.gather import check_range
from cnr_store_gpu.quantize import LatticeCodes, encode

Key = tuple[str, str, str]
"""What a buffer is for: (use, table, name)."""

Take = Callable[[Key, tuple[int, ...], torch.dtype, torch.device | str], torch.Tensor]
"""Returns contiguous memory of a shape, dtype and device for a use: the same memory for the same use."""

CopyToHost = Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True)
class StagedArray:
    """One array of the staging: the rows of one tensor, and how they are coded; None leaves them floats."""

    table: str
    name: str
    rows: torch.Tensor
    quantizer: LatticeCodes | None = None


@dataclass(frozen=True, slots=True)
class StagedIds:
    """Row ids that were on the device, and the rows that their table has; not checked yet."""

    table: str
    row_ids: torch.Tensor
    num_rows: int


@dataclass(slots=True)
class Delivery:
    """What has arrived: host tensors by table and name, codes by table, bytes that were handed out."""

    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    row_ids: dict[str, RowIds] = field(default_factory=dict)
    size_bytes: int = 0


def deliver(
    staged: Sequence[StagedArray], ids: Sequence[StagedIds], take: Take, copy_to_host: CopyToHost | None
) -> Delivery:
    """Code and copy the arrays of one device; blocks until they are in host memory.

    Parameters
    ----------
    staged, ids
        Contiguous tensors on one device. Read only.
    take
        Memory that codes and host copies go to; of this save alone.
    copy_to_host
        Copies (device, host) pairs and blocks; None if the tensors are in host memory, and are handed out as they are.

    Raises
    ------
    BadRowIds
        Ids outside their table. The rows were gathered all the same, so nothing of them may be used.
    """
    bring = _Bring(take, copy_to_host)
    coded: list[tuple[StagedArray, torch.Tensor]] = []
    wanted = [one for one in staged if one.quantizer is not None]
    flags = [torch.zeros(len(wanted), dtype=torch.int32, device=wanted[0].rows.device)] if wanted else []
    delivery = Delivery()
    for one in staged:
        if one.quantizer is None:
            delivery.tensors[one.table, one.name] = bring.add(("host", one.table, one.name), one.rows)
            continue
        key = ("device codes", one.table, one.name)
        codes = take(key, tuple(one.rows.shape), torch.int16, one.rows.device)
        encode(one.quantizer, one.rows, codes, flags[0][len(coded) : len(coded) + 1])
        coded.append((one, bring.add(("host codes", one.table, one.name), codes)))
    host_ids = [bring.add(("host ids", one.table, ""), one.row_ids) for one in ids]
    host_flags = [bring.add(("host flags", "", ""), flag) for flag in flags]
    bring.wait()
    for one_ids, arrived in zip(ids, host_ids, strict=True):
        check_range(arrived, one_ids.num_rows)
        delivery.row_ids[one_ids.table] = arrived.numpy().astype(np.int64, copy=False)
    for number, (one, codes) in enumerate(coded):
        if int(host_flags[0][number]):
            delivery.tensors[one.table, one.name] = bring.add(("host", one.table, one.name), one.rows)
        else:
            delivery.codes[one.table] = codes
    bring.wait()
    delivery.size_bytes = bring.size_bytes
    return delivery


class _Bring:
    """Copies that are asked for one by one and made together."""

    def __init__(self, take: Take, copy_to_host: CopyToHost | None) -> None:
        self._take, self._copy_to_host = take, copy_to_host
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.size_bytes = 0

    def add(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host tensor that will hold the copy after `wait`."""
        self.size_bytes += tensor.numel() * tensor.element_size()
        if self._copy_to_host is None:
            return tensor
        target = self._take(key, tuple(tensor.shape), tensor.dtype, "cpu")
        self._pairs.append((tensor, target))
        return target

    def wait(self) -> None:
        """Block until everything asked for is there."""
        pairs, self._pairs = self._pairs, []
        if self._copy_to_host is not None and pairs:
            self._copy_to_host(pairs)
