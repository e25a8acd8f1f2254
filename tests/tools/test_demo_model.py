"""The model of the demonstration: its optimizer and metrics; equal state gives equal bits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_config import RunConfig, demo_config
from torch import nn

from cnr_store.errors import BadInput
from cnr_store_tools.demo import metrics
from cnr_store_tools.demo.adagrad import RowWiseAdagrad
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.model import ModelConfig, SmallDLRM
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.demo.train import evaluate, make_optimizers, predict, train_step
from tests.support.launcher import Launcher, Program

CONFIG = replace(
    demo_config(),
    traffic=TrafficConfig(table_rows=(3_000, 500, 20), num_samples=24_000, drift_every=4_000, seed=5),
    steps=40,
    batch_size=256,
    dim=8,
)


@pytest.fixture(scope="module")
def log() -> ClickLog:
    assert CONFIG.traffic is not None
    return generate_clicks(CONFIG.traffic)


def _start(log: ClickLog, config: RunConfig = CONFIG) -> tuple[SmallDLRM, tuple[RowWiseAdagrad, torch.optim.Optimizer]]:
    model = SmallDLRM(config.model_config(log))
    return model, make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)


def _train(model: SmallDLRM, optimizers: tuple[torch.optim.Optimizer, ...], batches: TimeOrderedBatches) -> list[float]:
    return [train_step(model, optimizers, batch) for batch in batches]


def _bits(model: SmallDLRM, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, torch.Tensor]:
    """Every tensor of the training state, by name."""
    tensors = dict(model.state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{number}.{index}.{name}": value for name, value in state.items()}
    return tensors


def _assert_same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def max_weight_difference(model: SmallDLRM, other: SmallDLRM) -> float:
    others = dict(other.named_parameters())
    return max(float((weight - others[name]).detach().abs().max()) for name, weight in model.named_parameters())


PROCESS = """
import hashlib, torch
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.model import SmallDLRM
from run_config import demo_config
from cnr_store_tools.demo.traffic import generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step
config = demo_config(steps=24)
torch.set_num_threads(config.num_threads)
log = generate_clicks(config.traffic)
model = SmallDLRM(config.model_config(log))
optimizers = make_optimizers(model)
for batch in TimeOrderedBatches(log, config.batch_size, max_batches=20):
    train_step(model, optimizers, batch)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def test_two_processes_with_one_seed_are_equal_bit_for_bit(launcher: Launcher, tmp_path: Path) -> None:
    """One is an interpreter of its own, with its own seed of hashes; the other one is forked."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (forked,) = launcher.run(Program(["-c", f"import sys; sys.path[:] = {sys.path}\n{PROCESS}"]), folder=tmp_path)
    assert forked.returncode == 0, forked.stderr

    fresh = subprocess.run([sys.executable, "-c", PROCESS], env=environment, check=True, capture_output=True, text=True)

    assert len(fresh.stdout.strip()) == 64
    assert fresh.stdout == forked.stdout


def test_a_resume_through_state_dicts_equals_the_uninterrupted_run(log: ClickLog) -> None:
    past, _ = split_by_time(log)
    model, optimizers = _start(log)
    batches = TimeOrderedBatches(past, 256, max_batches=30)
    saved: list[object] = []
    for step, batch in enumerate(batches):
        train_step(model, optimizers, batch)
        if step == 9:
            saved = copy.deepcopy([part.state_dict() for part in (model, *optimizers, batches)])
    resumed, resumed_optimizers = _start(log, replace(CONFIG, seed=77))
    again = TimeOrderedBatches(past, 256, max_batches=30)

    for part, state in zip((resumed, *resumed_optimizers, again), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]  # four classes, one method
    _train(resumed, resumed_optimizers, again)

    _assert_same_bits(_bits(model, optimizers), _bits(resumed, resumed_optimizers))


def test_forgetting_the_accumulators_changes_the_resumed_run(log: ClickLog) -> None:
    past, _ = split_by_time(log)
    model, optimizers = _start(log)
    batches = TimeOrderedBatches(past, 256, max_batches=12)
    half = copy.deepcopy(model)
    for step, batch in enumerate(batches):
        train_step(model, optimizers, batch)
        if step == 5:
            half = copy.deepcopy(model)
    again = TimeOrderedBatches(past, 256, max_batches=12)
    again.load_state_dict({**again.state_dict(), "next_batch": 6})

    _train(half, make_optimizers(half), again)

    assert max_weight_difference(model, half) > 1e-4


def test_step_moves_touched_rows_and_no_other(log: ClickLog) -> None:
    model, optimizers = _start(log)
    before = copy.deepcopy(_bits(model, optimizers))
    batch = TimeOrderedBatches(log, 256).batch(0)

    train_step(model, optimizers, batch)

    for column, (name, weight) in enumerate(model.table_parameters()):
        touched = torch.zeros(weight.shape[0], dtype=torch.bool)
        touched[batch.ids[:, column]] = True
        moved = (weight.detach() != before[name]).any(dim=1)
        slot = optimizers[0].state[weight]["momentum1"] != before[f"optimizer0.{column}.momentum1"]
        assert torch.equal(moved, touched)
        assert torch.equal(slot, touched)


def _rowwise_adagrad_reference(
    weight: np.ndarray, momentum: np.ndarray, ids: np.ndarray, gradients: np.ndarray, lr: float, eps: float
) -> None:
    for row in np.unique(ids):
        gradient = gradients[ids == row].astype(np.float64).sum(axis=0)
        momentum[row] += (gradient**2).mean()
        weight[row] -= lr * gradient / (np.sqrt(momentum[row]) + eps)


def test_rowwise_adagrad_equals_a_plain_loop_over_rows() -> None:
    random = np.random.default_rng(3)
    table = nn.Embedding(11, 5, sparse=True)
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, eps=1e-3)
    weight = table.weight.detach().numpy().astype(np.float64)
    momentum = np.zeros(11)

    for _ in range(4):
        ids = random.integers(0, 11, 9)
        gradients = random.standard_normal((9, 5)).astype(np.float32)
        optimizer.zero_grad()
        table(torch.from_numpy(ids)).backward(torch.from_numpy(gradients))
        optimizer.step()
        _rowwise_adagrad_reference(weight, momentum, ids, gradients, 0.1, 1e-3)

    np.testing.assert_allclose(table.weight.detach().numpy(), weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(optimizer.state[table.weight]["momentum1"].numpy(), momentum, rtol=1e-5)


def test_rowwise_adagrad_calls_a_closure_and_returns_its_loss() -> None:
    table = nn.Embedding(7, 3, sparse=True)
    optimizer = RowWiseAdagrad(table.parameters())
    before = table.weight.detach().clone()

    def closure() -> float:
        loss = table(torch.tensor([2, 2])).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(2 * float(before[2].sum()), abs=1e-5)
    assert (table.weight.detach() != before).any(dim=1).nonzero().flatten().tolist() == [2]


def test_model_equals_a_plain_forward_of_each_sample() -> None:
    config = ModelConfig(table_rows=(9, 4), table_names=("a", "b"), dim=3, num_dense=2, top_hidden=(5,), table_init=1.0)
    model = SmallDLRM(config)
    ids, dense = torch.tensor([[1, 3], [8, 0]]), torch.randn(2, 2, generator=torch.Generator().manual_seed(0))

    logits = model(ids, dense)

    weights = dict(model.named_parameters())
    for sample in range(2):
        vectors = [weights["tables.a.weight"][ids[sample, 0]], weights["tables.b.weight"][ids[sample, 1]]]
        vectors.append(model.bottom(dense[sample]))
        dots = [vectors[1] @ vectors[0], vectors[2] @ vectors[0], vectors[2] @ vectors[1]]
        expected = model.top(torch.cat([*vectors, torch.stack(dots)]))
        torch.testing.assert_close(logits[sample], expected[0])


def test_model_without_dense_features_has_no_bottom() -> None:
    model = SmallDLRM(ModelConfig(table_rows=(9, 4), table_names=("a", "b"), dim=3))

    assert model(torch.tensor([[1, 3]]), torch.empty(1, 0)).shape == (1,)
    assert [name for name, _ in model.table_parameters()] == ["tables.a.weight", "tables.b.weight"]
    assert all(name.startswith("top.") for name, _ in model.dense_parameters())


def test_evaluation_changes_nothing(log: ClickLog) -> None:
    model, optimizers = _start(log)
    before = copy.deepcopy(_bits(model, optimizers))

    probabilities = predict(model, log, batch_size=1_000)

    assert model.training
    assert ((probabilities > 0) & (probabilities < 1)).all()
    np.testing.assert_allclose(probabilities, predict(model, log, batch_size=7_777), rtol=1e-5)
    _assert_same_bits(before, _bits(model, optimizers))


def test_generated_clicks_can_be_learned(log: ClickLog) -> None:
    past, future = split_by_time(log)
    model, optimizers = _start(log)
    untrained = evaluate(model, future)

    _train(model, optimizers, TimeOrderedBatches(past, 256))

    trained = evaluate(model, future)
    assert trained.auc > 0.65
    assert trained.logloss < untrained.logloss - 0.02


def _naive_auc(labels: list[int], scores: list[float]) -> float:
    wins = [
        (one > other) + 0.5 * (one == other)
        for one, clicked in zip(scores, labels, strict=True)
        if clicked
        for other, also in zip(scores, labels, strict=True)
        if not also
    ]
    return sum(wins) / len(wins)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-4, 4)), min_size=2, max_size=60))
def test_auc_equals_the_share_of_ordered_pairs(samples: list[tuple[int, int]]) -> None:
    labels = [0, 1] + [label for label, _ in samples]
    scores = [0.0, 1.0] + [float(score) for _, score in samples]

    assert metrics.auc(labels, scores) == pytest.approx(_naive_auc(labels, scores))


def test_logloss_equals_the_mean_of_the_logs_and_is_bounded_at_the_ends() -> None:
    assert metrics.logloss([1, 0], [0.8, 0.3]) == pytest.approx(-(np.log(0.8) + np.log(0.7)) / 2)
    assert metrics.logloss([1, 0], [0.0, 1.0]) == pytest.approx(-np.log(1e-7), rel=1e-6)
    assert metrics.logloss([1, 0], [1.0, 0.0]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.1, 0.2], "both classes"),
        ([1, 0], [0.1, float("nan")], "NaN"),
        ([1, 0], [0.1], "one length"),
    ],
)
def test_auc_that_is_undefined_is_refused(labels: list[int], scores: list[float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        metrics.auc(labels, scores)


def test_logloss_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="no samples"):
        metrics.logloss([], [])
