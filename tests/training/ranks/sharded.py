"""Scenarios of models that TorchRec shards: saved on some ranks, restored on others, in other pieces or none."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

with warnings.catch_warnings():  # fbgemm's own modules warn while they are imported
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

import numpy as np
import pytest
import torch

from cnr_store import Store, TableOptions, Unsupported
from cnr_store.format import arrays
from cnr_store.training import CheckpointManager, RestoredState
from tests.training.ranks.scenarios import Place, State, WatchedStorage, copied, scenario
from tests.training.runs import assert_same, grouped
from tests.training.torchrec.models import SHARDINGS, Built, Model, Sharding, build_model, fill, pieces, random_spec

SEED = 3
EXACT = TableOptions.exact()
ROW_WISE, ADAGRAD = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD
"""Fused optimizers with one number per row, and with one per weight."""
LAST, STOP = 4, 7
"""The step of the last save before the end of the process, and the last step of the whole training."""


def built_for(place: Place, sharding: Sharding, optimizer: EmbOptimType = ROW_WISE) -> Built:
    dense: Any = (lambda params: torch.optim.Adam(params, lr=0.01)) if optimizer is ADAGRAD else None
    built = build_model(sharding, place.world, SEED, optimizer=optimizer, dense=dense)
    torch.manual_seed(100 + place.rank)
    return built


def spoiled(built: Built) -> Built:
    """A model as a process that restarts has it: nothing in it is what was saved."""
    fill(built.dmp, 99)
    torch.manual_seed(0)
    return built


def manager_of(store: str | Store, built: Built, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        store, model=built.dmp, optimizer=built.optimizer, **grouped(**{"options": EXACT, "every_steps": 2} | options)
    )


def train(place: Place, built: Built, start: int, stop: int, manager: CheckpointManager | None = None) -> None:
    for number in range(start, stop):
        torch.rand(1 + place.rank)  # the generators move, on each rank in its own way
        built.step(built.batch(number, place.rank))
        if manager is not None:
            manager.step()


def tables_of(built: Built) -> State:
    """What this rank holds of tables, by table, first row, first column and name."""
    return {
        f"{piece.table}@{piece.row},{piece.column}/{name}": tensor.detach().clone()
        for piece in pieces(built)
        for name, tensor in {"weight": piece.weight, **piece.slots}.items()
    }


def dense_of(built: Built) -> State:
    """Every dense parameter."""
    tables = {piece.table for piece in pieces(built)}
    live = built.dmp.module.named_parameters()
    return copied({name: value for name, value in live if name not in tables and not name.startswith("sparse.")})


def state_of(built: Built) -> State:
    """Everything that training depends on, as this rank has it."""
    found = tables_of(built) | dense_of(built)
    for name, parameter in built.dmp.named_parameters():
        state = built.dense._optimizer.state.get(parameter, {})
        found |= copied({f"{name}/{key}": value for key, value in state.items()})
    for name, module in built.dmp.named_modules():
        if hasattr(module, "iter_cpu"):
            found[f"{name}/iter"] = int(module.iter.item())
    return found | {"rng": torch.get_rng_state()}


def whole_tables(place: Place, built: Built) -> State:
    """Every table of all ranks in one piece: its weights, and slots that are not cut by columns."""
    found: dict[tuple[str, str], list[tuple[int, int, torch.Tensor]]] = {}
    for of_rank in place.gather(tables_of(built)):
        for name, tensor in of_rank.items():
            table, rest = name.split("@")
            corner, kind = rest.split("/")
            row, column = map(int, corner.split(","))
            found.setdefault((table, kind), []).append((row, column, tensor))
    return {f"{table}/{kind}": joined(given) for (table, kind), given in found.items()}


def joined(given: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    shape = [max(row + len(tensor) for row, _, tensor in given)]
    if given[0][2].ndim == 2:
        shape.append(max(column + tensor.shape[1] for _, column, tensor in given))
    whole = torch.full(shape, float("nan"))
    for row, column, tensor in given:
        rows = slice(row, row + len(tensor))
        if tensor.ndim == 2:
            whole[rows, column : column + tensor.shape[1]] = tensor
        else:
            whole[rows] = tensor
    return whole


# ---- from four ranks to two to one


@scenario(1, 4)
def row_wise_on_four_ranks(place: Place) -> None:
    built = built_for(place, "row_wise")
    held = place.gather([piece.table for piece in pieces(built) if len(piece.weight)])
    assert any(len(held[rank]) < len(held[0]) for rank in range(4)), "a rank has no rows of some table"
    manager = manager_of(place.url("four"), built)
    train(place, built, 0, 5, manager)
    report = manager.save()
    assert [one.kind for one in manager.history] == ["baseline", "delta", "delta"]
    assert len(set(place.gather((report.version, report.step, report.size_bytes)))) == 1
    place.keep("four", whole_tables(place, built) | dense_of(built))


@scenario(2, 2)
def table_wise_on_two_ranks(place: Place) -> None:
    storage = WatchedStorage(place.url("four"))
    built = spoiled(built_for(place, "table_wise"))
    manager = manager_of(storage.open(), built)
    restored = manager.restore()
    assert isinstance(restored, RestoredState)
    assert restored.step == 5
    assert_same(whole_tables(place, built) | dense_of(built), place.kept("four", 0))
    assert_only_needed_chunks_were_read(place, storage, manager.store, built)
    train(place, built, 5, 7, manager)
    train(place, built, 7, 9, manager)
    manager.wait_until_finished()
    assert [one.step for one in manager.history] == [7, 9]
    place.keep("two", whole_tables(place, built) | dense_of(built))
    manager.close()


def assert_only_needed_chunks_were_read(place: Place, storage: WatchedStorage, store: Store, built: Built) -> None:
    """Of tables each rank reads the chunks that have rows of its shards, and no others; small tables share theirs."""
    mine = [(piece.table, piece.row, len(piece.weight)) for piece in pieces(built)]
    needed: set[str] = set()
    others: set[str] = set()
    for reader in store.snapshot().readers:
        for part in reader.manifest.parts:
            meets = any(
                part.table == table and part.rows[0] < row + rows and row < part.rows[1] for table, row, rows in mine
            )
            lists = [one for one in (part.add, part.set, part.delete, part.escape) if one is not None]
            inside = {
                arrays.chunk_path(array, chunk)
                for one in lists
                for array in one.arrays.values()
                for chunk in range(len(one.first))
            }
            (needed if meets else others).update(f"data/{reader.name}/{path}" for path in inside)
    found = {key for key in storage.reads if key in needed | others}
    assert found <= needed
    chunks = {key for key in needed if ".codes/c." in key}
    assert chunks
    assert chunks <= found


@scenario(2, 1)
def one_process_reads_what_ranks_have_saved(place: Place) -> None:
    saved = place.kept("two", 0)
    with Store.open(place.url("four")) as store:
        snapshot = store.snapshot()
        for name, tensor in saved.items():
            table, _, kind = name.rpartition("/")
            if kind == "weight":
                assert np.array_equal(snapshot.table(table).read(), tensor.numpy()), name
            elif kind == "momentum1":
                assert np.array_equal(snapshot.table(table).read(slot=kind), tensor.numpy()), name
            else:
                assert np.array_equal(snapshot.read_dense(name), tensor.numpy()), name
        assert snapshot.tables.keys() == {name.removesuffix("/weight") for name in saved if name.endswith("/weight")}


@scenario(2, 1)
def an_unsharded_model_takes_what_ranks_have_saved(place: Place) -> None:
    saved = place.kept("two", 0)
    model = Model(random_spec(SEED))
    manager = CheckpointManager(place.url("four"), model=model, options=EXACT)
    restored = manager.restore(strict=False)  # it has no optimizer
    assert restored is not None
    assert restored.step == 9
    expected = {name.removesuffix("/weight"): value for name, value in saved.items() if "/momentum1" not in name}
    found = copied(dict(model.state_dict()))
    assert_same({name: found[name] for name in expected}, expected)
    assert manager.save().kind == "baseline"
    manager.close()


# ---- the same ranks go on


# table_row_wise: kernels of which some are stepped by an optimizer of the caller.
CASES: list[tuple[Sharding, EmbOptimType]] = [*product(SHARDINGS, (ROW_WISE, ADAGRAD)), ("table_row_wise", ADAGRAD)]


def case_name(sharding: Sharding, optimizer: EmbOptimType) -> str:
    return f"{sharding}-{optimizer.name.lower()}"


@scenario(1, 2)
def trainings_end_behind_their_last_save(place: Place) -> None:
    for sharding, optimizer in CASES:
        name = case_name(sharding, optimizer)
        built = built_for(place, sharding, optimizer)
        manager = manager_of(place.url(name), built)
        train(place, built, 0, LAST, manager)
        manager.wait_until_finished()
        place.keep(f"{name}-saved", state_of(built))
        train(place, built, LAST, LAST + 1, manager)  # given up
    built = built_for(place, "mixed")
    manager = manager_of(place.url("quantized"), built, options=None)
    train(place, built, 0, LAST, manager)
    manager.wait_until_finished()


@scenario(2, 2)
def resumed_is_uninterrupted(place: Place) -> None:
    for sharding, optimizer in CASES:
        name = case_name(sharding, optimizer)
        expected = built_for(place, sharding, optimizer)
        train(place, expected, 0, STOP)
        reached = state_of(expected)
        built = spoiled(built_for(place, sharding, optimizer))
        manager = manager_of(place.url(name), built)
        restored = manager.restore()
        assert restored is not None
        assert restored.step == LAST
        place.assert_kept(f"{name}-saved", state_of(built))
        train(place, built, LAST, STOP, manager)
        assert_same(state_of(built), reached)
        manager.wait_until_finished()
        assert [report.step for report in manager.history] == [6]
        manager.close()


@scenario(2, 2)
def quantized_trainings_resume_alike(place: Place) -> None:
    reached = []
    for _ in range(2):
        built = spoiled(built_for(place, "mixed"))
        manager = manager_of(place.url("quantized"), built, options=None, every_steps=None)
        restored = manager.restore(step=LAST)
        assert restored is not None
        train(place, built, LAST, STOP, manager)
        reached.append(state_of(built))
        manager.save()
        manager.close()
    assert_same(*reached)


# ---- columns cut anew


@scenario(2, 2)
def other_columns_are_refused_before_anything_changes(place: Place) -> None:
    built = built_for(place, "row_wise")
    manager = manager_of(place.url(case_name("column_wise", ROW_WISE)), built)
    before, version = state_of(built), manager.store.head().record.v
    with pytest.raises(Unsupported, match="slots_rule"):
        manager.restore()
    assert_same(state_of(built), before)
    assert manager.store.head().record.v == version
    manager.close()


@scenario(2, 2)
def columns_cut_anew_are_averaged(place: Place) -> None:
    url = place.url(case_name("column_wise", ROW_WISE))
    source = built_for(place, "column_wise")
    reading = manager_of(url, source)
    reading.restore()
    cut = place.gather(tables_of(source))
    saved = whole_tables(place, source)
    reading.close()

    built = built_for(place, "row_wise")
    manager = manager_of(url, built)
    restored = manager.restore(slots_rule="mean")
    assert restored is not None
    found = whole_tables(place, built)
    for name, tensor in found.items():
        if name.endswith("/weight"):
            assert torch.equal(tensor, saved[name]), name
        else:
            assert torch.equal(tensor, weighted_mean(name.rpartition("/")[0], cut)), name
    train(place, built, restored.step, restored.step + 1, manager)
    assert manager.save().kind == "baseline"
    train(place, built, restored.step + 1, restored.step + 2, manager)
    assert manager.save().kind == "delta"
    now = whole_tables(place, built)
    for name, tensor in now.items():
        table, _, kind = name.rpartition("/")
        view = manager.store.snapshot().table(table)
        assert np.array_equal(view.read() if kind == "weight" else view.read(slot=kind), tensor.numpy()), name
    manager.close()


def weighted_mean(table: str, cut: list[State]) -> torch.Tensor:
    """The mean of a row's momentum over its shards, by how many columns each has."""
    pieces_of = {name: value for state in cut for name, value in state.items() if name.startswith(f"{table}@")}
    momenta = {name: value for name, value in pieces_of.items() if name.endswith("/momentum1")}
    widths = {name: pieces_of[name.replace("/momentum1", "/weight")].shape[1] for name in momenta}
    total = sum(value.double() * widths[name] for name, value in momenta.items())
    return (total / sum(widths.values())).float()


