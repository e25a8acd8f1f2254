"""The precision of each table during a run: counts restores, refines scales after them, reports its decisions.

`cnr_store.write.rate` makes the decisions; this module remembers what they need and asks at the right time. The result
is the same on every rank: it follows from the checkpoint, the options, and what the ranks exchange.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cnr_store.encodings.scale import ScaleChoice
from cnr_store.errors import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.document import RateDocument, RunRates, TableRates, slot_bits_by
from cnr_store.training.precision.measuring import ScaleMeter, step_of
from cnr_store.training.save_interval import SaveInterval
from cnr_store.training.shards import Holdings
from cnr_store.types import AffineBits, Encoding, Lattice
from cnr_store.write.policy import Decision
from cnr_store.write.rate import (
    DRIFT,
    Refinement,
    bits_after,
    halvings_for_loss,
    is_too_fine,
    known_bits,
    refinement,
    smoothed,
)
from cnr_store.write.schema_choice import asked_bits, given_scale, keeps_slots
from cnr_store.write.table_options import SlotBits, TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer

Schedule = Literal["constant", "loss"]
"""Whether scales stay as they were chosen, or become finer as the loss falls (`CheckpointManager.report_loss`)."""


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """What one save did to the scale of a table that is stored as a lattice.

    Attributes
    ----------
    before, after
        The step; None before if the table is new, or was no lattice.
    reason
        One clause.
    choice
        How it was measured, where it was chosen and not halved.
    """

    before: float | None
    after: float
    reason: str
    choice: ScaleChoice | None = None


@dataclass(frozen=True, slots=True)
class TableRate:
    """How exact a table is stored now.

    Attributes
    ----------
    bits
        The width that its scale is for, or that its rows have; None if ``max_error=``, ``scale=`` or an exact encoding
        sets the precision.
    pending
        What the next save changes; None if nothing.
    """

    bits: AffineBits | None
    pending: Refinement | None = None


@dataclass(frozen=True, slots=True)
class RateStatus:
    """How exactly tables are stored, how often, and why; `CheckpointManager.rate`.

    Attributes
    ----------
    restores
        How often the state was restored since the run began. A restore counts once a save has followed it.
    tables
        By name.
    first_loss, loss
        Mean of the reported losses at the first save, and now; None if none was reported.
    interval
        How often the manager saves with ``every_steps="auto"``, and why; else None.
    """

    restores: int
    tables: Mapping[str, TableRate]
    first_loss: float | None = None
    loss: float | None = None
    interval: SaveInterval | None = None


_DEFAULT_BITS = asked_bits(TableOptions())
_MOST_ZEROED = 0.5
"""Share of a table's rows that a scale may round to zero without a warning."""

_GROWN = 1.1
"""Growth of rows, as a factor, before a scale is measured again that was found not to be too fine."""

logger = logging.getLogger(__name__)


