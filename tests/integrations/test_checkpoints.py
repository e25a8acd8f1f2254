"""A training that another program saved goes on in a store, bit by bit as the run that was never stopped."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import BadInput, NotFound, Store, TableOptions, verify_store
from cnr_store.errors import BadDtype
from cnr_store.integrations.checkpoints import import_checkpoint, load_checkpoint
from cnr_store.training import CheckpointManager, TrackingOptions, load
from cnr_store_tools.demo.adagrad import RowWiseAdagrad

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS, MORE = 4, 3
TABLES = ["users.weight", "items.weight"]
MakeOptimizers = Callable[["Recommender"], list[torch.optim.Optimizer]]
SaveAs = Callable[[Path, "Recommender", list[torch.optim.Optimizer], int], Path]


class Recommender(nn.Module):
    """Two tables, one of them smaller than what an import takes for a table by itself; a normalized dense part."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(300, 8, mode="sum", sparse=sparse)
        self.users = nn.EmbeddingBag(2000, 8, mode="sum", sparse=sparse)
        self.dense = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.users(batch % 2000), self.items(batch % 300)], dim=1)
        return self.dense(rows)


def train(model: Recommender, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        batch = torch.arange(step * 37, step * 37 + 24).reshape(8, 3) * 11
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(batch) - step).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def parts(model: Recommender) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [model.items.weight, model.users.weight], list(model.dense.parameters())


def two(model: Recommender, of_tables: type, of_dense: type) -> list[torch.optim.Optimizer]:
    tables, dense = parts(model)
    return [of_tables(tables, lr=0.05), of_dense(dense, lr=0.01)]


def two_groups(model: Recommender) -> list[torch.optim.Optimizer]:
    tables, dense = parts(model)
    return [torch.optim.Adam([{"params": dense, "lr": 0.02}, {"params": tables}], lr=0.01)]


def option_of_one_group(model: Recommender) -> list[torch.optim.Optimizer]:
    tables, dense = parts(model)
    return [torch.optim.Adam([{"params": tables, "are_tables": True}, {"params": dense}], lr=0.01)]


OPTIMIZERS: dict[str, MakeOptimizers] = {
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)],
    "plain sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.01)],
    "groups in another order": two_groups,
    "with names": lambda model: [torch.optim.Adam(model.named_parameters(), lr=0.01)],
    "an option of one group": option_of_one_group,
    "two of one class": lambda model: two(model, torch.optim.Adagrad, torch.optim.Adagrad),
    "two with the same options": lambda model: two(model, torch.optim.Adam, torch.optim.AdamW),
    "two with others": lambda model: two(model, torch.optim.Adagrad, torch.optim.Adam),
}
SPARSE: dict[str, MakeOptimizers] = {
    "row-wise adagrad": lambda model: two(model, RowWiseAdagrad, torch.optim.Adam),
    "sparse adam": lambda model: two(model, torch.optim.SparseAdam, torch.optim.Adam),
    "sparse momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)],
}


def torch_file(folder: Path, model: Recommender, optimizers: list[torch.optim.Optimizer], step: int) -> Path:
    saved: dict[str, Any] = {"step": step, "model": model.state_dict(), "note": "from another program"}
    saved |= {f"optimizer-{index}": one.state_dict() for index, one in enumerate(optimizers)}
    torch.save(saved, folder / "old.pt")
    return folder / "old.pt"


