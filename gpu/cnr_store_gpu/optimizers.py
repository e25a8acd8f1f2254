"""Which rows of a table an optimizer step changes, decided from its class and hyperparameters.

Why this module exists: most optimizers move only the rows that had a gradient, but momentum keeps moving
rows that were touched long ago, and weight decay moves every row. A tracker that marks looked-up rows
would silently lose the others. What stands here was compared with the real optimizers row by row
(tests/gpu/test_optimizers.py).

Everything here is pure: it reads the optimizer and changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from cnr_store.errors import BadInput


class Movement(IntEnum):
    """How far a step reaches beyond the rows that had a gradient; a larger one includes the smaller."""

    TOUCHED = 0
    """Only the rows that had a gradient in this step."""
    EVER_TOUCHED = 1
    """Also rows that had a gradient in any earlier step: their momentum or averages are not zero yet."""
    ALL = 2
    """Every row of the table."""


@dataclass(frozen=True, slots=True)
class RowMovement:
    """What one step of an optimizer changes in one table.

    Attributes
    ----------
    weights
        Rows of the weights.
    slots
        Rows of the optimizer's slots (at least the weights' for every known optimizer with slots).
    explanation
        One sentence: which class and hyperparameters lead to it.
    is_known
        False when the optimizer's ``step`` is not one that was checked.
    """

    weights: Movement
    slots: Movement
    explanation: str
    is_known: bool = True

    @property
    def rows(self) -> Movement:
        """Rows to save when weights and slots share one row list."""
        return max(self.weights, self.slots)


MOVING_HYPERPARAMETERS = ("weight_decay", "momentum")
"""All of a parameter group that the rules below decide by: while these stay, so does the movement."""

Group = Mapping[str, Any]
_Rule = Callable[[Group], tuple[Movement, Movement, str]]


def _number(group: Group, name: str) -> float:
    value = group.get(name)
    return 0.0 if value is None else float(value)


def _decays(group: Group) -> bool:
    return _number(group, "weight_decay") != 0


def _everything(group: Group) -> tuple[Movement, Movement, str]:
    decay = _number(group, "weight_decay")
    return Movement.ALL, Movement.ALL, f"weight_decay={decay:g} moves every row in every step"


def _sgd(group: Group) -> tuple[Movement, Movement, str]:
    if _decays(group):
        return _everything(group)
    if _number(group, "momentum"):
        why = f"momentum={_number(group, 'momentum'):g} keeps moving rows of earlier steps"
        return Movement.EVER_TOUCHED, Movement.EVER_TOUCHED, why
    return (
        Movement.TOUCHED,
        Movement.TOUCHED,
        "without momentum and weight decay a row without gradient stays",
    )


def _adagrad(group: Group) -> tuple[Movement, Movement, str]:
    if _decays(group):
        return _everything(group)
    return Movement.TOUCHED, Movement.TOUCHED, "a row without gradient keeps its weights and its accumulator"


def _averages_only(group: Group) -> tuple[Movement, Movement, str]:
    if _decays(group):
        return _everything(group)
    if _number(group, "momentum"):
        why = f"momentum={_number(group, 'momentum'):g} keeps moving rows of earlier steps"
        return Movement.EVER_TOUCHED, Movement.EVER_TOUCHED, why
    why = "weights move with their gradient only, but the averages of rows of earlier steps go on decaying"
    return Movement.TOUCHED, Movement.EVER_TOUCHED, why


def _adam(group: Group) -> tuple[Movement, Movement, str]:
    if _decays(group):
        return _everything(group)
    why = f"betas={tuple(group.get('betas', ()))} keep moving rows of earlier steps"
    return Movement.EVER_TOUCHED, Movement.EVER_TOUCHED, why


def _sparse_adam(_group: Group) -> tuple[Movement, Movement, str]:
    return Movement.TOUCHED, Movement.TOUCHED, "moments are updated only in the rows of the sparse gradient"


def _asgd(_group: Group) -> tuple[Movement, Movement, str]:
    return Movement.ALL, Movement.ALL, "it shrinks every row in every step (lambd) and averages every row"


def _lbfgs(_group: Group) -> tuple[Movement, Movement, str]:
    return Movement.ALL, Movement.ALL, "its direction mixes all parameters and all earlier gradients"


_RULES: dict[Any, _Rule] = {
    inspect.unwrap(getattr(torch.optim, name).step): rule
    for name, rule in {
        "SGD": _sgd,
        "Adagrad": _adagrad,
        "RMSprop": _averages_only,
        "Adadelta": _averages_only,
        "Rprop": _averages_only,
        "Adafactor": _averages_only,
        "Adam": _adam,
        "AdamW": _adam,
        "Adamax": _adam,
        "NAdam": _adam,
        "RAdam": _adam,
        "Muon": _adam,
        "SparseAdam": _sparse_adam,
        "ASGD": _asgd,
        "LBFGS": _lbfgs,
    }.items()
    if hasattr(torch.optim, name)  # Adafactor and Muon came late
}
# By name, because this package must not import them.
_RULES_BY_NAME: dict[str, _Rule] = {"torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _adagrad}


def _rule_of(cls: type) -> _Rule | None:
    """Return the rule of the class whose ``step`` runs: a subclass with its own is another optimizer."""
    # unwrap: torch wraps `step` with its profiling hook when the first instance is made.
    step = inspect.unwrap(cls.step)  # type: ignore[attr-defined]
    rule = _RULES.get(step)
    return rule or _RULES_BY_NAME.get(f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}")


def row_movement(
    optimizer: torch.optim.Optimizer,
    param_group: Group,
    *,
    assume: Mapping[str, Movement] | None = None,
) -> RowMovement:
    """Return which rows of the tables in ``param_group`` a step of ``optimizer`` changes. No side effects.

    Parameters
    ----------
    optimizer
        Any torch optimizer.
    param_group
        With its present hyperparameters (schedulers change them: ask at each step).
    assume
        The caller's word for optimizers that are not known here, by class name. Weight decay still means ALL.

    Returns
    -------
    RowMovement
        For an unknown optimizer ALL, with ``is_known`` False: saving too much is safe, too little is not.
    """
    cls = type(optimizer)
    rule = _rule_of(cls)
    if rule is not None:
        weights, slots, why = rule(param_group)
        return RowMovement(weights, slots, f"{cls.__name__}: {why}")
    if assume is not None and cls.__name__ in assume:
        movement = assume[cls.__name__]
        if _decays(param_group):
            weights, slots, why = _everything(param_group)
            return RowMovement(weights, slots, f"{cls.__name__}: {why}")
        return RowMovement(movement, movement, f"{cls.__name__}: the caller said {movement.name}")
    why = "its step is not known here, so every row may move"
    return RowMovement(Movement.ALL, Movement.ALL, f"{cls.__name__}: {why}", is_known=False)


_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}
"""Classes of Accelerate and Lightning, by name, because this package must not import them."""


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's and Lightning's wrappers; any other optimizer as it is.

    A wrapper's ``step`` calls the inner one, whose hooks run; hooks of the wrapper itself do not.

    Raises
    ------
    BadInput
        It is no torch optimizer, or a wrapper of another kind: it has no place for hooks of its own.
    """
    while _WRAPPERS & {cls.__name__ for cls in type(optimizer).__mro__}:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"{name} is no torch.optim.Optimizer; pass the optimizer that changes the weights", found=name)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise BadInput(
            f"{name} wraps another optimizer and cannot be followed, because no hook of it would run; pass the "
            "optimizer that it wraps (often its attribute `.optimizer`)",
            found=name,
        )
    return optimizer


