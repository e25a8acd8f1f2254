"""Who saves a training state in the cost benchmark: one class per peer, each as its own documentation has it used.

All save the same tensors and leave them as durable as a store does: files are fsynced, with their folder. Who has no
way to an object store writes a file, which is not fsynced then, and lets s3fs send it in parallel parts. A load puts
everything back into the live tensors; files are in the page cache by then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import harness
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
import zarr.storage
from places import Place
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from trainee import Trainee, TrainingState

from cnr_store import CompactionPolicy, Store, TableOptions
from cnr_store.encodings.widths import EXACT_MANTISSA_BITS
from cnr_store.maintenance.compaction.plan import DEFAULT_POLICY
from cnr_store.maintenance.maintain import compact
from cnr_store.training import CheckpointManager, SavePolicy, StoreOptions, TrackingOptions
from cnr_store.training.options import DenseCopies, WhenBusy
from cnr_store.types import AffineBits, Encoding, FloatBits, Lattice, TableDtype

Wait = Callable[[], object]
"""Blocks until what was saved is durable and can be found."""
Tensors = Mapping[str, torch.Tensor]


class Peer(Protocol):
    """A way to write every tensor at each save. Used as: `open`, `save`, `load` as often as one likes, `close`.

    Attributes
    ----------
    name
        For tables.
    loads
        Whether loading is measured; not where another peer writes the same files.
    """

    name: str
    loads: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of what was saved last."""

    def open(self, place: Place, trainee: TrainingState) -> None:
        """Prepare what a training prepares once."""

    def save(self) -> Wait | None:
        """Save; returns when the training may go on. None if the save is durable then."""

    def load(self) -> None:
        """Put what was saved last into the live tensors."""

    def close(self) -> None:
        """Remove everything."""


class _Saved:
    """Something to save at a place, under a name that is its own."""

    name: str
    loads: bool = True
    place: Place
    trainee: TrainingState
    url: str

    def open(self, place: Place, trainee: TrainingState) -> None:
        self.place, self.trainee, self.url = place, trainee, place.new()

    def close(self) -> None:
        self.place.remove(self.url)

    @property
    def size_bytes(self) -> int:
        """Bytes of what was saved last."""
        return self.place.size_bytes(self.url)


class _OneFile(_Saved):
    """A format of one file, sent by s3fs if it is to lie in an object store."""

    def write(self, path: Path) -> None:
        raise NotImplementedError

    def read(self, path: Path) -> Tensors:
        raise NotImplementedError

    def save(self) -> Wait | None:
        """Write the file, and fsync or send it."""
        url = self.url
        if self.place.is_local:
            self.write(Path(url))
            harness.fsync_file(Path(url))
            return None
        with tempfile.TemporaryDirectory(dir=self.place.scratch) as folder:
            path = Path(folder) / "file"
            self.write(path)
            self.place.filesystem.put_file(str(path), url)
        return None

    def load(self) -> None:
        """Fetch the file if it is elsewhere, read it, copy."""
        if self.place.is_local:
            self.trainee.fill(self.read(Path(self.url)))
            return
        with tempfile.TemporaryDirectory(dir=self.place.scratch) as folder:
            path = Path(folder) / "file"
            self.place.filesystem.get_file(self.url, str(path))
            self.trainee.fill(self.read(path))


class TorchSave(_OneFile):
    """``torch.save`` and ``torch.load(weights_only=True)``."""

    name = "torch.save"

    def write(self, path: Path) -> None:
        torch.save(self.trainee.tensors, path)

    def read(self, path: Path) -> Tensors:
        found: Tensors = torch.load(path, weights_only=True)
        return found


class Safetensors(_OneFile):
    """``save_file`` and ``load_file``, which maps the file."""

    name = "safetensors"

    def write(self, path: Path) -> None:
        safetensors.torch.save_file(self.trainee.tensors, path)

    def read(self, path: Path) -> Tensors:
        return safetensors.torch.load_file(path)