# ---- every way to every other, by `make soak`


@scenario(3, 4)
def saved_in_every_way(place: Place) -> None:
    for sharding in SHARDINGS:
        built = built_for(place, sharding)
        manager = manager_of(place.url(f"all-{sharding}"), built)
        train(place, built, 0, 5, manager)
        manager.save()
        place.keep(f"all-{sharding}", whole_tables(place, built) | dense_of(built))
        manager.close()


@scenario(3, 2)
def restored_in_every_other_way(place: Place) -> None:
    for saved, sharding in product(SHARDINGS, SHARDINGS):
        expected = place.kept(f"all-{saved}", 0)
        built = spoiled(built_for(place, sharding))
        manager = manager_of(place.url(f"all-{saved}"), built, every_steps=None)
        # Kernels of another kind have other slots, and columns that are cut otherwise other values in them.
        restored = manager.restore(step=5, slots_rule="mean", strict=False)
        assert restored is not None
        found = whole_tables(place, built) | dense_of(built)
        kept = [name for name in expected if "/" not in name or name.endswith("/weight")]
        assert_same({name: found[name] for name in kept}, {name: expected[name] for name in kept})
        train(place, built, 5, 6, manager)
        assert manager.save().kind == "baseline"
        train(place, built, 6, 8, manager)
        assert manager.save().kind == "delta"
        now = whole_tables(place, built)
        snapshot = manager.store.snapshot()
        for name in kept:
            if name.endswith("/weight"):
                table = name.removesuffix("/weight")
                assert np.array_equal(snapshot.table(table).read(), now[name].numpy()), (saved, sharding, name)
        manager.close()