def _state_tensors(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Mapping[str, Any]:
    # .get: `state` is a defaultdict, and asking it for a parameter would add an empty entry.
    found: Mapping[str, Any] = optimizer.state.get(param, {})
    return found


def is_row_slot(value: Any, of_table: torch.Size) -> bool:
    """Return whether optimizer state of a table of that shape travels with the rows. Reads the shape only."""
    if not isinstance(value, torch.Tensor) or not (shape := value.shape):
        return False
    return shape == of_table or (shape[0] == of_table[0] and (len(shape) == 1 or shape[1:] == (1,)))


def row_slots(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state that travels with the rows.

    Live tensors ``(num_rows,)``, ``(num_rows, 1)`` or shaped like ``param``, by the optimizer's own names.
    SGD makes its momentum a sparse tensor when the first gradient is sparse.
    Empty before the first step of an optimizer that makes its state lazily. The tensors are the
    optimizer's own: writing them changes its state.
    """
    of_table = param.shape
    return {name: value for name, value in _state_tensors(optimizer, param).items() if is_row_slot(value, of_table)}


def scalar_state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """Return the rest of the parameter's state: ``step``, other numbers, and tensors of other shapes.

    None values are left out. Tensors are the optimizer's own, live.
    """
    of_table, state = param.shape, _state_tensors(optimizer, param)
    return {name: value for name, value in state.items() if value is not None and not is_row_slot(value, of_table)}


def rows_with_state(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, *, window_rows: int = 1 << 18
) -> torch.Tensor:
    """Return the rows any of whose slots is not zero: which rows were ever touched, rebuilt after a restore.

    int64, sorted, on the host. Reads every slot once, ``window_rows`` rows at a time.
    """
    found: list[torch.Tensor] = []
    all_slots = row_slots(optimizer, param).values()
    slots = [slot for slot in all_slots if not slot.is_sparse]
    sparse_rows = [slot._indices()[0].to(param.device) for slot in all_slots if slot.is_sparse]
    for start in range(0, param.shape[0], window_rows):
        stop = min(start + window_rows, param.shape[0])
        used = torch.zeros(stop - start, dtype=torch.bool, device=param.device)
        for slot in slots:
            used |= (slot[start:stop] != 0).reshape(stop - start, -1).any(dim=1).to(param.device)
        for rows in sparse_rows:
            used[rows[(rows >= start) & (rows < stop)] - start] = True
        found.append(used.nonzero().squeeze(1).cpu() + start)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")
