"""Follows lookups and optimizer steps, and marks what they change.

Why this module exists: no single place knows which rows a step changes. Forward has the ids, the gradient has rows that
forward does not show, the optimizer changes further rows, and the version of a weight shows whether other code wrote.
The hooks that collect this are here; the tracker decides when rows are taken.

Where a step will read the gradient, that names the rows, and forward only counts the lookup: a save must not come
between the two. Elsewhere forward marks them.

A hook on a lookup is traced by ``torch.compile``: it calls operators and changes nothing in Python. Hooks on steps
run outside compiled code. No hook waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from cnr_store.errors import BadInput
from cnr_store.runtime.caller import warn_caller
from cnr_store_gpu import operators
from cnr_store_gpu.optimizer_tables import Gradients, SteppedTables
from cnr_store_gpu.optimizers import (
    MOVING_HYPERPARAMETERS,
    Movement,
    RowMovement,
    row_movement,
    row_slots,
    rows_with_state,
)
from cnr_store_gpu.row_union import Cumulative
from cnr_store_gpu.tables import Lookup, gradient_mask, rows_with_gradient
from cnr_store_gpu.tracked_table import NOTED, LookupLedger, TrackedTable, named, restamp, stamp_of, written
from cnr_store_gpu.words import NO_ROW, words_full

OnBypass = Literal["warn", "raise"]


class LookupHook:
    """A hook on a module that belongs to this module alone.

    A copy of the model (for averaging) shares it rather than copying the tracker. A pickled model (``torch.save``, a
    process that is spawned) has `no_hook` in its place.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self._call(*args)

    def __deepcopy__(self, memo: object) -> LookupHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_no_hook, ()


