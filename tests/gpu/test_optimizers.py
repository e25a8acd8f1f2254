"""What the real optimizers do to 50 rows, against what the classification says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn import functional

from cnr_store_gpu import Movement, row_movement, row_slots, rows_with_state, scalar_state

# torch's own SGD and Adagrad make sparse tensors without saying whether they want them checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NUM_ROWS = 50
BEFORE, NOW = list(range(10)), [20, 21]
ROWS = {
    Movement.TOUCHED: set(NOW),
    Movement.EVER_TOUCHED: set(BEFORE) | set(NOW),
    Movement.ALL: set(range(NUM_ROWS)),
}
T, E, A = Movement.TOUCHED, Movement.EVER_TOUCHED, Movement.ALL

Make = Callable[[list[torch.Tensor]], optim.Optimizer]


class RowWiseAdagrad(optim.Optimizer):
    """An optimizer that the library does not know: one accumulator per row."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                sums = state.setdefault("sum", torch.zeros(param.shape[0]))
                state["step"] = state.get("step", 0) + 1
                gradient = param.grad + group["weight_decay"] * param
                sums += gradient.pow(2).mean(dim=1)
                param -= group["lr"] * gradient / (sums.sqrt().unsqueeze(1) + 1e-8)


class OwnStep(optim.SGD):
    """A subclass that steps in another way."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class SameStep(optim.SGD):
    """A subclass that steps as its base does."""


def train(make: Make, *, sparse: bool = False) -> tuple[optim.Optimizer, torch.nn.Parameter, set[int], set[int]]:
    """Touch BEFORE in three steps, then NOW; return the rows of weights and slots that the last step changed."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(NUM_ROWS, 4))
    optimizer = make([weight])

    def one(ids: list[int]) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            rows = functional.embedding(torch.tensor(ids), weight, sparse=sparse)
            loss = (rows * torch.randn(len(ids), 4)).sum() + rows.pow(2).sum() / 2
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    one(BEFORE)
    one(BEFORE)
    one(BEFORE)
    weights = weight.detach().clone()
    slots = {name: slot.to_dense().clone() for name, slot in row_slots(optimizer, weight).items()}
    one(NOW)

    def changed(before: torch.Tensor, after: torch.Tensor) -> set[int]:
        return set((before != after).reshape(NUM_ROWS, -1).any(dim=1).nonzero().flatten().tolist())

    moved: set[int] = set()
    for name, slot in row_slots(optimizer, weight).items():
        moved |= changed(slots[name], slot.to_dense())
    return optimizer, weight, changed(weights, weight.detach()), moved


DENSE: dict[str, tuple[Make, Movement, Movement | None]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.1), T, None),
    "SGD subclass": (lambda p: SameStep(p, lr=0.1), T, None),
    "SGD momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), E, E),
    "SGD nesterov": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), E, E),
    "SGD weight decay": (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01), A, None),
    "SGD both": (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01, momentum=0.5), A, A),
    "Adagrad": (lambda p: optim.Adagrad(p, lr=0.1), T, T),
    "Adagrad initial": (lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1), T, T),
    "Adagrad weight decay": (lambda p: optim.Adagrad(p, lr=0.1, weight_decay=0.01), A, A),
    "RMSprop": (lambda p: optim.RMSprop(p), T, E),
    "RMSprop centered": (lambda p: optim.RMSprop(p, centered=True), T, E),
    "RMSprop momentum": (lambda p: optim.RMSprop(p, momentum=0.9), E, E),
    "RMSprop weight decay": (lambda p: optim.RMSprop(p, weight_decay=0.01), A, A),
    "Adadelta": (lambda p: optim.Adadelta(p), T, E),
    "Adadelta weight decay": (lambda p: optim.Adadelta(p, weight_decay=0.01), A, A),
    "Rprop": (lambda p: optim.Rprop(p), T, E),
    "Adafactor": (lambda p: optim.Adafactor(p), T, E),
    "Adafactor weight decay": (lambda p: optim.Adafactor(p, weight_decay=0.01), A, E),
    "Adam": (lambda p: optim.Adam(p), E, E),
    "Adam amsgrad": (lambda p: optim.Adam(p, amsgrad=True), E, E),
    "Adam weight decay": (lambda p: optim.Adam(p, weight_decay=0.01), A, A),
    "AdamW": (lambda p: optim.AdamW(p), A, E),
    "AdamW without decay": (lambda p: optim.AdamW(p, weight_decay=0), E, E),
    "Adamax": (lambda p: optim.Adamax(p), E, E),
    "NAdam": (lambda p: optim.NAdam(p), E, E),
    "RAdam": (lambda p: optim.RAdam(p), E, E),
    "Muon": (lambda p: optim.Muon(p), A, E),
    "Muon without decay": (lambda p: optim.Muon(p, weight_decay=0), E, E),
    "ASGD": (lambda p: optim.ASGD(p), A, A),
}
SPARSE: dict[str, tuple[Make, Movement, Movement | None]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.1), T, None),
    "SGD momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), E, E),
    "Adagrad": (lambda p: optim.Adagrad(p, lr=0.1), T, T),
    "SparseAdam": (lambda p: optim.SparseAdam(p), T, T),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_step_changes_exactly_the_rows_of_its_class(name: str) -> None:
    make, weights, slots = DENSE[name]

    optimizer, _, changed, moved = train(make)

    said = row_movement(optimizer, optimizer.param_groups[0])
    assert said.is_known
    assert said.weights is weights
    assert changed == ROWS[weights]
    if slots is None:
        assert moved == set()
    else:
        assert moved == ROWS[slots]
        assert said.slots >= slots
    assert said.rows is max(said.weights, said.slots)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_step_changes_exactly_the_rows_of_its_class(name: str) -> None:
    make, weights, slots = SPARSE[name]

    optimizer, _, changed, moved = train(make, sparse=True)

    said = row_movement(optimizer, optimizer.param_groups[0])
    assert said.weights is weights
    assert changed == ROWS[weights]
    if slots is not None:
        assert moved == ROWS[slots]


