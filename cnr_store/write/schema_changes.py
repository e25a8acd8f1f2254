"""What a transaction declares of tables: new ones, others that end, other sizes, scales and encodings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import CONFIDENCE, ScaleChoice, scale_choice
from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadDtype, BadInput, BadShape, TableNotFound, Unsupported
from cnr_store.format.layout import check_name
from cnr_store.format.limits import MAX_SHIFT, MAX_SHIFT_IN_CHAIN, MIN_SCALE
from cnr_store.format.records import TableSchema
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.ranks import together
from cnr_store.runtime.records import converter
from cnr_store.segment.codes import Array
from cnr_store.segment.shards import Shard
from cnr_store.types import Lattice, TableDtype
from cnr_store.write.schema_agreement import NewShard, Proposal, agree, agreed_choice, alike, options_text, propose
from cnr_store.write.schema_choice import checked_size, choose_table_scale, needs_sample, table_dtype, table_schema
from cnr_store.write.table_options import TableOptions
from cnr_store.write.writer_state import SegmentDraft, WriterState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One shard that will be written whole: what `Transaction.write_table` will get, and how it shall be stored.

    ``options`` None keeps what was asked for before.
    """

    values: Any
    slots: Mapping[str, Any] = field(default_factory=dict)
    options: TableOptions | None = None


