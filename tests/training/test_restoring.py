"""Restoring in place: by version, under other names, into other models, or a clear error before anything changes."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cnr_store import BadInput, CorruptStore, Store, TableOptions
from cnr_store.errors import BadDtype, BadShape, ChannelNotFound, MissingObject, TagNotFound, VersionNotFound
from cnr_store.training import CheckpointManager, document, shards, tensors
from cnr_store.training.restoring import _put_tensor
from tests.training.runs import ROWS, Training, assert_same, go_on, manager_of, uninterrupted


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with checkpoints of steps 2, 4 and 6; that of step 4 has the tag ``good``."""
    training = Training()
    with manager_of(str(tmp_path / "store"), training, every_steps=2) as manager:
        go_on(training, manager, 0, 6)
    store = Store.open(str(tmp_path / "store"))
    store.tag("good", store.snapshot(step=4).version)
    store.close()
    return str(tmp_path / "store")


@pytest.mark.parametrize("wanted", [{"step": 4}, {"tag": "good"}, {"version": 3}])
@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_an_older_checkpoint_is_continued_behind_a_rollback(wanted: dict[str, Any], policy: Any, url: str) -> None:
    expected = uninterrupted("rowwise_adagrad", 9)
    training = Training()
    manager = manager_of(url, training, every_steps=2, policy=policy)

    restored = manager.restore(**wanted)
    assert restored is not None
    assert restored.step == 4
    go_on(training, manager, 4, 8)
    manager.close()
    again = Training()
    manager = manager_of(url, again, policy=policy)
    manager.restore()
    again.train(8)

    kinds = [record.kind for record in manager.store.log()]
    assert kinds.count("rollback") == 1
    assert manager.current_step == 8
    assert_same(again.state(), expected)
    manager.close()


def test_restoring_the_head_by_its_step_needs_no_rollback(url: str) -> None:
    manager = manager_of(url, Training())

    manager.restore(step=6)

    assert "rollback" not in [record.kind for record in manager.store.log()]
    manager.close()


def test_restoring_again_in_the_same_process_undoes_what_was_trained_since(url: str) -> None:
    expected = uninterrupted("rowwise_adagrad", 8)
    training = Training()
    manager = manager_of(url, training, every_steps=2)
    manager.restore()
    go_on(training, manager, 20, 23)
    manager.restore(step=6)
    go_on(training, manager, 6, 8)
    manager.close()

    assert_same(training.state(), expected)


def test_tensors_are_filled_in_place(url: str) -> None:
    training = Training()
    before = {name: tensor.data_ptr() for name, tensor in training.model.state_dict().items()}
    slot = training.optimizers[0].state[training.model.user.weight]["momentum1"]
    manager = manager_of(url, training)

    manager.restore()

    assert {name: tensor.data_ptr() for name, tensor in training.model.state_dict().items()} == before
    assert training.optimizers[0].state[training.model.user.weight]["momentum1"] is slot
    assert manager.tracker.bitmap.any() is False
    manager.close()


def test_state_that_was_made_since_is_gone_after_a_restore(tmp_path: Path) -> None:
    expected = uninterrupted("sparse_adam", 3)
    training = Training("sparse_adam")
    manager = manager_of(str(tmp_path), training)
    manager.save()
    training.train(50)
    manager.step()
    manager.save()

    manager.restore(step=0)
    go_on(training, manager, 0, 3)
    manager.save()

    assert_same(training.state(), expected)
    manager.close()