def test_lbfgs_is_taken_for_all_rows() -> None:
    optimizer, _, changed, _ = train(lambda p: optim.LBFGS(p, lr=0.1, max_iter=2))

    assert changed
    assert row_movement(optimizer, optimizer.param_groups[0]).rows is A


def test_every_optimizer_of_torch_is_known() -> None:
    names = [name for name in dir(optim) if isinstance(getattr(optim, name), type) and name != "Optimizer"]
    unknown = []
    for name in names:
        parameter = torch.nn.Parameter(torch.zeros(3, 2))
        optimizer = getattr(optim, name)([parameter])
        if not row_movement(optimizer, optimizer.param_groups[0]).is_known:
            unknown.append(name)

    assert unknown == []


@pytest.mark.parametrize("make", [RowWiseAdagrad, lambda p: OwnStep(p, lr=0.1)])
def test_unknown_step_is_taken_for_all_rows(make: Make) -> None:
    optimizer, _, _, _ = train(make)

    said = row_movement(optimizer, optimizer.param_groups[0])

    assert (said.rows, said.is_known) == (A, False)
    assert type(optimizer).__name__ in said.explanation


def test_caller_says_what_an_unknown_optimizer_does() -> None:
    optimizer, _, changed, moved = train(RowWiseAdagrad)

    said = row_movement(optimizer, optimizer.param_groups[0], assume={"RowWiseAdagrad": T})

    assert (said.rows, said.is_known) == (T, True)
    assert changed == moved == ROWS[T]


def test_weight_decay_overrules_what_the_caller_says() -> None:
    optimizer, _, changed, _ = train(lambda p: RowWiseAdagrad(p, weight_decay=0.1))

    said = row_movement(optimizer, optimizer.param_groups[0], assume={"RowWiseAdagrad": T})

    assert said.rows is A
    assert changed == ROWS[A]


def test_each_group_is_judged_by_its_own_hyperparameters() -> None:
    one, two = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = optim.AdamW([{"params": [one], "weight_decay": 0.0}, {"params": [two]}])

    said = [row_movement(optimizer, group).rows for group in optimizer.param_groups]

    assert said == [E, A]


def test_hyperparameters_given_as_tensors_are_read() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = optim.Adam([parameter], lr=torch.tensor(0.1), weight_decay=0.5)

    assert row_movement(optimizer, optimizer.param_groups[0]).rows is A


SLOTS: dict[str, tuple[Make, set[str], set[str]]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.1), set(), set()),
    "SGD momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}, set()),
    "Adagrad": (lambda p: optim.Adagrad(p), {"sum"}, {"step"}),
    "Adam": (lambda p: optim.Adam(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
    "Adafactor": (lambda p: optim.Adafactor(p), {"row_var"}, {"col_var", "step"}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"sum"}, {"step"}),
    "ASGD": (lambda p: optim.ASGD(p), {"ax"}, {"step", "eta", "mu"}),
}


@pytest.mark.parametrize("name", SLOTS)
def test_state_is_split_into_row_slots_and_the_rest(name: str) -> None:
    make, slots, rest = SLOTS[name]

    optimizer, weight, _, _ = train(make)

    assert set(row_slots(optimizer, weight)) == slots
    assert set(scalar_state(optimizer, weight)) == rest
    assert all(slot is optimizer.state[weight][key] for key, slot in row_slots(optimizer, weight).items())


def test_asking_for_slots_before_the_first_step_makes_none() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = optim.Adam([parameter])

    assert row_slots(optimizer, parameter) == {}
    assert scalar_state(optimizer, parameter) == {}
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("window_rows", [1, 7, 50, 1000])
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_ever_touched_are_found_again_from_the_slots(window_rows: int, sparse: bool) -> None:
    optimizer, weight, _, _ = train(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), sparse=sparse)

    rows = rows_with_state(optimizer, weight, window_rows=window_rows)

    np.testing.assert_array_equal(rows.cpu().numpy(), sorted(ROWS[E]))
