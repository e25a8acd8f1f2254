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
class ModelTable:
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
    """

    table: str
    weight: nn.Parameter
    lookups: tuple[Lookup, ...]
    aliases: tuple[str, ...]


def shows_ids(module: nn.Module) -> bool:
    """Return whether the module's first input is its row ids; a subclass with its own forward may differ."""
    return type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)


def plan_tables(model: nn.Module, tables: Mapping[str, nn.Parameter | nn.Module] | None = None) -> list[ModelTable]:
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


def _plan_one(table: str, weight: nn.Parameter, uses: list[tuple[str, nn.Module]]) -> ModelTable:
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
    return ModelTable(table, weight, lookups, aliases)


# Widest first: the scan costs per element it looks at, and eight bytes at a time are one element.
_BITS_BY_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gradient_mask(gradient: torch.Tensor) -> torch.Tensor:
    """Return which rows of a dense gradient ``(num_rows, dim)`` are not zero: bool ``(num_rows,)``, on its device.

    Reads it once and waits for no device. A row of -0.0 may count: its bits are not zero.
    """
    gradient = gradient.detach()
    if gradient.is_contiguous() and gradient.numel():
        row_bytes, start_bytes = (n * gradient.itemsize for n in (gradient.shape[1], gradient.storage_offset()))
        size = next(size for size in _BITS_BY_SIZE if row_bytes % size == 0 and start_bytes % size == 0)
        # Flat first: a single row may have any stride, and a wider view refuses odd ones.
        gradient = gradient.view(-1).view(_BITS_BY_SIZE[size]).view(gradient.shape[0], -1)
    return gradient.any(dim=1)


def rows_with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows of a gradient ``(num_rows, dim)`` that are not zero, int64, on its device.

    Sorted for a dense gradient, which is read once; for a sparse one as they come, with repeats. Waits for the device
    of a dense gradient: ``gradient_mask`` does not.
    """
    if gradient.is_sparse:
        indices = gradient._indices()
        return indices.view(-1) if len(indices) == 1 else indices[0]
    return gradient_mask(gradient).nonzero().squeeze(1)
