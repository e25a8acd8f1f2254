"""Realistic models for the benchmarks: the tables of models in production, and the optimizers that people train with.

A suite takes some by ``--model TABLES/OPTIMIZER`` (`add_model_option`). Which suites do, and why the others do not, is
said in `suites`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

OptimizerName = Literal["rowwise_adagrad", "adagrad", "adam"]
"""``adam`` is `torch.optim.SparseAdam`: of a dense one every row moves in every step."""

_MLPERF_ROWS = (
    40_000_000, 40_000_000, 40_000_000, 40_000_000, 40_000_000, 3_067_956, 590_152, 405_282, 39_060, 20_265, 17_295,
    12_973, 11_938, 7_424, 7_122, 2_209, 1_543, 976, 155, 108, 63, 36, 14, 10, 4, 3,
)  # fmt: skip
"""MLPerf training, DLRM-DCNv2 on Criteo 1TB click logs: rows by table, each of 128 columns."""

_ZIPF_ENDS = (100, 1_000_000)
_ZIPF_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The embedding tables of one model, and its optimizer.

    Attributes
    ----------
    name
        For tables and titles.
    tables
        (rows, dim) of each.
    optimizer
        Of the tables; the dense part has `torch.optim.Adagrad`.
    """

    name: str
    tables: tuple[tuple[int, int], ...]
    optimizer: OptimizerName = "rowwise_adagrad"

    @property
    def elements(self) -> int:
        """Of all tables together."""
        return sum(rows * dim for rows, dim in self.tables)

    def in_one_table(self) -> BenchModel:
        """Return a model with as many elements in one table of the mean width: what many tables are compared with."""
        rows = sum(rows for rows, _ in self.tables)
        dim = max(1, round(self.elements / rows))
        return BenchModel(f"{self.name}, in one table", ((self.elements // dim, dim),), self.optimizer)


def equal_tables(rows: int, dim: int, *, count: int = 4) -> BenchModel:
    """Return ``count`` tables of ``rows`` rows together, with row-wise Adagrad."""
    return BenchModel(f"{count} tables", ((rows // count, dim),) * count)


def mlperf_tables(divided_by: int = 100) -> tuple[tuple[int, int], ...]:
    """Return the 26 tables of MLPerf's DLRM-DCNv2 with so many times fewer rows, at least 3 each."""
    return tuple((max(3, rows // divided_by), 128) for rows in _MLPERF_ROWS)


def zipf_tables(count: int, divided_by: int = 1) -> tuple[tuple[int, int], ...]:
    """Return tables whose sizes fall by rank as ``rank^-s`` from 1,000,000 rows to 100, in columns of 16 to 128.

    The widths are drawn with a fixed seed, as is the order of the tables.
    """
    smallest, largest = _ZIPF_ENDS
    exponent = np.log(largest / smallest) / np.log(count)
    rows = np.rint(largest * np.arange(1, count + 1) ** -exponent).astype(int)
    random = np.random.default_rng(0)
    dims = random.choice(_ZIPF_DIMS, count)
    return tuple((max(3, int(rows[at]) // divided_by), int(dims[at])) for at in random.permutation(count))


TABLES = {
    "mlperf": lambda divided_by: mlperf_tables(100 * divided_by),
    "zipf300": lambda divided_by: zipf_tables(300, divided_by),
    "zipf1000": lambda divided_by: zipf_tables(1000, divided_by),
}
QUICK_DIVIDED_BY = 1000
MODELS = tuple(f"{tables}/{optimizer}" for tables in TABLES for optimizer in get_args(OptimizerName))


def named_model(name: str, divided_by: int = 1) -> BenchModel:
    """Return a preset, ``mlperf/adam`` say, with so many times fewer rows.

    Raises
    ------
    KeyError
    """
    if name not in MODELS:
        raise KeyError(f"no model {name!r}; there are {', '.join(MODELS)}")
    tables, _, optimizer = name.partition("/")
    return BenchModel(name, TABLES[tables](divided_by), optimizer)  # type: ignore[arg-type]


def add_model_option(
    parser: argparse.ArgumentParser, default: Sequence[str] = (), others: Sequence[str] = (), *, instead: bool = False
) -> None:
    """Add ``--model`` (several behind it) and ``--divided-by``.

    ``others``: models that only this suite has; ``instead``: with a model, nothing else is measured (`many_tables`).
    """
    choices = (*others, *MODELS)
    parser.add_argument(
        "--model", nargs="+", choices=choices, default=list(default), metavar="MODEL",
        help=f"{'measure these instead, each beside one table: ' if instead else ''}of {', '.join(choices)}",
    )  # fmt: skip
    parser.add_argument("--divided-by", type=int, default=1, help="how many times fewer rows than the models have")


def chosen_model(options: argparse.Namespace, name: str) -> BenchModel:
    """Return a preset with as many rows as the options say; a quick run divides them by `QUICK_DIVIDED_BY` at least."""
    return named_model(name, max(options.divided_by, QUICK_DIVIDED_BY) if options.quick else options.divided_by)


def chosen_models(options: argparse.Namespace) -> list[BenchModel]:
    """Return all presets that were asked for, as `chosen_model` does."""
    return [chosen_model(options, name) for name in options.model]
