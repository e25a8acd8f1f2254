"""The live objects of a training: model, optimizers, reader, this rank's shards, and the hooks that track changes.

Large dense layers can be tables too: `large_layers` selects them. Kernels are compiled here, before the first save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cnr_store.communication.state import CommunicationState
from cnr_store.encodings import scale
from cnr_store.errors import BadInput
from cnr_store.runtime.addresses import are_equal
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.communication_state import checked_communication
from cnr_store.training.dynamic_tables import DynamicTable, DynamicTables, StagedKeys, give_back_changes
from cnr_store.training.kept_plan import KeptPlan
from cnr_store.training.options import (
    PrecisionPolicy,
    StoreOptions,
    TrackingOptions,
    check_table_options,
    options_by_table,
)
from cnr_store.training.reader import IntervalReader, Stateful
from cnr_store.training.shards import (
    Handle,
    Holdings,
    LocalShard,
    find_shards,
    follow_lookups,
    hold,
    plain_optimizers,
    unwrapped,
    watched_shard,
)
from cnr_store.training.state import (
    StatePlan,
    find_local_shards,
    live_slots,
    mirror_estimate,
    plan_state,
    table_parameters,
)
from cnr_store.training.tensors import table_dtype_name
from cnr_store.write.mirrors import MirrorMode, check_mirror_folder
from cnr_store.write.schema_choice import encoding_name
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import RowTracker, Taken, WatchedShard, kernels, warmup
from cnr_store_gpu.host_copies import gather_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LiveTraining:
    """The live objects of one training, on this rank.

    Attributes
    ----------
    communication
        Hooks and optimizers that compress what ranks send, and meters.
    intervals
        The reader, if it reports when its state is exact.
    declared
        Names of parameters that are tables besides the embeddings, dense layers that are stored as tables among them.
    tables, options
        The names of all tables of the model, also those of other ranks, and their options.
    dynamic
        Tables that grow by key, beside the model.
    stored_tables
        The names of both.
    ranks, control
        The ranks that train together; ``control`` is a separate channel for the manager's messages beside saves.
    plan
        Where each part of the state is.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    reader: Stateful | None
    intervals: IntervalReader | None
    extras: Mapping[str, Stateful]
    communication: tuple[CommunicationState, ...]
    declared: tuple[str, ...]
    tables: frozenset[str]
    options: dict[str, TableOptions]
    dynamic: DynamicTables
    stored_tables: frozenset[str]
    holdings: Holdings
    tracker: RowTracker
    lookups: list[Handle]
    ranks: Ranks
    control: Ranks
    plan: KeptPlan

    def give_back(self, taken: Mapping[str, Taken], keyed: Iterable[StagedKeys]) -> None:
        """Count rows as changed again that a save has taken which is not known to be committed."""
        self.tracker.give_back(taken)
        give_back_changes(self.dynamic, keyed)

    def detach(self) -> None:
        """Remove every hook from the model. A second call does nothing."""
        self.tracker.detach()
        while self.lookups:
            self.lookups.pop().remove()


