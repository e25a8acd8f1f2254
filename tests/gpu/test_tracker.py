"""Tracked rows are the rows that training changed: never fewer, and no more where forward shows it exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cnr_store.errors import BadInput, BadRowIds, BadShape, TableNotFound
from cnr_store_gpu import Movement, RowMovement, RowTracker, WatchedShard, operators, plan_tables
from cnr_store_gpu.tables import rows_with_gradient

# torch's own SGD and Adagrad make sparse tensors without saying whether they want them checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def taken(tracker: RowTracker) -> dict[str, list[int]]:
    return {table: rows.row_ids.tolist() for table, rows in tracker.take().items()}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Any, **named: Any) -> None:
    optimizer.zero_grad()
    model(*inputs, **named).sum().backward()
    optimizer.step()


def changed_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return (before != after.detach()).any(dim=1).nonzero().flatten().tolist()


# ---- what forward shows


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_marks_the_rows_it_looks_up(sparse: bool) -> None:
    model = nn.Embedding(20, 3, sparse=sparse)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    before = model.weight.detach().clone()

    learn(model, optimizer, torch.tensor([[3, 7], [7, 19]]))

    assert taken(tracker) == {"weight": [3, 7, 19]}
    assert changed_rows(before, model.weight) == [3, 7, 19]
    assert taken(tracker) == {"weight": []}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_with_offsets_and_padding_marks_what_changes(sparse: bool, mode: str) -> None:
    model = nn.EmbeddingBag(20, 3, mode=mode, sparse=sparse, padding_idx=4)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    before = model.weight.detach().clone()

    learn(model, optimizer, input=ids(1, 4, 2, 1, 9), offsets=ids(0, 2, 2))

    assert taken(tracker) == {"weight": [1, 2, 9]} == {"weight": changed_rows(before, model.weight)}


def test_embedding_leaves_its_padding_row_out() -> None:
    model = nn.Embedding(20, 3, padding_idx=0)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    learn(model, optimizer, ids(0, 5))

    assert taken(tracker) == {"weight": [5]}


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_rewrites_rows_even_in_evaluation(make: type[nn.Embedding]) -> None:
    model = make(20, 3, max_norm=0.01, padding_idx=2)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    with torch.no_grad():
        model.weight[2] = 1.0
    tracker.reset()
    before = model.weight.detach().clone()

    with torch.no_grad():
        model.eval()(torch.tensor([[2, 6]]))

    changed = changed_rows(before, model.weight)
    assert 6 in changed
    assert set(changed) <= set(taken(tracker)["weight"]) == {2, 6}
    model.train()
    learn(model, optimizer, torch.tensor([[3, 8]]))
    assert set(taken(tracker)["weight"]) == {3, 8}


def test_evaluation_is_not_recorded() -> None:
    model = nn.Sequential(nn.Embedding(20, 3), nn.Dropout())
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    with torch.no_grad():
        model(ids(1, 2))
    with torch.inference_mode():
        model(ids(1, 2))
    model.eval()
    model(ids(3, 4))

    assert tracker.at_step_boundary
    assert taken(tracker) == {"0.weight": []}


def test_training_in_eval_mode_is_read_from_the_gradient() -> None:
    model = nn.Embedding(20, 3).eval()
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    learn(model, optimizer, ids(1, 2))

    assert taken(tracker) == {"weight": [1, 2]}


def test_frozen_table_is_not_recorded() -> None:
    model = nn.Sequential(nn.Embedding(20, 3).requires_grad_(False), nn.Linear(3, 1))
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    learn(model, optimizer, ids(1, 2))

    assert taken(tracker) == {"0.weight": []}


def test_compiled_model_marks_in_every_call() -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 3), nn.Linear(3, 1))
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    compiled = torch.compile(model, backend="eager")

    rows = []
    for first in (1, 5, 8):
        learn(compiled, optimizer, torch.tensor([[first, first + 1]]))
        rows.append(taken(tracker)["0.weight"])

    assert rows == [[1, 2], [5, 6], [8, 9]]


# ---- names, ties and users without ids


class Tied(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        self.query = nn.Embedding(20, 3)
        self.document = nn.Embedding(20, 3)
        self.document.weight = self.query.weight
        if head:
            self.head = nn.Linear(3, 20, bias=False)
            self.head.weight = self.query.weight

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        rows = self.query(query) * self.document(document)
        return self.head(rows) if hasattr(self, "head") else rows


def test_tied_weights_are_one_table() -> None:
    model = Tied(head=False)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    learn(model, optimizer, ids(1), ids(7))

    assert taken(tracker) == {"query.weight": [1, 7]}
    tracker.mark("document.weight", [9])
    assert taken(tracker) == {"query.weight": [9]}


def test_table_tied_to_a_linear_layer_is_read_from_the_gradient() -> None:
    model = Tied(head=True)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    before = model.query.weight.detach().clone()

    learn(model, optimizer, ids(1), ids(7))

    assert taken(tracker) == {"query.weight": changed_rows(before, model.query.weight)}
    assert len(changed_rows(before, model.query.weight)) == 20


class Functional(nn.Module):
    """Looks rows up without an embedding module."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(20, 3))
        self.sparse = sparse

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.embedding(rows, self.rows, sparse=self.sparse)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_functional_lookups_are_read_from_the_gradient(sparse: bool, set_to_none: bool) -> None:
    model = Functional(sparse)
    optimizer = sgd(model)
    tracker = RowTracker(model, {"items": model.rows}, optimizers=[optimizer])

    learn(model, optimizer, ids(1, 7, 7))
    optimizer.zero_grad(set_to_none=set_to_none)
    learn(model, optimizer, ids(3))

    assert taken(tracker) == {"items": [1, 3, 7]}


