"""What is done on the device of the tables for a save: rows turned into codes there, and kernels compiled beforehand.

Why this module exists: which rows may cross to the host as codes is decided by how the store keeps them, and which
kernels a save launches by what the shards look like. Neither is the staging's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import array_specs
from cnr_store.training.background import WEIGHT
from cnr_store.training.shards import LocalShard
from cnr_store.types import Lattice
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import LatticeCodes, kernels


def rows_as_codes(
    shards: Mapping[str, LocalShard], schemas: Mapping[str, TableSchema], options: Mapping[str, TableOptions]
) -> dict[str, LatticeCodes]:
    """Return how the weights of touched rows are coded where they are, by name of the shard; pure.

    Parameters
    ----------
    shards
        By name: those whose rows are written, not those that are written whole.
    schemas
        How the tables are stored now, by table: the save must not change a scale.
    options
        By table. Tables whose rows may escape are left out: an escape row is kept as it is, and codes are not.
    """
    coded: dict[str, LatticeCodes] = {}
    for name, shard in shards.items():
        schema = schemas.get(shard.table)
        if schema is None or options[shard.table].nonfinite == "escape":
            continue
        spec = array_specs(schema)["codes"]
        if isinstance(spec.encoding, Lattice):
            coded[name] = LatticeCodes(float(spec.scale), tensor=WEIGHT)
    return coded


@dataclass(frozen=True, slots=True)
class Launches:
    """What the kernels of one device are compiled for: columns and dtypes of rows, tables that are taken at once."""

    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    num_tables: int


def launches_of(shards: Iterable[LocalShard]) -> dict[torch.device, Launches]:
    """Return what saves of these shards launch on each device; slots are float32, per row or per element. Pure."""
    by_device: dict[torch.device, list[LocalShard]] = {}
    for shard in shards:
        by_device.setdefault(shard.weight.device, []).append(shard)
    return {
        device: Launches(
            tuple(sorted({1, *(shard.weight.shape[1] for shard in own)})),
            tuple(sorted({torch.float32, *(shard.weight.dtype for shard in own)}, key=str)),
            len(own),
        )
        for device, own in by_device.items()
    }


def wait_for_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Block until what this thread has queued on the devices of these tensors is done.

    Another thread reads them on its own stream, which is not behind this one's. Does nothing for host memory.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def compile_kernels(shards: Iterable[LocalShard]) -> None:
    """Compile what the first save would compile in its stall (0.1 to 3 s a kernel, once per machine).

    Blocks. Nothing is done for tables in host memory, or without triton.
    """
    for device, launches in launches_of(shards).items():
        if device.type == "cuda":
            kernels.warmup(
                device, dims=launches.dims, dtypes=launches.dtypes, num_tables=(launches.num_tables,)
            )  # fmt: skip
