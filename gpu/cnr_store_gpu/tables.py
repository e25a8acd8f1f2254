"""Which parameters of a model are tables, under which names, and which modules look rows up in them.

Why this module exists: the same weights can be reached by several modules (tied weights) or by none that
we can watch. Deciding that once, in a plan, keeps the hooks thin. Nothing here attaches or changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from cnr_store.errors import BadInput, BadShape

Lookup = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """One table and how its changes can be seen.

    Attributes
    ----------
    table
        Owner-qualified name of the weights.
    weight
        The parameter ``(num_rows, dim)``.
    lookups
        Modules whose forward shows the row ids.
    aliases
        Other qualified names of the same parameter.
    scans_gradient
        True when some user of the weights shows no ids (a Linear tied to the embedding, a parameter used by
        the model's own code): rows must then be read from the gradient.
    """

    table: str
    weight: nn.Parameter
    lookups: tuple[Lookup, ...]
    aliases: tuple[str, ...]
    scans_gradient: bool


def shows_ids(module: nn.Module) -> bool:
    """Return whether the module's first input is its row ids; a subclass with its own forward may differ."""
    return type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)


def plan_tables(model: nn.Module, tables: Mapping[str, nn.Parameter | nn.Module] | None = None) -> list[TablePlan]:
    """Return the tables of a model.

    Parameters
    ----------
    model
        Looked through for every module that owns a table's parameter.
    tables
        Name to parameter, or to a module with a ``weight``. None means every ``nn.Embedding`` and
        ``nn.EmbeddingBag``, named ``<module>.weight``; tied ones once, under the name that comes first.

    Raises
    ------
    BadInput
        Two names for one parameter, a module without a ``weight``, or ``max_norm`` on shared weights.
    BadShape
        Weights that have not two dimensions.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((f"{name}.{own}" if name else own, module))
    chosen = _declared(tables) if tables is not None else _found(owners)
    return [_plan_one(table, weight, owners.get(id(weight), [])) for table, weight in chosen.items()]


def _found(owners: Mapping[int, list[tuple[str, nn.Module]]]) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    for uses in owners.values():
        for qualified, module in uses:
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and qualified.rpartition(".")[2] == "weight":
                found[uses[0][0]] = cast(nn.Parameter, module.weight)  # Embedding declares it as a Tensor
                break
    return found


def _declared(tables: Mapping[str, nn.Parameter | nn.Module]) -> dict[str, nn.Parameter]:
    names: dict[int, str] = {}
    declared: dict[str, nn.Parameter] = {}
    for table, owner in tables.items():
        weight = getattr(owner, "weight", None) if isinstance(owner, nn.Module) else owner
        if not isinstance(weight, nn.Parameter):
            raise BadInput(
                f"table {table!r}: expected a parameter or a module with a weight, found {type(owner).__name__}",
                table=table,
                found=type(owner).__name__,
            )
        if id(weight) in names:
            raise BadInput(
                f"tables {names[id(weight)]!r} and {table!r} are the same parameter; give tied weights one name",
                table=table,
                found=names[id(weight)],
            )
        names[id(weight)] = table
        declared[table] = weight
    return declared


def _plan_one(table: str, weight: nn.Parameter, uses: list[tuple[str, nn.Module]]) -> TablePlan:
    if weight.ndim != 2:
        raise BadShape(
            f"table {table!r}: expected (num_rows, dim), found {tuple(weight.shape)}",
            table=table,
            expected="(num_rows, dim)",
            found=tuple(weight.shape),
        )
    lookups = tuple(
        m for _, m in uses if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.weight is weight and shows_ids(m)
    )
    if len(uses) > 1 and any(module.max_norm is not None for module in lookups):
        raise BadInput(
            f"table {table!r}: max_norm rewrites rows in forward, and the weights are shared by "
            f"{[name for name, _ in uses]}; clip them after the step instead, or untie them",
            table=table,
        )
    aliases = tuple(name for name, _ in uses if name != table)
    return TablePlan(table, weight, lookups, aliases, scans_gradient=len(lookups) < len(uses) or not uses)


def rows_with_gradient(gradient: torch.Tensor, *, window_rows: int = 1 << 18) -> torch.Tensor:
    """Return the rows of a gradient that are not zero, int64.

    Sorted for a dense gradient, which is read once, ``window_rows`` rows at a time; for a sparse one as they
    come, with repeats.
    """
    if gradient.is_sparse:
        return gradient._indices()[0]
    windows = range(0, gradient.shape[0], window_rows)
    found = [(gradient[at : at + window_rows] != 0).any(dim=1).nonzero().squeeze(1) + at for at in windows]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
