"""`dcp.save`, `dcp.async_save` and `dcp.load` of one process on a store."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cnr_store import Store, TableOptions, verify_store
from cnr_store.errors import BadInput, NonFiniteValues, SaveInProgress, Unsupported
from cnr_store.integrations.dcp import CnrStager, CnrStorageReader, CnrStorageWriter
from cnr_store.maintenance.compaction.run import compact_run
from cnr_store.serving import Loader
from cnr_store.training import CheckpointManager
from cnr_store_gpu import RowTracker
from tests.integrations.dcp.states import DIM, ROWS, Run, assert_equal, copy_of
from tests.tools.cli_runner import cnr

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

USERS, USERS_SUM = "model.users.weight", "optim.state.users.weight.sum"


def load_into_new(store: Path, **which: Any) -> dict[str, Any]:
    state = Run(seed=1).state()
    dcp.load(state, storage_reader=CnrStorageReader(store, **which))
    return state


def rows_of(store: Path) -> list[tuple[str, int]]:
    """Kind of the newest record, and the changed rows of each segment of its chain."""
    with Store.open(str(store)) as opened:
        return [(one.kind, one.rows) for one in opened.head().record.chain]


def error_of(save: Any) -> BaseException:
    """What a save of one process raised, out of DCP's wrapping."""
    with pytest.raises(CheckpointException) as raised:
        save()
    return raised.value.failures[0][0]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_each_save_is_one_version_and_loads_to_the_last_bit(store: Path) -> None:
    run, saved = Run(), {}
    with CnrStorageWriter(store) as writer:
        for step in (100, 200, 300):
            run.step(first=step)
            metadata = dcp.save(run.state(), checkpoint_id=f"step-{step}", storage_writer=writer)
            saved[step] = metadata.storage_data["version"], copy_of(run.state())

    for step, (version, expected) in saved.items():
        assert_equal(load_into_new(store, step=step), expected)
        assert_equal(load_into_new(store, version=version), expected)
    assert_equal(load_into_new(store), saved[300][1])
    assert [version for version, _ in saved.values()] == [2, 3, 4]


def test_a_delta_holds_the_rows_that_changed_and_nothing_else(store: Path) -> None:
    run = Run()
    run.step(first=0, count=10)
    with CnrStorageWriter(store) as writer:
        dcp.save(run.state(), storage_writer=writer)
        run.step(first=50, count=7)
        dcp.save(run.state(), storage_writer=writer)
        dcp.save(run.state(), storage_writer=writer)

    assert rows_of(store) == [("baseline", ROWS), ("delta", 7), ("delta", 0)]


def test_optimizer_state_becomes_slots_of_its_table(store: Path) -> None:
    run = Run(torch.optim.Adam)
    run.step()
    with CnrStorageWriter(store) as writer:
        dcp.save(run.state(), storage_writer=writer)

    with Store.open(str(store)) as opened:
        snapshot = opened.snapshot()
        assert list(snapshot.tables) == [USERS]
        assert sorted(snapshot.tables[USERS].slots) == ["exp_avg", "exp_avg_sq"]
        assert "model.days.weight" in snapshot.dense  # too small for a table
        assert "optim.state.days.weight.exp_avg" in snapshot.dense
    state = Run(torch.optim.Adam, seed=1).state()
    dcp.load(state, storage_reader=CnrStorageReader(store))
    assert_equal(state, copy_of(run.state()))


def test_flattened_optimizer_state_and_row_slots_are_slots_too(store: Path) -> None:
    weight = torch.randn(ROWS, DIM)
    state = {
        "m": {"emb.weight": weight},
        "state.emb.weight.sum": torch.rand(ROWS),
        "state.emb.weight.step": torch.ones(()),
    }
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)

    with Store.open(str(store)) as opened:
        assert opened.snapshot().tables["m.emb.weight"].slots["sum"].kind == "row"
    loaded: dict[str, Any] = {
        "m": {"emb.weight": torch.empty(ROWS, DIM)},
        "state.emb.weight.sum": torch.empty(ROWS),
        "state.emb.weight.step": torch.empty(()),
    }
    dcp.load(loaded, storage_reader=CnrStorageReader(store))
    assert_equal(loaded, copy_of(state))


