"""What a commit says, decided purely: chains, generations, and whether receipts apply to the state they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cnr_store.errors import BadInput, DoesNotApply
from cnr_store.records import ChainEntry, CommitRecord, Generation, Manifest, PartEntry, Receipt, TableSchema
from cnr_store.types import MAX_CHAIN, Lattice


def next_chain(head: CommitRecord, entry: ChainEntry, *, keep: int) -> tuple[ChainEntry, ...]:
    """Return the chain of a commit: ``entry`` alone if it is a baseline, else behind the first ``keep`` segments.

    Raises
    ------
    BadInput
        If the chain would exceed its cap.
    """
    chain = (entry,) if entry.kind == "baseline" else (*head.chain[:keep], entry)
    if len(chain) > MAX_CHAIN:
        raise BadInput(f"a chain holds at most {MAX_CHAIN} segments; commit a full", expected=MAX_CHAIN)
    return chain


def generations(tables: Mapping[str, TableSchema]) -> dict[str, Generation]:
    """Return what a record says of each table's scale."""
    return {
        name: Generation(
            generation=schema.generation,
            scale=schema.encoding.scale if isinstance(schema.encoding, Lattice) else None,
            shift=schema.shift,
        )
        for name, schema in tables.items()
    }


def check_receipts(receipts: Sequence[Receipt], *, world: int, l0: int, base: Manifest | None) -> None:
    """Refuse receipts that do not start from the state the commit builds on (design, section 4, rules 1 and 2).

    Every writer must be there, name the same ``l0``, and its parts must name the state digest that the base's parts
    of the same table, rows and columns ended with. A resized table is compared by its columns.

    Raises
    ------
    DoesNotApply
        A mirror that is not the head's: the writer must restore first, or commit a full.
    BadInput
        A receipt is missing.
    """
    ranks = sorted(receipt.rank for receipt in receipts)
    if ranks != list(range(world)):
        raise BadInput(f"receipts of ranks {ranks} are there, expected {world} ranks", expected=world, found=ranks)
    ends = {} if base is None else {_rectangle(part): part.state_digest for part in base.parts}
    for receipt in receipts:
        if receipt.l0 != l0:
            raise DoesNotApply(
                f"rank {receipt.rank} staged a delta from logical {receipt.l0}, the commit is on {l0}; restore first",
                expected=l0, found=receipt.l0,
            )  # fmt: skip
        for part in receipt.parts:
            wanted = ends.get(_rectangle(part))
            if part.base_digest is not None and wanted is not None and part.base_digest != wanted:
                raise DoesNotApply(
                    f"the mirror of table {part.table!r} (rank {receipt.rank}) starts from state digest "
                    f"{part.base_digest}, the head's is {wanted}; restore first, or commit a full",
                    table=part.table, expected=wanted, found=part.base_digest,
                )  # fmt: skip


def _rectangle(part: PartEntry) -> tuple[str, int, tuple[int, int]]:
    return part.table, part.rows[0], part.columns
