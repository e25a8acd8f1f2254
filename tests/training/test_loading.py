"""`load` reads a checkpoint into a module; models that it fits in part, and models that have more rows."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BadInput, StorageFailure, Store, TableOptions, Unsupported, verify_store
from cnr_store.errors import BadShape, VersionNotFound
from cnr_store.training import CheckpointManager, TrackingOptions, load
from tests.support.ranks import ThreadRank, on_ranks
from tests.training.runs import Training, assert_same, grouped, manager_of, uninterrupted
from tests.training.test_beside import KIND, files_of, go_on
from tests.training.test_fallback import Job, Part, value


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with checkpoints of steps 1 to 3; that of step 2 is tagged and in a channel."""
    training = Training(KIND)
    with manager_of(tmp_path / "store", training) as manager:
        go_on(training, manager, 0, 3)
        version = manager.store.snapshot(step=2).version
        manager.store.tag("two", version)
        manager.store.set_channel("live", version)
    return str(tmp_path / "store")


def test_the_example_of_the_docs_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (section,) = re.findall(r"^## Evaluate beside a training\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    with Store.open(url) as store:
        store.tag("good", store.snapshot(step=1).version)
    names = {"model": Training(KIND).model, "validation": None, "logloss": lambda *_: 0.5}

    exec(example.replace("s3://bucket/run-7", url), names)  # noqa: S102 (what the page says)

    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [["3", "0.5"], ["1", "0.5"]]


def without_rng(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith("rng")}


def weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name[0].isalpha() and not name.startswith("rng")}


@pytest.mark.parametrize(
    ("wanted", "step"), [({}, 3), ({"step": 1}, 1), ({"tag": "two"}, 2), ({"channel": "live"}, 2), ({"version": 2}, 1)]
)
def test_a_version_is_read_into_a_model_and_nothing_written(url: str, wanted: dict[str, Any], step: int) -> None:
    training, before = Training(KIND), files_of(url)
    generators = torch.get_rng_state()

    loaded = load(url, training.model, **wanted)

    assert (loaded.step, loaded.missing, loaded.unexpected) == (step, (), ())
    assert sorted(loaded.tables) == ["item.weight", "user.weight"]
    assert files_of(url) == before
    assert torch.equal(torch.get_rng_state(), generators)
    assert_same(weights(training.state()), weights(uninterrupted(KIND, step)))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "sparse_adam", "sgd_momentum"])
def test_optimizers_are_read_where_they_are_given(tmp_path: Path, kind: str) -> None:
    training = Training(kind)
    with manager_of(tmp_path, training, allow_dense=True) as manager:
        go_on(training, manager, 0, 2)
    other = Training(kind)

    load(str(tmp_path), other.model, other.optimizers)

    assert_same(without_rng(other.state()), without_rng(training.state()))


def test_a_declared_table_is_found_by_what_is_stored(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.rows = nn.Parameter(torch.randn(5, 2))
        return model

    saved, model = make(), make()
    with CheckpointManager(
        str(tmp_path), model=saved, tracking=TrackingOptions(tables=["rows"]), options=TableOptions.exact()
    ) as manager:
        manager.tracker.mark_all("rows")
        manager.save()

    assert load(str(tmp_path), model).tables == ("rows",)
    assert torch.equal(model.get_parameter("rows"), saved.get_parameter("rows"))


def test_an_empty_store_has_nothing_to_load(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "store")).close()

    with pytest.raises(VersionNotFound, match="holds no checkpoint"):
        load(str(tmp_path / "store"), nn.Embedding(3, 2))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("read", [load, lambda url, model: CheckpointManager(url, model=model)])
@pytest.mark.parametrize("device", ["meta", "lazy"])
def test_a_model_without_memory_is_refused(url: str, read: Callable[..., Any], device: str) -> None:
    """What is read into a meta tensor is lost: load() said that it had loaded the model."""
    model: nn.Module = nn.Sequential(nn.LazyLinear(2)) if device == "lazy" else Training(KIND).model.to(device)

    with pytest.raises(BadInput, match=r"have no memory yet .*to_empty"):
        read(url, model)


