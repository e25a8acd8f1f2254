"""The storage writer of `torch.distributed.checkpoint`: each `dcp.save` is one version of a store."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cnr_store.errors import BadInput, NotAStore, Unsupported
from cnr_store.integrations.dcp.attempt import AwaitFinish, SaveAttempt, roll_call
from cnr_store.integrations.dcp.layout import Owners, RankShare, TableRule, share_out
from cnr_store.integrations.dcp.row_marks import RowMarks, TakenMarks, table_of
from cnr_store.integrations.dcp.stager import CnrStager
from cnr_store.integrations.dcp.tracked_copy import TrackedCopy
from cnr_store.integrations.dcp.values import LAYOUT_DOCUMENT, plain_value, to_leaf, values_document
from cnr_store.integrations.dcp.writing import Options, write_changes, write_dense, write_whole
from cnr_store.runtime.arguments import checked_choice, checked_count
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.ranks import OneRank, Ranks, rank_zero, together
from cnr_store.store import Store
from cnr_store.training.ranks import ProcessRanks
from cnr_store.types import Rectangle
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import RowTracker

_STEP = re.compile(r"(\d+)/?$")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the training step at the end of a checkpoint id: 300 of ``300``, ``step-300`` and ``run/step_300``.

    Raises
    ------
    BadInput
    """
    found = _STEP.search(str(checkpoint_id))
    if found is None:
        raise BadInput(
            f"checkpoint id {str(checkpoint_id)!r} does not end with a training step; pass for example "
            'checkpoint_id="step-300": the store is the one that the writer or reader was made for',
            found=str(checkpoint_id),
        )
    return int(found[1])


class _AskedStep(threading.local):
    """The training step of the save that a thread is in: DCP names it and begins to write in the same thread."""

    step: int | None = None


