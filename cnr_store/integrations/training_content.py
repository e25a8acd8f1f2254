"""Decides what the nested dicts of a saved training are: the model's tensors, states of optimizers, other values. Pure.

An optimizer's ``state_dict()`` numbers its parameters. Which number is which parameter is in no file of ``torch.save``;
it follows from the order of the model's parameters and from their shapes, or the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cnr_store.errors import BadInput
from cnr_store.types import JsonValue

MAX_DEPTH = 64
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own modules; other buffers look like parameters that no optimizer has."""

_MODELS = ("model", "state_dict", "model_state_dict")
_STEPS = ("step", "global_step")
_WRAPPER = "module."
"""What DistributedDataParallel puts before all names; a manager names the parameters of the model inside."""

_MAX_STATES = 10_000


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The names of a group's parameters, in the optimizer's order, and its hyperparameters."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The state of an optimizer, by the model's name of the parameter and the optimizer's name of the value.

    What ``get_state_dict`` of torch made of several optimizers is one here: it does not say which groups were whose.
    """

    groups: tuple[ParameterGroup, ...]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TrainingContent:
    """What a saved training has.

    Attributes
    ----------
    tensors
        Tensors of the model by its own names, all others by their dotted place in the file.
    optimizers
        In the order of the file; a restore divides their groups among the live ones.
    extras
        By name, the entries that the caller asked for.
    reader
        The entry that is the state of the data loader; None if the caller named none.
    scalars
        Plain values by their dotted place.
    step
        The training step that the file gives.
    ignored
        What a store cannot have, and second names of a tensor that is in the file under another one.
    """

    tensors: dict[str, torch.Tensor]
    optimizers: tuple[SavedOptimizer, ...]
    extras: dict[str, Any]
    reader: Any
    scalars: dict[str, JsonValue]
    step: int | None
    ignored: tuple[str, ...]


Place = tuple[Any, ...]
"""The keys that lead to a value."""


def split_content(
    content: Mapping[Any, Any],
    *,
    model: str | None = None,
    parameters: Sequence[str] | None = None,
    extras: Sequence[str] = (),
    reader: str | None = None,
) -> TrainingContent:
    """Return what the nested dicts of a file are; see `cnr_store.integrations.checkpoints.load_checkpoint`. No I/O.

    Raises
    ------
    BadInput
        An entry that was named is missing, two values have one name, several entries could be the model, or it is not
        clear which parameters an optimizer has.
    """
    for name in (*extras, *(() if reader is None else (reader,))):
        if name not in content:
            raise BadInput(f"the file has no entry {name!r}; it has {sorted(map(str, content))}", found=name)
    taken: list[Place] = [(name,) for name in extras] + ([] if reader is None else [(reader,)])
    saved = dict(_optimizers(content, (), 0, taken))
    leaves = dict(_leaves(content, (), 0, {*taken, *saved}))
    place = _model_place(leaves, model, needed=bool(saved))
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, JsonValue] = {}
    ignored: list[str] = []
    of_model = {at: at[-1] for at in leaves if place is not None and at[:-1] == place}
    wrapped = len(_WRAPPER) * (bool(of_model) and all(str(name).startswith(_WRAPPER) for name in of_model.values()))
    seen: set[str] = set()
    held: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for at, value in leaves.items():
        name = str(of_model[at])[wrapped:] if at in of_model else ".".join(map(str, at))
        if name in seen:
            raise BadInput(f"the file contains two values with the name {name!r}", found=name)
        seen.add(name)
        if isinstance(value, torch.Tensor):
            memory = (value.data_ptr(), value.shape, value.stride()) if value.layout is torch.strided else None
            if memory is not None and value.numel() and memory in held:
                ignored.append(name)  # tied weights: the manager has them once, by the first name
                continue
            held |= set() if memory is None else {memory}
            tensors[name] = value
        elif (
            value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        ):
            scalars[name] = value
        else:
            ignored.append(name)
    names = [str(name)[wrapped:] for name in of_model.values()]
    candidates = {name: tensors[name] for name in names if name in tensors}
    return TrainingContent(
        tensors, tuple(_named(list(saved.values()), candidates, parameters, wrapped)),
        {name: content[name] for name in extras}, None if reader is None else content[reader], scalars,
        _step(content), tuple(ignored),
    )  # fmt: skip


def _optimizers(
    value: Any, at: Place, depth: int, skipped: Sequence[Place]
) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the state dicts of optimizers that lie in nested dicts and lists."""
    if depth > MAX_DEPTH or at in skipped:
        return
    _check_has_groups(value, at)
    if _is_optimizer(value):
        yield at, value
    else:
        for key, item in _items(value):
            yield from _optimizers(item, (*at, key), depth + 1, skipped)