class RateControl:
    """Decides how exactly a manager stores its tables. Call it from the thread that trains.

    Parameters
    ----------
    options
        By table, as the user gave them; of all tables, also those of other ranks.

    Raises
    ------
    BadInput
        ``bits="auto"`` without ``expected_restores``, or together with a schedule: both would refine.
    """

    def __init__(self, options: Mapping[str, TableOptions], holdings: Holdings, schedule: Schedule) -> None:
        for table, one in options.items():
            if one.bits == "auto":
                asked_bits(one)
                if schedule != "constant":
                    raise BadInput(
                        f'table {table!r} has bits="auto", which follows the restores, and schedule={schedule!r} '
                        "follows the loss; choose one of them",
                        table=table,
                    )
        self._options, self._meter, self._schedule = dict(options), ScaleMeter(holdings), schedule
        self._calibrated: dict[str, float] = {}
        # `TableRates.given` and `slot_bits`, which follow from the options; None once these have changed.
        self._of_options: tuple[list[str], dict[str, SlotBits | dict[str, SlotBits]]] | None = None
        self._first_loss: float | None = None
        self._loss: float | None = None
        self._losses = 0
        self._staged_first: float | None = None
        self._halved: dict[str, int] = {}
        self._steps: dict[str, float] = {}
        self._measured_at: dict[str, float] = {}
        self._restores = 0
        self._bits: dict[str, AffineBits] = {}
        self._pending: dict[str, Refinement] = {}
        self._staged: dict[str, AffineBits] = {}
        self._before: dict[str, TableSchema] = {}

    @property
    def status(self) -> RateStatus:
        """What is known now."""
        tables = {name: TableRate(self._bits.get(name), self._pending.get(name)) for name in self._options}
        return RateStatus(self._restores, tables, self._first_loss, self._loss)

    def report_loss(self, loss: float) -> None:
        """Count a loss; those that are not finite, or 0, do not count; without a schedule, nor those below.

        Raises
        ------
        BadInput
            It is negative, and a schedule follows it.
        """
        if loss < 0 and self._schedule == "loss":
            raise BadInput(f"the schedule follows a loss that is positive, found {loss!r}", found=loss)
        if not (math.isfinite(loss) and loss > 0):
            return
        self._loss = smoothed(self._loss, self._losses, loss)
        self._losses += 1

    def options_for(self, table: str) -> TableOptions:
        """Return how to store a table that is written whole: by the user's options, and the restores since then.

        A scale that follows the loss is kept, after the halvings that are due.
        """
        step, planned = self._steps.get(table), self._pending.get(table)
        if self._schedule == "loss" and step is not None and self._is_lattice(table):
            due = 0 if planned is None else planned.halvings
            return replace(self._options[table], bits=None, max_error=None, scale=math.ldexp(step, -due))
        return self._widened(table)

    def calibrated(self, scales: Mapping[str, float]) -> None:
        """Store tables at scales that a validation chose, from now on and in the runs that restore this one."""
        self._calibrated |= scales
        self._of_options = None
        for table, scale in scales.items():
            self._options[table] = replace(self._options[table], scale=scale)

    def _widened(self, table: str) -> TableOptions:
        options = self._options[table]
        if options.bits != "auto" or options.expected_restores is None:
            return options
        return replace(options, expected_restores=max(options.expected_restores, float(self._restores)))

    # ---- after a restore

    def restored(self, ranks: Ranks, writer: Writer, document: RateDocument, kept: Collection[str]) -> None:
        """Decide, after a restore, what the next save changes. Blocks; all ranks call it.

        Takes some 0.3 s for each table whose width grows, and else microseconds.

        Parameters
        ----------
        document
            From the restored checkpoint.
        kept
            Tables that stay as they are stored, under their own names.
        """
        self._restores = document.run.restores + 1
        self._bits, self._pending, self._staged = {}, {}, {}
        run, tables = document.run, document.tables
        self._first_loss, self._loss, self._losses = run.first_loss, run.loss, run.losses
        self._staged_first = None
        self._halved = {table: halvings for table, halvings in tables.halved.items() if table in kept}
        found = ((table, step_of(writer.snapshot.tables[table])) for table in kept)
        self._steps = {table: step for table, step in found if step is not None}
        self.calibrated({table: scale for table, scale in tables.calibrated.items() if self._is_unsaid(table)})
        if self._schedule == "loss":
            self._follow_loss(ranks, writer)
        growing: dict[str, tuple[AffineBits, AffineBits]] = {}
        for table, options in self._options.items():
            if table not in kept:
                continue
            if options.bits != "auto":
                self._follow_options(table, writer.snapshot.tables[table].encoding, tables)
                continue
            assert options.expected_restores is not None  # refused when the manager was made
            bits = known_bits(tables.bits, table, options.expected_restores)
            self._bits[table] = bits
            wanted = bits_after(options.expected_restores, self._restores)
            if wanted > bits:
                growing[table] = (bits, wanted)
        if growing:
            self._widen(ranks, writer, growing)
        for table in self._options:
            if table in kept:
                self._follow_slot_bits(table, writer.snapshot.tables[table], tables)

    def _widen(self, ranks: Ranks, writer: Writer, growing: Mapping[str, tuple[AffineBits, AffineBits]]) -> None:
        """Plan the widths that the restores ask for, by table the width of now and that; all ranks call it."""
        measured = self._meter.measure(ranks, writer, {table: self._widened(table) for table in growing})
        refused: dict[str, str] = {}
        for table, (bits, wanted) in growing.items():
            asked = measured[table]
            if asked.refused is not None:
                refused[table] = asked.refused
                continue
            expected = self._options[table].expected_restores or 0.0
            reason = f"restored {self._restores} times, {expected:g} were expected"
            if expected >= self._restores:
                reason = f"{expected:g} restores are expected now"
            planned = refinement(bits, wanted, self._steps.get(table), asked.scale, asked.halvings, reason)
            if planned is not None:
                self._pending[table] = planned
                logger.info(
                    "table %s: %d bits instead of %d (%s): %s", table, wanted, bits, reason, _effect_of(planned)
                )
        if refused:
            logger.warning(
                "tables %s keep their scales, though more bits are due; the first: %s", some_of(refused.keys()),
                min(refused.items())[1],
            )  # fmt: skip

    def _follow_options(self, table: str, encoding: Encoding, known_rates: TableRates) -> None:
        """Plan a baseline of a table whose options ask for another scale than those of the checkpoint did."""
        options = self._options[table]
        if options.bits is not None:
            self._bits[table] = asked_bits(options)
        if not isinstance(encoding, Lattice) or not self._is_lattice(table):
            return
        if self._schedule != "constant" or table in self._calibrated:
            return
        if self._has_target(table):
            known = None if table in known_rates.given else known_rates.bits.get(table, _DEFAULT_BITS)
            if known == asked_bits(options):
                return
            reason = f"bits={asked_bits(options)} is asked for now, not {known or 'a given scale'}"
        else:
            # A scale that was halved since is still the one that was given.
            asked, chosen = given_scale(options), encoding.scale
            if chosen == asked or (options.max_error is not None and asked / DRIFT < chosen <= asked):
                return
            reason = f"a scale of {asked:.6g} is asked for now, not {chosen:.6g}"
        self._pending[table] = Refinement("baseline", 0, asked_bits(options), reason)
        logger.info("table %s: %s: %s", table, reason, _effect_of(self._pending[table]))

    def _follow_slot_bits(self, table: str, schema: TableSchema, known_rates: TableRates) -> None:
        """Plan a baseline of a table whose slots are to be stored in other bits than the checkpoint's options gave."""
        options, before = self._options[table], known_rates.slot_bits.get(table)
        if before == options.slot_bits:
            return
        if not keeps_slots(schema, replace(options, slot_bits=before), options):
            reason = f"slot_bits={options.slot_bits} is asked for now, not {before}"
            due = self._pending.get(table)
            halvings = 0 if due is None else due.halvings
            self._pending[table] = Refinement("baseline", halvings, self._width_anew(table), reason)
            logger.info("table %s: %s: %s", table, reason, _effect_of(self._pending[table]))

    def _follow_loss(self, ranks: Ranks, writer: Writer) -> None:
        """Plan the halvings that the loss of the checkpoint asks for, as far as codes have room."""
        if self._first_loss is None or self._loss is None:
            return
        levels = halvings_for_loss(self._first_loss, self._loss)
        due = {table: levels - self._halved.get(table, 0) for table in self._steps}
        due = {table: halvings for table, halvings in due.items() if halvings > 0}
        if not due:
            return
        rooms = together(ranks, lambda: {table: self._meter.room(writer, table) for table in due})
        reason = f"the loss fell from {self._first_loss:.4g} to {self._loss:.4g}"
        lacking = set()
        for table, halvings in due.items():
            possible = min(halvings, *(room[table] for room in rooms))
            if possible < halvings:
                lacking.add(table)
            if possible:
                self._pending[table] = Refinement("halve", possible, asked_bits(self._options[table]), reason)
        if lacking:
            logger.warning(
                "%s, which asks for more halvings than the scales of tables %s have room for", reason, some_of(lacking)
            )

    # ---- one save

    def decide(self, decision: Decision, chain_length: int) -> Decision:
        """Return a policy's decision, or a baseline if this delta could not refine scales that are due. Pure."""
        waits = self._to_refine()
        if decision.kind == "delta" and decision.base == "baseline" and chain_length > 1 and waits:
            return Decision(
                "baseline", "baseline", f"the scales of {waits} change, and a one-shot delta cannot refine them"
            )
        return decision

    def too_fine(self, ranks: Ranks, writer: Writer, anew: Collection[str]) -> set[str]:
        """Return tables whose scale is far finer than asked, for a baseline to choose it anew. All ranks call it.

        Looks at a few live rows of each table with ``bits=``, about a millisecond; where those have grown enough it
        blocks for some 0.3 s to measure, and not again before they have grown on.

        Parameters
        ----------
        anew
            Tables that are written anew already.
        """
        if self._schedule != "constant" or not writer.is_synced:
            return set()
        schemas = writer.snapshot.tables
        known = {
            table: step
            for table in self._options.keys() & schemas.keys()
            if table not in anew and table not in self._pending and self._has_target(table)
            if (step := step_of(schemas[table])) is not None
        }
        if not known:  # a rank that is not synced does not ask either: then all tables are written whole
            return set()
        roughly = together(
            ranks, lambda: {table: self._meter.roughly(table, self._width_anew(table)) for table in known}
        )
        most = {table: max(answer[table] for answer in roughly) for table in known}
        known = {
            table: step
            for table, step in known.items()
            if is_too_fine(step, most[table]) and most[table] > _GROWN * self._measured_at.get(table, 0.0)
        }
        self._measured_at |= {table: most[table] for table in known}
        if not known:
            return set()
        targets = self._meter.scales(ranks, writer, {table: self._widened(table) for table in known})
        found = {table for table, target in targets.items() if is_too_fine(known[table], target)}
        for table in found:
            reason = f"the rows have grown: {targets[table]:.4g} would do for {known[table]:.4g}"
            self._pending[table] = Refinement("baseline", 0, self._width_anew(table), reason)
        return found

    def _is_lattice(self, table: str) -> bool:
        return self._meter.is_lattice(table, self._options[table])

    def _is_unsaid(self, table: str) -> bool:
        """Whether the options leave open how exactly a table is stored."""
        options = self._options.get(table, TableOptions(bits=8))
        return (options.bits, options.max_error, options.scale) == (None, None, None) and self._is_lattice(table)

    def _has_target(self, table: str) -> bool:
        """Whether the options of a lattice name a target for its scale, not the scale itself."""
        options = self._options[table]
        return options.max_error is None and options.scale is None

    def waits_for_baseline(self) -> set[str]:
        """Return the tables that the next save must write anew."""
        return {table for table, planned in self._pending.items() if planned.how == "baseline"}

    def anew_in(self, transaction: Transaction) -> set[str]:
        """Return tables that a save must write anew: whose scale should be refined, which only a delta can."""
        return set(self._to_refine()) if transaction.kind == "baseline" else set()

    def stage(self, transaction: Transaction, writer: Writer, anew: set[str]) -> None:
        """Refine the scales that are due, before the transaction gets rows. Blocks for a pass over those tables' codes.

        Parameters
        ----------
        anew
            Tables that this save declares anew.

        Raises
        ------
        BadInput
            A scale cannot be halved. The next save writes its table anew.
        """
        self._before = dict(writer.snapshot.tables) if writer.is_synced else {}
        # Of now: losses go on being reported while the save is under way.
        self._staged_first = self._loss if self._first_loss is None else self._first_loss
        self._staged = {table: self._width_anew(table) for table in anew if self._options[table].bits is not None}
        for table, planned in list(self._pending.items()):
            if table in anew:
                continue
            if planned.how == "halve":
                try:
                    transaction.refine_scale(table, planned.halvings)
                except BadInput:
                    self._pending[table] = replace(planned, how="baseline")
                    raise
            if self._options[table].bits is not None:
                self._staged[table] = planned.bits

    def document(self) -> RateDocument:
        """Return what the next checkpoint records, after `stage`."""
        if self._of_options is None:
            given = [t for t in sorted(self._options.keys() - self._calibrated.keys()) if not self._has_target(t)]
            self._of_options = given, slot_bits_by(self._options)
        run = RunRates(self._restores, self._staged_first, self._loss, self._losses)
        bits: dict[str, int] = {**self._bits, **self._staged}
        return RateDocument(run, TableRates(bits, self._halved_after(), self._calibrated, *self._of_options))

    def _halved_after(self) -> dict[str, int]:
        """How often the schedule has halved each scale after this save; a newly chosen scale keeps its count."""
        due = {table: one.halvings for table, one in self._pending.items()} if self._schedule == "loss" else {}
        return {table: self._halved.get(table, 0) + due.get(table, 0) for table in {*self._halved, *due}}

    def won(self, transaction: Transaction) -> dict[str, ScaleChange]:
        """Record that the staged save is committed; return what it did to scales, and log it."""
        changes: dict[str, ScaleChange] = {}
        tables = transaction.tables
        anew = [table for table, schema in tables.items() if schema is not self._before.get(table)]
        for table in anew:
            schema, before = tables[table], self._before.get(table)
            step = step_of(schema)
            if step is None:
                continue
            same = before is not None and (before.generation, before.shift) == (schema.generation, schema.shift)
            if same and before is not None and before.encoding == schema.encoding:
                continue
            planned = self._pending.get(table)
            old = None if before is None else step_of(before)
            reason = "first baseline" if before is None else "written anew" if planned is None else planned.reason
            choice = transaction.scale_choices.get(table)
            changes[table] = ScaleChange(old, step, reason, choice)
            logger.info("table %s: scale %s%.6g (%s)", table, f"{old:.6g} to " if old else "", step, reason)
        _warn_of_zeroed({table: one.choice.zeroed for table, one in changes.items() if one.choice is not None})
        self._bits |= self._staged
        self._halved = self._halved_after()
        self._first_loss = self._staged_first
        if anew or len(tables) < len(self._before):
            self._steps = {table: step for table, schema in tables.items() if (step := step_of(schema))}
        self._pending, self._staged = {}, {}
        return changes

    def lost(self) -> None:
        """Record that the staged save is not committed: what was due stays due."""
        self._staged = {}

    def _to_refine(self) -> list[str]:
        return sorted(table for table, planned in self._pending.items() if planned.how == "halve")

    def _width_anew(self, table: str) -> AffineBits:
        return asked_bits(self._widened(table))


def _warn_of_zeroed(shares: Mapping[str, float]) -> None:
    """Warn, once for all tables, of scales that round too large a share of their table's rows to zero."""
    most = sorted((table for table, share in shares.items() if share > _MOST_ZEROED), key=shares.__getitem__)[::-1]
    if most:
        worst = ", ".join(f"{100 * shares[table]:.0f} % of the rows of {table}" for table in most[:5])
        others = f" and most of {len(most) - 5} other tables" if len(most) > 5 else ""
        logger.warning(
            "scales round to zero %s%s, because other rows are very much larger; find out whether these "
            "diverged, or give such tables max_error= or TableOptions.exact()", worst, others,
        )  # fmt: skip


def _effect_of(planned: Refinement) -> str:
    if planned.how == "halve":
        return f"its scale is halved {planned.halvings} times in the next save"
    return "the next save writes it whole" if planned.how == "baseline" else "its scale is fine enough"