def dcp_by_number(folder: Path, model: Recommender, optimizers: list[torch.optim.Optimizer], step: int) -> Path:
    saved = {"step": step, "model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    dcp.save(saved, checkpoint_id=folder / "old-dcp", no_dist=True)
    return folder / "old-dcp"


def dcp_by_name(folder: Path, model: Recommender, optimizers: list[torch.optim.Optimizer], step: int) -> Path:
    weights, state = get_state_dict(model, optimizers)
    dcp.save({"step": step, "model": weights, "optimizer": state}, checkpoint_id=folder / "old-dcp", no_dist=True)
    return folder / "old-dcp"


def state_of(model: Recommender, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Every number of a training, as bytes; sparse state as dense."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            whole = value.to_dense() if value.layout is not torch.strided else value
            return (str(whole.dtype), tuple(whole.shape), whole.numpy().tobytes())
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return [plain(dict(model.state_dict()))] + [plain(one.state_dict()) for one in optimizers]


def assert_goes_on(tmp_path: Path, make: MakeOptimizers, save: SaveAs, *, sparse: bool = False) -> None:
    """Train, save, import, resume in a new model by a manager: equal to the run that was never stopped."""
    torch.manual_seed(1)
    straight = Recommender(sparse=sparse)
    own = make(straight)
    train(straight, own, range(STEPS))
    file = save(tmp_path, straight, own, STEPS)
    train(straight, own, range(STEPS, STEPS + MORE))

    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        report = import_checkpoint(store, file, tables=["users.*", "items.*"], options=TableOptions.exact())
        assert verify_store(store, deep=True).is_sound
    torch.manual_seed(2)
    resumed = Recommender(sparse=sparse)
    optimizers = make(resumed)
    assume = TrackingOptions(assume={"RowWiseAdagrad": "touched"})
    with CheckpointManager(
        tmp_path / "store", model=resumed, optimizer=optimizers, tracking=assume, options=TableOptions.exact()
    ) as manager:
        restored = manager.restore()
        assert restored is not None
        train(resumed, optimizers, range(restored.step, STEPS + MORE))
        manager.save()
    saved_again = Recommender(sparse=sparse)
    others = make(saved_again)
    load(str(tmp_path / "store"), saved_again, others)

    assert state_of(saved_again, others) == state_of(resumed, optimizers)
    assert sorted(report.tables) == sorted(TABLES)
    assert not [name for name in report.dense if any(name.startswith(f"optimizer/0/{table}") for table in TABLES)]
    assert state_of(resumed, optimizers) == state_of(straight, own)


@pytest.mark.parametrize("save", [torch_file, dcp_by_number, dcp_by_name])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_imported_training_goes_on_bit_by_bit(tmp_path: Path, make: MakeOptimizers, save: SaveAs) -> None:
    assert_goes_on(tmp_path, make, save)


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_an_imported_training_with_sparse_gradients_goes_on(tmp_path: Path, make: MakeOptimizers) -> None:
    assert_goes_on(tmp_path, make, torch_file, sparse=True)


def saved(tmp_path: Path, optimizer: torch.optim.Optimizer, model: nn.Module, **others: Any) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **others}, tmp_path / "old.pt")
    return tmp_path / "old.pt"


def test_a_scheduler_and_the_loader_go_on_where_they_were(tmp_path: Path) -> None:
    def made() -> tuple[Any, ...]:
        model = Recommender()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return model, optimizer, scheduler, StatefulDataLoader(torch.arange(100), batch_size=4)

    model, optimizer, scheduler, loader = made()
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    train(model, [optimizer], range(3))
    scheduler.step()
    file = saved(tmp_path, optimizer, model, lr=scheduler.state_dict(), data=loader.state_dict(), global_step=3)

    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        import_checkpoint(store, load_checkpoint(file, extras=["lr"], reader="data"), tables=TABLES)
    model, optimizer, resumed, loader = made()
    manager = CheckpointManager(
        tmp_path / "store", model=model, optimizer=optimizer, reader=loader, extras={"lr": resumed}
    )
    with manager:
        restored = manager.restore()

        assert restored is not None
        assert restored.step == 3
        assert resumed.state_dict() == scheduler.state_dict()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert torch.equal(next(iter(loader)), seen[-1] + 4)


def test_names_are_those_of_the_model_inside_a_wrapper(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("module", Recommender())
    file = saved(tmp_path, torch.optim.Adam(model.named_parameters(), lr=0.1), model)

    found = load_checkpoint(file)

    assert found.optimizers[0].groups[0].parameters == tuple(dict(Recommender().named_parameters()))
    assert found.tensors.keys() == Recommender().state_dict().keys()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = Recommender()
    model.add_module("again", model.users)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))

    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        report = import_checkpoint(store, saved(tmp_path, optimizer, model), tables=TABLES)

    assert report.ignored == ("again.weight",)
    assert load(str(tmp_path / "store"), model, optimizer).tables == ("items.weight", "users.weight")


