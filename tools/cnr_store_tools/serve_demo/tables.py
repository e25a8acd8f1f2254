"""The tables that all processes of the demonstration agree on, made from a number of rows alone; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DIM = 16
SHARES = {"user": 0.6, "item": 0.3, "place": 0.1}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables by short name, and how many rows of each the traffic looks up; witnesses come behind these."""

    rows: Mapping[str, int]

    @property
    def parameters(self) -> dict[str, int]:
        """Name of the parameter, as in the store, to the rows that traffic looks up."""
        return {parameter_of(name): count for name, count in self.rows.items()}


def parameter_of(name: str) -> str:
    """Return the name under which a store knows a table."""
    return f"tables.{name}.weight"


def make_tables(rows: int) -> Tables:
    """Return the tables of ``rows`` rows together, without the witnesses.

    >>> make_tables(1000).parameters
    {'tables.user.weight': 600, 'tables.item.weight': 300, 'tables.place.weight': 100}
    """
    return Tables({name: max(1, round(rows * share)) for name, share in SHARES.items()})
