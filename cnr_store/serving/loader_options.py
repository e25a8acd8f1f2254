"""Options of a loader: how it serves tables, which checks a version must pass, how often it polls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cnr_store.errors import BadInput
from cnr_store.format.layout import check_name
from cnr_store.runtime.arguments import check_not_one, checked_number, some_of
from cnr_store.serving.candidate import Check
from cnr_store.serving.rows.served_table import KeptAs, Served
from cnr_store.serving.rows.shards import Shard, check_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options of a `Loader`. Options by table may name only tables that the loader serves.

    Attributes
    ----------
    dense
        Names of the dense tensors to serve, if the version has them; None serves all.
    shard
        The rows to serve: a `RowRange`, a `HashShard`, or one of them (None for all rows) by table.
    served
        The dtype that lookups return: ``float32``, ``float16``, ``bfloat16`` (its bits, uint16) or ``int8`` (fused
        8-bit rows); None is each table's own dtype. One for all tables, or by table.
    kept_as
        ``values`` or ``codes``; ``auto`` keeps values if differences can be applied to them. Codes of a float32
        lattice table take half the memory and are decoded as they are looked up. One for all tables, or by table.
    validate
        Called with a `Candidate` before a version is published; if it returns False or raises, the version is never
        served.
    warm_up
        Called with the `Candidate` of the first version, or with ``warm_up_each`` of every one, after ``validate``.
    cursor
        Name of a registered cursor at the served version, which protects what this loader needs from expiry. It expires
        a day after its last renewal.
    poll_interval_s
        Seconds between the polls of the thread of `Loader.start`.

    Raises
    ------
    BadInput
    """

    dense: Sequence[str] | None = None
    shard: Shard | Mapping[str, Shard | None] | None = None
    served: Served | Mapping[str, Served | None] | None = None
    kept_as: Literal["auto"] | KeptAs | Mapping[str, Literal["auto"] | KeptAs] = "auto"
    validate: Check | None = None
    warm_up: Check | None = None
    warm_up_each: bool = False
    cursor: str | None = None
    poll_interval_s: float = 0.5

    def __post_init__(self) -> None:
        check_not_one("dense", self.dense)
        for one in self.shard.values() if isinstance(self.shard, Mapping) else (self.shard,):
            check_shard(one)
        checked_number("poll_interval_s", self.poll_interval_s, above=0)
        if self.cursor is not None:
            check_name(self.cursor)


def check_by_table(options: LoaderOptions, tables: Collection[str]) -> None:
    """Refuse options by table for a table that is not one of ``tables``. Pure.

    Raises
    ------
    BadInput
    """
    for argument, by_table in (("shard", options.shard), ("served", options.served), ("kept_as", options.kept_as)):
        strange = sorted(by_table.keys() - set(tables)) if isinstance(by_table, Mapping) else []
        if strange:
            raise BadInput(
                f"{argument} names {strange[0]!r}, not one of the tables to serve: {some_of(set(tables), strange[0])}",
                found=strange[0],
            )