class Renamed(nn.Module):
    """The same tables under other names, and no dense part."""

    def __init__(self, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.members = nn.Embedding(rows, 4, dtype=dtype)
        self.things = nn.Embedding(ROWS // 2, 4)


def test_tables_are_restored_under_other_names(url: str) -> None:
    model, source = Renamed(), Training()
    manager_of(url, source).restore()
    manager = CheckpointManager(url, model=model, options=TableOptions.exact())

    restored = manager.restore(tables={"user.weight": "members.weight", "item.weight": "things.weight"}, strict=False)
    report = manager.save()

    assert restored is not None
    assert sorted(restored.tables) == ["members.weight", "things.weight"]
    assert torch.equal(model.members.weight, source.model.user.weight)
    assert torch.equal(model.things.weight, source.model.item.weight)
    assert report is not None
    assert report.kind == "baseline"
    assert set(manager.store.snapshot().tables) == {"members.weight", "things.weight"}
    manager.close()


def test_what_only_one_side_has_is_left_alone_without_strict(url: str) -> None:
    model = Renamed()
    fresh = model.things.weight.detach().clone()
    manager = CheckpointManager(url, model=model, options=TableOptions.exact())

    restored = manager.restore(tables={"user.weight": "members.weight"}, strict=False)

    assert restored is not None
    assert restored.tables == ("members.weight",)
    assert torch.equal(model.things.weight, fresh)
    manager.close()


def refused_for(url: str, model: nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    manager = CheckpointManager(url, model=model, options=TableOptions.exact())
    version = manager.store.latest_version()

    with pytest.raises(error, match=match):
        manager.restore(**options)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert manager.store.latest_version() == version
    manager.close()


def test_different_tables_are_named_before_anything_changes(url: str) -> None:
    refused_for(url, Renamed(), BadInput, "missing in the checkpoint.*members.*missing in the model.*item")


@pytest.mark.parametrize(
    ("name_map", "match"),
    [
        ({"nothing": "members.weight"}, "names stored table 'nothing'"),
        ({"user.weight": "nothing"}, "the model has tables"),
        ({"user.weight": "members.weight", "item.weight": "members.weight"}, "two stored tables"),
    ],
)
def test_wrong_name_maps_are_refused(name_map: dict[str, str], match: str, url: str) -> None:
    refused_for(url, Renamed(), BadInput, match, tables=name_map)


def test_another_shape_is_refused(url: str) -> None:
    names = {"user.weight": "members.weight", "item.weight": "things.weight"}

    refused_for(url, Renamed(rows=ROWS + 1), BadShape, "members.weight", tables=names, strict=False)


def test_another_dtype_is_refused(url: str) -> None:
    names = {"user.weight": "members.weight", "item.weight": "things.weight"}

    refused_for(url, Renamed(dtype=torch.float16), BadDtype, "members.weight", tables=names, strict=False)


def test_another_optimizer_is_refused_and_named(url: str) -> None:
    training = Training("sparse_adam")
    manager = manager_of(url, training)

    with pytest.raises(BadInput, match=r"optimizer 0 is SparseAdam.*RowWiseAdagrad"):
        manager.restore()

    manager.close()


def test_parameters_of_an_optimizer_in_another_order_are_named(tmp_path: Path) -> None:
    saved, live = Training("sgd"), Training("sgd")
    parameters = live.optimizers[0].param_groups[0]["params"]
    parameters[2:4] = parameters[3:1:-1]
    with manager_of(str(tmp_path / "store"), saved) as manager:
        manager.save()

    found = r"'norm.bias', 'norm.weight'.*has SGD.*'norm.weight', 'norm.bias'"
    with manager_of(str(tmp_path / "store"), live) as manager, pytest.raises(BadInput, match=found):
        manager.restore()


@pytest.mark.parametrize("gone", ["user", "item"])
def test_without_a_table_its_optimizer_keeps_the_state_of_others(gone: str, tmp_path: Path) -> None:
    """A regression: the optimizer began anew, step counters included, although strict=False restores what both have."""
    url, saved = str(tmp_path / "store"), Training("adam")
    with manager_of(url, saved) as manager:
        saved.train(0)
        manager.save()
    live = Training("adam")
    table = getattr(live.model, gone)
    setattr(live.model, f"new_{gone}", table)
    delattr(live.model, gone)
    with manager_of(url, live) as manager:
        restored = manager.restore(strict=False)

    assert restored is not None
    assert restored.missing == (f"new_{gone}.weight",)
    assert set(restored.unexpected) <= {f"{gone}.weight", f"optimizer/0/{gone}.weight/step"}
    was, now = saved.optimizers[0].state, live.optimizers[0].state
    for name, parameter in live.model.named_parameters():
        if parameter is table.weight:
            assert parameter not in now
            continue
        of_saved = was[saved.model.get_parameter(name)]
        assert now[parameter].keys() == of_saved.keys()
        assert all(torch.equal(now[parameter][key], of_saved[key]) for key in of_saved)


def test_weights_alone_are_restored_for_another_optimizer(url: str) -> None:
    source, training = Training(), Training("sparse_adam")
    manager_of(url, source).restore()
    manager = manager_of(url, training)

    manager.restore(strict=False)
    training.train(0)
    report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    manager.close()
    again = Training("sparse_adam")
    manager = manager_of(url, again)
    manager.restore()
    assert_same(again.state(), training.state())
    manager.close()


def test_what_does_not_exist_is_said(url: str, tmp_path: Path) -> None:
    manager = manager_of(url, Training())

    with pytest.raises(VersionNotFound):
        manager.restore(version=99)
    with pytest.raises(VersionNotFound, match="holds no checkpoint"):
        manager.restore(version=0)
    with pytest.raises(TagNotFound):
        manager.restore(tag="bad")
    with pytest.raises(ChannelNotFound):
        manager.restore(channel="bad")
    with pytest.raises(VersionNotFound):
        manager.restore(step=5)
    manager.close()
    empty = manager_of(str(tmp_path / "empty"), Training())
    assert empty.restore() is None
    empty.close()


def test_a_training_goes_on_from_the_version_of_a_channel(url: str) -> None:
    """`load` and `Store.snapshot` took a channel, `restore` did not."""
    with Store.open(url) as store:
        store.set_channel("serving", store.snapshot(step=4).version)

    with manager_of(url, Training()) as manager:
        restored = manager.restore(channel="serving")

    assert restored is not None
    assert restored.step == 4
    with pytest.raises(BadInput, match="channel="):
        manager_of(url, Training()).restore(channel="serving", fallback=True)


def test_a_damaged_head_is_an_error_and_an_older_version_still_restores(url: str) -> None:
    store = Store.open(url)
    newest = store.snapshot(step=6)
    victim = next(Path(url, "data", newest.record.chain[-1].seg).glob("r*.add-0.codes/c.*.0"))
    victim.unlink()
    training = Training()
    manager = manager_of(url, training)

    with pytest.raises(CorruptStore) as damaged:
        manager.restore()
    restored = manager.restore(step=4)

    assert isinstance(damaged.value, MissingObject)
    assert restored is not None
    assert_same(training.state(), uninterrupted("rowwise_adagrad", 4))
    manager.close()
    store.close()


def test_tables_outside_host_memory_are_read_by_windows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided like a column of a larger tensor, so numpy cannot write into it whole: the path of other devices."""
    source, training = Training(), Training()
    manager_of(url, source).restore()
    wide = torch.zeros(ROWS, 8)
    training.model.user.weight.data = wide[:, ::2]
    monkeypatch.setattr(tensors, "WINDOW_BYTES", 1000)
    manager = manager_of(url, training)
    manager.restore()

    assert torch.equal(training.model.user.weight, source.model.user.weight)
    manager.close()


@pytest.mark.parametrize("where", ["in windows", "as a sparse slot"])
def test_a_table_without_rows_is_restored(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank has it under uneven row-wise sharding: on an accelerator, or with a sparse slot, it could not be."""
    if where == "in windows":
        monkeypatch.setattr("cnr_store.training.restoring.writable_array", lambda _: None)

    def run(steps: int) -> torch.Tensor:
        empty, item = nn.Embedding(0, 4, sparse=True), nn.Embedding(6, 4, sparse=True)
        nn.init.zeros_(item.weight)
        model = nn.ModuleDict({"empty": empty, "item": item})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        with CheckpointManager(
            str(tmp_path / "store"), model=model, optimizer=optimizer, options=TableOptions.exact(), every_steps=1
        ) as manager:
            manager.restore()
            while manager.current_step < steps:
                optimizer.zero_grad()
                (empty(torch.zeros(0, dtype=torch.long)).sum() + item(torch.tensor([1, 2])).sum()).backward()
                optimizer.step()
                manager.step()
        return item.weight.detach()

    run(2)

    # lr 0.5, and momentum makes steps of 1, 1.5 and 1.75 gradients
    assert torch.equal(run(3)[1:3], torch.full((2, 4), -2.125))


def test_a_run_that_forgot_to_restore_starts_with_a_full(url: str, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    manager = manager_of(url, training)
    training.train(30)

    report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    assert "were not restored" in caplog.text
    weight = manager.store.snapshot().table("user.weight").read()
    assert torch.equal(torch.from_numpy(weight), training.model.user.weight.cpu())
    manager.close()


class Towers(nn.Module):
    """A sparse table, and a dense layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(2, 2)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam(self.rows.parameters(), lr=0.1), torch.optim.SGD(self.out.parameters(), lr=0.1)]


def trained(model: Towers, optimizers: list[torch.optim.Optimizer], ids: list[int]) -> None:
    model.rows(torch.tensor(ids)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_the_save_after_a_restore_that_is_not_strict_is_full(tmp_path: Path) -> None:
    """The slots were not restored, and a delta wrote those of the touched rows alone."""
    model = Towers()
    optimizers = model.optimizers()
    with CheckpointManager(str(tmp_path), model=model, optimizer=optimizers, options=TableOptions.exact()) as manager:
        trained(model, optimizers, list(range(20)))
        manager.save()
    model = Towers()
    optimizers = model.optimizers()[::-1]
    manager = CheckpointManager(str(tmp_path), model=model, optimizer=optimizers, options=TableOptions.exact())

    manager.restore(strict=False)
    trained(model, optimizers, [0])
    report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    live = optimizers[1].state[model.rows.weight]["exp_avg"]
    assert torch.equal(torch.from_numpy(manager.store.snapshot().table("rows.weight").read(slot="exp_avg")), live.cpu())
    manager.close()


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [
        ("exp_avg", {"capturable": False}, "meta"),
        ("step", {"capturable": False}, "cpu"),
        ("step", {"capturable": True}, "meta"),
        ("step", {"fused": True}, "meta"),
    ],
)
def test_only_the_step_counter_stays_on_the_host(key: str, group: dict[str, Any], device: str) -> None:
    """State of a bias with one element was restored on the host, beside a parameter that is not there."""
    state: dict[str, Any] = {}

    _put_tensor(state, key, torch.ones(1, device="cpu"), torch.empty(1, device="meta"), group)

    assert state[key].device.type == device


def hostile(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """From now on, checkpoints have documents of a trainer that ``change`` had its way with."""
    real = document.trainer_documents

    def changed(*args: Any) -> dict[str, Any]:
        documents = real(*args)
        change(documents)
        return documents

    monkeypatch.setattr("cnr_store.training.save_staging.trainer_documents", changed)


def shape_of(*shape: int) -> Any:
    return lambda d: d["trainer/0"]["slots"]["rows.weight"]["exp_avg"].update(shape=list(shape))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(shape_of(1 << 45), id="larger than memory"),
        pytest.param(shape_of(80), id="as many, but no rows"),
        pytest.param(shape_of(4, 20), id="transposed"),
        pytest.param(shape_of(-20, -4), id="negative"),
        pytest.param(lambda d: d["trainer/0"]["slots"]["rows.weight"]["exp_avg"].update(layout="jagged"), id="layout"),
        pytest.param(lambda d: d["progress/0"].pop("extras"), id="no extras"),
        pytest.param(lambda d: d["progress/0"]["options"][0][0].update(params=[]), id="params"),
        pytest.param(lambda d: d["trainer/0"]["optimizers"][0].update(groups=3), id="groups"),
        pytest.param(lambda d: d["trainer/0"]["optimizers"][0].pop("class"), id="no class"),
        pytest.param(lambda d: d["progress/0"]["options"].pop(), id="no options of an optimizer"),
        pytest.param(lambda d: d["progress/0"]["options"][0].pop(), id="no options of a group"),
        pytest.param(
            lambda d: d["progress/0"]["state"][0][0].update(parameters=[[0, 1 << 40]]), id="state of no parameter"
        ),
        pytest.param(
            lambda d: d["progress/0"]["state"][0][0]["parameters"].append([0, 1]), id="state of a parameter twice"
        ),
        pytest.param(lambda d: d.pop("progress/0"), id="no progress"),
        pytest.param(lambda d: d["progress/0"].update(rate={"restores": -1}), id="rate"),
    ],
)
def test_a_hostile_trainer_document_changes_nothing(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Towers()
    optimizers = model.optimizers()
    with monkeypatch.context() as patch:
        hostile(patch, change)
        with CheckpointManager(str(tmp_path), model=model, optimizer=optimizers) as manager:
            trained(model, optimizers, [1])
            manager.save()
    model = Towers()
    before = model.rows.weight.detach().clone()
    optimizers = model.optimizers()
    manager = CheckpointManager(str(tmp_path), model=model, optimizer=optimizers)

    with pytest.raises(CorruptStore, match=r"(trainer|progress)/0"):
        manager.restore()

    assert torch.equal(model.rows.weight, before)
    assert optimizers[0].param_groups[0]["params"] == [model.rows.weight]
    manager.close()


def test_generators_that_cannot_be_set_are_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Towers()
    with monkeypatch.context() as patch:
        patch.setattr(document, "capture_rng", lambda: {"python": {"version": 3}})
        with CheckpointManager(str(tmp_path), model=model) as manager:
            manager.save()
    manager = CheckpointManager(str(tmp_path), model=Towers())

    with pytest.raises(CorruptStore, match="random generators"):
        manager.restore()

    manager.close()


@given(st.integers(0, 3), st.none() | st.integers(1, 3), st.booleans())
@settings(max_examples=30)
def test_the_kind_of_a_slot_is_that_of_its_rows(rows: int, width: int | None, is_sparse: bool) -> None:
    slot = torch.zeros(rows) if width is None else torch.zeros(rows, width)

    kind = tensors.slot_kind(slot.to_sparse(1) if is_sparse else slot)

    assert kind == ("row" if tensors.flat_rows(slot).ndim == 1 else "element")


@pytest.mark.parametrize("steps_between", [1, 2])
def test_two_shards_of_one_table_on_a_rank_get_their_own_slots_back(
    monkeypatch: pytest.MonkeyPatch, steps_between: int
) -> None:
    """The optimizer's side was looked up by the table's name: the second shard's slots were dropped.

    Where a parameter between them had stepped more often than they, what was saved was refused.
    """

    class TwoPieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
            self.second = nn.Parameter(torch.zeros(4, 2))

    def find(model: Any, optimizers: Any) -> list[shards.LocalShard]:
        pieces = ((model.first, (0, 4)), (model.second, (4, 8)))
        return [
            dataclasses.replace(shards.whole_shard("t", piece, optimizers), index=index, num_rows=8, rows=rows)
            for index, (piece, rows) in enumerate(pieces)
        ]

    library = shards.ShardingLibrary(find=find, follow=lambda *_: [], unwrap=lambda _: None)
    monkeypatch.setitem(shards._REGISTERED, "pieces", library)
    url = f"memory://{uuid.uuid4().hex}"
    saved, restored = TwoPieces(), TwoPieces()
    optimizer, fresh = (torch.optim.Adagrad(model.parameters(), lr=0.5) for model in (saved, restored))
    with CheckpointManager(url, model=saved, optimizer=optimizer, options=TableOptions.exact()) as manager:
        manager.restore()
        saved.between.grad = torch.ones(3)
        for _ in range(steps_between - 1):
            optimizer.step()
        saved.first.grad, saved.second.grad = torch.ones(4, 2), torch.full((4, 2), 2.0)
        optimizer.step()
        manager.step()
        manager.save()

    with CheckpointManager(url, model=restored, optimizer=fresh, options=TableOptions.exact()) as manager:
        manager.restore()

    for mine, theirs in zip(restored.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(fresh.state[mine]["sum"], optimizer.state[theirs]["sum"])
        assert fresh.state[mine]["step"] == optimizer.state[theirs]["step"]


def test_a_table_of_one_column_is_restored(tmp_path: Path) -> None:
    """Its weights and slots of shape (rows, 1) were taken for vectors, and the restore was refused."""

    def started() -> tuple[nn.Module, CheckpointManager]:
        model = nn.Sequential(nn.Embedding(10, 1))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        manager = CheckpointManager(str(tmp_path / "store"), model=model, optimizer=optimizer)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        return model, manager

    saved, manager = started()
    manager.save()
    manager.close()
    restored, manager = started()
    manager.restore()
    manager.close()

    # The scale of the lattice bounds the difference.
    torch.testing.assert_close(restored[0].weight, saved[0].weight, rtol=0, atol=0.02)  # type: ignore[index]
