"""Watches a model and its optimizers, and knows which rows of its tables changed since the last save.

Why this module exists: forward shows which rows are looked up, the gradient shows which rows a step updates, the
optimizer decides which of them (and which others) change, and a save may begin only when all are done. The tracker
combines them: hooks mark rows, step hooks read the gradient and check what the optimizer does, and ``take`` returns the
rows at a step boundary.

It must never lose a row: if it cannot see a change (a writer that bypasses the hooks, a replaced tensor, an unknown
optimizer), it marks more rows, with a warning. It writes no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import some_of
from cnr_store_gpu import operators
from cnr_store_gpu.bitmap import DeviceBitmaps, Ids, OutOfRange, Taken
from cnr_store_gpu.hooks import Following, OnBypass
from cnr_store_gpu.memory import Memories, memory_of
from cnr_store_gpu.optimizers import Movement, RowMovement, inner_optimizer, row_slots
from cnr_store_gpu.shards import ChangeSource, WatchedShard, bounds_of, check_shards, tensor_of
from cnr_store_gpu.tables import plan_tables
from cnr_store_gpu.tracked_table import (
    LookupLedger,
    OvertakenLookups,
    RowProbe,
    TrackedTable,
    TrackedTables,
    restamp,
    written,
)

InFlight = Literal["refuse", "remark"]


class RowTracker:
    """Rows of a model's tables that changed since the last ``take``.

    Parameters
    ----------
    model
        Its ``nn.Embedding`` and ``nn.EmbeddingBag`` modules get forward hooks, which ``torch.compile`` traces
        without a graph break (but for ``max_norm``). Attach before the first compiled call.
    tables
        Name to parameter or module; None means every embedding of the model (``plan_tables``). A parameter
        that other code than an embedding uses is tracked all the same, by its gradient.
    optimizers
        Attached at once; see ``attach_optimizer``. Each of their steps reads a dense gradient once, because
        forward does not show every row that gets one. Once there is one, a table that none of them has is
        expected not to change: a write to it counts as one that no hook saw.
    shards
        Tables that other code looks up, and reports with ``lookup`` and ``updated``.
    in_flight
        What ``take`` does while lookups wait for their update: ``"refuse"``, or ``"remark"`` to take all the same
        and mark their rows again for the next interval. A training that looks up the next batch before the step of
        this one needs ``"remark"``; it keeps references to the ids of those lookups.
    steps_ahead
        With ``"remark"``: how many batches are looked up before the step of an earlier one.
    allow_dense
        Accept optimizers that move every row in every step. Every delta is then a baseline of such a table.
    assume
        What unknown optimizers do, by class name; without an entry they count as ALL.
    on_bypass
        What a write that no hook saw does: ``"warn"`` (and mark the whole table, so nothing is lost) or
        ``"raise"``.
    verify_rows
        At each ``take`` compare so many random rows per table that carry no mark; 0 for none.
    seed
        Seed of that sample.
    device
        Where rows are marked. None: where each table is, one bitmap per device.

    Notes
    -----
    No hook waits for an accelerator; ``take`` does. A captured CUDA graph marks rows on each replay, but its lookups
    are not counted and its steps not seen: take right after the replay of a whole step.

    Examples
    --------
    >>> model = nn.Embedding(10, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> tracker = RowTracker(model, optimizers=[optimizer])
    >>> model(torch.tensor([3, 5])).sum().backward()
    >>> optimizer.step()
    >>> tracker.take()["weight"].row_ids
    array([3, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Mapping[str, nn.Parameter | nn.Module] | None = None,
        *,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        shards: Sequence[WatchedShard] = (),
        in_flight: InFlight = "refuse",
        steps_ahead: int = 1,
        allow_dense: bool = False,
        assume: Mapping[str, Movement] | None = None,
        on_bypass: OnBypass = "warn",
        verify_rows: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if in_flight not in ("refuse", "remark") or steps_ahead < 0:
            raise BadInput(
                f"in_flight={in_flight!r}, steps_ahead={steps_ahead}: expected 'refuse' or 'remark', and 0 or more",
                found=in_flight,
            )
        plans = plan_tables(model, tables)
        check_shards(shards, [plan.table for plan in plans], [plan.weight for plan in plans])
        weights: dict[str, torch.Tensor | None] = {plan.table: plan.weight for plan in plans}
        weights.update({shard.name: shard.weight for shard in shards})
        places = {plan.table: (plan.weight.shape[0], torch.device(device or plan.weight.device)) for plan in plans}
        for shard in shards:
            own = shard.device or (shard.weight.device if shard.weight is not None else "cpu")
            places[shard.name] = (shard.num_rows, torch.device(device or own))
        self.bitmap = DeviceBitmaps(places)
        self._remarks = in_flight == "remark"
        self._ledger = LookupLedger(list(places), keeps_ids=self._remarks, steps_ahead=steps_ahead)
        shard_of = {shard.name: shard for shard in shards}
        found: list[TrackedTable] = []
        for place, (table, weight) in enumerate(weights.items()):
            bitmap = self.bitmap.of(table)
            first_word, num_rows = bitmap.span(table)
            memory = memory_of(table, weight, shard_of[table].memory if table in shard_of else None)
            watched = TrackedTable(table, num_rows, weight, bitmap, first_word, place, table in shard_of, memory)
            if table in shard_of:
                watched.movement = shard_of[table].movement
            found.append(watched)
        restamp(found)
        self._memories = Memories([watched.memory for watched in found if watched.memory is not None])
        self._tables = TrackedTables(found, {alias: plan.table for plan in plans for alias in plan.aliases})
        self._sources: dict[str, list[ChangeSource]] = {}
        checked = {table: weight for table, weight in weights.items() if weight is not None}
        self._probe = RowProbe(checked, rows_per_table=verify_rows, seed=seed) if verify_rows else None
        self.overtaken = OvertakenLookups(self._ledger, self._waiting_tables)
        self._following = Following(
            list(self._tables), self._ledger, assume=assume, allow_dense=allow_dense, on_bypass=on_bypass
        )
        try:
            for plan in plans:
                for module in plan.lookups:
                    self._following.attach_lookup(self._tables.find(plan.table), module)
            for optimizer in optimizers:
                self.attach_optimizer(optimizer)
        except BaseException:
            self.detach()
            raise

    # ---- calls of the user

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tables' weights by name, of all that have some; live."""
        return {watched.table: watched.weight for watched in self._tables if watched.weight is not None}

    def slots(self, table: str) -> dict[str, torch.Tensor]:
        """Return the table's live slots; empty without an attached optimizer, or before its first step."""
        watched = self._tables.find(table)
        if watched.optimizer is None or watched.weight is None:
            return {}
        return row_slots(watched.optimizer, watched.weight)

    def movement(self, table: str) -> RowMovement | None:
        """Return what the table's optimizer does to it, as of its last step; None without one."""
        return self._tables.find(table).movement

    def mark(self, table: str, ids: Ids, *, out_of_range: OutOfRange = "raise") -> None:
        """Mark rows that the caller writes, now or before the next step or ``take``.

        For writers that no hook sees: loading rows, clipping, eviction, averaging, kernels of your own. A
        write after that step or ``take`` needs another call.
        ``table`` may be any name of tied weights. Errors as in ``RowBitmap.mark``; its default waits for the
        device of a table that is not on the CPU.
        """
        watched = self._tables.find(table)
        watched.declared = watched.marked = True
        watched.bitmap.mark(watched.table, ids, out_of_range=out_of_range)

    def mark_all(self, table: str) -> None:
        """Mark every row of the table, as ``mark``; the memory that a parameter has now is the table's from now on."""
        watched = self._tables.find(table)
        watched.declared = True
        if watched.memory is not None:
            watched.memory.accept()
        self._following.mark_all(watched)

    def lookup(self, name: str, ids: Ids, *, learns: bool = True) -> None:
        """Report a lookup whose update is still to come; for lookups that no hook sees, as those of shards.

        Parameters
        ----------
        name
            A shard or table.
        ids
            Integers of any shape, local to the shard; those outside it mark nothing. Kept until the update with
            ``in_flight="remark"``: do not overwrite them (if you do, the whole table is marked at the next take).
        learns
            Whether an update follows. It ends with ``updated``, or the step of the attached optimizer that has the
            weight; no row may be taken before then. Without it the rows are marked only.

        Waits for no device if the ids are on the table's. ``torch.compile`` traces it without a graph break.

        Raises
        ------
        BadRowIds
            Ids that are no integers.
        """
        watched = self._tables.find(name)
        tensor = tensor_of(name, ids)
        if not torch.compiler.is_compiling():
            self._following.check_bypass(written([watched]))
        self._following.looked_up(watched, tensor, learns=learns)

    def lookup_slices(
        self, names: Sequence[str], ids: Ids, ends: Sequence[int] | torch.Tensor, *, learns: bool = True
    ) -> None:
        """Report lookups of slices of ``ids``, each in its own shard, as ``lookup``: one operator, one launch.

        Parameters
        ----------
        names
            The shard of each slice, all on one device; names may repeat.
        ids
            The ids of all slices, one after the other.
        ends
            Where each slice ends, ascending. A tensor is not checked, so that nothing waits for its device; numbers
            are copied to it.

        Raises
        ------
        BadShape
            Not one end per name, or ends that are not ascending within the ids; nothing was marked.
        BadInput
            Shards on several devices; call it once per device.
        """
        slices = self._tables.slices_of(tuple(names))
        tensor = tensor_of(", ".join(names), ids)
        bounds = bounds_of(ends, len(slices.places), tensor.numel(), slices.words.device)
        if not torch.compiler.is_compiling():
            self._following.check_bypass(written([self._tables.find(name) for name in dict.fromkeys(names)]))
        operators.mark_slices(slices.words, tensor, bounds, slices.first_words, slices.num_rows)
        if learns:
            counts, key, is_traced = self._ledger.counts, self._ledger.key, torch.compiler.is_compiling()
            operators.note_lookup(counts, tensor, bounds, list(slices.places), operators.NO_ROW, key, is_traced)

    def updated(self, name: str) -> None:
        """Report that the outstanding updates of a table are written: a fused optimizer's backward is over.

        Ends its pending lookups (with ``in_flight="remark"`` those that are ``steps_ahead`` updates old), and adds
        the rows that its ``movement`` moves. Blocks for nothing.
        """
        self._following.updated(self._tables.find(name))

    def add_source(self, name: str, source: ChangeSource) -> None:
        """Add a source of changed rows of a table: each ``take`` calls it.

        The tracker then does not detect writes to the table: the source must report them.
        """
        watched = self._tables.find(name)
        watched.has_source = True
        self._sources.setdefault(watched.table, []).append(source)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow an optimizer's steps: each ends its tables' pending lookups and adds the rows it moves.

        Raises
        ------
        BadInput
            It moves every row of a table (weight decay) and ``allow_dense`` is not set; or it wraps another one.
            Accelerate's and Lightning's wrappers are taken: the optimizer inside is followed.
        """
        self._following.attach_optimizer(inner_optimizer(optimizer))

    def detach(self) -> None:
        """Remove every hook. Marks stay; a second call does nothing."""
        self._following.detach()

    # ---- step boundaries

    @property
    def pending(self) -> int:
        """Lookups that may still change rows: made while learning, since their table's last update.

        With optimizers attached, only those in tables that one of them has, and in shards: no step would end the
        others.
        """
        return sum(self._waiting().values())

    @property
    def at_step_boundary(self) -> bool:
        """Whether a save would be whole now: no lookup waits for its update, or its rows would be marked again."""
        return self._remarks or self.pending == 0

    def declare_boundary(self) -> None:
        """Declare that no update is outstanding: a step was skipped, or no attached optimizer makes updates."""
        self._ledger.settle_all()

    def check_boundary(self) -> None:
        """Return if a save would be whole now.

        Raises
        ------
        BadInput
            Lookups wait for their update: a save now would lose it from both deltas.
        """
        waiting = {} if self._remarks else self._waiting()
        if waiting:
            raise BadInput(
                f"between forward and optimizer step: lookups of {some_of(waiting)} wait for their "
                f"step. Save right after optimizer.step(), and evaluate under torch.no_grad(); "
                f"after a skipped step, or an update that no "
                f"attached optimizer makes, call manager.tracker.declare_boundary() first, or updated(name) where it "
                f"is made; where batches are always in flight, use TrackingOptions(in_flight='remark')",
                table=next(iter(waiting)),
                found=waiting,
            )

    def check_memory(self) -> None:
        """Return if the rows of all tables lie where they were at the last step, ``mark_all`` or ``reset``.

        Waits for no device.

        Raises
        ------
        MemoryMoved
            The memory of a table was freed or replaced: its rows cannot be copied now.
        """
        self._memories.check()

    def _waiting(self) -> dict[str, int]:
        return {watched.table: self._ledger.pending(watched.place) for watched in self._waiting_tables()}

    def _waiting_tables(self) -> list[TrackedTable]:
        return [one for one in map(self._tables.at, self._ledger.waiting()) if self._following.ends_lookups(one)]

    # ---- handing rows out

    def take(self) -> Mapping[str, Taken]:
        """Return, for every table and shard, the rows to save, and start the next interval.

        The rows are the marked ones, those of the sources, others that the optimizer changes (EVER_TOUCHED, ALL), and
        whole tables that were written without a hook. Gather right after it, before the training continues, and
        ``give_back`` the result if the save is not committed. Waits once for each device that has tables.

        Raises
        ------
        BadInput
            Not at a step boundary, a bypassing write with ``on_bypass="raise"``, or a row that changed
            without a mark (``verify_rows``). All marks are kept.
        MemoryMoved
            As ``check_memory``. All marks are kept.
        BadRowIds
            A source gave rows that its table does not have; the others are marked.
        """
        self.check_boundary()
        self.check_memory()
        for table, sources in self._sources.items():
            for source in sources:
                self.bitmap.of(table).mark(table, source.take())
        if changed := written(list(self._tables)):
            self._following.check_bypass(changed)
        for watched in self._tables:
            # A write that left the version alone (through `.data`) must not excuse one of a later interval.
            watched.declared = False
        self._check_sample()
        touched = Movement.TOUCHED
        for watched in [one for one in self._tables if one.reach is not touched]:
            self._following.add_moved(watched)
        taken = self.bitmap.take_all()
        self._ledger.begin_interval()
        self._tables.begin_interval()
        for watched in [one for one in self._tables if one.keeps_ever]:
            self._following.ever.add(taken[watched.table])
        self._tables.mark_again(self._ledger.in_flight())
        self.overtaken.mark_again()
        if self._probe is not None:
            self._probe.resample()
        return taken

    def give_back(self, taken: Taken | Mapping[str, Taken]) -> None:
        """Mark taken rows again, after a save that was not committed."""
        for one in (taken,) if isinstance(taken, Taken) else taken.values():
            watched = self._tables.find(one.table)
            watched.marked = True
            watched.bitmap.give_back(one)

    def reset(self) -> None:
        """Start again from the present weights: after a restore, or after warm-up before the baseline.

        Call it when weights and optimizer state are in place. Marks are cleared, present weights are taken
        as known, what sources have is dropped, and the rows that momentum still moves are found again from the
        slots that are not zero.
        """
        self.declare_boundary()
        for sources in self._sources.values():
            for source in sources:
                source.take()
        self.bitmap.clear()
        self._ledger.begin_interval()
        self._following.ever.clear()
        self._tables.begin_interval()
        restamp(list(self._tables))
        for watched in self._tables:
            watched.declared = False
            if watched.memory is not None:
                watched.memory.accept()
            if watched.keeps_ever:
                self._following.keep_ever(watched)
        if self._probe is not None:
            self._probe.resample()

    def _check_sample(self) -> None:
        if self._probe is None:
            return
        for watched in self._tables:
            if watched.reach is Movement.ALL or watched.weight is None:
                continue
            self._following.add_moved(watched)
            table = watched.table
            silent = self._probe.silent_changes(table, watched.bitmap.row_ids(table))
            if len(silent):
                self._following.mark_all(watched)
                explanation = watched.movement.explanation if watched.movement else "no optimizer is attached"
                raise BadInput(
                    f"table {table!r}: {len(silent)} sampled rows changed without a mark (first: row "
                    f"{int(silent[0])}); {explanation}. All its rows are marked now, so the next save is "
                    f"whole",
                    table=table,
                    found=silent[:10].tolist(),
                )