def test_loading_needs_no_right_to_write(url: str) -> None:
    for path in (Path(url), *Path(url).rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))

    assert load(url, Training(KIND).model).step == 3


class Other(nn.Module):
    """One table of the same name, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(300, 4, sparse=True)
        self.mine = nn.Linear(2, 2)


def restored_in_part(url: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with CheckpointManager(url, model=model, optimizer=optimizer) as manager:
        return manager.restore(strict=False)


def loaded_in_part(url: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return load(url, model, optimizer, strict=False)


@pytest.mark.parametrize("read", [restored_in_part, loaded_in_part])
def test_what_is_missing_and_unexpected_is_returned(url: str, read: Callable[..., Any]) -> None:
    """It returned a state with no word of what was left out."""
    model = Other()

    state = read(url, model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert state.tables == ("user.weight",)
    assert state.missing == ("mine.bias", "mine.weight", "optimizer/0")
    assert {
        "item.weight",
        "out.weight",
        "norm.running_mean",
        "optimizer/0",
        "optimizer/1",
        "user.weight/momentum1",
    } <= set(state.unexpected)


@pytest.mark.parametrize("read", [restored_in_part, loaded_in_part])
def test_to_restore_nothing_is_refused_without_strict(url: str, read: Callable[..., Any]) -> None:
    """It returned a state without tables, and no warning."""
    model = nn.ModuleDict({"members": nn.Embedding(300, 4, sparse=True)})
    before = model["members"].get_parameter("weight").clone()

    with pytest.raises(BadInput, match=r"nothing of .* fits .*'item.weight', 'user.weight'.*members.weight"):
        read(url, model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert torch.equal(model["members"].get_parameter("weight"), before)


class Growing:
    """A table that gets new ids, with an optimizer that makes its state in the first step, or at once."""

    def __init__(self, rows: int, kind: str) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"ids": nn.Embedding(rows, 4, sparse=kind == "sparse_adam")})
        self.weight = self.model["ids"].get_parameter("weight")
        with torch.no_grad():
            self.weight.fill_(0.25)
        self.optimizer: torch.optim.Optimizer = {
            "adagrad": lambda: torch.optim.Adagrad([self.weight], lr=0.1, initial_accumulator_value=0.5),
            "sparse_adam": lambda: torch.optim.SparseAdam([self.weight], lr=0.1),
            "adam": lambda: torch.optim.Adam([self.weight], lr=0.1),
        }[kind]()

    def train(self, ids: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model["ids"](torch.tensor(ids)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        found = {"weight": self.weight.detach().clone()}
        return found | {key: torch.as_tensor(value).clone() for key, value in self.optimizer.state[self.weight].items()}

    def manager(self, url: Path, **options: Any) -> CheckpointManager:
        chosen = {"options": TableOptions.exact(), **options}
        return CheckpointManager(str(url), model=self.model, optimizer=self.optimizer, **grouped(**chosen))


@pytest.mark.parametrize(
    ("resize", "kind", "policy"),
    [
        ("fill", "adagrad", "consecutive"), ("model", "sparse_adam", "consecutive"), ("model", "adam", "consecutive"),
        ("fill", "sparse_adam", "one_shot"), ("model", "adagrad", "baseline"),
    ],
)  # fmt: skip
def test_new_ids_are_restored_saved_and_resumed_bit_for_bit(
    tmp_path: Path, resize: Any, kind: str, policy: Any
) -> None:
    small = Growing(6, kind)
    with small.manager(tmp_path, policy=policy) as manager:
        for ids in ([0, 1], [1, 5]):
            small.train(ids)
            manager.step()
            manager.save()
    grown = Growing(9, kind)
    with grown.manager(tmp_path, policy=policy) as manager:
        with pytest.raises(BadShape, match=r"resize=\"fill\" or resize=\"model\""):
            manager.restore()
        state = manager.restore(resize=resize)
        assert state is not None
        assert torch.equal(grown.weight[:6], small.weight)
        assert torch.equal(grown.weight[6:], torch.full((3, 4), 0.0 if resize == "fill" else 0.25))
        for ids in ([0, 7], [7, 8], [2]):
            grown.train(ids)
            manager.step()
            manager.save()
        expected = {
            "consecutive": ["delta"] * 3, "one_shot": ["baseline", "delta", "delta"], "baseline": ["baseline"] * 3,
        }  # fmt: skip
        assert [report.kind for report in manager.history] == expected[policy]
        assert manager.store.snapshot().table("ids.weight").schema.num_rows == 9
    again = Growing(9, kind)
    with again.manager(tmp_path, policy=policy) as manager:
        manager.restore()
        assert_same(again.state(), grown.state())
    with Store.open(str(tmp_path)) as store:
        assert verify_store(store, deep=True).is_sound
    for one in (grown, again):
        one.train([8, 3])
    assert_same(again.state(), grown.state())


def refuse(*_given: Any, **_named: Any) -> None:
    raise StorageFailure("the disk is full of bees")


def test_a_resize_whose_save_fails_is_in_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Growing(6, "adagrad")
    with small.manager(tmp_path) as manager:
        small.train([0, 1])
        manager.save()
    grown = Growing(9, "adagrad")
    with grown.manager(tmp_path, on_error="warn") as manager:
        manager.restore(resize="model")
        grown.train([7])
        with monkeypatch.context() as broken:
            broken.setattr(
                type(manager.store.storage), "put", lambda *_a, **_o: (_ for _ in ()).throw(OSError(5, "no"))
            )
            with pytest.raises(Exception, match="no"):
                manager.save()
        manager.save()
    again = Growing(9, "adagrad")
    with again.manager(tmp_path) as manager:
        manager.restore()
    assert_same(again.state(), grown.state())


@pytest.mark.parametrize("resize", ["fill", "model"])
def test_new_ids_are_loaded_to_evaluate(tmp_path: Path, resize: Any) -> None:
    small, grown = Growing(6, "adagrad"), Growing(9, "adagrad")
    with small.manager(tmp_path) as manager:
        small.train([0, 1])
        manager.save()

    load(str(tmp_path), grown.model, grown.optimizer, resize=resize)

    assert torch.equal(grown.weight[:6], small.weight)
    assert torch.equal(grown.weight[6:], torch.full((3, 4), 0.0 if resize == "fill" else 0.25))
    with pytest.raises(BadShape, match="shape"):
        load(str(tmp_path), Growing(5, "adagrad").model, resize=resize)


def test_each_rank_loads_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)

    def begin(_rank: int, manager: CheckpointManager, part: Part) -> None:
        manager.save()
        job.train(manager, part, 2)

    job.run(begin)

    def one(rank: ThreadRank) -> Any:
        part = Part(rank.rank)
        with job.open() as store, torch.no_grad():
            part.weight.zero_()
            loaded = load(store, nn.ModuleDict({f"t{rank.rank}": part}), ranks=rank)
        assert (loaded.step, sorted(loaded.tables)) == (2, ["t0.weight", "t1.weight"])
        return part.weight.detach().cpu().numpy()

    for rank, found in enumerate(on_ranks(2, one)):
        assert np.array_equal(found, value(rank, 2))


def test_ranks_are_told_that_they_cannot_save_more_rows(tmp_path: Path) -> None:
    small = Growing(6, "adagrad")
    with small.manager(tmp_path) as manager:
        manager.save()

    def one(rank: ThreadRank) -> None:
        grown = Growing(9, "adagrad")
        before = grown.state()
        refused = pytest.raises(Unsupported, match="of one process that holds its tables whole")
        with grown.manager(tmp_path, ranks=rank, rng=False) as manager, refused:
            manager.restore(resize="fill")
        assert_same(grown.state(), before)

    on_ranks(2, one)
