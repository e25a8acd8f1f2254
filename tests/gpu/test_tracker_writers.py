"""Rows that reach an optimizer in another way, or that code writes which no hook sees; the life of a tracker."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store.errors import BadInput, TableNotFound
from cnr_store_gpu import Movement, RowTracker
from tests.gpu.tracked import changed_rows, ids, learn, sgd, taken

# torch's own SGD and Adagrad make sparse tensors without saying whether they want them checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def test_momentum_keeps_rows_of_earlier_intervals() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model, momentum=0.9)
    tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(1))
    assert taken(tracker) == {"weight": [1]}
    before = model.weight.detach().clone()

    learn(model, optimizer, ids(5))

    assert changed_rows(before, model.weight) == [1, 5]
    assert taken(tracker) == {"weight": [1, 5]}
    assert taken(tracker) == {"weight": []}  # no step, so nothing moved


def test_momentum_of_an_optimizer_that_trained_before_is_found_again() -> None:
    model = nn.Embedding(20, 3)
    optimizer = torch.optim.Adam(model.parameters())
    learn(model, optimizer, ids(1))

    tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(5))
    assert taken(tracker) == {"weight": [1, 5]}

    tracker.reset()
    learn(model, optimizer, ids(6))
    assert taken(tracker) == {"weight": [1, 5, 6]}


def test_weight_decay_is_refused_unless_full_saves_are_accepted() -> None:
    model = nn.Embedding(20, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(BadInput, match="weight_decay"):
        RowTracker(model, optimizers=[optimizer])
    tracker = RowTracker(model, optimizers=[optimizer], allow_dense=True)
    learn(model, optimizer, ids(5))

    assert taken(tracker) == {"weight": list(range(20))}
    assert taken(tracker) == {"weight": []}


def test_weight_decay_that_comes_and_goes_within_an_interval_is_seen() -> None:
    model = nn.Embedding(20, 3)
    optimizer = torch.optim.Adam(model.parameters())
    tracker = RowTracker(model, optimizers=[optimizer])
    optimizer.param_groups[0]["weight_decay"] = 0.1

    with pytest.warns(RuntimeWarning, match="every row is saved from here on"):
        learn(model, optimizer, ids(5))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    learn(model, optimizer, ids(6))

    assert taken(tracker) == {"weight": list(range(20))}
    before = model.weight.detach().clone()
    learn(model, optimizer, ids(6))
    assert changed_rows(before, model.weight) == taken(tracker)["weight"] == list(range(20))


class Unknown(torch.optim.SGD):
    """Moves row 0 in every step, whatever the gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0][0] += 1


def test_unknown_optimizer_warns_and_saves_everything() -> None:
    model = nn.Embedding(20, 3)
    optimizer = Unknown(model.parameters(), lr=0.1)

    with pytest.warns(RuntimeWarning, match="Unknown"):
        tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(5))

    assert taken(tracker) == {"weight": list(range(20))}


def test_wrong_word_about_an_optimizer_is_found_by_the_sample() -> None:
    model = nn.Embedding(20, 3)
    optimizer = Unknown(model.parameters(), lr=0.1)
    assume = {"Unknown": Movement.TOUCHED}
    tracker = RowTracker(model, optimizers=[optimizer], assume=assume, verify_rows=20)
    learn(model, optimizer, ids(5))

    with pytest.raises(BadInput, match="row 0") as caught:
        tracker.take()

    assert caught.value.table == "weight"
    assert caught.value.found == [0]
    assert tracker.bitmap.of("weight").count("weight") == 20


def test_sample_is_quiet_when_all_is_marked() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model, momentum=0.9)
    tracker = RowTracker(model, optimizers=[optimizer], verify_rows=20)

    for row in (3, 5, 8):
        learn(model, optimizer, ids(row))
        assert row in taken(tracker)["weight"]


# ---- writers that no hook sees


def write_behind(model: nn.Embedding) -> None:
    with torch.no_grad():
        model.weight[3] += 1


def load(model: nn.Embedding) -> None:
    model.load_state_dict({"weight": torch.zeros(20, 3)})


@pytest.mark.parametrize("write", [write_behind, load])
@pytest.mark.parametrize("then_step", [False, True])
def test_write_behind_the_tracker_marks_the_whole_table(write: Any, then_step: bool) -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(1))

    write(model)

    def go_on() -> dict[str, list[int]]:
        if then_step:
            learn(model, optimizer, ids(1))
        return taken(tracker)

    with pytest.warns(RuntimeWarning, match="no hook saw"):
        rows = go_on()
    assert rows == {"weight": list(range(20))}
    assert taken(tracker) == {"weight": []}


def test_write_behind_the_tracker_raises_on_request_and_is_kept() -> None:
    model = nn.Embedding(20, 3)
    tracker = RowTracker(model, optimizers=[sgd(model)], on_bypass="raise")
    write_behind(model)

    with pytest.raises(BadInput, match="mark_all"):
        tracker.take()

    assert taken(tracker) == {"weight": list(range(20))}


@pytest.mark.parametrize("mark_first", [False, True])
def test_declared_write_marks_its_rows_only(mark_first: bool) -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")

    if mark_first:
        tracker.mark("weight", [3])
    write_behind(model)
    if not mark_first:
        tracker.mark("weight", [3])
    learn(model, optimizer, ids(1))

    assert taken(tracker) == {"weight": [1, 3]}
    load(model)
    tracker.mark_all("weight")
    assert taken(tracker) == {"weight": list(range(20))}


