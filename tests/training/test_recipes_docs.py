"""The examples of docs/recipes.md and docs/migrate.md run as they stand, in a training that they are put into."""

from __future__ import annotations

import json
import re
import shlex
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import Store
from cnr_store.training import CheckpointManager, SavePolicy
from tests.support.pages import DOCS, python_blocks, run_example
from tests.support.torcheasyrec_dump import Chunk, rows_of, write_dump
from tests.tools.cli_runner import cnr

RECIPES = python_blocks(DOCS / "recipes.md")
SCHEDULER, METRICS, LOGGING, SIGTERM, NAMES, FENCED, SLOTS = RECIPES
MIGRATE = DOCS / "migrate.md"
TORCH_SAVE, DCP, THROUGH, DUMP, BACK = python_blocks(MIGRATE)
IMPORTS = re.findall(r"^    (cnr import .*)$", MIGRATE.read_text(), re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch[:, None]).square().mean()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the reader of a recipe has, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(500, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {
        "compute_loss": compute_loss,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loader": StatefulDataLoader(torch.arange(400), batch_size=4),
        "train_step": train_step,
    }


def test_schedulers_and_scalers_are_saved_and_restored(training: dict[str, Any]) -> None:
    run_example(SCHEDULER, training)

    saved = (training["scheduler"].state_dict(), training["scaler"].state_dict())
    training["scheduler"].step()
    run_example(SCHEDULER.split("manager.restore()")[0] + "manager.restore()\nmanager.close()", training)

    assert (training["scheduler"].state_dict(), training["scaler"].state_dict()) == saved


def test_metrics_of_each_save_are_sent(training: dict[str, Any]) -> None:
    run_example(METRICS, training)
    training["train_step"](torch.arange(4))
    training["manager"].step()

    report = training["manager"].save()
    training["manager"].close()

    (line,) = Path("metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 1, "checkpoint/MB": report.size_bytes / 1e6, "checkpoint/rows": 500,
        "checkpoint/stall_s": report.stall_s,
    }  # fmt: skip


def test_the_end_of_a_training_is_saved_and_named(training: dict[str, Any]) -> None:
    run_example(LOGGING, training)
    run_example(SIGTERM, training)
    training["manager"] = CheckpointManager("run-1", model=training["model"], optimizer=training["optimizer"])
    assert training["manager"].restore().step == 100

    run_example(NAMES, training)
    run_example(FENCED, training)
    run_example(SLOTS, training)
    training["manager"].close()

    with Store.open("run-1") as store:
        assert store.snapshot(tag="before-the-change").step == store.snapshot(channel="serving").step == 100


def named(training: dict[str, Any]) -> None:
    """Give the training a model whose table has the name that the page's patterns match."""
    model = torch.nn.Sequential(OrderedDict(emb=torch.nn.EmbeddingBag(500, 8), top=torch.nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training |= {"model": model, "optimizer": optimizer}


def train(training: dict[str, Any], batch: torch.Tensor) -> None:
    training["optimizer"].zero_grad()
    training["model"](batch[:, None]).square().sum().backward()
    training["optimizer"].step()


def import_and_resume(training: dict[str, Any], line: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the page's lines in a new model; then both trainings are equal to the last bit."""
    straight = dict(training)
    done = cnr(*shlex.split(line)[1:])
    assert (done.code, done.err) == (0, "")
    named(training)

    run_example(example, training)
    assert capsys.readouterr().out == "goes on at step 7000\n"
    for run in (straight, training):
        train(run, torch.arange(2, 9))
    training["manager"].close()

    for name, tensor in straight["model"].state_dict().items():
        assert torch.equal(training["model"].state_dict()[name], tensor)


def test_a_file_of_torch_save_goes_on_and_back(training: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    named(training)
    train(training, torch.arange(4))
    model, optimizer = training["model"], training["optimizer"]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7000}, "old.pt")

    import_and_resume(training, IMPORTS[0], TORCH_SAVE, capsys)
    run_example(BACK, training)

    back = torch.load("back.pt", weights_only=True)
    old = torch.load("old.pt", weights_only=True)
    assert torch.equal(back["model"]["emb.weight"], old["model"]["emb.weight"])
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], old["optimizer"]["state"][0]["exp_avg"])
    with Store.open("run-1") as store:
        assert set(store.snapshot().tables["emb.weight"].slots) == {"exp_avg", "exp_avg_sq"}


def test_a_folder_of_dcp_goes_on(training: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    named(training)
    train(training, torch.arange(4))
    weights, state = get_state_dict(training["model"], training["optimizer"])
    dcp.save({"model": weights, "optimizer": state, "step": 7000}, checkpoint_id="old-dcp")

    import_and_resume(training, IMPORTS[1], DCP, capsys)


def test_a_checkpoint_is_moved_through_the_model(training: dict[str, Any]) -> None:
    training["train_step"](torch.arange(4))
    model, optimizer = training["model"], training["optimizer"]
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="old-dcp")
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()

    run_example(THROUGH, training)
    training["manager"].close()

    assert torch.equal(model.weight, expected)
    with Store.open("run-3") as store:
        assert set(store.snapshot().tables["weight"].slots) == {"exp_avg", "exp_avg_sq"}


def test_weights_of_safetensors_are_imported(training: dict[str, Any]) -> None:
    safetensors.torch.save_file({"emb.weight": torch.ones(1000, 4)}, "model.safetensors")

    assert cnr(*shlex.split(IMPORTS[3])[1:]).code == 0

    with Store.open("run-4") as store:
        assert list(store.snapshot().tables) == ["emb.weight"]


def test_a_dump_of_torcheasyrec_is_imported(training: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(Path("model_dir/delta_embedding_dump"), 100, [[Chunk("ebc.user", rows_of(1, [5, 7], 4))]])

    assert cnr(*shlex.split(IMPORTS[2])[1:]).code == 0
    with Store.create("run-6", fsync=False) as store:
        run_example(DUMP, training | {"store": store})

    assert capsys.readouterr().out == "(100,) 2 0\n"
    with Store.open("run-5") as store:
        assert store.snapshot().table("ebc.user").read_all()[0].tolist() == [5, 7]


def test_an_on_save_that_raises_does_not_stop_the_training(
    training: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(report: object) -> None:
        raise RuntimeError("the dashboard is down")

    manager = CheckpointManager(
        "run-1", model=training["model"], optimizer=training["optimizer"], save_policy=SavePolicy(on_save=broken)
    )
    for _ in range(2):
        training["train_step"](torch.arange(4))
        manager.step()
        manager.save()
    manager.close()

    assert [report.version for report in manager.history] == [2, 3]
    assert caplog.text.count("on_save raised for version") == 2