def test_state_that_could_belong_to_two_tables_is_a_table_of_its_own(store: Path) -> None:
    table = torch.randn(ROWS, DIM)
    state = {"a": {"emb": table}, "b": {"emb": table + 1}, "optim": {"state": {"emb": {"sum": table + 2}}}}
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)

    with Store.open(str(store)) as opened:
        assert {name: len(one.slots) for name, one in opened.snapshot().tables.items()} == {
            "a.emb": 0, "b.emb": 0, "optim.state.emb.sum": 0,
        }  # fmt: skip


def test_names_and_size_say_what_is_a_table(store: Path) -> None:
    state = {"emb": torch.randn(20, 4), "big": torch.randn(3000, 4), "ids": torch.arange(3000).reshape(-1, 1)}
    with CnrStorageWriter(store, tables=["em*"]) as writer:
        dcp.save(state, storage_writer=writer)
    with Store.open(str(store)) as opened:
        assert list(opened.snapshot().tables) == ["emb"]

    with CnrStorageWriter(store, tables=["ids"]) as writer:
        error = error_of(lambda: dcp.save(state, storage_writer=writer))
    assert isinstance(error, BadInput)
    assert "'ids'" in str(error)


def test_options_say_how_exact_tables_are(store: Path) -> None:
    state = {"emb": torch.randn(ROWS, DIM), "other": torch.randn(ROWS, DIM)}
    with CnrStorageWriter(store, options={"em*": TableOptions(max_error=0.01)}) as writer:
        dcp.save(state, storage_writer=writer)
    loaded = {name: torch.empty(ROWS, DIM) for name in state}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))

    assert 0 < (loaded["emb"] - state["emb"]).abs().max() <= 0.0101
    assert torch.equal(loaded["other"], state["other"])


def test_nan_and_infinity_come_back_and_are_refused_if_options_say_so(store: Path) -> None:
    state = {"emb": torch.randn(ROWS, DIM)}
    state["emb"][3, 2], state["emb"][9, 0] = torch.nan, torch.inf
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)
        dcp.save(state, storage_writer=writer)
    loaded = {"emb": torch.empty(ROWS, DIM)}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))
    assert torch.equal(loaded["emb"].nan_to_num(7), state["emb"].nan_to_num(7))

    with CnrStorageWriter(store, options=TableOptions()) as writer:
        assert isinstance(error_of(lambda: dcp.save(state, storage_writer=writer)), NonFiniteValues)


def test_every_dtype_and_shape_comes_back(store: Path) -> None:
    state: dict[str, Any] = {
        str(dtype): torch.randint(0, 2, (3, 4)).to(dtype)
        for dtype in (torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float16)
    }
    state |= {"scalar": torch.tensor(1.5), "none": torch.empty(0, 4), "cube": torch.randn(2, 3, 4)}
    state |= {f"table {dtype}": torch.randn(ROWS, 3).to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    state["transposed"] = torch.randn(DIM, ROWS).T
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))

    assert_equal(loaded, copy_of(state))


def test_values_come_back_without_pickle(store: Path) -> None:
    values = {"epoch": 3, "rate": float("inf"), "name": "über", "flag": None, "raw": b"\0\1", "pair": (1, [2.5])}
    state: dict[str, Any] = {**values, "io": io.BytesIO(b"content"), "array": np.arange(3), "x": torch.ones(2)}
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)
    loaded: dict[str, Any] = dict.fromkeys(state) | {"x": torch.zeros(2)}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))

    assert {name: loaded[name] for name in values} == values
    assert loaded["io"].getvalue() == b"content"
    assert loaded["array"].tolist() == [0, 1, 2]
    opcodes = (pickle.dumps(values)[:2], b"pickle")
    objects = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    assert not any(data.startswith(opcodes[0]) or b"archive/data.pkl" in data for data in objects)