def watch_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    reader: Stateful | None,
    extras: Mapping[str, Stateful],
    communication: Sequence[CommunicationState],
    options: TableOptions | Mapping[str, TableOptions] | None,
    ranks: Ranks,
    *,
    tracking: TrackingOptions,
    precision: PrecisionPolicy,
    store_options: StoreOptions,
) -> LiveTraining:
    """Find the state to save, agree on it with all ranks, and attach the tracker to the model. Blocks.

    Raises
    ------
    BadInput, TableNotFound, BadDtype, Unsupported
        Raised on all ranks, also when only one of them fails. All hooks are removed before.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"model= takes a torch.nn.Module, found a {type(model).__name__}", found=type(model).__name__)
    model = unwrapped(model)
    optimizers = plain_optimizers(list(optimizer) if isinstance(optimizer, Sequence) else [optimizer])
    objects = checked_communication(communication)
    declared = tuple(tracking.tables)
    layers: list[str] = []
    plain: dict[str, nn.Parameter] = {}
    shards: list[LocalShard] = []

    def find() -> None:
        if precision.dense is not None:
            layers.extend(large_layers(model, optimizers, declared, precision.dense_above_bytes))
        found, here = find_local_shards(model, optimizers, (*declared, *layers), ranks)
        plain.update((name, parameter) for name, parameter in found.items() if name not in layers)
        shards.extend(here)

    # If one rank fails, the others raise now instead of waiting for it.
    together(ranks, find)
    holdings = hold(shards, ranks)
    given = options_by_table(options, [*holdings.tables, *tracking.dynamic_tables])
    by_table = {table: given[table] for table in holdings.tables}
    dynamic = checked_dynamic(tracking.dynamic_tables, given, holdings, ranks)
    if precision.dense is not None:
        named = options if isinstance(options, Mapping) else {}
        by_table |= {layer: named.get(layer, precision.dense) for layer in layers}
    # This also raises for state that cannot be saved.
    check_alike(lambda: plan_state(model, optimizers, holdings.shards, holdings.tables), optimizers, ranks)
    _log_memory(holdings, by_table, store_options.mirror)
    trackers: list[RowTracker] = []
    lookups: list[Handle] = []

    def attach() -> None:
        check_mirror_folder(store_options.mirror, store_options.mirror_folder)
        dtypes = {shard.table: table_dtype_name(shard.weight, shard.table) for shard in shards}
        check_table_options(by_table, dtypes)
        trackers.append(
            RowTracker(
                model, plain, optimizers=optimizers, allow_dense=tracking.allow_dense, assume=tracking.movements,
                on_bypass=tracking.on_bypass, verify_rows=tracking.verify_rows, in_flight=tracking.in_flight,
                shards=[
                    WatchedShard(shard.name, shard.rows[1] - shard.rows[0])
                    if shard.table in layers
                    else watched_shard(shard)
                    for shard in shards
                    if shard.table not in plain
                ],
            )
        )  # fmt: skip
        for shard in shards:
            if shard.table in layers:
                trackers[0].add_source(shard.name, EveryRow(shard.num_rows))
        lookups.extend(follow_lookups(model, trackers[0]))
        compile_kernels(shards, any(encoding_name(by_table[table], one) == "lattice" for table, one in dtypes.items()))

    try:
        together(ranks, attach)
        control = ranks.another()
    except BaseException:
        for handle in lookups:
            handle.remove()
        for tracker in trackers:
            tracker.detach()
        raise
    intervals = reader if isinstance(reader, IntervalReader) else None
    return LiveTraining(
        model, optimizers, reader, intervals, dict(extras), objects, (*declared, *layers), frozenset(holdings.tables),
        by_table, dynamic, frozenset({*holdings.tables, *dynamic.tables}), holdings,
        trackers[0], lookups, ranks, control, KeptPlan(model, optimizers, holdings),
    )  # fmt: skip


def checked_dynamic(
    tables: Mapping[str, DynamicTable], options: Mapping[str, TableOptions], holdings: Holdings, ranks: Ranks
) -> DynamicTables:
    """Return the dynamic tables of this rank, if all ranks have the same ones. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        They are not; or the model has a table of the same name.
    """
    found = DynamicTables(dict(tables), {name: options[name] for name in tables})

    def share() -> dict[str, list[Any]]:
        for name in sorted(tables.keys() & holdings.tables.keys()):
            raise BadInput(f"dynamic table {name!r} has the name of a table of the model; give it another", table=name)
        return found.forms()

    answers = together(ranks, share)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise BadInput(
                f"rank {rank} has other dynamic tables than rank 0; every rank has all of them, with the same width "
                "and slots, each with its own keys",
                expected=answers[0], found=answer,
            )  # fmt: skip
    return found


def _log_memory(holdings: Holdings, options: Mapping[str, TableOptions], mirror: MirrorMode) -> None:
    owned = [holding.shard for holding in holdings.owned.values()]
    total = sum(mirror_estimate(one.weight, live_slots(one), options[one.table]) for one in owned)
    where = {"memory": "in memory", "mmap": "on disk", "none": "not kept"}[mirror]
    logger.info("%d shards of tables, code mirrors of about %.1f MiB (%s)", len(owned), total / 2**20, where)


@dataclass(frozen=True, slots=True)
class Launches:
    """What the kernels of one device are compiled for: columns and dtypes of rows, tables that are taken at once."""

    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    num_tables: int


def launches_of(shards: Iterable[LocalShard]) -> dict[torch.device, Launches]:
    """Return what saves of these shards launch on each device; slots are float32, per row or per element. Pure."""
    by_device: dict[torch.device, list[LocalShard]] = {}
    for shard in shards:
        by_device.setdefault(shard.weight.device, []).append(shard)
    return {
        device: Launches(
            tuple(sorted({1, *(shard.weight.shape[1] for shard in own)})),
            tuple(sorted({torch.float32, *(shard.weight.dtype for shard in own)}, key=str)),
            len(own),
        )
        for device, own in by_device.items()
    }


def compile_kernels(shards: Iterable[LocalShard], chooses_scales: bool) -> None:
    """Compile what the first saves would compile in their stall (0.1 to 3 s a kernel, once per machine). Blocks.

    Of tables in host memory these are the kernels that find changed rows and, if tables are a lattice, choose a scale.
    """
    warmup()
    gather_parts(np.zeros((0, 6), np.int64))
    are_equal(np.zeros(1, np.int64), 0)
    if chooses_scales:
        scale.warmup()
    for device, launches in launches_of(shards).items():
        if device.type == "cuda":
            kernels.warmup(
                device, dims=launches.dims, dtypes=launches.dtypes, num_tables=(launches.num_tables,)
            )  # fmt: skip


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def large_layers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tables: Iterable[str], above_bytes: int
) -> tuple[str, ...]:
    """Return the names of two-dimensional parameters of at least ``above_bytes`` that are no tables. Changes nothing.

    Parameters
    ----------
    tables
        Parameters that the caller names as tables.

    Raises
    ------
    TableNotFound, Unsupported
    """
    known = {id(table) for table in table_parameters(model, tables).values()}
    sharded = {shard.table for shard in find_shards(model, optimizers)}
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in known
        and name not in sharded
        and parameter.dim() == 2
        and parameter.dtype in _DTYPES
        and type(parameter.data) is torch.Tensor
        and parameter.nbytes >= above_bytes
    )


class EveryRow:
    """A source of changes for a dense layer, of which every row changes in each step: no hook follows its steps."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def take(self) -> torch.Tensor:
        """Return all rows."""
        return torch.arange(self._num_rows)


def check_alike(plan: Callable[[], StatePlan], optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> None:
    """Return if all ranks have the dense tensors and optimizers of rank 0, which saves them. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        Names the first difference; or what ``plan`` raised on a rank.
    """
    answers = together(
        ranks,
        lambda: {
            "dense tensors": {name: list(tensor.shape) for name, tensor in plan().dense.items()},
            "optimizers": {
                str(number): [type(optimizer).__name__, len(optimizer.param_groups)]
                for number, optimizer in enumerate(optimizers)
            },
        },
    )
    for rank, answer in enumerate(answers):
        for what, given in answer.items():
            expected = answers[0][what]
            differ = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
            if differ:
                raise BadInput(
                    f"rank {rank} has other {what} than rank 0, which saves them for all: {differ[0]!r} is "
                    f"{given.get(differ[0], 'not there')}, on rank 0 {expected.get(differ[0], 'not there')}; only "
                    "tables may be on some ranks alone",
                    expected=expected.get(differ[0]), found=given.get(differ[0]),
                )  # fmt: skip
