"""One schema per table from what several ranks propose, each from its own rows of it. Pure.

A delta of one rank must mean the same as a delta of another, so all of them encode a table alike; only the choice of
a scale depends on the rows that a rank sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cnr_store.encodings.sampling import SAMPLE_ELEMENTS, RowSample
from cnr_store.encodings.scale import ScaleChoice, pooled
from cnr_store.errors import BadInput
from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.types import Affine, Lattice, TableDtype
from cnr_store.write.schema_choice import choose_table_scales, table_schema
from cnr_store.write.table_options import TableOptions


@dataclass(frozen=True, slots=True)
class Proposal:
    """The schema that the rows of one shard ask for, how many elements the shard has, and the options it came from.

    ``choice``: how the scale of a lattice was measured.
    """

    schema: TableSchema
    elements: int
    options: str = ""
    choice: ScaleChoice | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NewShard:
    """One shard of a table that is to get a schema.

    Attributes
    ----------
    sample
        Of its weights (rows, columns).
    slots
        As for `Transaction.write_table`; a sample of them is read.
    shape
        (num_rows, dim) of the whole table.
    held
        The lattice scale that the table has now, if it has one.
    """

    table: str
    sample: RowSample
    slots: Mapping[str, Any]
    options: TableOptions
    shape: tuple[int, int]
    generation: int
    held: float | None = None


def alike(shards: Sequence[NewShard]) -> list[list[int]]:
    """Return which shards `propose` takes together, by position: alike, and of about one full sample. Pure."""
    runs: list[list[int]] = []
    last: dict[tuple[str, TableDtype, int], tuple[list[int], int]] = {}
    for number, one in enumerate(shards):
        key = options_text(one.options), one.sample.dtype, one.sample.dim
        run, elements = last.get(key, ([], SAMPLE_ELEMENTS))
        if elements >= SAMPLE_ELEMENTS:
            run, elements = [], 0
            runs.append(run)
        run.append(number)
        last[key] = run, elements + one.sample.count * one.sample.dim
    return runs


def propose(shards: Sequence[NewShard]) -> list[Proposal]:
    """Return the schemas that fit the rows of shards with equal options and dtypes and as many columns each. Blocks.

    Raises
    ------
    BadInput
    """
    options, dtype = shards[0].options, shards[0].sample.dtype
    try:
        choices = choose_table_scales(
            options, dtype, [one.sample for one in shards], held=[one.held for one in shards]
        )  # fmt: skip
    except BadInput as error:
        if len(shards) > 1:  # whose rows they are
            return [proposal for one in shards for proposal in propose([one])]
        table = shards[0].table
        raise BadInput(f"table {table!r}: {error}", table=table, expected=error.expected, found=error.found) from None
    return [
        Proposal(
            table_schema(
                one.table, options, num_rows=one.shape[0], dim=one.shape[1], dtype=dtype, sample=one.sample,
                choice=choice, slots=one.slots, generation=one.generation,
            ),
            one.sample.size * one.sample.dim, options_text(options), choice,
        )
        for one, choice in zip(shards, choices, strict=True)
    ]  # fmt: skip


def options_text(options: TableOptions) -> str:
    """Return options in a form that ranks compare. Pure."""
    return msgspec.json.encode(options, order="sorted").decode()


def agreed_choice(proposals: Sequence[Proposal]) -> ScaleChoice | None:
    """Return what is known of a lattice's scale from all shards together (`cnr_store.encodings.scale.pooled`)."""
    choices = [(one.choice, one.elements) for one in proposals if one.choice is not None]
    return pooled([choice for choice, _ in choices], [elements for _, elements in choices]) if choices else None


def agree(table: str, proposals: Sequence[Proposal]) -> TableSchema:
    """Return the one schema of a table; the same for every rank, whatever its own proposal was.

    A lattice's scale is that of all shards together (`cnr_store.encodings.scale.pooled`).

    Raises
    ------
    BadInput
        The ranks disagree in more than the scale: dtype, slots, options or mirrors.
    """
    if len(proposals) == 1:
        return proposals[0].schema
    asked = sorted({proposal.options for proposal in proposals})
    if len(asked) > 1:
        raise BadInput(
            f"the ranks ask for different ways to store table {table!r}: {asked}; give all ranks the same options",
            table=table, found=asked,
        )  # fmt: skip
    merged: dict[str, Any] = {
        "encoding": _agreed_encoding(proposals),
        "generation": max(proposal.schema.generation for proposal in proposals),
    }
    steps = _agreed_steps(proposals)
    merged_schemas = [
        msgspec.structs.replace(one.schema, **merged, slots=_with_steps(one.schema.slots, steps)) for one in proposals
    ]
    candidates = {msgspec.json.encode(schema, order="sorted") for schema in merged_schemas}
    if len(candidates) > 1:
        raise BadInput(
            f"the ranks do not agree on table {table!r}: {sorted(c.decode() for c in candidates)}; give every rank the "
            "same options, dtype and optimizer",
            table=table,
        )
    return merged_schemas[0]


def _agreed_steps(proposals: Sequence[Proposal]) -> dict[str, Lattice]:
    """The step of each slot that is a lattice, over all shards whose slot is not all zero."""
    known: dict[str, list[tuple[ScaleChoice, int]]] = {}
    for one in proposals:
        for name, slot in one.schema.slots.items():
            if isinstance(slot.encoding, Lattice):
                known.setdefault(name, []).append((ScaleChoice(slot.encoding.scale, 0, 0.0, 0.0), one.elements))
    return {
        name: Lattice(scale=pooled([choice for choice, _ in given], [count for _, count in given]).scale)
        for name, given in known.items()
    }


def _with_steps(slots: Mapping[str, SlotSchema], steps: Mapping[str, Lattice]) -> dict[str, SlotSchema]:
    return {
        name: msgspec.structs.replace(slot, encoding=steps[name]) if name in steps else slot
        for name, slot in slots.items()
    }


def _agreed_encoding(proposals: Sequence[Proposal]) -> Any:
    first = proposals[0].schema.encoding
    same_kind = [one for one in proposals if type(one.schema.encoding) is type(first)]
    if len(same_kind) < len(proposals) or len({one.schema.encoding for one in proposals}) == 1:
        return first
    if isinstance(first, Lattice):
        choices = [one.choice or ScaleChoice(one.schema.encoding.scale, 0, 0.0, 0.0) for one in proposals]  # type: ignore[union-attr]
        return Lattice(scale=pooled(choices, [one.elements for one in proposals]).scale)
    if isinstance(first, Affine):  # of the same options: some rows need wide parameters
        return msgspec.structs.replace(first, param_dtype="float32")
    return first