class Counter:
    """An object with a state dict, which DCP asks for it."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"blob": self.value, "at": {"step": len(self.value)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["blob"]


def test_stateful_objects_are_saved_and_loaded(store: Path) -> None:
    found = Counter(b"")
    with CnrStorageWriter(store) as writer:
        dcp.save({"counter": Counter(b"some"), "x": torch.ones(2)}, storage_writer=writer)
    dcp.load({"counter": found}, storage_reader=CnrStorageReader(store))

    assert found.value == b"some"


class Unknown:
    """What no document can hold."""


def test_an_object_that_needs_pickle_is_refused_by_name(store: Path) -> None:
    with CnrStorageWriter(store) as writer:
        error = error_of(lambda: dcp.save({"scheduler": Unknown()}, storage_writer=writer))
        assert isinstance(error, BadInput)
        assert "scheduler" in str(error)
        assert "Unknown" in str(error)
        dcp.save({"scheduler": 1}, storage_writer=writer)

    with Store.open(str(store)) as opened:
        assert [record.kind for record in opened.log() if record.kind != "fence"] == ["baseline", "init"]


def test_tensors_that_come_and_go_begin_a_baseline(store: Path) -> None:
    first = {"a": torch.randn(ROWS, DIM), "d": torch.ones(3), "e": torch.ones(3)}
    second = {"b": torch.randn(ROWS, DIM), "d": torch.ones(3)}
    with CnrStorageWriter(store) as writer:
        dcp.save(first, storage_writer=writer)
        dcp.save(first | {"d": torch.zeros(3)}, storage_writer=writer)
        dcp.save(second, storage_writer=writer)
        dcp.save({"b": second["b"]}, storage_writer=writer)

    with Store.open(str(store)) as opened:
        snapshot = opened.snapshot()
        assert (list(snapshot.tables), list(snapshot.dense)) == (["b"], [])
        assert [one.kind for one in opened.head().record.chain] == ["baseline", "delta"]


def test_a_long_chain_begins_anew_from_the_mirror(store: Path) -> None:
    run = Run()
    run.step()
    with CnrStorageWriter(store) as writer:
        for step in range(67):
            run.model.users.weight.data[step] += 1
            dcp.save(run.state(), storage_writer=writer)

    assert len(rows_of(store)) == 3
    assert_equal(load_into_new(store), copy_of(run.state()))


def test_a_new_writer_goes_on_after_the_newest_version(store: Path) -> None:
    run = Run()
    run.step()
    for _ in range(2):
        with CnrStorageWriter(store) as writer:
            dcp.save(run.state(), storage_writer=writer)
        run.step(first=100)

    with Store.open(str(store)) as opened:
        assert [(one.kind, one.step) for one in opened.log()] == [
            ("baseline", 1), ("fence", 0), ("baseline", 0), ("fence", 0), ("init", 0),
        ]  # fmt: skip


# ---- the store is one like any other


def test_loaders_compaction_verification_and_the_command_read_it(store: Path) -> None:
    run = Run()
    run.step()
    with CnrStorageWriter(store) as writer:
        for first in (0, 40, 80):
            run.step(first=first)
            dcp.save(run.state(), storage_writer=writer)

    with Store.open(str(store)) as opened:
        assert verify_store(opened, deep=True).is_sound
        compact_run(opened, run=(0, 3))
        assert len(opened.head().record.chain) == 1
    assert_equal(load_into_new(store), copy_of(run.state()))
    with Loader(str(store), tables=[USERS]) as loader:
        loader.poll()
        found = loader.lookup_many({USERS: np.array([3, 41])}).rows[USERS]
        assert np.array_equal(found, run.model.users.weight.detach()[[3, 41]].numpy())
    assert USERS in cnr("show", store).out


def test_dcp_loads_tables_that_a_manager_saved(store: Path) -> None:
    run = Run()
    run.step()
    options = TableOptions.exact()
    with CheckpointManager(str(store), model=run.model, optimizer=run.optimizer, options=options) as manager:
        manager.save()
    with Store.open(str(store)) as opened:
        name = next(one for one in opened.snapshot().tables if "users" in one)
    loaded = {name: torch.empty(ROWS, DIM)}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))

    assert torch.equal(loaded[name], run.model.users.weight.detach())


def test_dcps_own_conversion_reads_it(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    with CnrStorageWriter(store) as writer:
        dcp.save(run.state(), storage_writer=writer)
    monkeypatch.setattr("torch.distributed.checkpoint.format_utils.FileSystemReader", CnrStorageReader)
    dcp_to_torch_save(store, tmp_path / "whole.pt")

    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal(loaded, copy_of(run.state()))
    assert loaded["epoch"] == 3


# ---- loading


def test_another_dtype_is_refused_unless_it_is_asked_for(store: Path) -> None:
    state = {"emb": torch.randn(ROWS, DIM), "bias": torch.randn(3)}
    with CnrStorageWriter(store) as writer:
        dcp.save(state, storage_writer=writer)
    for name, other in (("emb", torch.float64), ("bias", torch.float16)):
        loaded = {name: torch.empty_like(state[name], dtype=other)}
        error = error_of(lambda loaded=loaded: dcp.load(loaded, storage_reader=CnrStorageReader(store)))
        assert "allow_cast" in str(error)
        dcp.load(loaded, storage_reader=CnrStorageReader(store, allow_cast=True))
        assert torch.equal(loaded[name], state[name].to(other))


def test_other_shapes_and_names_are_refused(store: Path) -> None:
    with CnrStorageWriter(store) as writer:
        dcp.save({"emb": torch.randn(ROWS, DIM)}, storage_writer=writer)
    for state in ({"emb": torch.empty(ROWS + 1, DIM)}, {"more": torch.empty(3)}):
        error_of(lambda state=state: dcp.load(state, storage_reader=CnrStorageReader(store)))


def test_a_checkpoint_id_is_the_step_at_its_end(store: Path) -> None:
    with CnrStorageWriter(store) as writer:
        for step in (7, 9):
            dcp.save({"x": torch.tensor(step)}, checkpoint_id=step, storage_writer=writer)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="step-300"):
            dcp.save({"x": torch.ones(1)}, checkpoint_id="last", storage_writer=writer)
    loaded = {"x": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id="runs/step_7", storage_reader=CnrStorageReader(store))

    assert loaded["x"] == 7
    assert CnrStorageWriter.validate_checkpoint_id("step-7")
    assert not CnrStorageReader.validate_checkpoint_id("last")


# ---- what is refused


def test_what_a_save_cannot_keep_is_refused_with_the_remedy(store: Path) -> None:
    with CnrStorageWriter(store) as writer:
        with pytest.raises(Unsupported, match="use_collectives"):
            dcp.save({"x": torch.ones(1)}, storage_writer=writer, use_collectives=False)
        with pytest.raises(Unsupported, match="THREAD"):
            pickle.dumps(writer)
        kept = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"x": torch.ones(1)}, storage_writer=writer, planner=kept)
        error = error_of(lambda: dcp.save({"x": torch.ones(1)}, storage_writer=writer, planner=kept))
        assert "enable_plan_caching" in str(error)
        dcp.save({"x": torch.ones(1)}, storage_writer=writer)
    assert AsyncCheckpointerType.PROCESS  # what the message speaks of


# ---- staging


def test_the_writer_is_a_stager_itself(store: Path) -> None:
    with CnrStorageWriter(store) as writer:
        assert isinstance(writer, AsyncStager)
        assert isinstance(CnrStager(), AsyncStager)


@pytest.mark.parametrize("is_tracked", [False, True])
def test_async_saves_hold_what_was_there_when_they_began(store: Path, is_tracked: bool) -> None:
    run = Run()
    run.step()
    tracker = RowTracker(run.model, optimizers=[run.optimizer]) if is_tracked else None
    expected = []
    with CnrStorageWriter(store, tracker=tracker) as writer:
        for first in (0, 30, 60, 90):
            run.step(first=first)
            expected.append(copy_of(run.state()))
            future = dcp.async_save(run.state(), storage_writer=writer)
            run.step(first=500)
            future.result()

    assert [rows for _, rows in rows_of(store)] == [ROWS, 20, 20, 20]
    for version, state in enumerate(expected, start=2):
        assert_equal(load_into_new(store, version=version), state)


def paused_in(method: str) -> tuple[DefaultSavePlanner, threading.Event, threading.Event]:
    """A planner that waits in one of its methods. The events: it does; it may go on."""
    planner, begun, may_go_on = DefaultSavePlanner(), threading.Event(), threading.Event()
    call = getattr(planner, method)

    def wait(*arguments: Any) -> Any:
        begun.set()
        may_go_on.wait()
        return call(*arguments)

    setattr(planner, method, wait)
    return planner, begun, may_go_on


def test_a_save_during_another_one_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.integrations.dcp.attempt._PATIENCE_S", 0.1)
    planner, begun, may_end = paused_in("resolve_data")
    state = {"x": torch.ones(3)}
    with CnrStorageWriter(store) as writer:
        first = dcp.async_save(state, storage_writer=writer, planner=planner)
        begun.wait()
        error = error_of(lambda: dcp.async_save(state, storage_writer=writer).result())
        may_end.set()
        assert isinstance(error, SaveInProgress)
        assert first.result().storage_data == {"version": 2}
        assert dcp.async_save(state, storage_writer=writer).result().storage_data == {"version": 3}


def test_a_save_that_was_overtaken_while_planned_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ended: both let the later attempt commit, which waited for the earlier one."""
    monkeypatch.setattr("cnr_store.integrations.dcp.attempt._PATIENCE_S", 0.1)
    slow, planned, may_write = paused_in("create_global_plan")
    fast, begun, may_end = paused_in("resolve_data")
    state = {"x": torch.ones(3)}
    with CnrStorageWriter(store) as writer:
        overtaken = dcp.async_save(state, storage_writer=writer, planner=slow)
        planned.wait()
        first = dcp.async_save(state, storage_writer=writer, planner=fast)
        begun.wait()
        may_write.set()
        error = error_of(overtaken.result)
        may_end.set()
        assert isinstance(error, SaveInProgress)
        assert first.result().storage_data == {"version": 2}
        assert dcp.async_save(state, storage_writer=writer).result().storage_data == {"version": 3}