@pytest.mark.parametrize("until", ["take", "step"])
@pytest.mark.parametrize("mark_all", [False, True])
def test_declared_write_does_not_excuse_a_later_one(until: str, mark_all: bool) -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    model.weight.data[3] = 0  # leaves no trace in the version
    if mark_all:
        tracker.mark_all("weight")
    else:
        tracker.mark("weight", [3])
    if until == "take":
        tracker.take()
    else:
        learn(model, optimizer, ids(1))

    write_behind(model)

    with pytest.warns(RuntimeWarning, match="no hook saw"):
        rows = taken(tracker)
    assert rows == {"weight": list(range(20))}


def test_updates_of_an_optimizer_not_attached_need_a_declared_boundary() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, on_bypass="raise")
    learn(model, optimizer, ids(1))

    with pytest.raises(BadInput, match="declare_boundary"):
        tracker.take()
    tracker.declare_boundary()

    assert taken(tracker) == {"weight": [1]}


def test_replaced_parameter_stops_training() -> None:
    model = nn.Embedding(20, 3)
    RowTracker(model)
    model.weight = nn.Parameter(torch.zeros(20, 3))

    with pytest.raises(BadInput, match="another parameter"):
        model(ids(1))


class MovesWithoutGradient(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0][7] += 1


def test_step_that_writes_weights_without_gradient_is_found() -> None:
    model = nn.Embedding(20, 3)
    optimizer = MovesWithoutGradient(model.parameters(), lr=0.1)
    assume = {"MovesWithoutGradient": Movement.TOUCHED}
    tracker = RowTracker(model, optimizers=[optimizer], assume=assume)

    optimizer.step()

    with pytest.warns(RuntimeWarning, match="no hook saw"):
        rows = taken(tracker)
    assert rows == {"weight": list(range(20))}


def test_loaded_optimizer_state_counts_as_a_change_of_every_row() -> None:
    model, other = nn.Embedding(20, 3), nn.Embedding(20, 3)
    optimizer, trained = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    learn(other, trained, ids(4))
    tracker = RowTracker(model, optimizers=[optimizer])

    optimizer.load_state_dict(trained.state_dict())
    assert taken(tracker) == {"weight": list(range(20))}

    tracker.reset()
    learn(model, optimizer, ids(9))
    assert taken(tracker) == {"weight": [4, 9]}


# ---- life


def test_rows_of_a_lost_save_come_again() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(1, 4))
    lost = tracker.take()
    learn(model, optimizer, ids(4, 6))

    tracker.give_back(lost)

    assert taken(tracker) == {"weight": [1, 4, 6]}


def test_reset_after_a_restore_starts_from_the_restored_weights() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise", verify_rows=20)
    learn(model, optimizer, ids(1))
    model(ids(2))
    load(model)

    tracker.reset()

    assert taken(tracker) == {"weight": []}


def test_detached_tracker_leaves_the_model_alone() -> None:
    model = nn.Embedding(20, 3, max_norm=1.0)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    tracker.detach()
    tracker.detach()
    learn(model, optimizer, ids(1))

    assert not tracker.bitmap.any()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_refused_tracker_leaves_no_hooks() -> None:
    model = nn.Embedding(20, 3)

    with pytest.raises(BadInput):
        RowTracker(model, optimizers=[torch.optim.AdamW(model.parameters())])

    assert not model._forward_pre_hooks


def test_unknown_name_is_named() -> None:
    tracker = RowTracker(nn.Embedding(20, 3))

    with pytest.raises(TableNotFound, match="'user'"):
        tracker.mark("user", [1])


def test_slots_and_movement_come_from_the_attached_optimizer() -> None:
    model = nn.Embedding(20, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    tracker = RowTracker(model, optimizers=[optimizer])

    movement = tracker.movement("weight")

    assert movement is not None
    assert movement.rows is Movement.TOUCHED
    assert tracker.slots("weight")["sum"] is optimizer.state[model.weight]["sum"]
    assert tracker.weights["weight"] is model.weight
    assert RowTracker(nn.Embedding(2, 2)).slots("weight") == {}


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize(
    ("happens", "of", "about"),
    [
        (
            "an unknown optimizer",
            "12 tables, \\['0.weight', .* and 7 more: OwnStep: its step is not known",
            "'touched'",
        ),
        ("a write", "12 tables, \\['0.weight', .* and 7 more: written by something that no hook saw", "mark"),
        (
            "weight decay",
            "12 tables, \\['0.weight', .* and 7 more: SGD: weight_decay=0.1 moves .* now",
            "every row is saved",
        ),
    ],
)
def test_what_happens_to_many_tables_is_one_warning(happens: str, of: str, about: str) -> None:
    """A regression: a model of 300 tables got 300 warnings."""
    model = nn.ModuleList(nn.Embedding(20, 3) for _ in range(12))
    optimizer = (OwnStep if happens == "an unknown optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)

    def train() -> None:
        tracker = RowTracker(model, optimizers=[optimizer])
        if happens == "a write":
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        if happens == "weight decay":
            optimizer.param_groups[0]["weight_decay"] = 0.1
        optimizer.zero_grad()
        sum(one(ids(1)).sum() for one in model).backward()
        optimizer.step()
        taken(tracker)

    with pytest.warns(RuntimeWarning) as warned:
        train()
    (message,) = [str(one.message) for one in warned]
    assert re.match(of, message)
    assert about in message
