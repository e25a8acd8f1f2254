"""Watches a model and its optimizers, and knows which rows of its tables changed since the last save.

Why this module exists: forward shows which rows are looked up, the gradient which rows a step gets, the
optimizer decides which of them (and which others) move, and a save may only happen when all are done. The
tracker joins them: hooks mark rows, step hooks read the gradient and check what the optimizer does, and
``take`` hands the rows out at a step boundary.

It must never lose a row: whatever it cannot see (a writer that bypasses the hooks, a replaced tensor, an
unknown optimizer) makes it mark more, with a warning. It writes no weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from cnr_store.errors import BadInput, TableNotFound
from cnr_store_gpu.bitmap import Cumulative, Ids, OutOfRange, RowBitmap, Taken
from cnr_store_gpu.optimizers import Movement, RowMovement, row_movement, row_slots, rows_with_state
from cnr_store_gpu.tables import Lookup, TablePlan, plan_tables, rows_with_gradient
from cnr_store_gpu.verify import RowProbe

OnBypass = Literal["warn", "raise"]


@dataclass(slots=True, eq=False)
class _Watched:
    """What the hooks know of one table."""

    plan: TablePlan
    stamp: tuple[int, int]
    optimizer: torch.optim.Optimizer | None = None
    movement: RowMovement | None = None
    pending: int = 0  # lookups that learn, since the last step
    declared: bool = False  # the caller marked rows, so a change of version until the next step or take is theirs
    reach: Movement = Movement.TOUCHED  # the furthest that a step reached since the last take
    keeps_ever: bool = False
    stepped: bool = False  # the running step has a gradient for it


def _stamp(weight: torch.Tensor) -> tuple[int, int]:
    """Return what changes with in-place writes (but those through ``.data``) and with another storage."""
    return weight._version, weight.data_ptr()


class RowTracker:
    """Rows of a model's tables that changed since the last ``take``.

    Parameters
    ----------
    model
        Its ``nn.Embedding`` and ``nn.EmbeddingBag`` modules get forward hooks.
    tables
        Name to parameter or module; None means every embedding of the model (``plan_tables``). A parameter
        that other code than an embedding uses is tracked all the same, by its gradient.
    optimizers
        Attached at once; see ``attach_optimizer``. Each of their steps reads a dense gradient once, because
        forward does not show every row that gets one. Once there is one, a table that none of them has is
        expected to stand still: a write to it counts as one that no hook saw.
    allow_dense
        Accept optimizers that move every row in every step. Every delta is then a full save of such a table.
    assume
        What optimizers that the library does not know do, by class name; they count as ALL otherwise.
    on_bypass
        What a write that no hook saw does: ``"warn"`` (and mark the whole table, so nothing is lost) or
        ``"raise"``.
    verify_rows
        At each ``take`` compare so many random rows per table that carry no mark; 0 for none.
    seed
        Seed of that sample.
    device
        Where the bitmap lives.

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
        allow_dense: bool = False,
        assume: Mapping[str, Movement] | None = None,
        on_bypass: OnBypass = "warn",
        verify_rows: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        plans = plan_tables(model, tables)
        self._watched = {plan.table: _Watched(plan, _stamp(plan.weight)) for plan in plans}
        self._names = {alias: plan.table for plan in plans for alias in plan.aliases}
        self._names.update({plan.table: plan.table for plan in plans})
        self._by_weight = {id(plan.weight): self._watched[plan.table] for plan in plans}
        self.bitmap = RowBitmap({plan.table: plan.weight.shape[0] for plan in plans}, device)
        self._ever = Cumulative(self.bitmap.table_rows)
        self._allow_dense, self._assume, self._on_bypass = allow_dense, assume, on_bypass
        weights = {plan.table: plan.weight for plan in plans}
        self._probe = RowProbe(weights, rows_per_table=verify_rows, seed=seed) if verify_rows else None
        self._follows_steps = False
        self._handles: list[Any] = []
        try:
            for plan in plans:
                for module in plan.lookups:
                    self._attach_lookup(self._watched[plan.table], module)
            for optimizer in optimizers:
                self.attach_optimizer(optimizer)
        except BaseException:
            self.detach()
            raise

    # ---- what the caller says

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The tables' parameters by name; live."""
        return {table: watched.plan.weight for table, watched in self._watched.items()}

    def slots(self, table: str) -> dict[str, torch.Tensor]:
        """Return the table's live slots; empty without an attached optimizer, or before its first step."""
        watched = self._watched[self._table(table)]
        return {} if watched.optimizer is None else row_slots(watched.optimizer, watched.plan.weight)

    def movement(self, table: str) -> RowMovement | None:
        """Return what the attached optimizer does to the table, as of its last step; None without one."""
        return self._watched[self._table(table)].movement

    def mark(self, table: str, ids: Ids, *, out_of_range: OutOfRange = "raise") -> None:
        """Mark rows that the caller writes, now or before the next step or ``take``.

        For writers that no hook sees: loading rows, clipping, eviction, averaging, kernels of your own. A
        write after that step or ``take`` needs another call.
        ``table`` may be any name of tied weights. Errors as in ``RowBitmap.mark``.
        """
        watched = self._watched[self._table(table)]
        watched.declared = True
        self.bitmap.mark(watched.plan.table, ids, out_of_range=out_of_range)

    def mark_all(self, table: str) -> None:
        """Mark every row of the table, as ``mark``."""
        watched = self._watched[self._table(table)]
        watched.declared = True
        self.bitmap.mark_all(watched.plan.table)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow an optimizer's steps: each ends its tables' pending lookups and adds the rows it moves.

        Raises
        ------
        BadInput
            It moves every row of a table (weight decay) and ``allow_dense`` is not set.
        """
        found = [
            (watched, row_movement(optimizer, group, watched.plan.weight, assume=self._assume))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (watched := self._by_weight.get(id(parameter))) is not None
        ]
        for watched, movement in found:
            if not movement.is_known:
                warnings.warn(
                    f"table {watched.plan.table!r}: {movement.explanation}, and every save will be a full "
                    f"one. Say what it does with "
                    f"assume={{{type(optimizer).__name__!r}: Movement.TOUCHED}}, and check it with "
                    f"verify_rows=1000",
                    RuntimeWarning,
                    stacklevel=2,
                )
            elif movement.rows is Movement.ALL and not self._allow_dense:
                raise BadInput(
                    f"table {watched.plan.table!r}: {movement.explanation}, so no delta is smaller than a "
                    f"full save. Put tables into a group without weight decay, or accept it with "
                    f"allow_dense=True",
                    table=watched.plan.table,
                    found=movement.explanation,
                )
        self._follows_steps = True
        for watched, movement in found:
            watched.optimizer, watched.movement = optimizer, movement
            if movement.rows is Movement.EVER_TOUCHED:
                self._keep_ever(watched)
        self._handles.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)))
        self._handles.append(optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)))
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._after_load))

    def detach(self) -> None:
        """Remove every hook. Marks stay; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    # ---- step boundaries

    @property
    def pending(self) -> int:
        """Lookups that may still change rows: made while learning, since their optimizer's last step.

        With optimizers attached, only those in tables that one of them has: no step would end the others.
        """
        return sum(self._waiting().values())

    @property
    def at_step_boundary(self) -> bool:
        """Whether a save would be whole now: no lookup waits for its step."""
        return self.pending == 0

    def declare_boundary(self) -> None:
        """Say that no update is outstanding: a step was skipped, or no attached optimizer makes them."""
        for watched in self._watched.values():
            watched.pending = 0

    def check_boundary(self) -> None:
        """Return if a save would be whole now.

        Raises
        ------
        BadInput
            Lookups wait for their optimizer's step: a save now would lose their update from both deltas.
        """
        waiting = self._waiting()
        if waiting:
            raise BadInput(
                f"between forward and optimizer step: lookups that wait for their step, by table: "
                f"{waiting}. Save right after optimizer.step(); after a skipped step, or an update that no "
                f"attached optimizer makes, call declare_boundary() first",
                table=next(iter(waiting)),
                found=waiting,
            )

    def _waiting(self) -> dict[str, int]:
        return {
            table: watched.pending
            for table, watched in self._watched.items()
            if watched.pending and (watched.optimizer is not None or not self._follows_steps)
        }

    # ---- handing rows out

    def take(self) -> dict[str, Taken]:
        """Return, for every table, the rows to save, and start the next interval.

        The rows are the marked ones, those that the optimizer moves besides (EVER_TOUCHED, ALL), and whole
        tables that were written behind the tracker. Gather right after it, before training goes on, and
        ``give_back`` the result if the save does not win.

        Raises
        ------
        BadInput
            Not at a step boundary, a bypassing write with ``on_bypass="raise"``, or a row that changed
            without a mark (``verify_rows``). All marks are kept.
        """
        self.check_boundary()
        for watched in self._watched.values():
            self._check_bypass(watched)
            # A write that left the version alone (through `.data`) must not excuse one of a later interval.
            watched.declared = False
        self._check_sample()
        for watched in self._watched.values():
            self._add_moved(watched)
        taken = self.bitmap.take_all()
        for table, watched in self._watched.items():
            watched.reach = Movement.TOUCHED
            if watched.keeps_ever:
                self._ever.add(taken[table])
        if self._probe is not None:
            self._probe.resample()
        return taken

    def give_back(self, taken: Taken | Mapping[str, Taken]) -> None:
        """Mark taken rows again, after a save that did not win."""
        self.bitmap.give_back(taken)

    def reset(self) -> None:
        """Start anew from the present weights: after a restore, or after warm-up before the baseline.

        Call it when weights and optimizer state are in place. Marks are cleared, present weights are taken
        as known, and the rows that momentum still moves are found again from the slots that are not zero.
        """
        self.declare_boundary()
        self.bitmap.clear()
        self._ever.clear()
        for watched in self._watched.values():
            watched.reach, watched.declared, watched.stamp = (
                Movement.TOUCHED,
                False,
                _stamp(watched.plan.weight),
            )
            if watched.keeps_ever:
                watched.keeps_ever = False
                self._keep_ever(watched)
        if self._probe is not None:
            self._probe.resample()

    # ---- hooks

    def _attach_lookup(self, watched: _Watched, module: Lookup) -> None:
        # Dynamo cannot trace a numba kernel: under torch.compile the hook is a graph break, and runs in each call.
        on_lookup = partial(torch.compiler.disable(self._on_lookup), watched)
        self._handles.append(module.register_forward_pre_hook(on_lookup, with_kwargs=True))
        if module.max_norm is not None:
            self._handles.append(
                module.register_forward_hook(partial(torch.compiler.disable(self._after_renorm), watched))
            )

    def _on_lookup(self, watched: _Watched, module: Lookup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        learns = torch.is_grad_enabled() and module.weight.requires_grad
        if module.weight is not watched.plan.weight:
            raise BadInput(
                f"table {watched.plan.table!r}: its module got another parameter after the tracker was "
                f"attached; detach this tracker, and attach a new one",
                table=watched.plan.table,
            )
        rewrites = module.max_norm is not None  # in every forward, even in eval, and the padding row too
        if rewrites:
            self._check_bypass(watched)
        if not (learns or rewrites):
            return
        if learns and not module.training and not rewrites:
            # Usually an evaluation without no_grad. Should a gradient come of it, the step reads the rows
            # from there.
            return
        ids = args[0] if args else kwargs["input"]
        skip = None if rewrites else module.padding_idx
        # Forward itself refuses ids outside the table.
        self.bitmap.mark(watched.plan.table, ids, skip_row=skip, out_of_range="ignore")
        if learns and module.training:
            watched.pending += 1

    def _after_renorm(self, watched: _Watched, *_: Any) -> None:
        watched.stamp = _stamp(watched.plan.weight)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for watched, group in self._tables_of(optimizer):
            self._check_bypass(watched)
            watched.optimizer = optimizer
            watched.stepped = watched.plan.weight.grad is not None or _has_closure(args, kwargs)
            if not watched.stepped:
                continue
            self._follow_movement(watched, row_movement(optimizer, group, watched.plan.weight, assume=self._assume))
            self._mark_gradient(watched)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for watched, _ in self._tables_of(optimizer):
            if _has_closure(args, kwargs):  # its gradients came to be inside the step
                self._mark_gradient(watched)
            # A step leaves weights without a gradient alone; one that does not will be found by their stamp.
            if watched.stepped:
                watched.stamp = _stamp(watched.plan.weight)
            watched.pending, watched.declared = 0, False

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        for watched, _ in self._tables_of(optimizer):
            if row_slots(optimizer, watched.plan.weight):  # all of them may differ now, and they are saved by row
                self.bitmap.mark_all(watched.plan.table)
            if watched.keeps_ever:
                self._keep_ever(watched)

    def _tables_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[_Watched, dict[str, Any]]]:
        return [
            (watched, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (watched := self._by_weight.get(id(parameter))) is not None
        ]

    def _mark_gradient(self, watched: _Watched) -> None:
        gradient = watched.plan.weight.grad
        if gradient is None or watched.reach is Movement.ALL:  # then the whole table is taken anyway
            return
        # Also where forward marked rows: weights that are used outside their module, and gradients that were
        # kept over a save, move rows that no lookup of this interval showed.
        self.bitmap.mark(watched.plan.table, rows_with_gradient(gradient), out_of_range="ignore")

    # ---- what the rows' movement asks for

    def _follow_movement(self, watched: _Watched, movement: RowMovement) -> None:
        before = watched.movement
        watched.movement = movement
        if movement.rows is Movement.ALL and before is not None and before.rows is not Movement.ALL:
            warnings.warn(
                f"table {watched.plan.table!r}: {movement.explanation} now; its saves are full from here on",
                RuntimeWarning,
                stacklevel=4,
            )
        if movement.rows is Movement.EVER_TOUCHED and not watched.keeps_ever:
            self._keep_ever(watched)
        watched.reach = max(watched.reach, movement.rows)

    def _keep_ever(self, watched: _Watched) -> None:
        watched.keeps_ever = True
        if watched.optimizer is not None:
            rows = rows_with_state(watched.optimizer, watched.plan.weight)
            self._ever.add_rows(watched.plan.table, rows)

    def _add_moved(self, watched: _Watched) -> None:
        if watched.reach is Movement.ALL:
            self.bitmap.mark_all(watched.plan.table)
        elif watched.reach is Movement.EVER_TOUCHED:
            self.bitmap.or_words(watched.plan.table, self._ever.words(watched.plan.table))

    # ---- what no hook saw

    def _check_bypass(self, watched: _Watched) -> None:
        now = _stamp(watched.plan.weight)
        if now == watched.stamp:
            return
        # Without any attached optimizer every update looks like this; it is a bypass only if nothing was
        # marked either.
        expected = watched.declared or (not self._follows_steps and self.bitmap.count(watched.plan.table) > 0)
        watched.stamp, watched.declared = now, False
        if expected:
            return
        self.bitmap.mark_all(watched.plan.table)
        message = (
            f"table {watched.plan.table!r} was written by something that no hook saw (loading, clipping, "
            f"an optimizer that is not attached, a replaced tensor)"
        )
        if self._on_bypass == "raise":
            raise BadInput(
                f"{message}; call mark(table, ids) or mark_all(table) where it is written, or reset() after a restore",
                table=watched.plan.table,
            )
        warnings.warn(f"{message}; all its rows count as changed", RuntimeWarning, stacklevel=3)

    def _check_sample(self) -> None:
        if self._probe is None:
            return
        for table, watched in self._watched.items():
            if watched.reach is Movement.ALL:
                continue
            self._add_moved(watched)
            silent = self._probe.silent_changes(table, self.bitmap.row_ids(table))
            if len(silent):
                self.bitmap.mark_all(watched.plan.table)
                explanation = watched.movement.explanation if watched.movement else "no optimizer is attached"
                raise BadInput(
                    f"table {table!r}: {len(silent)} sampled rows changed without a mark (first: row "
                    f"{int(silent[0])}); {explanation}. All its rows are marked now, so the next save is "
                    f"whole",
                    table=table,
                    found=silent[:10].tolist(),
                )

    def _table(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            raise TableNotFound(
                f"no table {name!r} is tracked; there are {sorted(self._watched)}", table=name
            ) from None


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # The step hooks get the optimizer itself as the first positional argument.
    return any(callable(value) and not isinstance(value, torch.optim.Optimizer) for value in (*args, *kwargs.values()))