def test_embedding_with_a_forward_of_its_own_is_read_from_the_gradient() -> None:
    class Scaled(nn.Embedding):
        def forward(self, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return scale * super().forward(rows)

    model = Scaled(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    learn(model, optimizer, torch.tensor(0.5), ids(3, 4))

    assert taken(tracker) == {"weight": [3, 4]}


class ScoresAll(nn.Module):
    """Looks rows up by its module, and scores them against the whole table in code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.items(rows) @ self.items.weight.T, dim=1)[:, 0]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_table_that_is_looked_up_and_used_whole_is_read_from_the_gradient(make: Any) -> None:
    model = ScoresAll()
    optimizer = make(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer])
    for _ in range(2):
        before = model.items.weight.detach().clone()

        learn(model, optimizer, ids(1, 2))

        assert changed_rows(before, model.items.weight) == list(range(20))
        assert taken(tracker) == {"items.weight": list(range(20))}


def test_gradients_kept_over_a_save_move_rows_that_no_lookup_shows() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    learn(model, optimizer, ids(1))
    assert taken(tracker) == {"weight": [1]}
    before = model.weight.detach().clone()

    model(ids(2)).sum().backward()  # row 1 still has its gradient
    optimizer.step()

    assert taken(tracker) == {"weight": changed_rows(before, model.weight)} == {"weight": [1, 2]}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["plain", "offset", "transposed", "narrowed"]),
    seed=st.integers(0, 2**16),
)
def test_rows_with_gradient_are_the_rows_that_are_not_zero(
    rows: int, dim: int, dtype: torch.dtype, layout: str, seed: int
) -> None:
    torch.manual_seed(seed)
    values = torch.zeros(rows, dim, dtype=dtype)
    values[torch.rand(rows, dim) < 0.05] = torch.finfo(dtype).tiny
    values[torch.rand(rows, dim) < 0.01] = torch.nan
    gradient = {
        "plain": values.clone(),
        "offset": torch.cat([torch.ones(3, dtype=dtype), values.flatten()])[3:].view(rows, dim),
        "transposed": values.T.contiguous().T,
        "narrowed": torch.cat([values, torch.ones(rows, 1, dtype=dtype)], dim=1)[:, :dim],
    }[layout]

    found = rows_with_gradient(gradient)

    assert found.dtype == torch.int64
    assert found.tolist() == np.flatnonzero((values.double().cpu().numpy() != 0).any(axis=1)).tolist()


def test_what_the_host_counts_stays_there_whatever_the_default_device_is() -> None:
    # `torch.set_default_device("cuda")` put the counts of lookups there; "meta" shows it without a GPU.
    model = nn.ModuleList([nn.Embedding(20, 3, sparse=True), nn.Embedding(5, 3)])
    optimizer, rows = sgd(model), ids(3, 4)
    with torch.device("meta"):
        tracker = RowTracker(model, optimizers=[optimizer], shards=[WatchedShard("s", 9)])
        sum(table(rows).sum() for table in model).backward()
        tracker.lookup_slices(["s"], rows, [2])
        optimizer.step()
        tracker.updated("s")
        found = taken(tracker)

    assert found == {"0.weight": [3, 4], "1.weight": [3, 4], "s": [3, 4]}


def test_sparse_gradients_of_a_device_are_marked_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([nn.Embedding(size, 3, sparse=True) for size in (20, 5000, 1)])
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    tracker.bitmap.of("0.weight")._host = None  # the path of other devices, also on the CPU
    calls: list[int] = []

    def counted(words: torch.Tensor, rows: torch.Tensor, *places: torch.Tensor) -> None:
        calls.append(len(rows))
        mark_slices(words, rows, *places)

    mark_slices = operators.mark_slices_here
    monkeypatch.setattr(operators, "mark_slices_here", counted)

    for looked_up in ([ids(3, 3), ids(4999, 0, 32), ids(0)], [ids(7), ids(), ids(0, 0)], [ids(1), None, None]):
        optimizer.zero_grad()
        sum(
            table(rows.long()).sum() for table, rows in zip(model, looked_up, strict=True) if rows is not None
        ).backward()
        optimizer.step()
        expected = [[] if rows is None else sorted(set(rows.tolist())) for rows in looked_up]
        assert list(taken(tracker).values()) == expected

    assert calls == [6, 3]  # a table alone is marked without a copy of its rows


def test_tables_may_be_given_as_modules_under_other_names() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 2), "b": nn.Embedding(6, 2)})

    plans = plan_tables(model, {"first": model["a"]})

    assert [(plan.table, plan.aliases) for plan in plans] == [("first", ("a.weight",))]
    assert [plan.table for plan in plan_tables(model)] == ["a.weight", "b.weight"]


def test_tables_that_cannot_be_tracked_are_refused() -> None:
    model = Tied(head=False)
    shared = nn.ModuleList([nn.Embedding(5, 2, max_norm=1.0), nn.Embedding(5, 2)])
    shared[1].weight = shared[0].weight

    with pytest.raises(BadInput, match="same parameter"):
        plan_tables(model, {"a": model.query, "b": model.document.weight})
    with pytest.raises(BadInput, match="ReLU"):
        plan_tables(model, {"a": nn.ReLU()})
    with pytest.raises(BadShape, match=r"\(3,\)"):
        plan_tables(model, {"a": nn.Parameter(torch.zeros(3))})
    with pytest.raises(BadInput, match="max_norm"):
        plan_tables(shared)


# ---- step boundaries


def test_take_between_forward_and_step_is_refused_and_loses_nothing() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    loss = model(ids(1, 2)).sum()
    with pytest.raises(BadInput, match="between forward and optimizer step"):
        tracker.take()
    loss.backward()
    with pytest.raises(BadInput):
        tracker.take()
    optimizer.step()

    assert taken(tracker) == {"weight": [1, 2]}


def test_accumulated_batches_belong_to_one_step() -> None:
    model = nn.Embedding(20, 3)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])

    for row in (1, 5, 9):
        model(ids(row)).sum().backward()
        assert not tracker.at_step_boundary
    assert tracker.pending == 3
    optimizer.step()

    assert tracker.at_step_boundary
    assert taken(tracker) == {"weight": [1, 5, 9]}


def test_skipped_step_is_declared() -> None:
    model = nn.Embedding(20, 3)
    tracker = RowTracker(model, optimizers=[sgd(model)])
    model(ids(1)).sum().backward()

    tracker.declare_boundary()

    assert taken(tracker) == {"weight": [1]}


def test_step_of_another_optimizer_is_no_boundary() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    first, second = sgd(model["a"]), sgd(model["b"])
    tracker = RowTracker(model, optimizers=[first, second])

    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    first.step()
    assert tracker.pending == 1
    second.step()

    assert taken(tracker) == {"a.weight": [1], "b.weight": [2]}


def test_table_that_no_attached_optimizer_has_does_not_hold_up_the_boundary() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    optimizer = sgd(model["a"])
    tracker = RowTracker(model, optimizers=[optimizer])

    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    assert tracker.pending == 1
    optimizer.step()

    assert tracker.at_step_boundary
    assert taken(tracker)["a.weight"] == [1]


def test_optimizer_that_was_left_out_is_a_write_behind_the_tracker() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    attached, left_out = sgd(model["a"]), sgd(model["b"])
    tracker = RowTracker(model, optimizers=[attached])
    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    attached.step()
    tracker.take()  # the update of row 2 is still to come

    left_out.step()
    model["b"](ids(3))

    with pytest.warns(RuntimeWarning, match="not attached"):
        rows = taken(tracker)
    assert rows["b.weight"] == list(range(20))


def test_table_that_joins_an_attached_optimizer_late_is_followed() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    optimizer = sgd(model["a"])
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    tracker.declare_boundary()
    tracker.take()
    optimizer.add_param_group({"params": [model["b"].weight]})

    optimizer.step()

    assert taken(tracker) == {"a.weight": [1], "b.weight": [2]}


def test_parameter_that_is_replaced_in_a_group_is_followed() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3, sparse=True)})
    optimizer = sgd(model["a"])
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    optimizer.step()
    tracker.declare_boundary()
    tracker.take()
    optimizer.param_groups[0]["params"][0] = model["b"].weight
    before = model["b"].weight.detach().clone()

    optimizer.step()

    assert taken(tracker) == {"a.weight": [], "b.weight": changed_rows(before, model["b"].weight)}
    assert changed_rows(before, model["b"].weight) == [2]


def test_weight_decay_switched_on_for_one_group_moves_its_tables_whole() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    optimizer = torch.optim.SGD([{"params": [model[name].weight]} for name in "ab"], lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    for decay in (0.0, 0.1):
        optimizer.param_groups[1]["weight_decay"] = torch.tensor(decay)
        (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
        if decay:
            with pytest.warns(RuntimeWarning, match="full from here on"):
                optimizer.step()
        else:
            optimizer.step()

    assert taken(tracker) == {"a.weight": [1], "b.weight": list(range(20))}


@pytest.mark.parametrize("contiguous", [False, True])
def test_sparse_gradients_of_several_tables_are_marked_each_in_its_own(contiguous: bool) -> None:
    model = nn.ModuleDict({name: nn.Embedding(2000, 3) for name in "abc"})
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    rows = {"a": [1999, 1, 1], "b": [], "c": [40, 3]}
    for name, found in rows.items():
        spread = torch.tensor([[row, 7] for row in found], dtype=torch.int64).reshape(-1, 2).T[:1]
        indices = spread.contiguous() if contiguous else spread
        values = torch.ones(len(found), 3)
        model[name].weight.grad = torch.sparse_coo_tensor(indices, values, (2000, 3))

    optimizer.step()

    assert taken(tracker) == {f"{name}.weight": sorted(set(found)) for name, found in rows.items()}


@pytest.mark.parametrize("sparse", [False, True])
def test_step_with_a_closure_is_followed(sparse: bool) -> None:
    model = Functional(sparse)
    optimizer = sgd(model)
    tracker = RowTracker(model, {"items": model.rows}, optimizers=[optimizer])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids(4, 6)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)

    assert taken(tracker) == {"items": [4, 6]}


# ---- optimizers that reach further


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

    with pytest.warns(RuntimeWarning, match="full from here on"):
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


def replace_data(model: nn.Embedding) -> None:
    model.weight.data = torch.zeros(20, 3)


@pytest.mark.parametrize("write", [write_behind, load, replace_data])
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


def test_updates_of_an_optimizer_that_is_not_attached_need_a_declared_boundary() -> None:
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


# ---- the law


class Mixed(nn.Module):
    """Embeddings and bags of both gradient kinds, with and without a padding row and max_norm, the first one tied."""

    def __init__(self, sizes: list[int], kinds: list[str], options: list[dict[str, Any]], tied: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        for size, kind, own in zip(sizes, kinds, options, strict=True):
            sparse = kind.endswith("sparse")
            make = nn.EmbeddingBag if kind.startswith("bag") else nn.Embedding
            mode = {"mode": "sum"} if kind.startswith("bag") else {}
            own = own | {"padding_idx": own["padding_idx"] % size if own["padding_idx"] is not None else None}
            self.tables.append(make(size, 3, sparse=sparse, **own, **mode))
        if tied:
            self.twin = nn.Embedding(sizes[0], 3, padding_idx=self.tables[0].padding_idx)
            self.twin.weight = self.tables[0].weight
            self.twin.sparse = self.tables[0].sparse

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for table, rows in zip(self.tables, batch, strict=True):
            if isinstance(table, nn.EmbeddingBag):  # a bag, an empty bag, a bag
                total = total + table(rows, torch.tensor([0, len(rows) // 2, len(rows) // 2])).sum()
            else:
                total = total + table(rows).sum()
        if hasattr(self, "twin"):
            total = total + self.twin(batch[0].flip(0) // 2).sum()
        return total


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.05),
}
GRADIENTS = {"sparse adam": [" sparse"], "adam": [""], "rmsprop": [""]}
EXACT = {"sgd", "adagrad", "sparse adam"}  # elsewhere a row may stand still, or only its slots move


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tracked_rows_are_the_changed_rows(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    sizes = data.draw(st.lists(st.sampled_from([1, 31, 33, 64, 1025]), min_size=1, max_size=3))
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    kind = st.sampled_from([base + g for base in ("embedding", "bag") for g in GRADIENTS.get(name, ["", " sparse"])])
    kinds = [data.draw(kind) for _ in sizes]
    tied = data.draw(st.booleans())
    options = [
        {
            "padding_idx": data.draw(st.sampled_from([None, 0, 3])),
            "max_norm": None if tied and number == 0 else data.draw(st.sampled_from([None, None, 1.0])),
        }
        for number in range(len(sizes))
    ]
    model = Mixed(sizes, kinds, options, tied)
    optimizer = OPTIMIZERS[name](model.parameters())
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise", verify_rows=8)
    if data.draw(st.booleans()):
        for table in tracker.weights:
            tracker.bitmap.of(table)._host = None  # the path of other devices, on the CPU
    rewritten = {f"tables.{number}.weight" for number, own in enumerate(options) if own["max_norm"] is not None}

    for _ in range(data.draw(st.integers(1, 4))):
        before = {table: weight.detach().clone() for table, weight in tracker.weights.items()}
        for _ in range(data.draw(st.integers(0, 3))):
            optimizer.zero_grad()
            for _ in range(data.draw(st.integers(1, 2))):  # accumulation
                batch = [torch.tensor(random.integers(0, size, 5)) for size in sizes]
                model(batch).backward()
            with torch.no_grad():
                model([torch.tensor(random.integers(0, size, 5)) for size in sizes])
            optimizer.step()
            model.eval()
            model([torch.tensor(random.integers(0, size, 5)) for size in sizes])
            model.train()
        rows = taken(tracker)

        for table, weight in tracker.weights.items():
            changed = changed_rows(before[table], weight)
            assert set(changed) <= set(rows[table])
            if name in EXACT and table not in rewritten:
                assert changed == rows[table]


# ---- shards, which others look up


def shard_tracker(rows: int = 100, **options: Any) -> tuple[torch.Tensor, RowTracker]:
    weight = torch.randn(rows, 3)
    tracker = RowTracker(nn.Identity(), shards=[WatchedShard("t", rows, weight)], **options)
    return weight, tracker


def test_lookup_in_a_shard_is_taken_once_its_update_is_written() -> None:
    weight, tracker = shard_tracker(on_bypass="raise", verify_rows=100)

    tracker.lookup("t", ids(5, 7))
    with pytest.raises(BadInput, match="updated"):
        tracker.take()
    weight[[5, 7]] += 1
    tracker.updated("t")
    tracker.lookup("t", [9], learns=False)

    assert tracker.at_step_boundary
    assert taken(tracker) == {"t": [5, 7, 9]}
    assert taken(tracker) == {"t": []}


def test_write_to_a_shard_that_nobody_told_of_marks_all_of_it() -> None:
    weight, tracker = shard_tracker(10)
    tracker.lookup("t", ids(5))
    weight[5] += 1
    tracker.updated("t")
    weight[6] += 1

    with pytest.warns(RuntimeWarning, match="no hook saw"):
        rows = taken(tracker)

    assert rows == {"t": list(range(10))}


def test_update_of_a_shard_is_no_unknown_write_to_its_neighbour_in_memory() -> None:
    memory = torch.randn(30, 3)
    shards = [WatchedShard("a", 10, memory[:10]), WatchedShard("b", 20, memory[10:])]
    tracker = RowTracker(nn.Identity(), shards=shards, on_bypass="raise")

    for row in range(3):
        tracker.lookup("a", ids(row))
        memory[row] += 1
        tracker.lookup("b", ids(row))
        memory[10 + row] += 1
        tracker.updated("a")
        tracker.updated("b")

    assert taken(tracker) == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_slices_go_to_their_shards_also_when_a_name_repeats() -> None:
    shards = [WatchedShard("a", 10), WatchedShard("b", 2000), WatchedShard("far", 5, device=torch.device("cpu", 0))]
    tracker = RowTracker(nn.Embedding(4, 2), shards=shards)

    tracker.lookup_slices(["b", "a", "b"], ids(1, 1999, 3, 99, 2), [2, 4, 5])
    tracker.lookup_slices(["a", "b"], np.array([8, 7]), torch.tensor([1, 2]), learns=False)

    assert tracker.pending == 3
    for name in ("a", "b"):
        tracker.updated(name)
    assert taken(tracker) == {"weight": [], "a": [3, 8], "b": [1, 2, 7, 1999], "far": []}
    with pytest.raises(BadShape, match="2 names"):
        tracker.lookup_slices(["a", "b"], ids(1), [1])
    for ends in ([2, 1], [1, 3], [-1, 2]):
        with pytest.raises(BadShape, match="ascending"):
            tracker.lookup_slices(["a", "b"], ids(1, 2), ends)
    with pytest.raises(BadInput, match="devices"):
        tracker.lookup_slices(["a", "far"], ids(1, 2), [1, 2])
    with pytest.raises(BadRowIds, match="integers"):
        tracker.lookup_slices(["a", "b"], torch.tensor([0.5, 1.0]), [1, 2])
    assert taken(tracker) == {"weight": [], "a": [], "b": [], "far": []}


def test_shard_in_an_attached_optimizer_is_followed_by_its_steps() -> None:
    weight = nn.Parameter(torch.randn(20, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    tracker = RowTracker(
        nn.Identity(), shards=[WatchedShard("t", 20, weight)], optimizers=[optimizer], on_bypass="raise"
    )

    for row in (3, 8):
        optimizer.zero_grad()
        tracker.lookup("t", ids(row))
        assert tracker.pending == 1
        weight[[row]].sum().backward()
        optimizer.step()
        assert tracker.at_step_boundary
        before = weight.detach().clone()

    assert taken(tracker) == {"t": [3, 8]}
    optimizer.zero_grad()
    weight[[9]].sum().backward()
    optimizer.step()
    assert taken(tracker) == {"t": changed_rows(before, weight)} == {"t": [3, 8, 9]}
    assert tracker.slots("t")["momentum_buffer"] is optimizer.state[weight]["momentum_buffer"]


@pytest.mark.parametrize(
    ("rows", "expected"), [(Movement.TOUCHED, [4]), (Movement.EVER_TOUCHED, list(range(10))), (Movement.ALL, None)]
)
def test_movement_of_a_shard_is_added_at_each_update(rows: Movement, expected: list[int] | None) -> None:
    shard = WatchedShard("t", 10, movement=RowMovement(rows, rows, "the caller says so"))
    if expected is None:
        with pytest.raises(BadInput, match="the caller says so"):
            RowTracker(nn.Identity(), shards=[shard])
        expected = list(range(10))
    tracker = RowTracker(nn.Identity(), shards=[shard], allow_dense=True)
    assert taken(tracker) == {"t": []}

    tracker.lookup("t", ids(4))
    tracker.updated("t")

    assert taken(tracker) == {"t": expected}


def test_shards_are_marked_given_back_and_reset_like_tables() -> None:
    _, tracker = shard_tracker(10)
    tracker.mark("t", [1])
    lost = tracker.take()
    tracker.mark_all("t")
    tracker.reset()

    tracker.give_back(lost)

    assert taken(tracker) == {"t": [1]}


def test_shards_that_cannot_be_tracked_are_refused() -> None:
    model = nn.Embedding(5, 2)

    with pytest.raises(BadInput, match="has this name"):
        RowTracker(model, shards=[WatchedShard("weight", 5)])
    with pytest.raises(BadInput, match="another name"):
        RowTracker(model, shards=[WatchedShard("t", 5, model.weight)])
    with pytest.raises(BadShape, match=r"\(6, dim\)"):
        RowTracker(model, shards=[WatchedShard("t", 6, torch.zeros(5, 2))])
    with pytest.raises(BadInput, match="in_flight"):
        RowTracker(model, in_flight="maybe")  # type: ignore[arg-type]


class Source:
    """Rows that something else says have changed."""

    def __init__(self, *rows: int) -> None:
        self.rows = list(rows)

    def take(self) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


def test_rows_of_a_source_are_taken_with_the_others() -> None:
    weight, tracker = shard_tracker(10, on_bypass="raise")
    one, two = Source(3, 4), Source(9)
    tracker.add_source("t", one)
    tracker.add_source("t", two)
    weight[3] += 1

    tracker.mark("t", [1])

    assert taken(tracker) == {"t": [1, 3, 4, 9]}
    assert taken(tracker) == {"t": []}
    one.rows = [5]
    tracker.reset()
    assert taken(tracker) == {"t": []}
    two.rows = [2, 10]
    with pytest.raises(BadRowIds, match="rows 0 to 9"):
        tracker.take()
    assert taken(tracker) == {"t": [2]}


# ---- batches in flight


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_change_of_a_pipelined_shard_is_taken_wherever_it_is_cut(data: st.DataObject) -> None:
    ahead = data.draw(st.integers(0, 3))
    told_ahead = data.draw(st.integers(ahead, 3))
    weight, tracker = shard_tracker(60, in_flight="remark", steps_ahead=told_ahead, on_bypass="raise")
    batches = data.draw(st.lists(st.lists(st.integers(0, 59), max_size=4), min_size=1, max_size=8))
    cuts = data.draw(st.lists(st.booleans(), min_size=4 * len(batches) + 8, max_size=4 * len(batches) + 8))
    known, position = weight.clone(), 0

    def maybe_take() -> None:
        nonlocal known, position
        position += 1
        if cuts[position - 1]:
            assert set(changed_rows(known, weight)) <= set(tracker.take()["t"].row_ids.tolist())
            known = weight.clone()

    for number in range(len(batches) + ahead):
        if number < len(batches):
            tracker.lookup("t", torch.tensor(batches[number], dtype=torch.int64))
            maybe_take()
        if number >= ahead:
            weight[batches[number - ahead]] += 1
            maybe_take()
            tracker.updated("t")
            maybe_take()

    assert set(changed_rows(known, weight)) <= set(tracker.take()["t"].row_ids.tolist())
    for _ in range(told_ahead + 1):
        tracker.updated("t")
    assert tracker.pending == 0
    tracker.take()
    assert taken(tracker) == {"t": []}


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.booleans(), min_size=16, max_size=16), sparse=st.booleans(), seed=st.integers(0, 99))
def test_every_change_of_a_pipelined_model_is_taken_wherever_it_is_cut(
    cuts: list[bool], sparse: bool, seed: int
) -> None:
    model = nn.Embedding(60, 3, sparse=sparse)
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer], in_flight="remark", on_bypass="raise")
    random = np.random.default_rng(seed)
    known = model.weight.detach().clone()
    waiting = model(torch.tensor(random.integers(0, 60, 3)))
    for number in range(8):
        following = model(torch.tensor(random.integers(0, 60, 3)))
        for part in range(2):
            if cuts[2 * number + part]:
                assert set(changed_rows(known, model.weight)) <= set(taken(tracker)["weight"])
                known = model.weight.detach().clone()
            if part == 0:
                optimizer.zero_grad()
                waiting.sum().backward()
                optimizer.step()
        waiting = following
    assert set(changed_rows(known, model.weight)) <= set(taken(tracker)["weight"])
    assert tracker.pending <= 2


def test_slices_in_flight_are_marked_again() -> None:
    shards = [WatchedShard("a", 10), WatchedShard("b", 2000)]
    tracker = RowTracker(nn.Identity(), shards=shards, in_flight="remark", steps_ahead=0)
    tracker.lookup_slices(["b", "a"], ids(1, 1999, 3), [2, 3])

    assert taken(tracker) == taken(tracker) == {"a": [3], "b": [1, 1999]}
    tracker.updated("a")
    tracker.updated("b")
    tracker.take()
    assert taken(tracker) == {"a": [], "b": []}


def test_ids_in_flight_that_were_overwritten_mark_the_whole_table() -> None:
    _, tracker = shard_tracker(10, in_flight="remark")
    rows = ids(1, 2)
    tracker.lookup("t", rows)
    rows.fill_(0)

    with pytest.warns(RuntimeWarning, match="overwritten"):
        tracker.take()

    tracker.declare_boundary()
    assert taken(tracker) == {"t": list(range(10))}


def test_ids_of_tables_that_nothing_updates_are_not_kept() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    tracker = RowTracker(model, optimizers=[sgd(model["a"])], in_flight="remark")

    for row in range(5):
        model["b"](ids(row))

    assert tracker.pending == 0
    assert tracker._ledger.in_flight() == []