class SchemaChanges:
    """The tables as a transaction will leave them. Errors are those of `Transaction`.

    ``written``, where a method asks for it, names the tables whose rows the transaction was given already.

    Attributes
    ----------
    before, tables
        Every table as it was, and as it will be.
    created, declared, refined, dropped
        Names of tables: hashed ones that are new, those that ranks agreed on, those with a finer scale, those that end.
    options
        How tables were asked to be stored in this transaction.
    choices
        How the scales were measured of tables that are stored as a new lattice, over all ranks.
    """

    def __init__(self, state: WriterState, draft: SegmentDraft) -> None:
        self._state = state
        self._draft = draft
        self.before: dict[str, TableSchema] = {} if state.snapshot is None else state.snapshot.tables
        self.tables: dict[str, TableSchema] = dict(self.before)
        self.created: set[str] = set()
        self.declared: set[str] = set()
        self.refined: set[str] = set()
        self.dropped: set[str] = set()
        self.options: dict[str, TableOptions] = {}
        self.choices: dict[str, ScaleChoice] = {}

    def schema(self, table: str) -> TableSchema:
        """Return a table as it will be.

        Raises
        ------
        TableNotFound
        """
        if table not in self.tables:
            raise TableNotFound(f"no table {table!r}; there are {some_of(self.tables, table)}", table=table)
        return self.tables[table]

    def options_of(self, table: str) -> TableOptions | None:
        """Return the options given for the table, in this transaction or before; None if none were given."""
        return self.options.get(table) or self._state.mirrors.options.get(table)

    def agree(self, tables: Mapping[str, Sequence[Declaration]], written: Set[str]) -> None:
        """Agree with all ranks on the schemas of tables that they write whole. Blocks; all ranks call it."""
        self.declared.update(self._agree(partial(self._propose, tables, written)))

    def _agree(self, propose_own: Callable[[], dict[str, list[Proposal]]]) -> list[str]:
        """Set the schemas that follow from what all ranks propose; returns their tables. Blocks; all ranks call it."""
        ranks = self._state.setup.ranks
        if ranks.world == 1:  # which sends nothing
            [proposals] = together(ranks, propose_own)
        else:
            proposals = {}
            for answer in together(ranks, lambda: {table: [*map(_sent, own)] for table, own in propose_own().items()}):
                for table, given in answer.items():
                    proposals.setdefault(table, []).extend(map(_received, given))
        agreed = [table for table, given_by_all in sorted(proposals.items()) if given_by_all]
        for table in agreed:
            self.tables[table] = agree(table, proposals[table])
            self._chose(table, agreed_choice(proposals[table]))
        return agreed

    def _propose(self, tables: Mapping[str, Sequence[Declaration]], written: Set[str]) -> dict[str, list[Proposal]]:
        for table, declarations in tables.items():
            check_name(table)
            self._check_declared(table, declarations, written)
        shards = [self._new_shard(table, one) for table, declarations in tables.items() for one in declarations]
        runs = alike(shards)
        found = self._state.setup.workers.run(partial(propose, [shards[number] for number in run]) for run in runs)
        proposals = dict(zip(chain.from_iterable(runs), chain.from_iterable(found), strict=True))
        made: dict[str, list[Proposal]] = {}
        for number, shard in enumerate(shards):
            self.options[shard.table] = shard.options
            made.setdefault(shard.table, []).append(proposals[number])
        return made

    def _check_declared(self, table: str, declarations: Sequence[Declaration], written: Set[str]) -> None:
        held = self._state.setup.held
        if held.placement is not None and table not in held.shapes:
            raise BadInput(f"table {table!r} has no shard in the writer's placement", table=table)
        if held.placement is None and (len(declarations) != 1 or len(declarations[0].values.shape) != 2):
            raise BadInput(
                f"table {table!r}: a writer of whole tables declares one array (num_rows, dim), found "
                f"{[tuple(one.values.shape) for one in declarations]}",
                table=table,
            )
        if self._draft.kind == "delta" and table in self.before:
            raise BadInput(f"table {table!r} exists; a delta cannot store it anew, begin a baseline", table=table)
        if table in written or table in self.refined:
            raise BadInput(f"declare table {table!r} once, before writing its rows", table=table)

    def _new_shard(self, table: str, one: Declaration) -> NewShard:
        held = self._state.setup.held
        return NewShard(
            table, RowSample(one.values, table_dtype(one.values, table)), one.slots, self._asked(table, one.options),
            shape=one.values.shape if held.placement is None else held.shapes[table],
            generation=self._next_generation(table), held=self._held_scale(table),
        )  # fmt: skip

    def create(
        self,
        table: str,
        *,
        dim: int,
        options: TableOptions | None,
        dtype: str,
        slots: Mapping[str, Literal["row", "element"]],
        sample: Array | None,
    ) -> None:
        """Add a table with hashed int64 keys. All ranks call it: one scale holds for what each of them samples."""
        own = partial(self._created, table, dim=dim, options=options, dtype=dtype, slots=slots, sample=sample)
        if not self._agree(lambda: {table: own()}):
            raise BadInput(
                f"table {table!r}: a scale for bits= is chosen on a sample, and no rank has a row of one; create it "
                "when a rank has rows (give them as sample=), or give scale= or exact options",
                table=table,
            )
        self.options[table] = options or TableOptions()
        self.created.add(table)

    def _created(
        self,
        table: str,
        *,
        dim: int,
        options: TableOptions | None,
        dtype: str,
        slots: Mapping[str, Literal["row", "element"]],
        sample: Array | None,
    ) -> list[Proposal]:
        """What this rank proposes for a new table with hashed keys: nothing if it needs rows to do so, and has none."""
        check_name(table)
        if table in self.tables:
            raise BadInput(f"table {table!r} exists", table=table)
        if dtype not in get_args(TableDtype):
            raise BadDtype(
                f"table {table!r} has dtype {dtype!r}; use one of {get_args(TableDtype)}",
                table=table, expected=list(get_args(TableDtype)), found=dtype,
            )  # fmt: skip
        dim = checked_size(table, "dim", dim, least=1)
        rows = np.zeros((0, dim), carrier(dtype)) if sample is None else np.asarray(sample)  # type: ignore[arg-type]
        if rows.ndim != 2 or rows.shape[1] != dim or rows.dtype != carrier(dtype):  # type: ignore[arg-type]
            raise BadShape(
                f"the sample of table {table!r} is {rows.dtype} of shape {rows.shape}, expected {dtype} (n, {dim})",
                table=table, expected=["n", dim], found=rows.shape,
            )  # fmt: skip
        for name, slot_kind in slots.items():
            check_name(name)
            if slot_kind not in ("row", "element"):
                raise BadInput(f"slot {name!r} of table {table!r} is {slot_kind!r}; use row or element", table=table)
        kinds = {
            name: np.zeros(0, np.float32) if kind == "row" else np.zeros((0, dim), np.float32)
            for name, kind in slots.items()
        }
        chosen = options or TableOptions()
        if rows.shape[0] == 0 and needs_sample(chosen, dtype):
            return []
        sampled = RowSample(rows, dtype, is_all=False)  # type: ignore[arg-type]
        choice = choose_table_scale(chosen, dtype, sampled)  # type: ignore[arg-type]
        schema = table_schema(
            table, chosen, num_rows=0, dim=dim, dtype=dtype, sample=sampled, slots=kinds, keys="hashed",  # type: ignore[arg-type]
            generation=self._next_generation(table), choice=choice,
        )  # fmt: skip
        return [Proposal(schema, rows.size, options_text(chosen), choice)]

    def whole(
        self, table: str, values: Any, dtype: TableDtype, slots: Mapping[str, Any], options: TableOptions | None
    ) -> TableSchema:
        """Return the schema of a table that is written whole.

        It is as it was, unless the table is new, its shape changed kind, or options are given. Of ranks that write
        together it is as they declared it.
        """
        if self._state.setup.held.placement is None and table not in self.declared:
            return self._chosen(table, values, dtype, slots, options)
        if table not in self.declared and (options is not None or table not in self.tables):
            raise BadInput(
                f"table {table!r} is new or gets other options, and ranks write it together: all of them must call "
                "declare_tables() first, which finds one scale for all rows",
                table=table,
            )
        return self.tables[table]

    def _chosen(
        self, table: str, values: Any, dtype: TableDtype, slots: Mapping[str, Any], options: TableOptions | None
    ) -> TableSchema:
        num_rows, dim = values.shape
        old = self.tables.get(table)
        kinds = {name: "row" if len(array.shape) == 1 else "element" for name, array in slots.items()}
        if old is not None and options is None:
            same = (old.dim, old.dtype, {n: s.kind for n, s in old.slots.items()}) == (dim, dtype, kinds)
            if same:
                return msgspec.structs.replace(old, num_rows=num_rows)
        chosen = self.options[table] = self._asked(table, options)
        sample = RowSample(values, dtype)
        choice = choose_table_scale(chosen, dtype, sample, held=self._held_scale(table))
        schema = table_schema(
            table, chosen, num_rows=num_rows, dim=dim, dtype=dtype, sample=sample, choice=choice,
            slots=slots, generation=self._next_generation(table),
        )  # fmt: skip
        self._chose(table, choice)
        return schema

    def resize(self, table: str, num_rows: int, written: Set[str]) -> None:
        """Change a dense table's number of rows."""
        if self._state.setup.held.placement is not None:
            raise Unsupported(
                "resize_table() is not there for writers that hold shards; use a writer of whole tables on one rank"
            )
        schema = self.schema(table)
        num_rows = checked_size(table, "rows", num_rows, dim=schema.dim)
        if schema.keys == "hashed":
            raise BadInput(f"table {table!r} has hashed keys and no number of rows", table=table)
        if self._draft.kind == "baseline":
            raise BadInput(f"a baseline takes the size from write_table(); resize {table!r} in a delta", table=table)
        if table in written or table in self.refined:
            raise BadInput(f"resize table {table!r} before writing its rows", table=table)
        self.tables[table] = msgspec.structs.replace(schema, num_rows=num_rows)
        self._state.mirrors.stage_resize(Shard(table), self.tables[table], self._state.setup.workers)

    def refine(self, table: str, halvings: int, written: Set[str]) -> None:
        """Halve a lattice's step so many times, and stage mirrors of its finer codes."""
        schema = self.schema(table)
        state = self._state
        if self._draft.kind == "baseline" or self._draft.is_one_shot or not state.is_restored:
            raise BadInput(
                f"the scale of table {table!r} can be refined only in the first delta after a restore", table=table
            )
        shards = state.setup.held.shards({table: schema})[table]
        if not isinstance(schema.encoding, Lattice) or any(state.mirrors.get(shard) is None for shard in shards):
            raise BadInput(f"table {table!r} is no lattice with a mirror; nothing to refine", table=table)
        if table in written or table in self.refined:
            raise BadInput(f"refine table {table!r} once, before writing its rows", table=table)
        halvings = checked_size(table, "halvings", halvings, least=1)
        finer = msgspec.structs.replace(schema, shift=schema.shift + halvings)
        assert state.snapshot is not None  # a restored writer has one
        begin = state.snapshot.plan(table).batches[0].segment
        coarsest = state.snapshot.manifests[begin].tables[table].shift
        if finer.shift - coarsest > MAX_SHIFT_IN_CHAIN:
            raise BadInput(
                f"table {table!r} cannot be refined by {halvings} halvings: its chain would hold codes of scales "
                f"{finer.shift - coarsest} halvings apart, at most {MAX_SHIFT_IN_CHAIN} fit 32 bits; compact the chain "
                "into its baseline first (compact), or choose a scale in a baseline",
                table=table, expected=MAX_SHIFT_IN_CHAIN, found=finer.shift - coarsest,
            )  # fmt: skip
        smallest = schema.encoding.scale * 0.5**finer.shift
        is_in_range = finer.shift <= MAX_SHIFT and smallest >= MIN_SCALE
        refined: list[Shard] = []
        for shard in shards if is_in_range else ():
            if not state.mirrors.stage_refine(shard, finer, halvings, state.setup.workers):
                break
            refined.append(shard)
        if not is_in_range or len(refined) < len(shards):
            for shard in refined:  # the table stays as it was, and the transaction may go on
                state.mirrors.drop_staged(shard)
            raise BadInput(
                f"table {table!r} cannot be refined by {halvings} halvings to a scale of {smallest:g}: codes or the "
                "scale would leave their range",
                table=table, found=halvings,
            )  # fmt: skip
        self.tables[table] = finer
        self.refined.add(table)

    def drop(self, table: str, written: Set[str]) -> None:
        """Drop a table."""
        if table in self.dropped or table not in self._state.head_tables:
            self.schema(table)
        if table in written:
            raise BadInput(f"table {table!r} was written in this transaction", table=table)
        self.tables.pop(table, None)
        self.created.discard(table)
        self.dropped.add(table)

    def _asked(self, table: str, options: TableOptions | None) -> TableOptions:
        return options or self._state.mirrors.options.get(table) or TableOptions()

    def _held_scale(self, table: str) -> float | None:
        """The lattice step that a table has at the head: rows that were restored from it, and not moved, lie on it."""
        schema = self.before.get(table)
        if schema is None or not isinstance(schema.encoding, Lattice):
            return None
        return schema.encoding.scale * 0.5**schema.shift

    def _chose(self, table: str, choice: ScaleChoice | None) -> None:
        if choice is None:
            self.choices.pop(table, None)
            return
        self.choices[table] = choice
        logger.info(
            "table %s: scale %.6g chosen on %d rows; mean squared error %.3g, known within %.1f %% at %.0f %%",
            table, choice.scale, choice.sample_rows, choice.mse, 100 * choice.relative_half_width, 100 * CONFIDENCE,
        )  # fmt: skip

    def _next_generation(self, table: str) -> int:
        """One above every generation in the chain: a one-shot delta may put two lives of a table side by side."""
        snapshot = self._state.snapshot
        known = [m.tables for m in snapshot.manifests] if snapshot else [self._state.head_tables]
        return 1 + max((tables[table].generation for tables in known if table in tables), default=0)


def _sent(proposal: Proposal) -> tuple[Any, int, str, Any]:
    """A proposal as the ranks send it to each other."""
    choice = None if proposal.choice is None else msgspec.to_builtins(proposal.choice)
    return msgspec.to_builtins(proposal.schema), proposal.elements, proposal.options, choice


_schema_of = converter(TableSchema)


def _received(sent: tuple[Any, int, str, Any]) -> Proposal:
    schema, elements, options, choice = sent
    known = None if choice is None else scale_choice(choice)
    return Proposal(_schema_of(schema), elements, options, known)