def _is_optimizer(value: Any) -> bool:
    """Return whether a value is the ``state_dict()`` of an optimizer. DCP leaves out a ``state`` that is empty."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return (
        isinstance(groups, list | tuple)
        and isinstance(value.get("state", {}), Mapping)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups)
    )


def _check_has_groups(value: Any, at: Place) -> None:
    """Return if a value is no optimizer's state whose groups are lost: its slots would become tables of their own.

    Raises
    ------
    BadInput
    """
    if not isinstance(value, Mapping):
        return
    if any(isinstance(key, str) and key.startswith("param_groups.") for key in value):
        problem = "is flattened, so which parameters make a group is lost; save it without flatten_optimizer_state_dict"
    elif list(value) == ["state"] and isinstance(value["state"], Mapping) and _are_states(value["state"].values()):
        problem = (
            "has states by name and no groups, as TorchRec's fused optimizers save it; load it with TorchRec, and save "
            "the training with a CheckpointManager"
        )
    else:
        return
    place = ".".join(map(str, at))
    raise BadInput(f"the optimizer at {place!r} {problem}", found=place)


def _are_states(values: Collection[Any]) -> bool:
    return bool(values) and all(
        isinstance(one, Mapping) and any(isinstance(value, torch.Tensor) for value in one.values()) for one in values
    )


def _leaves(value: Any, at: Place, depth: int, skipped: set[Place]) -> Iterator[tuple[Place, Any]]:
    if depth > MAX_DEPTH:
        raise BadInput(f"values are nested more than {MAX_DEPTH} deep at {'.'.join(map(str, at))[:80]!r}", found=depth)
    if at in skipped:
        return
    if isinstance(value, Mapping | list | tuple):
        for key, item in _items(value):
            yield from _leaves(item, (*at, key), depth + 1, skipped)
    else:
        yield at, value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _model_place(leaves: Mapping[Place, Any], model: str | None, *, needed: bool) -> Place | None:
    """Return where the model's tensors lie; None if that is not clear and nobody needs it.

    Raises
    ------
    BadInput
    """
    places = list(dict.fromkeys(at[:-1] for at, value in leaves.items() if isinstance(value, torch.Tensor)))
    by_name = {".".join(map(str, place)): place for place in places}
    if model is not None:
        if model not in by_name:
            raise BadInput(f"the file has no tensors at {model!r}; it has some at {sorted(by_name)}", found=model)
        return by_name[model]
    usual = [place for place in places if place and place[-1] in _MODELS]
    found = places if len(places) == 1 else usual
    if len(found) == 1:
        return found[0]
    if needed:
        raise BadInput(
            f"the file has tensors at {sorted(by_name)}; say which are the model's: model= (--model)",
            found=sorted(by_name),
        )
    return None


def _step(content: Mapping[Any, Any]) -> int | None:
    for name in _STEPS:
        value = content.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if type(value) is int and value >= 0:
            return value
    return None


def _named(
    saved: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, torch.Tensor],
    given: Sequence[str] | None,
    wrapped: int,
) -> Iterator[SavedOptimizer]:
    """Yield the optimizers with the names of their parameters."""
    numbered: list[list[Mapping[str, Any]]] = []
    for one in saved:
        for group in one["param_groups"]:
            if _names_in(group) is None:
                numbered.append([_state_of(one, number) for number in group["params"]])
    matched = iter(_match(numbered, tensors, given) if numbered else ())
    for one in saved:
        groups = []
        state: dict[str, dict[str, Any]] = {}
        for group in one["param_groups"]:
            found = _names_in(group)
            names = tuple(next(matched)) if found is None else tuple(name[wrapped:] for name in found)
            if unknown := sorted(set(names) - tensors.keys()):
                raise BadInput(f"an optimizer has parameters {unknown}, which the model does not have", found=unknown)
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append(ParameterGroup(names, options))
            for name, key in zip(names, group["params"], strict=True):
                values = _state_of(one, key)
                state[name] = {str(of): value for of, value in values.items() if value is not None}
        yield SavedOptimizer(tuple(groups), state)


def _names_in(group: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the names of a group's parameters; None if they have only numbers."""
    names = group.get("param_names", group["params"])
    return names if all(isinstance(name, str) for name in names) else None