def test_a_second_name_in_a_dcp_folder_is_left_out(tmp_path: Path) -> None:
    """DCP stores a tied weight under each of its names."""
    model = Recommender()
    model.add_module("again", nn.Linear(8, 2000, bias=False))
    model.again.weight = model.users.weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))
    folder = dcp_by_name(tmp_path, model, [optimizer], 1)
    trained = state_of(model, [optimizer])

    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        report = import_checkpoint(store, folder, tables=TABLES, options=TableOptions.exact())
    train(model, [optimizer], range(1, 2))
    with CheckpointManager(
        tmp_path / "store", model=model, optimizer=optimizer, options=TableOptions.exact()
    ) as manager:
        restored = manager.restore()
        saved_next = manager.save()

        assert "again.weight" in report.dense
        assert restored is not None
        assert state_of(model, [optimizer]) == trained
        assert saved_next is not None
        assert saved_next.kind == "delta"
        assert "again.weight" not in manager.store.snapshot().dense


def test_a_scheduler_that_is_left_out_does_not_refuse_the_optimizer(tmp_path: Path) -> None:
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    train(model, [optimizer], range(1))
    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        import_checkpoint(store, saved(tmp_path, optimizer, model), tables=TABLES)
    resumed = torch.optim.Adam(model.parameters(), lr=0.1)

    load(str(tmp_path / "store"), model, resumed)

    assert resumed.param_groups[0]["max_lr"] == 0.2


def test_numbers_that_fit_several_parameters_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam([*model[2].parameters(), *model[0].parameters()], lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    file = saved(tmp_path, optimizer, model)
    names = ["2.weight", "2.bias", "0.weight", "0.bias"]

    with pytest.raises(BadInput, match="more than one way"):
        load_checkpoint(file)
    found = load_checkpoint(file, parameters=names)

    state = found.optimizers[0].state
    assert list(state) == names
    assert torch.equal(state["0.bias"]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])
    with pytest.raises(BadInput, match="3 names"):
        load_checkpoint(file, parameters=names[:3])
    with pytest.raises(BadInput, match=r"'9\.bias'"):
        load_checkpoint(file, parameters=[*names[:3], "9.bias"])


def test_state_of_other_shapes_than_the_model_is_refused(tmp_path: Path) -> None:
    model, other = Recommender(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    other(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    with pytest.raises(BadInput, match="in no way"):
        load_checkpoint(saved(tmp_path, optimizer, model))


def test_an_optimizer_whose_groups_are_lost_is_refused(tmp_path: Path) -> None:
    torchrec = pytest.importorskip("torchrec.optim.keyed")
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, flattened = get_state_dict(model, optimizer, options=flat)
    keyed = torchrec.KeyedOptimizerWrapper(dict(model.named_parameters()), lambda given: torch.optim.Adam(given))
    keyed.init_state()

    for optim, message in (
        (flattened, r"'optim' is flattened.*flatten_optimizer_state_dict"),
        (keyed.state_dict(), r"'optim' has states by name and no groups.*CheckpointManager"),
    ):
        torch.save({"model": weights, "optim": optim}, tmp_path / "old.pt")
        with pytest.raises(BadInput, match=message):
            load_checkpoint(tmp_path / "old.pt")
    dcp.save({"model": weights, "optim": flattened}, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(BadInput, match="'optim' is flattened"):
        load_checkpoint(tmp_path / "old")


def test_the_model_among_several_entries_must_be_named(tmp_path: Path) -> None:
    model, average = Recommender(), Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parts = {"net": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(parts, tmp_path / "old.pt")

    with pytest.raises(BadInput, match="--model"):
        load_checkpoint(tmp_path / "old.pt")
    found = load_checkpoint(tmp_path / "old.pt", model="net")

    assert torch.equal(found.tensors["users.weight"], model.users.weight)
    assert torch.equal(found.tensors["average.users.weight"], average.users.weight)
    with pytest.raises(BadInput, match="'nat'"):
        load_checkpoint(tmp_path / "old.pt", model="nat")
    with pytest.raises(BadInput, match="'lr'"):
        load_checkpoint(tmp_path / "old.pt", extras=["lr"])


def test_an_optimizer_with_other_options_is_refused(tmp_path: Path) -> None:
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))
    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        import_checkpoint(store, saved(tmp_path, optimizer, model), tables=TABLES)

    with pytest.raises(BadInput, match=r"optimizer 0 is Adagrad .* with options .*'betas'.* that Adagrad does not"):
        load(str(tmp_path / "store"), model, torch.optim.Adagrad(model.parameters()))


def test_a_second_import_replaces_the_whole_state(tmp_path: Path) -> None:
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with Store.create(str(tmp_path / "store"), fsync=False) as store:
        import_checkpoint(store, saved(tmp_path, optimizer, model), tables=TABLES)

        import_checkpoint(store, tmp_path / "weights.pt", tables=TABLES)

        assert store.snapshot().dense.keys() == model.state_dict().keys() - set(TABLES)
        assert store.snapshot().tables["users.weight"].slots == {}
        assert not store.snapshot().documents


# Folders of DCP that are damaged, or were made to do harm.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))
    return dcp_by_name(tmp_path, model, [optimizer], 1)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code ran",))


def test_an_index_with_code_runs_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (_Evil(), {"a": _Evil()}, [1], 3):
        (folder / ".metadata").write_bytes(pickle.dumps(content))

        with pytest.raises(BadInput, match="not a whole DCP checkpoint"):
            load_checkpoint(folder)

    assert capsys.readouterr().out == ""


def test_a_value_with_code_runs_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"model": {"w": torch.ones(3)}, "note": _Evil()}, checkpoint_id=folder / "evil", no_dist=True)

    with pytest.raises(BadInput, match="weights only"):
        load_checkpoint(folder / "evil")

    assert capsys.readouterr().out == ""