class ZarrPython(_Saved):
    """One array per tensor with the defaults of zarr-python: its chunks, zstd."""

    name = "zarr-python"

    def save(self) -> Wait | None:
        """Create the arrays."""
        group = zarr.create_group(self._store())
        for name, tensor in self.trainee.tensors.items():
            group.create_array(name, data=tensor.numpy())
        if self.place.is_local:
            harness.fsync_tree(Path(self.url))
        return None

    def load(self) -> None:
        """Read each array and copy it."""
        group = zarr.open_group(self._store(), mode="r")
        for name, tensor in self.trainee.tensors.items():
            array = group[name]
            assert isinstance(array, zarr.Array)
            tensor.copy_(torch.as_tensor(array[...]))

    def _store(self) -> Any:
        if self.place.is_local:
            return self.url
        return zarr.storage.FsspecStore.from_url(self.url, storage_options=dict(self.place.options))


class Dcp(_Saved):
    """``torch.distributed.checkpoint`` of one process over gloo, ``save`` and ``load``; it fsyncs files itself."""

    name = "dcp.save"

    def open(self, place: Place, trainee: TrainingState) -> None:
        super().open(place, trainee)
        self._meeting = tempfile.TemporaryDirectory(dir=place.scratch)
        meet = f"file://{self._meeting.name}/meeting"
        dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)

    def save(self) -> Wait | None:
        """Save with the default writer, or the one for fsspec."""
        dcp.save(dict(self.trainee.tensors), **self._where())
        return None

    def load(self) -> None:
        """Load in place."""
        reader: dict[str, Any] = {"checkpoint_id": self.url}
        if not self.place.is_local:
            reader = {"storage_reader": FsspecReader(self.url, **self.place.options)}
        dcp.load(dict(self.trainee.tensors), **reader)

    def close(self) -> None:
        dist.destroy_process_group()
        self._meeting.cleanup()
        super().close()

    def _where(self) -> dict[str, Any]:
        if self.place.is_local:
            return {"checkpoint_id": self.url}
        # No checkpoint_id: it would open the filesystem anew, without its options. sync_files would call os.sync(),
        # which helps nothing in an object store.
        return {"storage_writer": FsspecWriter(self.url, sync_files=False, **self.place.options)}


class DcpAsync(Dcp):
    """``async_save`` with the default stager, which allocates its copy anew at each save."""

    name, loads = "dcp.async_save", False

    def stager(self) -> DefaultStager:
        """Return what copies the state: as `dcp.async_save` makes it if it is given none."""
        return DefaultStager(StagingOptions(False, False, False, False))

    def save(self) -> Wait | None:
        """Return when the copy is there; the waiting raises what the save has raised."""
        future: Any = dcp.async_save(dict(self.trainee.tensors), async_stager=self.stager(), **self._where())
        wait: Wait = future.result
        return wait