def _state_of(saved: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    """Return what an optimizer has of a parameter; the keys of a file of DCP are text."""
    state = saved.get("state", {})
    found: Mapping[str, Any] = state.get(key, state.get(str(key), {}))
    return found


def _match(
    groups: Sequence[Sequence[Mapping[str, Any]]], tensors: Mapping[str, torch.Tensor], given: Sequence[str] | None
) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Each group has its parameters in the model's order, and a parameter that was stepped has state of its shape. There
    must be one way to do that.

    Raises
    ------
    BadInput
    """
    count = sum(map(len, groups))
    if given is not None:
        if len(given) != count:
            raise BadInput(
                f"parameters= has {len(given)} names; the optimizers have {count} parameters",
                expected=count,
                found=len(given),
            )
        names = iter(given)
        return [[next(names) for _ in group] for group in groups]
    candidates = {name: value for name, value in tensors.items() if name.rpartition(".")[2] not in _BUFFERS}
    ways, matched = _ways(groups, candidates, per_row=False)
    if not ways:
        ways, matched = _ways(groups, candidates, per_row=True)
    if ways != 1:
        problem = "in more than one way" if ways else "in no way"
        raise BadInput(
            f"the file numbers the {count} parameters of its optimizers, and they fit the {len(candidates)} tensors of "
            f"the model {problem}; name them in the optimizers' order with parameters= of load_checkpoint, or save "
            "from optimizers made of model.named_parameters()",
            expected=count, found=len(candidates),
        )  # fmt: skip
    return matched


def _ways(
    groups: Sequence[Sequence[Mapping[str, Any]]], candidates: Mapping[str, torch.Tensor], *, per_row: bool
) -> tuple[int, list[list[str]]]:
    """Return in how many ways the groups can take their parameters in order (2: more than one), and one of them."""
    count = sum(map(len, groups))
    # By how many parameters of each group have a name: the number of ways, and the names of the last one.
    states: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    for index, (name, tensor) in enumerate(candidates.items()):
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for at, (ways, chain) in states.items():
            for group in (None, *range(len(groups))):
                if group is not None and not _fits(groups[group], at[group], tensor, per_row=per_row):
                    continue
                after = at if group is None else (*at[:group], at[group] + 1, *at[group + 1 :])
                if count - sum(after) < len(candidates) - index:
                    known = following.get(after, (0, None))[0]
                    following[after] = (min(2, known + ways), chain if group is None else (group, name, chain))
        states = following
        if len(states) > _MAX_STATES:
            return 2, []
    ways, chain = states.get(tuple(map(len, groups)), (0, None))
    matched: list[list[str]] = [[] for _ in groups]
    while chain is not None:
        group, name, chain = chain
        matched[group].insert(0, name)
    return ways, matched


def _fits(group: Sequence[Mapping[str, Any]], at: int, parameter: torch.Tensor, *, per_row: bool) -> bool:
    """Return whether a group's parameter of that number can be this one, by the shapes of its state.

    ``per_row``: also if the state has one number for each row, as the state of a vector may have.
    """
    if at >= len(group):
        return False
    shapes = [value.shape for value in group[at].values() if isinstance(value, torch.Tensor) and value.ndim]
    allowed = [parameter.shape, (*parameter.shape[:1], 1)] + ([parameter.shape[:1]] if per_row else [])
    return not shapes or any(shape in allowed for shape in shapes)