class CnrStorageWriter(StorageWriter, Closing):
    """Saves state dicts of DCP into a store. Keep one for the whole run: what it saved last is what deltas build on.

    With several ranks all make it together, and use it, for saves with collectives only. It is an ``AsyncStager``
    too, so `dcp.async_save` needs no other one.

    Parameters
    ----------
    store
        A store, or its URL or path; it is made if there is none.
    options
        How tables are stored: for all of them, or by pattern of names (``{"model.emb*": TableOptions(bits=8)}``, the
        first that matches). Exactly, to the last bit, where nothing is said.
    tables
        Patterns of names: which two-dimensional float tensors are tables. None: those with ``min_rows`` rows or more.
        The optimizer's state of a table becomes its slots; all else is stored as it is.
    min_rows
        See ``tables``.
    tracker
        Knows which rows changed, of the tensors that are in the state dict themselves, not as copies. None: all rows
        are compared with what is stored.
    mirror, mirror_folder
        Where the codes are kept that rows are compared with: ``memory`` or ``mmap``; see `Store.writer`.
    process_group, no_dist
        As they are passed to `dcp.save`. It makes a gloo group of its own.
    storage_options
        Passed to fsspec, with a URL.

    Attributes
    ----------
    stager
        What copies a state dict for `dcp.async_save`.

    Raises
    ------
    BadInput and its kinds, StorageFailure
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        options: TableOptions | Mapping[str, TableOptions] | None = None,
        tables: Sequence[str] | None = None,
        min_rows: int = 1024,
        tracker: RowTracker | None = None,
        mirror: Literal["memory", "mmap"] = "memory",
        mirror_folder: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: Options = {} if options is None else options
        self._rule = TableRule(None if tables is None else tuple(tables), checked_count("min_rows", min_rows, least=1))
        self._mirror = checked_choice("mirror", mirror, ("memory", "mmap"))
        self._mirror_folder = mirror_folder
        self._ranks = _ranks(process_group, no_dist=no_dist)
        self._owned = None if isinstance(store, Store) else _opened(os.fspath(store), storage_options, self._ranks)
        self._store = store if isinstance(store, Store) else self._owned
        self._owners: Owners = {}
        self._saves = 0
        self._asked = _AskedStep()
        self._writer: Writer | None = None
        self._share: RankShare | None = None  # of the save that is under way
        self._saved: RankShare | None = None  # of the newest save, as long as a delta can build on it
        self._attempt: SaveAttempt | None = None
        self._beginning = threading.Lock()  # from the look at the attempt before until the new one stands in its place
        self.stager = CnrStager(tracker, stored=self._stored)

    # ---- what DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the training step of the next save from the end of ``checkpoint_id``; None: one more than the last.

        Raises
        ------
        BadInput
            It does not end with a number.
        """
        self._asked.step = None if checkpoint_id is None else step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return the store's URL, without credentials."""
        assert self._store is not None  # opened when this was made
        return StorageMeta(checkpoint_id=self._store.url)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a save; one that failed before is given up.

        Raises
        ------
        Unsupported, BadInput
            A save without collectives, or of other ranks than this was made for.
        SaveInProgress
        """
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "use_collectives=False: a version is committed by all ranks or by none; leave it out of dcp.save"
            )
        if kwargs.get("rank", self._ranks.rank) != self._ranks.rank or is_coordinator != (self._ranks.rank == 0):
            raise BadInput(
                f"dcp.save says that this is rank {kwargs.get('rank')}, and the storage writer was made for rank "
                f"{self._ranks.rank} of {self._ranks.world}; pass the same process_group= and no_dist= to both",
                expected=self._ranks.rank, found=kwargs.get("rank"),
            )  # fmt: skip
        if self._attempt is not None:
            self._attempt.give_up()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note which items this rank has, before DCP lets one rank alone write what several have.

        Raises
        ------
        Unsupported
            The planner left the plan out, because it is that of the save before.
        """
        if not plan.usable:
            raise Unsupported(
                "the planner left out a plan that did not change; use one without enable_plan_caching=True"
            )
        return replace(plan, storage_data=plan.items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide on the coordinator how everything is stored, and by which rank; see `share_out`."""
        self._saves += 1
        copies = [plan.storage_data if isinstance(plan.storage_data, list) else plan.items for plan in plans]
        return share_out(plans, copies, self._rule, self._owners, self._saves)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Begin to write this rank's share; does not wait for it.

        Raises
        ------
        Unsupported
            The planner has dropped the storage data of its plan.
        BadInput
            With a tracker: lookups wait for their optimizer step.
        SaveInProgress
            Another save began to write while this one was planned.
        """
        share = plan.storage_data
        if not isinstance(share, RankShare):
            raise Unsupported("the planner dropped the storage data of its plan; keep it in create_global_plan()")
        items = {item.index: item for item in plan.items}

        def resolve(index: MetadataIndex) -> torch.Tensor:
            tensor = planner.resolve_data(items[index])
            assert isinstance(tensor, torch.Tensor)  # DCP's contract for such items
            return tensor.detach() if not isinstance(tensor, TrackedCopy) else tensor

        values = {index.fqn: plain_value(items[index], planner) for index in share.values}
        taken = _taken_of([resolve(one.values) for one in share.shards], self.stager.marks)
        save = partial(self._save, share, resolve, values, taken, self._asked.step)
        with self._beginning:
            if self._attempt is not None:
                self._attempt.give_up()
            self._share = share
            self._attempt = SaveAttempt(save, self._attempt)
        self._asked.step = None
        results: Future[list[WriteResult]] = Future()
        sizes = [0 if item.type is WriteItemType.BYTE_IO else item.tensor_storage_size() or 0 for item in plan.items]
        results.set_result([WriteResult(i.index, size, None) for i, size in zip(plan.items, sizes, strict=True)])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Commit on the coordinator, when all ranks have begun to write. Blocks until the version stands.

        ``metadata.storage_data`` has its number then, on every rank: ``{"version": ...}``.

        Raises
        ------
        CnrStoreError
            Nothing became visible; of `CommitStateUnknown` only the log knows. The next save goes on all the same.
        """
        assert self._attempt is not None
        assert self._share is not None
        document = {"planner_data": metadata.planner_data, "slots": dict(self._share.slots)}
        version = self._attempt.finish(document)
        metadata.storage_data = {"version": version}
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id ends with a training step."""
        return _STEP.search(str(checkpoint_id)) is not None

    # ---- the stager that it is

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: nothing is left to wait for."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """See `CnrStager.stage`."""
        return self.stager.stage(state_dict, **kwargs)

    def synchronize_staging(self) -> None:
        """Do nothing: copies are complete when `stage` returns."""

    def _stored(self) -> set[str]:
        """Return the names of the tensors that the next save can write changed rows of."""
        share = self._saved
        return set() if share is None else {*share.tables, *share.slots}

    # ---- the save itself, on a thread

    def _save(
        self, share: RankShare, resolve: Any, values: Mapping[str, Any], taken: TakenMarks | None, step: int | None,
        await_finish: AwaitFinish,
    ) -> int:  # fmt: skip
        """Write a share and commit it with all ranks; return the version."""
        known = "" if self._saved is None else self._saved.layout
        is_anew = any(one != share.layout for one in roll_call(self._ranks, share.save, known))
        try:
            writer = self._open_writer(share) if is_anew or self._writer is None else self._writer
            seen: set[TakenMarks] = set() if taken is None else {taken}

            def noting(index: MetadataIndex) -> torch.Tensor:
                tensor = resolve(index)
                if not isinstance(tensor, TrackedCopy):
                    return tensor  # type: ignore[no-any-return]
                seen.add(tensor.taken)
                return tensor if tensor.row_ids is not None else tensor.rows

            record = writer.head.record
            following = record.step + 1 if record.chain else 0
            txn = writer.begin(following if step is None else step, "baseline" if is_anew else "delta")
            try:
                for table in sorted((txn.tables.keys() | set(txn.needs_whole_tables)) - set(share.tables)):
                    txn.drop_table(table)
                write_dense(txn, share, noting, self._ranks, list(writer.snapshot.dense) if writer.is_synced else [])
                if is_anew:
                    write_whole(txn, share, noting, self._options, self._ranks)
                else:
                    rows_of = _no_rows if taken is None else taken.rows_of
                    together(self._ranks, partial(write_changes, txn, share, noting, rows_of))
                version = self._commit(txn, values, await_finish)
            finally:
                txn.abort()
        except BaseException:
            if self._writer is None or not self._writer.is_synced:
                self._saved = None
            raise
        self._saved = share
        for one in seen:
            one.marks.won(one)
        return version

    def _commit(self, txn: Transaction, values: Mapping[str, Any], await_finish: AwaitFinish) -> int:
        name = values_document(self._ranks.rank)
        together(self._ranks, lambda: txn.put_document(name, dict(values), to_leaf) if values else None)
        if self._ranks.rank == 0:
            txn.put_document(LAYOUT_DOCUMENT, await_finish(), to_leaf)
        return txn.commit()

    def _open_writer(self, share: RankShare) -> Writer:
        """Open the store's writer for these shards, in place of the one before; its first save is a baseline."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._saved = None
        shards: dict[str, list[Rectangle]] = {}
        for one in share.shards:
            shards.setdefault(one.table, []).append(one.rectangle)
        assert self._store is not None  # opened when this was made
        self._writer = self._store.writer(
            mirror=self._mirror, mirror_folder=self._mirror_folder, ranks=self._ranks, shards=shards
        )
        return self._writer

    # ---- the end

    def close(self) -> None:
        """Give up a save that is not committed, and free all memory. All ranks call it; blocks until they have."""
        if self._attempt is not None:
            self._attempt.give_up()
            self._attempt.wait()
        self.stager.close()
        if self._writer is not None:
            self._writer.close()
        if self._owned is not None:
            self._owned.close()

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process, as AsyncCheckpointerType.PROCESS would.

        Raises
        ------
        Unsupported
        """
        raise Unsupported(
            "CnrStorageWriter keeps what deltas build on in this process; use dcp.async_save with the default "
            "async_checkpointer_type (AsyncCheckpointerType.THREAD)"
        )


def _no_rows(_: torch.Tensor) -> None:
    """Nobody tracks."""


def _taken_of(values: Sequence[torch.Tensor], marks: RowMarks) -> TakenMarks | None:
    """Take the marks of a save that reads the live tables themselves; None if it has copies of them."""
    if marks.tracker is None or any(isinstance(one, TrackedCopy) for one in values):
        return None
    live = marks.live()
    return marks.take(live) if any(table_of(one, live) for one in values) else None


def _ranks(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> Ranks:
    is_alone = no_dist or not dist.is_available() or not dist.is_initialized()
    return OneRank() if is_alone or dist.get_world_size(process_group) == 1 else ProcessRanks(process_group)


def _opened(url: str, storage_options: Mapping[str, Any] | None, ranks: Ranks) -> Store:
    """Open a store on every rank; rank 0 makes it if there is none. Blocks."""
    opened: list[Store] = []

    def make() -> None:
        try:
            Store.open(url, storage_options=storage_options).close()
        except NotAStore:
            Store.create(url, storage_options=storage_options).close()

    rank_zero(ranks, make)
    together(ranks, lambda: opened.append(Store.open(url, storage_options=storage_options)))
    return opened[0]