def test_an_index_that_names_other_files_is_refused(folder: Path) -> None:
    secret = folder.parent / "__0_0.distcp"
    (folder / "__0_0.distcp").rename(secret)
    index = (folder / ".metadata").read_bytes()
    old, new = b"\x8c\x0c__0_0.distcp", b"\x8c\x0f../__0_0.distcp"
    # Without the frame, whose length would not be right any more.
    frameless = index[:2] + index[11:]
    (folder / ".metadata").write_bytes(frameless.replace(old, new))

    assert frameless.count(old) == 1
    with pytest.raises(BadInput, match="not in the folder"):
        load_checkpoint(folder)


def test_a_tensor_with_missing_pieces_is_refused(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    name, about = next((name, one) for name, one in index.state_dict_metadata.items() if hasattr(one, "size"))
    about.size = torch.Size([about.size[0] + 1, *about.size[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(index))

    with pytest.raises(BadInput, match=f"pieces of tensor '{name}' are missing"):
        load_checkpoint(folder)


def test_every_cut_of_a_dcp_folder_is_an_error(folder: Path) -> None:
    index, data = (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()
    for length in range(0, len(index), 97):
        (folder / ".metadata").write_bytes(index[:length])
        with pytest.raises(BadInput):
            load_checkpoint(folder)
    (folder / ".metadata").write_bytes(index)
    for length in range(0, len(data), len(data) // 7):
        (folder / "__0_0.distcp").write_bytes(data[:length])
        with pytest.raises(BadInput):
            load_checkpoint(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(NotFound, match=r"__0_0\.distcp"):
        load_checkpoint(folder)


def test_a_cut_file_is_named(folder: Path) -> None:
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])

    with pytest.raises(BadInput, match=r"__0_0\.distcp ends before byte \d+; copy the checkpoint again"):
        load_checkpoint(folder)


def test_a_torch_file_with_code_or_without_a_dict_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, message in (
        (_Evil(), "weights only .it has objects of"),
        ([torch.ones(3)], "contains a list, expected a dict"),
    ):
        torch.save(content, tmp_path / "x.pt")

        with pytest.raises(BadInput, match=message):
            load_checkpoint(tmp_path / "x.pt")

    assert capsys.readouterr().out == ""


def test_sparse_and_complex_tensors_are_refused(tmp_path: Path) -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex64)):
        torch.save({"x": tensor}, tmp_path / "x.pt")
        with pytest.raises(BadDtype):
            load_checkpoint(tmp_path / "x.pt")


def test_a_resume_knows_by_which_options_an_import_stored_its_tables(tmp_path: Path) -> None:
    """A regression: slots that were imported with fewer bits kept these, whatever the manager's options said."""
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [optimizer], range(1))
    options = TableOptions(bits=4, slot_bits=2)
    url = str(tmp_path / "store")
    with Store.create(url, fsync=False) as store:
        import_checkpoint(store, saved(tmp_path, optimizer, model), tables=TABLES, options=options)

    kinds = []
    for asked in (options, TableOptions(bits=4)):
        with CheckpointManager(
            url, model=model, optimizer=optimizer, options=asked, tracking=TrackingOptions(tables=TABLES)
        ) as manager:
            manager.restore()
            report = manager.save()
            assert report is not None
            kinds.append(report.kind)

    assert kinds == ["delta", "baseline"]
