"""One committed state of the training, read-only: tables, slots, dense tensors, scalars, documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from cnr_store.errors import TableNotFound
from cnr_store.format import document_tree
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import (
    ChainEntry,
    CommitRecord,
    DenseEntry,
    Manifest,
    TableSchema,
)
from cnr_store.read.joined_replay import read_together
from cnr_store.read.plan import TablePlan, plan_table
from cnr_store.read.replay import ChunkReader
from cnr_store.read.table_view import TableView
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.closing import ProcessBound
from cnr_store.runtime.notebook import html_table
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.codes import Allocate, Array, TableCodes
from cnr_store.segment.packs import read_tensors
from cnr_store.segment.reader import IfMissing, SegmentReader, check_record, open_chain
from cnr_store.storage import Storage
from cnr_store.types import JsonValue, RowIds


class Snapshot(ProcessBound):
    """The state at one version. Opening reads one manifest per segment of the chain and nothing else.

    Attributes
    ----------
    record
        The commit record: version ``record.v``, ``step``, ``checkpoint``, chain.
    """

    def __init__(
        self,
        storage: Storage,
        entry: LogEntry,
        workers: Workers,
        *,
        known: Mapping[str, SegmentReader] | None = None,
        opens: bool = True,
        if_missing: IfMissing | None = None,
        cache: ChunkCache | None = None,
    ) -> None:
        """Open the state; with ``opens=False`` `open` or the first use does. ``known``: segments that are open.

        ``if_missing``: see `SegmentReader`. ``cache`` keeps what `TableView.read_rows` decodes, and nothing else: a
        read of ranges would push out what is looked up again.
        """
        self.record: CommitRecord = entry.record
        self._storage = storage
        self._workers = workers
        # What was opened for another version is missed as part of this one.
        self._known = {name: reader.with_if_missing(if_missing) for name, reader in (known or {}).items()}
        self._if_missing = if_missing
        self._cache = cache
        self._readers: tuple[SegmentReader, ...] | None = None
        if opens:
            self.open()

    def open(self) -> None:
        """Read the manifests that are not known yet; a second call does nothing.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore, StorageFailure
        """
        if self._readers is None:
            chain = self.record.chain
            readers = open_chain(
                self._storage, chain, self._workers, known=self._known, if_missing=self._if_missing
            )  # fmt: skip
            if readers:
                check_record(self.record, readers[-1])
            self._readers = readers

    def open_chain(self, chain: Sequence[ChainEntry]) -> tuple[SegmentReader, ...]:
        """Return the segments of another chain: a GET for each that neither this state nor ``known`` has.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore, StorageFailure
        """
        return open_chain(self._storage, chain, self._workers, known=self._known | self.known_readers)

    @property
    def known_readers(self) -> dict[str, SegmentReader]:
        """The segments that are open by now, by name; no I/O."""
        return dict(self._known) if self._readers is None else {reader.name: reader for reader in self._readers}

    @property
    def readers(self) -> tuple[SegmentReader, ...]:
        """The segments of the chain, baseline first."""
        if self._readers is None:
            self.open()
        assert self._readers is not None
        return self._readers

    @cached_property
    def lookup_readers(self) -> Sequence[ChunkReader]:
        """The segments of the chain through the cache, if there is one."""
        return self.readers if self._cache is None else [reader.with_cache(self._cache) for reader in self.readers]

    @property
    def version(self) -> int:
        """The log position this snapshot was opened at."""
        return self.record.v

    @property
    def step(self) -> int:
        """The training step of the state."""
        return self.record.step

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever saved."""
        return not self.readers

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests of the chain, baseline first."""
        return tuple([reader.manifest for reader in self.readers])

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema."""
        return dict(self.readers[-1].manifest.tables) if self.readers else {}

    def __repr__(self) -> str:
        count = len(self.tables) if self._readers is not None else None
        names = "not opened" if count is None else f"{count} table{'s' if count != 1 else ''}"
        return f"<Snapshot version {self.version}, step {self.step}, {names}>"

    def _repr_html_(self) -> str:
        columns = ("table", "rows", "dim", "dtype", "keys", "encoding", "slots")
        rows = [
            (
                name,
                one.num_rows,
                one.dim,
                one.dtype,
                one.keys,
                one.encoding.__struct_config__.tag,
                ", ".join(sorted(one.slots)),
            )
            for name, one in sorted(self.tables.items())
        ]
        return html_table(f"Snapshot of version {self.version}, step {self.step}", columns, rows)

    def table(self, name: str) -> TableView:
        """Return one table.

        Raises
        ------
        TableNotFound
        """
        schema = self.readers[-1].manifest.tables.get(name) if self.readers else None
        if schema is None:
            raise TableNotFound(
                f"version {self.version} has no table {name!r}; it has {some_of(self.tables, name)}",
                table=name, version=self.version,
            )  # fmt: skip
        return TableView(self, name, schema)

    def load_together(
        self, outputs: Mapping[str, Mapping[str, Array]], *, allocate: Allocate | None = None
    ) -> dict[str, TableCodes | None]:
        """Fill the arrays of whole tables, by name, as `TableView.load` does, of those that can be read together.

        Blocks. That costs much less than to read them one by one: it is for many small tables, which no row was deleted
        from or is exact in. Returns what `TableView.load` does of those that were read; load the others.

        Raises
        ------
        TableNotFound, BadInput, BadShape, BadDtype
            Before anything is read.
        StorageFailure, VersionExpired
            Outputs hold anything. A table that is damaged is left to `TableView.load`, which raises the error.
        """
        prepared = {name: self.table(name).check_outputs(arrays) for name, arrays in outputs.items()}
        if not prepared:
            return {}
        return {name: one.codes for name, one in read_together(self.readers, prepared, self.workers, allocate).items()}

    def read_many(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Return the values of dense tables by name, of all of them if none are named, as `TableView.read`. Blocks.

        Small tables are read together (`load_together`).

        Raises
        ------
        TableNotFound, BadInput, CorruptStore, StorageFailure, VersionExpired
        """
        if names is None:
            names = [name for name, schema in self.tables.items() if schema.keys == "dense"]
        values = {name: self.table(name).allocated() for name in names}
        together = self.load_together({name: {"codes": array} for name, array in values.items()})
        for name, array in values.items():
            if name not in together:
                self.table(name).load({"codes": array})
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    @property
    def dense(self) -> dict[str, DenseEntry]:
        """Dense tensor name to where it is, its dtype and its shape."""
        return dict(self.readers[-1].manifest.dense) if self.readers else {}

    def read_dense(self, name: str) -> npt.NDArray[Any]:
        """Return a dense tensor in its stored dtype (bfloat16 as uint16, bool as uint8); reads just its chunks.

        Raises
        ------
        TableNotFound, CorruptStore
        """
        return read_tensors(self.readers, self._dense_entries([name]), Inline())[name]

    def _dense_entries(self, names: Iterable[str]) -> dict[str, DenseEntry]:
        held, found = self.dense, dict[str, DenseEntry]()
        for name in names:
            if name not in held:
                raise TableNotFound(
                    f"version {self.version} has no dense tensor {name!r}; it has {some_of(held, name)}",
                    table=name, version=self.version,
                )  # fmt: skip
            found[name] = held[name]
        return found

    def read_many_dense(
        self, names: Iterable[str], into: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
    ) -> dict[str, npt.NDArray[Any]]:
        """Return dense tensors by name, as `read_dense`; chunks are read on the store's threads.

        ``into``: memory by name that some of them are read into, C-contiguous, of their stored dtype and shape; after
        an error it holds anything.

        Raises
        ------
        TableNotFound, CorruptStore
        BadShape, BadDtype
            Memory of another shape or dtype, or not in one piece; nothing was read.
        """
        return read_tensors(self.readers, self._dense_entries(names), self.workers, into)

    @property
    def scalars(self) -> dict[str, JsonValue]:
        """Step counters and other plain values saved with the state."""
        return dict(self.readers[-1].manifest.scalars) if self.readers else {}

    @property
    def documents(self) -> list[str]:
        """Names of the documents saved with the state (``reader/0``, ``trainer/0``, ``rng/0/torch`` ...)."""
        return sorted(self.readers[-1].manifest.documents) if self.readers else []

    def read_document(self, name: str, tensor_hook: document_tree.TensorHook | None = None) -> Any:
        """Return a document as the nested plain data that was saved (tuples, bytes and arrays included).

        ``tensor_hook`` makes what it likes of tensors, which are arrays without it.

        Raises
        ------
        TableNotFound
        """
        entry = self.readers[-1].manifest.documents.get(name) if self.readers else None
        if entry is None:
            raise TableNotFound(
                f"version {self.version} has no document {name!r}; it has {sorted(self.documents)}",
                path=name, version=self.version,
            )  # fmt: skip
        holder = next(one for one in self.readers if one.name == entry.segment)
        return document_tree.decode(holder.read_document(name), tensor_hook)

    def plan(
        self,
        table: str,
        start: int = 0,
        stop: int | None = None,
        rows: RowIds | None = None,
        columns: tuple[int, int] | None = None,
    ) -> TablePlan:
        """Return which chunks a read of ``table``, or of some of its columns, needs; no I/O."""
        return plan_table(self.manifests, table, start, stop, rows, columns)

    @property
    def workers(self) -> Workers:
        """The threads that reads run on."""
        return self._workers
