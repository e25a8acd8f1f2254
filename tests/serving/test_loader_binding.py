"""A module's tensors show what a loader serves: changed in apply() alone, and one copy where that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import BadInput, TableOptions, VersionRefused
from cnr_store.errors import BadShape, TableNotFound
from cnr_store.serving import HashShard, Loader, LoaderOptions, RowRange, binding
from tests.support.accelerator import DEVICE, needs_accelerator
from tests.support.loader_checks import opened_loader
from tests.support.memory import store_in_memory

ROWS, DIM = 40, 4


class Model(torch.nn.Module):
    """What is trained and what is served."""

    def __init__(self, rows: int = ROWS, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__()
        self.user = torch.nn.EmbeddingBag(rows, DIM, mode="sum", dtype=dtype, device=device)
        self.top = torch.nn.Linear(DIM, 1, device=device)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64, device=device))
        self.register_buffer("norm", torch.zeros(2, dtype=torch.bfloat16, device=device))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool, device=device))


class Training:
    """A store of what `Model` has."""

    def __init__(self, options: TableOptions | None = None, dtype: Any = np.float32) -> None:
        self.store = store_in_memory()
        self.writer = self.store.writer()
        self.step, self.dtype = 1, dtype
        self.values = np.zeros((ROWS, DIM), dtype)
        with self.writer.begin(1) as txn:
            txn.write_table("user.weight", self.values, options=options or TableOptions(scale=0.25))
            self.put_dense(txn)

    def put_dense(self, txn: Any) -> None:
        step = self.step
        half = torch.full((2,), step, dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        txn.put_dense(
            {
                "top.weight": np.full((1, DIM), step, np.float32),
                "top.bias": np.full(1, step, np.float32),
                "seen": np.full(2, step, np.int64),
                "norm": half,
                "flag": np.full(2, step % 2, np.uint8),
            },
            {"norm": "bfloat16", "flag": "bool"},
        )

    def save(self, rows: tuple[int, ...] = (3, 9), *, full: bool = False) -> None:
        self.step += 1
        self.values[list(rows)] = self.step
        with self.writer.begin(self.step, "baseline" if full else "delta") as txn:
            if full:
                txn.write_table("user.weight", self.values, options=TableOptions(scale=0.5))
            else:
                txn.write_rows("user.weight", np.asarray(rows), self.values[list(rows)])
            self.put_dense(txn)


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.writer.close()
    made.store.close()


def check_shows(model: Model, training: Training, step: int, values: Any = None) -> None:
    values = training.values if values is None else values
    assert np.array_equal(model.user.weight.detach().float().cpu().numpy(), values.astype(np.float32))
    assert model.top.weight.tolist() == [[step] * DIM]
    assert model.top.bias.tolist() == [step]
    assert model.seen.tolist() == [step] * 2  # type: ignore[operator]
    assert model.norm.tolist() == [step] * 2  # type: ignore[operator]
    assert model.flag.tolist() == [bool(step % 2)] * 2  # type: ignore[operator]


def test_parameters_change_in_apply_alone(training: Training) -> None:
    model = Model()
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        check_shows(model, training, 1)
        for full in (False, False, True, False):
            before, step = training.values.copy(), training.step
            training.save(full=full)
            assert loader.poll().is_updated
            check_shows(model, training, step, before)
            loader.apply()
            check_shows(model, training, training.step)
            assert np.array_equal(loader.lookup("user.weight", np.arange(ROWS)), training.values)
            output = model.top(model.user(torch.tensor([[3, 9]])))
            expected = (training.values[[3, 9]].sum(0) * training.step).sum() + training.step
            assert output.item() == expected


def test_a_parameter_on_the_cpu_is_the_held_rows(training: Training) -> None:
    model = Model()
    parameter = model.user.weight
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        for _ in range(3):
            training.save()
            loader.poll()
            loader.apply()
            held = loader._queue.view.table("user.weight").base.rows
            assert model.user.weight is parameter
            assert parameter.data_ptr() == held.ctypes.data
    assert np.array_equal(parameter.detach().numpy(), training.values)  # it outlives the loader


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_another_dtype_follow_by_changed_rows(training: Training, dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        memory = model.user.weight.data_ptr()
        for full in (False, True, False):
            training.save((1, 5, 39), full=full)
            loader.poll()
            training.save((2, 5), full=False)
            loader.poll()
            loader.apply()
            check_shows(model, training, training.step)
            assert model.user.weight.data_ptr() == memory


@pytest.mark.gpu
@needs_accelerator
def test_parameters_on_another_device_follow_by_changed_rows(training: Training) -> None:
    model = Model(device=DEVICE)
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        memory = model.user.weight.data_ptr()
        for full in (False, True, False):
            before, step = training.values.copy(), training.step
            training.save((1, 5, 39), full=full)
            loader.poll()
            check_shows(model, training, step, before)
            loader.apply()
            check_shows(model, training, training.step)
            assert model.user.weight.data_ptr() == memory


@pytest.mark.parametrize(("served", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_rows_held_as_codes_are_copied(training: Training, served: Any, dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    with Loader(training.store, publish="apply", options=LoaderOptions(served=served)) as loader:
        loader.bind(model)
        for _ in range(3):
            training.save()
            loader.poll()
            loader.apply()
            check_shows(model, training, training.step)


def test_a_bfloat16_table_is_adopted_bit_for_bit() -> None:
    bits = torch.arange(ROWS * DIM, dtype=torch.bfloat16).reshape(ROWS, DIM)
    store = store_in_memory()
    embedding = torch.nn.Embedding(ROWS, DIM, dtype=torch.bfloat16)
    with store, store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("weight", bits.view(torch.int16).numpy().view(np.uint16))
        with Loader(store, publish="apply") as loader:
            loader.bind(embedding)
            assert torch.equal(embedding.weight, bits)
            bits[7] = -1
            with writer.begin(2) as txn:
                txn.write_rows("weight", np.asarray([7]), bits[7:8].view(torch.int16).numpy().view(np.uint16))
            loader.poll()
            loader.apply()
            assert torch.equal(embedding.weight, bits)
            held = loader._queue.view.table("weight").base.rows
            assert embedding.weight.data_ptr() == held.ctypes.data


def test_a_parameter_that_is_part_of_another_tensor_is_copied_into(training: Training) -> None:
    """As fused modules have it: one buffer, and views of it under the names of tables."""
    model = Model()
    buffer = torch.zeros((2 * ROWS, DIM))
    model.user.weight = torch.nn.Parameter(buffer[ROWS:], requires_grad=False)
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        training.save()
        loader.poll()
        loader.apply()
        assert np.array_equal(buffer[ROWS:].numpy(), training.values)


def test_a_shard_shows_its_rows(training: Training) -> None:
    training.save((3, 9, 25))
    model = Model(rows=20)
    with Loader(training.store, publish="apply", options=LoaderOptions(shard=RowRange(5, 25))) as loader:
        loader.bind(model)
        training.save((4, 5, 24, 25))
        loader.poll()
        loader.apply()
        check_shows(model, training, training.step, training.values[5:25])


def test_names_may_differ(training: Training) -> None:
    embedding = torch.nn.Embedding(ROWS, DIM)
    with Loader(training.store, publish="apply") as loader:
        with pytest.raises(TableNotFound):
            loader.bind(embedding)
        with pytest.raises(BadInput):
            loader.bind(embedding, names={"wait": "user.weight"})
        loader.bind(embedding, names={"weight": "user.weight"})
        training.save()
        loader.poll()
        loader.apply()
        assert np.array_equal(embedding.weight.detach().numpy(), training.values)


def test_what_cannot_be_bound_is_refused(training: Training) -> None:
    model = Model()
    with Loader(training.store) as loader, pytest.raises(BadInput, match="apply"):
        loader.bind(model)
    for options in ({"shard": HashShard(0, 2)}, {"served": "int8"}):
        with opened_loader(training.store, publish="apply", **options) as loader, pytest.raises(BadInput):
            loader.bind(model)
    with Loader(training.store, publish="apply") as loader:
        with pytest.raises(BadShape):
            loader.bind(Model(rows=ROWS + 1))
        with pytest.raises(BadInput, match="to_empty"):
            loader.bind(Model(device="meta"))
        loader.bind(model)
        with pytest.raises(BadInput, match="already"):
            loader.bind(model)


def test_a_version_that_the_module_cannot_show_is_refused(training: Training) -> None:
    model = Model()
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        with training.writer.begin(50) as txn:
            txn.resize_table("user.weight", ROWS + 1)
        assert isinstance(loader.poll().error, VersionRefused)
        loader.apply()
        check_shows(model, training, 1)
        training.writer.begin(51).abort()
        with training.writer.begin(52) as txn:
            txn.resize_table("user.weight", ROWS)
            training.step = 52
            training.put_dense(txn)
        assert loader.poll().error is None
        loader.apply()
        check_shows(model, training, 52)


def test_a_rollback_is_shown_by_apply(training: Training) -> None:
    model = Model()
    before = training.values.copy()
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        first = loader.version
        training.save()
        loader.poll()
        loader.apply()
        loader.rollback(first)
        check_shows(model, training, 2)
        loader.apply()
        check_shows(model, training, 1, before)


def test_a_module_that_was_left_half_way_is_shown_whole_by_the_next_apply(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that was full when a version was shown left old rows in the module for good."""
    model = Model(dtype=torch.float64)
    copy_rows = binding._copy_rows

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        training.save((1, 5))
        loader.poll()
        monkeypatch.setattr(binding, "_copy_rows", fails)
        with pytest.raises(torch.OutOfMemoryError):
            loader.apply()
        monkeypatch.setattr(binding, "_copy_rows", copy_rows)
        loader.apply()
        check_shows(model, training, training.step)
        monkeypatch.setattr(binding, "_copy_rows", fails)
        training.save((2, 5))
        loader.poll()
        with pytest.raises(torch.OutOfMemoryError):
            loader.apply()
        monkeypatch.setattr(binding, "_copy_rows", copy_rows)
        training.save((3,))
        loader.poll()
        loader.apply()
        check_shows(model, training, training.step)


def test_what_is_bound_is_not_trained(training: Training) -> None:
    """A step of an optimizer was served, and the next delta was added to it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model)
        with pytest.raises(RuntimeError, match="does not require grad"):
            model.top(model.user(torch.tensor([[3, 9]]))).sum().backward()
        optimizer.step()
        training.save((3, 9))
        loader.poll()
        loader.apply()
        check_shows(model, training, training.step)


def test_tied_parameters_show_one_table(training: Training) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = torch.nn.Embedding(ROWS, DIM)
            self.scores = torch.nn.Linear(DIM, ROWS, bias=False)
            self.scores.weight = self.user.weight

    model = Tied()
    with Loader(training.store, publish="apply") as loader:
        loader.bind(model, names={"scores.weight": "user.weight"})
        training.save((3, 9))
        loader.poll()
        loader.apply()
        assert model.scores.weight is model.user.weight
        assert np.array_equal(model.scores.weight.numpy(), training.values)