class _ForwardHook(LookupHook):
    """The hook on the forward of a module without ``max_norm``: one frame where a step will name the rows.

    Parameters
    ----------
    looked_up
        ``Following.looked_up``.
    """

    def __init__(
        self, watched: TrackedTable, module: Lookup, ledger: LookupLedger, looked_up: Callable[..., None]
    ) -> None:
        super().__init__(looked_up)
        self._watched, self._module, self._place = watched, module, watched.place
        self._noted = None if ledger.keeps_ids else ledger.noted
        self._on_host = watched.bitmap.is_on_host

    def __call__(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark what is looked up, or count the lookup where that is enough."""
        if called is not self._module:
            return
        watched = self._watched
        weight = called._parameters.get("weight")  # the attribute is found a microsecond later
        if weight is None or weight is not watched.weight:
            raise replaced(watched)
        if not (called.training and weight.requires_grad and is_grad_enabled()):
            # Learning without training mode is usually an evaluation without no_grad. Should a gradient come of it,
            # the step reads the rows from there.
            return
        # Where a step will read it, a gradient names its rows, and forward need only be counted. A GPU that replays a
        # captured graph may have no step that a hook sees: there forward marks what a dense gradient would name.
        marks = not (watched.is_stepped and (self._on_host or called.sparse))
        if not marks and not is_compiling():  # what follows must not be traced
            noted = self._noted
            if noted is not None and len(noted) < NOTED:
                noted.append(self._place)
                return
        # The padding row gets no gradient. Forward itself refuses ids outside the table.
        skip_row = NO_ROW if called.padding_idx is None else called.padding_idx
        self._call(watched, args[0] if args else kwargs["input"], learns=True, skip_row=skip_row, marks=marks)


def no_hook(*_: object) -> None:
    """Do nothing: the hook of a module that was unpickled, which no tracker follows."""


def replaced(watched: TrackedTable) -> BadInput:
    """Return the error for a table whose module has other weights."""
    return BadInput(
        f"table {watched.table!r}: its module got another parameter after the tracker was attached; close the manager "
        "and make a new one, whose next save is a baseline of the live state (where there is no manager, detach this "
        "tracker and attach a new one)",
        table=watched.table,
    )


def _make_no_hook() -> Callable[..., None]:
    return no_hook


class Following:
    """The hooks of a tracker and what they know; it owns no marks, tables bring their bitmaps.

    Parameters
    ----------
    watched
        The tables.
    ledger
        Counts their lookups.
    assume, allow_dense, on_bypass
        As for ``RowTracker``.
    """

    def __init__(
        self,
        watched: Sequence[TrackedTable],
        ledger: LookupLedger,
        *,
        assume: Mapping[str, Movement] | None,
        allow_dense: bool,
        on_bypass: OnBypass,
    ) -> None:
        self._watched, self._ledger = list(watched), ledger
        self._by_weight = {id(one.weight): one for one in watched if one.weight is not None}
        self._assume, self._allow_dense, self._on_bypass = assume, allow_dense, on_bypass
        self.ever = Cumulative({one.table: one.num_rows for one in watched})
        self.follows_steps = False
        self._stepped: dict[int, SteppedTables] = {}
        self._handles: list[Any] = []
        for one in watched:
            if one.movement is not None:
                self._check_movement(one, one.movement)
                if one.movement.rows is Movement.EVER_TOUCHED:
                    self.keep_ever(one)

    # ---- attaching

    def attach_lookup(self, watched: TrackedTable, module: Lookup) -> None:
        """Mark what the module looks up."""
        if module.max_norm is None:
            hook = _ForwardHook(watched, module, self._ledger, self.looked_up)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            return

        # It asks for the version of the weights, which compiled code does not have: here the graph breaks.
        @torch.compiler.disable
        def on_rewrite(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                self._on_rewriting_lookup(watched, module, args, kwargs)

        @torch.compiler.disable
        def after_rewrite(called: nn.Module, *_: Any) -> None:
            if called is module:
                watched.stamp = stamp_of(watched.weight)

        self._handles.append(module.register_forward_pre_hook(LookupHook(on_rewrite), with_kwargs=True))
        self._handles.append(module.register_forward_hook(LookupHook(after_rewrite)))

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the optimizer's steps; errors and warnings as ``RowTracker.attach_optimizer``."""
        stepped = SteppedTables(optimizer, self._by_weight)
        found = [
            (watched, row_movement(optimizer, group, assume=self._assume))
            for group, tables in stepped.groups
            for watched in tables
            if watched.weight is not None
        ]
        for watched, movement in found:
            if movement.is_known:
                self._check_movement(watched, movement)
        if unknown := [watched for watched, movement in found if not movement.is_known]:
            warn_caller(
                f"{named(unknown)}: {found[0][1].explanation}, and every save will be a baseline. "
                f"Say what it does with TrackingOptions(assume={{{type(optimizer).__name__!r}: 'touched'}}) (a "
                f"RowTracker takes Movement.TOUCHED), and check it with verify_rows=1000"
            )
        self.follows_steps = True
        self._stepped[id(optimizer)] = stepped  # which keeps the optimizer, so its id stays its own
        for watched, movement in found:
            watched.optimizer, watched.movement, watched.is_stepped = optimizer, movement, True
            if movement.rows is Movement.EVER_TOUCHED:
                self.keep_ever(watched)
        for watched in self._watched:
            self._ledger.follow(watched.place, is_followed=self.ends_lookups(watched))
        self._handles.append(optimizer.register_step_pre_hook(_outside_graphs(self._before_step)))
        self._handles.append(optimizer.register_step_post_hook(_outside_graphs(self._after_step)))
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._after_load))

    def detach(self) -> None:
        """Remove every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def ends_lookups(self, watched: TrackedTable) -> bool:
        """Return whether something will report that the table's lookups are done."""
        return watched.is_shard or watched.optimizer is not None or not self.follows_steps

    def _check_movement(self, watched: TrackedTable, movement: RowMovement) -> None:
        if movement.rows is Movement.ALL and not self._allow_dense:
            raise BadInput(
                f"table {watched.table!r}: {movement.explanation}, so no delta is smaller than a "
                f"baseline. Put tables into a group without weight decay, or accept it with "
                f"TrackingOptions(allow_dense=True)",
                table=watched.table,
                found=movement.explanation,
            )

    # ---- lookups

    def _on_rewriting_lookup(
        self, watched: TrackedTable, module: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """``max_norm`` rewrites the rows in every forward, even in evaluation, and the padding row too."""
        if module.weight is not watched.weight:
            raise replaced(watched)
        self.check_bypass(written([watched]))
        watched.marked = True
        learns = torch.is_grad_enabled() and module.weight.requires_grad and module.training
        self.looked_up(watched, args[0] if args else kwargs["input"], learns=learns)

    def looked_up(
        self, watched: TrackedTable, ids: torch.Tensor, *, learns: bool, skip_row: int = NO_ROW, marks: bool = True
    ) -> None:
        """Mark the rows of one lookup, and count it if it learns. Traced by ``torch.compile``; eager works too."""
        is_traced = torch.compiler.is_compiling()
        if not is_traced and type(ids) is torch.Tensor:  # what the operators do, without the way there
            if marks:
                watched.bitmap.mark_looked_up(watched.first_word, watched.num_rows, ids, skip_row)
            if learns:
                self._ledger.note(ids, None, (watched.place,), skip_row, is_copy=False)
            return
        if marks:
            operators.mark(watched.bitmap.words, ids, watched.first_word, watched.num_rows, skip_row)
        if learns:
            counts, key = self._ledger.counts, self._ledger.key
            operators.note_lookup(counts, ids, None, [watched.place], skip_row, key, is_traced)

    # ---- steps

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = self._stepped[id(optimizer)]
        stepped.refresh()
        has_closure = _has_closure(args, kwargs)
        self.check_bypass(written(stepped.tables))
        gradients: Gradients = []
        dense_now: dict[str, list[TrackedTable]] = {}
        for group, tables in stepped.groups:
            key = _hyperparameters(group)
            for watched in tables:
                weight = watched.weight
                assert weight is not None
                gradient = weight.grad
                if gradient is not None:
                    gradients.append((watched, gradient))
                if watched.optimizer is not optimizer:
                    watched.optimizer, watched.is_stepped, watched.group_key = optimizer, True, ()
                    self._ledger.follow(watched.place, is_followed=True)
                if gradient is None and not has_closure:
                    continue
                movement = watched.movement
                if key != watched.group_key or movement is None:
                    movement = row_movement(optimizer, group, assume=self._assume)
                    watched.group_key = key
                if movement is not watched.followed and self.follow_movement(watched, movement):
                    dense_now.setdefault(movement.explanation, []).append(watched)
        for explanation, tables in dense_now.items():
            warn_caller(f"{named(tables)}: {explanation} now; every row is saved from here on")
        self._mark_gradients(stepped, gradients)
        stepped.moving = stepped.tables if has_closure else [watched for watched, _ in gradients]
        if has_closure:  # which may be called several times, with other gradients than the last
            for watched in stepped.tables:
                watched.is_stepped = False

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = self._stepped[id(optimizer)]
        if not stepped.groups:
            return
        if _has_closure(args, kwargs):  # their gradients came to be inside the step
            found = [(one, one.weight.grad) for one in stepped.tables if one.weight is not None]
            self._mark_gradients(stepped, [(one, gradient) for one, gradient in found if gradient is not None])
            for watched in stepped.tables:
                watched.is_stepped = True
        # A step leaves weights without a gradient alone; one that does not will be found by their stamp.
        restamp(stepped.moving)
        for watched in stepped.tables:
            watched.declared = False
        self._ledger.settle(stepped.places)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = self._stepped[id(optimizer)]
        stepped.refresh()
        for watched in stepped.tables:
            assert watched.weight is not None
            if row_slots(optimizer, watched.weight):  # all of them may differ now, and they are saved by row
                self.mark_all(watched)
            if watched.keeps_ever:
                self.keep_ever(watched)

    def _mark_gradients(self, stepped: SteppedTables, gradients: list[tuple[TrackedTable, torch.Tensor]]) -> None:
        # Also where forward marked rows: weights that are used outside their module, and gradients that were
        # kept over a save, move rows that no lookup of this interval showed.
        wanted = [one for one in gradients if one[0].reach is not Movement.ALL]  # else the whole table is taken anyway
        for watched, _ in wanted:
            watched.marked = True
        for watched, gradient in stepped.mark_together(wanted):
            if gradient.is_sparse or watched.bitmap.is_on_host:
                watched.bitmap.mark_looked_up(watched.first_word, watched.num_rows, rows_with_gradient(gradient))
            else:  # listing the rows would wait for the device
                watched.bitmap.mark_mask(watched.table, gradient_mask(gradient))

    def updated(self, watched: TrackedTable) -> None:
        """Note that the table's outstanding updates are written, without a step that a hook sees."""
        if watched.movement is not None and watched.optimizer is None:
            self.follow_movement(watched, watched.movement)
        watched.reports_updates, watched.declared = True, False
        for one in (watched, *watched.mates):
            one.stamp = stamp_of(one.weight)
        self._ledger.settle([watched.place])

    # ---- what the rows' movement asks for

    def follow_movement(self, watched: TrackedTable, movement: RowMovement) -> bool:
        """Note what the present step moves beyond its rows. Return True if it is every row, and was not before."""
        before = watched.movement
        watched.movement = movement
        if movement.rows is Movement.EVER_TOUCHED and not watched.keeps_ever:
            self.keep_ever(watched)
        watched.reach, watched.followed = max(watched.reach, movement.rows), movement
        return movement.rows is Movement.ALL and before is not None and before.rows is not Movement.ALL

    def keep_ever(self, watched: TrackedTable) -> None:
        """Remember every row that is ever taken, and find those that already move."""
        watched.keeps_ever = True
        if watched.optimizer is not None and watched.weight is not None:
            self.ever.add_rows(watched.table, rows_with_state(watched.optimizer, watched.weight))
        elif watched.is_shard:  # its slots are not ours to read: any row may have momentum
            self.ever.add_words(watched.table, words_full(watched.num_rows))

    def add_moved(self, watched: TrackedTable) -> None:
        """Mark the rows that steps of this interval moved besides those they had gradients for."""
        if watched.reach is Movement.ALL:
            watched.bitmap.mark_all(watched.table)
        elif watched.reach is Movement.EVER_TOUCHED:
            watched.bitmap.or_words(watched.table, self.ever.words(watched.table))

    # ---- what no hook saw

    def mark_all(self, watched: TrackedTable) -> None:
        """Mark every row."""
        watched.marked = True
        watched.bitmap.mark_all(watched.table)

    def check_bypass(self, tables: Sequence[TrackedTable]) -> None:
        """Mark those of the `written` tables whose change nothing explains as a whole, and warn or raise.

        Compares numbers that the host keeps; waits for no device.
        """
        found = [one for one in tables if self._is_bypassed(one)]
        if not found:
            return
        for watched in found:
            self.mark_all(watched)
        message = (
            f"{named(found)}: written by something that no hook saw (loading, clipping, an optimizer that is not "
            f"attached, a replaced tensor)"
        )
        if self._on_bypass == "raise":
            raise BadInput(
                f"{message}; call mark(table, ids) or mark_all(table) where it is written, or reset() after a restore",
                table=found[0].table,
            )
        warn_caller(
            f"{message}; all rows count as changed. Where the writer knows its rows, call mark(table, ids) of the "
            "tracker (manager.tracker), so that only those do"
        )

    def _is_bypassed(self, watched: TrackedTable) -> bool:
        if watched.has_source:
            return False
        expected = watched.declared or self._explains_writes(watched)
        watched.stamp, watched.declared = stamp_of(watched.weight), False
        return not expected

    def _explains_writes(self, watched: TrackedTable) -> bool:
        if watched.optimizer is not None:
            return False
        group = (watched, *watched.mates)
        is_reported = any(one.reports_updates for one in group)
        if (watched.is_shard or is_reported) and any(self._ledger.pending(one.place) for one in group):
            return True
        if is_reported or (self.follows_steps and not watched.is_shard):
            return False
        # If nothing reports updates, each of them looks like this; it is a bypass only if nothing was
        # marked either.
        return any(one.marked or self._ledger.saw(one.place) for one in group)


def _outside_graphs(hook: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return the hook so that compiled code breaks for it; the wrapper of torch alone costs more than the hook."""
    disabled = torch.compiler.disable(hook)

    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            disabled(optimizer, args, kwargs)
        else:
            hook(optimizer, args, kwargs)

    return call


def _hyperparameters(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that a rule of ``optimizers`` reads of a group."""
    return tuple([_plain(group.get(name)) for name in MOVING_HYPERPARAMETERS])


def _plain(value: object) -> object:
    # A tensor is compared by its value, and not by itself: it may be changed in place.
    return value.item() if isinstance(value, torch.Tensor) else value


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # The step hooks get the optimizer itself as the first positional argument.
    if len(args) == 1 and not kwargs:
        return False
    return any(callable(value) and not isinstance(value, torch.optim.Optimizer) for value in (*args, *kwargs.values()))