def test_a_save_has_its_own_step_whatever_step_a_refused_one_asks_for(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.integrations.dcp.attempt._PATIENCE_S", 0.1)
    state = {"x": torch.ones(3)}
    with CnrStorageWriter(store) as writer:
        slow, planned, may_write = paused_in("create_global_plan")
        later, later_planned, later_may_write = paused_in("create_global_plan")
        first = dcp.async_save(state, checkpoint_id="run/step-5", storage_writer=writer, planner=slow)
        planned.wait()
        second = dcp.async_save(state, checkpoint_id="run/step-6", storage_writer=writer, planner=later)
        later_planned.wait()
        may_write.set()
        assert first.result().storage_data == {"version": 2}
        later_may_write.set()
        second.result()

    with Store.open(str(store)) as opened:
        assert [opened.snapshot(version).step for version in (2, 3)] == [5, 6]


def test_tracked_tables_are_whole_again_when_the_state_dict_has_more(store: Path) -> None:
    run = Run()
    run.step()
    tracker = RowTracker(run.model, optimizers=[run.optimizer])
    with CnrStorageWriter(store, tracker=tracker) as writer:
        for names in (["model"], ["model"], ["model", "optim"], ["model", "optim"]):
            run.step(first=20)
            state = {name: run.state()[name] for name in names}
            dcp.async_save(state, storage_writer=writer).result()

    assert rows_of(store) == [("baseline", ROWS), ("delta", 10)]
    loaded = {name: Run(seed=1).state()[name] for name in ("model", "optim")}
    dcp.load(loaded, storage_reader=CnrStorageReader(store))
    assert_equal(loaded, copy_of({name: run.state()[name] for name in loaded}))


def test_any_url_of_fsspec_is_a_store() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    with CnrStorageWriter(url) as writer:
        for value in (1.0, 2.0):
            dcp.save({"x": torch.full((ROWS, DIM), value)}, storage_writer=writer)
    loaded = {"x": torch.empty(ROWS, DIM)}
    dcp.load(loaded, storage_reader=CnrStorageReader(url))

    assert torch.equal(loaded["x"], torch.full((ROWS, DIM), 2.0))


def test_kept_memory_is_used_again(store: Path) -> None:
    run = Run()
    run.step()
    with CnrStorageWriter(store) as writer:
        places = set()
        for _ in range(3):
            staged = writer.stage(run.state())
            places.add(staged["model"]["users.weight"].data_ptr())
            del staged
            dcp.async_save(run.state(), storage_writer=writer).result()
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                if thread.name.startswith(("Async", "cnr-dcp")):
                    thread.join()
            gc.collect()  # a baseline leaves a circle behind
        held = writer.stage(run.state())
        other = writer.stage(run.state())

    assert len(places) == 1
    assert held["model"]["users.weight"].data_ptr() != other["model"]["users.weight"].data_ptr()


def test_rows_stay_marked_until_their_save_is_committed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    tracker = RowTracker(run.model, optimizers=[run.optimizer])
    with CnrStorageWriter(store, tracker=tracker) as writer:
        dcp.async_save(run.state(), storage_writer=writer).result()
        for first, hook in ((30, "prepare_global_plan"), (60, "finish")):
            run.step(first=first)
            with monkeypatch.context() as patched:
                patched.setattr(writer, hook, fail)
                with pytest.raises(CheckpointException):
                    dcp.async_save(run.state(), storage_writer=writer).result()
        run.step(first=90)
        dcp.async_save(run.state(), storage_writer=writer).result()

    assert rows_of(store) == [("baseline", ROWS), ("delta", 30)]
    assert_equal(load_into_new(store), copy_of(run.state()))


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("planted")


def test_tracked_rows_are_enough_for_a_save_that_blocks(store: Path) -> None:
    run = Run()
    run.step()
    tracker = RowTracker(run.model, optimizers=[run.optimizer])
    with CnrStorageWriter(store, tracker=tracker) as writer:
        dcp.save(run.state(), storage_writer=writer)
        run.step(first=30)
        run.model.users.weight.data[700] += 1  # nobody marks this one: the tracker does not see it
        dcp.save(run.state(), storage_writer=writer)

    assert rows_of(store) == [("baseline", ROWS), ("delta", 10)]


def test_copies_of_a_tracked_table_are_compared(store: Path) -> None:
    run = Run()
    run.step()
    tracker = RowTracker(run.model, optimizers=[run.optimizer])
    with CnrStorageWriter(store, tracker=tracker) as writer:
        dcp.save(run.state(), storage_writer=writer)
        run.step(first=30)
        state = copy_of(run.state())
        run.step(first=60)
        dcp.save(state, storage_writer=writer)
        dcp.save(run.state(), storage_writer=writer)

    assert rows_of(store) == [("baseline", ROWS), ("delta", 10), ("delta", 10)]
    assert_equal(load_into_new(store), copy_of(run.state()))
