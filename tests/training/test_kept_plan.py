"""A plan that is kept from save to save is the one that would be made anew, whatever a training changed meanwhile."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.runtime.ranks import OneRank
from cnr_store.training import kept_plan
from cnr_store.training.kept_plan import Entries, KeptPlan, LocalState, OwnedTables
from cnr_store.training.shards import hold
from cnr_store.training.state import (
    find_local_shards,
    live_slots,
    needs_new_schema,
    other_state,
    plan_state,
    slot_documents,
)
from cnr_store.training.tensors import WEIGHT
from cnr_store.types import FloatBits, Lattice
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu.bitmap import RowLists
from tests.training.runs import KINDS, Training

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch itself, by its Adagrad


class Planned:
    """A training with the plan that is kept of it."""

    def __init__(self, kind: str) -> None:
        self.training = Training(kind)
        self.model, self.optimizers = self.training.model, self.training.optimizers
        _, shards = find_local_shards(self.model, self.optimizers, (), OneRank())
        self.holdings = hold(shards, OneRank())
        self.kept = KeptPlan(self.model, self.optimizers, self.holdings)
        self.options = dict.fromkeys(self.holdings.tables, TableOptions())
        self.schemas: dict[str, TableSchema] = {}
        self.extra = 0

    def fresh(self) -> LocalState:
        """Return the state without anything kept."""
        plan = plan_state(self.model, self.optimizers, self.holdings.shards, self.holdings.tables)
        slots = {name: live_slots(shard) for name, shard in plan.shards.items()}
        return LocalState(plan, slots, other_state(plan, self.optimizers), slot_documents(plan.shards, slots))

    def store(self, local: LocalState) -> None:
        """Set schemas that the tables could be stored with as they are."""
        self.schemas = {
            one.table: TableSchema(
                num_rows=one.num_rows, dim=one.dim, dtype="float32", encoding=Lattice(scale=0.5),
                slots={
                    slot: SlotSchema(
                        kind="row" if tensor.ndim == 1 else "element", dtype="float32",
                        encoding=FloatBits(mantissa_bits=7),
                    )
                    for slot, tensor in local.slots[name].items()
                },
            )
            for name, one in local.state.shards.items()
        }  # fmt: skip


def trains(one: Planned) -> None:
    one.training.train(one.extra)


def loads_a_state(one: Planned) -> None:
    one.optimizers[0].load_state_dict(copy.deepcopy(one.optimizers[0].state_dict()))


def replaces_a_tensor(one: Planned) -> None:
    for state in one.optimizers[0].state.values():
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        break


def changes_a_tensor_in_place(one: Planned) -> None:
    for state in one.optimizers[0].state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim == 2:
                value.data = value.data.half() if value.dtype is torch.float32 else value.data.float()
                return


def forgets_a_state(one: Planned) -> None:
    if one.optimizers[0].state:
        one.optimizers[0].state.popitem()


def adds_an_entry(one: Planned) -> None:
    for parameter, state in one.optimizers[0].state.items():
        state[f"extra{one.extra}"] = [torch.ones(parameter.shape[0]), torch.ones(3), 7, None, 2.5][one.extra % 5]
        return


def changes_a_number(one: Planned) -> None:
    for state in one.optimizers[0].state.values():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                state[key] = [one.extra, None, float(one.extra)][one.extra % 3]


def adds_a_layer(one: Planned) -> None:
    layer = nn.Linear(2, 2)
    setattr(one.model, f"layer{one.extra}", layer)
    one.optimizers[0].add_param_group({"params": [layer.weight]})


def removes_a_parameter(one: Planned) -> None:
    one.optimizers[0].param_groups[-1]["params"][-1:] = []


def replaces_a_parameter(one: Planned) -> None:
    bias = one.model.out.bias
    one.model.out.bias = nn.Parameter(torch.zeros(1))
    for optimizer in one.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [one.model.out.bias if old is bias else old for old in group["params"]]
        optimizer.state.pop(bias, None)


def renames_a_buffer(one: Planned) -> None:
    one.model._buffers[f"buffer{one.extra}"] = one.model._buffers.popitem()[1] if one.model._buffers else torch.ones(2)


def stops_saving_a_buffer(one: Planned) -> None:
    one.model.register_buffer(f"own{one.extra // 2}", torch.ones(2), persistent=bool(one.extra % 2))


def stores_anew(one: Planned) -> None:
    one.store(one.fresh())


def changes_a_schema(one: Planned) -> None:
    for name, schema in one.schemas.items():
        one.schemas[name] = msgspec.structs.replace(schema, num_rows=schema.num_rows + one.extra % 2)
        return


def changes_options(one: Planned) -> None:
    name = sorted(one.options)[one.extra % 2]
    one.options[name] = [TableOptions(), TableOptions(encoding="raw")][one.extra // 2 % 2]


ACTIONS: list[Callable[[Planned], None]] = [
    trains, loads_a_state, replaces_a_tensor, changes_a_tensor_in_place, forgets_a_state, adds_an_entry,
    changes_a_number, adds_a_layer, removes_a_parameter, replaces_a_parameter, renames_a_buffer, stops_saving_a_buffer,
    stores_anew, changes_a_schema, changes_options,
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Whether both are made of the same objects: tensors by identity, numbers by value."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) and a.is_sparse:
        return bool(a._values().data_ptr() == b._values().data_ptr())
    return a is b if isinstance(a, torch.Tensor) else bool(a == b)


def assert_equal(found: LocalState, expected: LocalState) -> None:
    assert found.state.shards == expected.state.shards
    assert same(found.state.dense, expected.state.dense)
    assert [vars_of(one) for one in found.state.optimized] == [vars_of(one) for one in expected.state.optimized]
    assert same(found.slots, expected.slots)
    assert same(found.other.inline, expected.other.inline)
    assert same(found.other.dense, expected.other.dense)
    assert found.documents == expected.documents


def kinds_of(local: LocalState) -> dict[str, list[object]]:
    """What a gather with `LocalState.like` takes as known of the slots."""
    return {
        name: [(slot, one.dtype, one.layout, one.device, one.ndim, one.numel()) for slot, one in own.items()]
        for name, own in local.slots.items()
    }


def vars_of(one: Any) -> tuple[object, ...]:
    return one.name, id(one.parameter), one.optimizer, one.group, one.is_table


@given(
    kind=st.sampled_from(sorted(KINDS)),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.booleans()), max_size=12),
)
def test_a_kept_plan_is_the_one_made_anew(kind: str, actions: list[tuple[Callable[[Planned], None], bool]]) -> None:
    one = Planned(kind)
    known: tuple[object, dict[str, list[object]]] = object(), {}

    for act, saves in actions:
        one.extra += 1
        with contextlib.suppress(
            RuntimeError, KeyError, ValueError, TypeError
        ):  # torch refuses what others left behind
            act(one)
        if not saves:
            continue
        found, expected = one.kept.local_state(), one.fresh()
        assert_equal(found, expected)
        assert found.like is not known[0] or kinds_of(found) == known[1]
        known = found.like, kinds_of(found)
        assert one.kept.tables_anew(found, one.schemas, one.options) == {
            shard.table
            for name, shard in expected.state.shards.items()
            if needs_new_schema(one.schemas.get(shard.table), shard, expected.slots[name], one.options[shard.table])
        }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_training_that_goes_on_keeps_its_plan(kind: str) -> None:
    one = Planned(kind)
    for _ in range(2):
        trains(one)
        first = one.kept.local_state()
    trains(one)

    second = one.kept.local_state()

    assert second.state is first.state
    assert second.documents is first.documents
    assert second.like is first.like
    assert_equal(second, one.fresh())


def test_stored_tables_in_another_order_are_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Planned("adagrad")
    trains(one)
    local = one.kept.local_state()
    one.store(local)
    expected = one.kept.tables_anew(local, one.schemas, one.options)
    judged: list[str] = []
    monkeypatch.setattr(kept_plan, "needs_new_schema", lambda *_: judged.append("again"))

    backwards = dict(reversed(one.schemas.items()))

    assert list(backwards) != list(one.schemas)
    assert one.kept.tables_anew(one.kept.local_state(), backwards, one.options) == expected
    assert not judged


def test_a_kept_plan_keeps_no_optimizer_state_alive() -> None:
    one = Planned("adagrad")
    trains(one)
    one.kept.local_state()
    slot = weakref.ref(one.optimizers[0].state[one.model.user.weight]["sum"])

    loads_a_state(one)
    gc.collect()

    assert slot() is None


def test_a_state_dict_hook_that_leaves_out_other_buffers_later_is_seen() -> None:
    planned = Planned("adagrad")
    norm = nn.BatchNorm1d(2)
    planned.model.add_module("scaling", norm)
    left_out: set[str] = set()

    def leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in left_out:
            state.pop(prefix + name, None)

    norm.register_state_dict_post_hook(leave_out)
    before = planned.kept.state_plan().dense
    left_out.add("running_mean")

    assert before.keys() - planned.kept.state_plan().dense.keys() == {"scaling.running_mean"}


def test_shards_are_in_place_until_a_parameter_has_other_memory() -> None:
    model = nn.ModuleList(nn.Embedding(4, 2) for _ in range(3))
    _, shards = find_local_shards(model, [], (), OneRank())
    tables = OwnedTables(hold(shards, OneRank()).owned)
    assert tables.are_in_place()
    assert all(shard.weight is shard.view for shard in shards)

    model[1].weight.data = torch.ones(4, 2)  # a library may give a parameter other memory

    assert not tables.are_in_place()
    assert shards[1].weight.data_ptr() != shards[1].view.data_ptr()


def test_shards_are_in_place_when_their_storage_is_allocated_again() -> None:
    model = nn.ModuleList(nn.Embedding(4, 2) for _ in range(3))
    _, shards = find_local_shards(model, [], (), OneRank())
    tables = OwnedTables(hold(shards, OneRank()).owned)
    storage, before = model[1].weight.untyped_storage(), model[1].weight.data_ptr()

    storage.resize_(1 << 20)  # as a library does that frees it for a while
    assert model[1].weight.data_ptr() != before

    assert tables.are_in_place()
    assert tables.are_in_place()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_requests_for_all_tables_are_those_of_each_table(kind: str) -> None:
    one = Planned(kind)
    tables = OwnedTables(one.holdings.owned)
    for _ in range(2):
        trains(one)
        local = one.kept.local_state()
    taken = {name: torch.arange(at) for at, name in enumerate(one.holdings.owned)}
    counts = np.array([*map(len, taken.values())])
    rows = RowLists([*taken], torch.cat([*taken.values()]).cpu().numpy(), counts)
    if not isinstance(local.slots, Entries):
        assert local.like is None  # then the stager asks table by table
        return

    for _ in range(2):
        found = tables.requests(local.like, local.slots, rows)

        assert found is not None
        assert [*found] == [*taken]
        for name, own in one.holdings.owned.items():
            assert found[name].row_ids.tolist() == taken[name].tolist()
            assert same(found[name].tensors, {WEIGHT: own.shard.weight, **local.slots[name]})
        assert tables.are_in_place()
        at = [*map(torch.Tensor.data_ptr, found.tensors)]
        assert found.addresses is not None
        assert all(known in (0, own) for known, own in zip(found.addresses.tolist(), at, strict=True))
        assert np.count_nonzero(found.addresses) == len(taken)  # all weights are contiguous
        trains(one)
        local = one.kept.local_state()
    others = RowLists([*taken][1:], rows.row_ids, counts[1:])
    assert tables.requests(local.like, local.slots, others) is None