class DcpAsyncKept(DcpAsync):
    """``async_save`` with a stager that is kept, and its memory with it: the shortest stall that dcp has."""

    name = "dcp.async_save, kept stager"

    def open(self, place: Place, trainee: TrainingState) -> None:
        super().open(place, trainee)
        self._stager = super().stager()
        self._stager.stage(dict(trainee.tensors))  # as the first of many saves

    def stager(self) -> DefaultStager:
        return self._stager

    def close(self) -> None:
        self._stager.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an element may be off after a load: so much, or so large a share of it; exact if both are 0."""

    absolute: float = 0.0
    relative: float = 0.0

    @classmethod
    def of(cls, encoding: Encoding, dtype: TableDtype) -> Bound:
        """Return half a step of a stored encoding."""
        if isinstance(encoding, Lattice):
            return cls(absolute=encoding.scale / 2)
        if isinstance(encoding, FloatBits) and encoding.mantissa_bits < EXACT_MANTISSA_BITS[dtype]:
            return cls(relative=2.0 ** -(encoding.mantissa_bits + 1))
        return cls()


class Cnr(_Saved):
    """``CheckpointManager``: the first save is a baseline, the next ones are deltas of the rows that were touched.

    The first save encodes the live tables while the training waits; with ``reads_live`` the training goes on meanwhile.
    ``every_steps``, ``overhead``, ``when_busy`` and ``dense_copies`` are the manager's.
    """

    def __init__(
        self, bits: AffineBits | None, *, reads_live: bool = False, every_steps: int | Literal["auto"] | None = None,
        overhead: float | None = None, when_busy: WhenBusy = "wait", dense_copies: DenseCopies = "stall",
    ) -> None:  # fmt: skip
        self.name = f"cnr_store{' (reads live)' if reads_live else ''}, {'exact' if bits is None else f'{bits}-bit'}"
        self.options = TableOptions.exact() if bits is None else TableOptions(bits=bits)
        self.reads_live, self.every_steps, self.overhead = reads_live, every_steps, overhead
        self.when_busy: WhenBusy = when_busy
        self.dense_copies: DenseCopies = dense_copies
        self.manager: CheckpointManager | None = None

    def open(self, place: Place, trainee: TrainingState, url: str | None = None) -> None:
        """Make a manager of a new store, or of the one that is there."""
        super().open(place, trainee)
        self.url = self.url if url is None else url
        self.open_manager()

    def open_manager(self) -> CheckpointManager:
        """Go on in a manager that knows nothing yet, as a training that was started again."""
        self.leave()
        self.manager = CheckpointManager(
            self.url,
            model=self.trainee.model,
            optimizer=self.trainee.optimizers,
            options=self.options,
            every_steps=self.every_steps,
            save_policy=SavePolicy(
                first_baseline="live" if self.reads_live else "stall",
                overhead=self.overhead,
                rng=False,
                when_busy=self.when_busy,
                dense_copies=self.dense_copies,
            ),
            tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
            store_options=StoreOptions(storage_options=self.place.options or None),
        )
        return self.manager

    def touch(self, share: float) -> None:
        """Move rows and mark them."""
        assert self.manager is not None
        assert isinstance(self.trainee, Trainee)
        for table, rows in self.trainee.touch(share).items():
            self.manager.tracker.mark(table, rows)
        self.manager.step()

    def save(self) -> Wait:
        """Save what was touched."""
        assert self.manager is not None
        self.manager.save(wait=False)
        return self.manager.wait_until_finished

    def load(self) -> None:
        """Restore weights, slots and dense tensors, and the mirror that the next delta needs, in a new manager."""
        if self.open_manager().restore() is None:
            raise SystemExit("the store is empty")

    def compact(self, policy: CompactionPolicy = DEFAULT_POLICY) -> None:
        """Compact the chain as the policy wants it, beside the manager."""
        with self.opened() as store:
            compact(store, policy=policy)

    def chain_bytes(self) -> list[int]:
        """Return the bytes of each segment that a restore reads."""
        with self.opened() as store:
            return [entry.size_bytes for entry in store.head().record.chain]

    def opened(self) -> Store:
        """Return the store, opened by somebody else than the manager."""
        return Store.open(self.url, storage_options=self.place.options or None)

    def bounds(self) -> dict[str, Bound]:
        """Return how far an element may be off after a load, by tensor: tables and their slots, as they are stored."""
        with self.opened() as store:
            tables = store.snapshot().tables
        found = {name: Bound.of(table.encoding, table.dtype) for name, table in tables.items()}
        for name, table in tables.items():
            for slot, schema in table.slots.items():
                found[f"optimizer.{name}.{slot}"] = Bound.of(schema.encoding, schema.dtype)
        return found

    def leave(self) -> None:
        """Close the manager; the store stays."""
        if self.manager is not None:
            self.manager.close()
        self.manager = None

    def close(self) -> None:
        self.leave()
        super().close()


def assert_same(expected: Tensors, found: Tensors, bounds: Mapping[str, Bound] | None = None) -> None:
    """Compare bit for bit; a tensor with a bound above 0 within it.

    Raises
    ------
    SystemExit
        A tensor differs.
    """
    for name, tensor in expected.items():
        bound = (bounds or {}).get(name, Bound())
        if bound == Bound():
            is_same = torch.equal(tensor, found[name])
        else:
            allowed = bound.relative * tensor.abs()
            if bound.absolute:
                # Half an ulp of what is restored comes on top.
                allowed += bound.absolute + float(tensor.abs().max()) * 2.0**-24
            is_same = bool(((tensor - found[name]).abs() <= allowed).all())
        if not is_same:
            raise SystemExit(f"{name} is not what was saved")


FULL_PEERS: tuple[type[Peer], ...] = (TorchSave, Safetensors, ZarrPython, Dcp, DcpAsync, DcpAsyncKept)
