"""Tracked rows are the rows that training changed: what forward shows, names, ties, step boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cnr_store.errors import BadInput, BadShape
from cnr_store_gpu import RowTracker, WatchedShard, operators, plan_tables
from cnr_store_gpu.tables import rows_with_gradient
from tests.gpu.tracked import Tied, changed_rows, ids, learn, sgd, taken

# torch's own SGD and Adagrad make sparse tensors without saying whether they want them checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


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


@settings(max_examples=60)
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


def test_gradients_of_several_tables_are_marked_on_any_device() -> None:
    """Where the device was not CUDA's, the ends of the slices stayed on the host, and the step raised."""
    model = nn.ModuleList([nn.Embedding(size, 3, sparse=True, device="meta") for size in (20, 5000)])
    optimizer = sgd(model)
    RowTracker(model, optimizers=[optimizer])

    sum(table(torch.tensor([1, 2], device="meta")).sum() for table in model).backward()
    optimizer.step()


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
    model = nn.Embedding(20, 3, sparse=True)  # where lookups only count, on every device
    optimizer = sgd(model)
    tracker = RowTracker(model, optimizers=[optimizer])
    model(ids(1)).sum().backward()

    tracker.declare_boundary()

    assert taken(tracker) == {"weight": []}
    optimizer.step()  # the gradient was kept
    assert taken(tracker) == {"weight": [1]}


def test_a_lookup_that_is_settled_before_its_update_loses_no_row() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    tracker = RowTracker(model)
    for table in model.values():
        table(ids(1, 2))
    assert not tracker.overtaken.are_all()

    tracker.updated("a.weight")
    model["a"](ids(4))
    assert not tracker.overtaken.are_all()
    for name in ("a.weight", "b.weight"):
        tracker.updated(name)
    model["a"](ids(4))
    assert tracker.overtaken.are_all()
    tracker.overtaken.settle()

    assert taken(tracker) == {"a.weight": [1, 2, 4], "b.weight": [1, 2]}
    assert taken(tracker) == {"a.weight": list(range(20)), "b.weight": []}
    assert taken(tracker) == {"a.weight": [], "b.weight": []}


def test_step_of_another_optimizer_is_no_boundary() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(20, 3), "b": nn.Embedding(20, 3)})
    first, second = sgd(model["a"]), sgd(model["b"])
    tracker = RowTracker(model, optimizers=[first, second])

    (model["a"](ids(1)) * model["b"](ids(2))).sum().backward()
    first.step()
    assert tracker.pending == 1
    second.step()

    assert taken(tracker) == {"a.weight": [1], "b.weight": [2]}


def test_table_that_no_attached_optimizer_has_does_not_delay_the_boundary() -> None:
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
            with pytest.warns(RuntimeWarning, match="every row is saved from here on"):
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
