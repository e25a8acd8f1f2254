"""Trainings of four ranks that one of them may end: a model with a table cut over the ranks, and what starts it.

Starting four processes with torch takes seconds, so one launcher imports everything once and forks the ranks of each
run; it speaks lines of JSON::

    python -m tests.training.ranks_program
    {"folder": "/tmp/x", "name": "calm", "steps": 4}     ->  [0, 0, 0, 0]

Each rank writes what it trained, step by step, to files before it is saved: that is what a restore is compared with.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn

from cnr_store import TableOptions
from cnr_store.errors import CnrStoreError, RankLost
from cnr_store.segment.codes import TableCodes
from cnr_store.storage.local import LocalStorage
from cnr_store.training import CheckpointManager, PeerCopies, SavePolicy, StoreOptions, TrackingOptions
from cnr_store.training.ranks import ProcessRanks
from cnr_store.training.shards import Handle, LocalShard, ShardingLibrary, register_library, whole_shard
from cnr_store.training.survivor import Survivor
from cnr_store_gpu import RowTracker
from cnr_store_tools.demo.adagrad import RowWiseAdagrad

USERS, ITEMS, DIM, BATCH = 60, 40, 4, 6
CUTS = {4: (0, 20, 33, 34, USERS), 1: (0, USERS)}
"""Where the table of users is cut, by number of ranks; one rank has a single row of it."""
DEADLINE_S = 100.0
"""A rank that is not over by then hangs."""

When = Literal["before", "after"]


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients. One of the addends is not 0: exact."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        whole = gradients[0].clone()
        dist.all_reduce(whole)
        return whole


class RowShard(nn.Module):
    """The rows of a table that this rank holds; its forward gives the rows of all ranks."""

    def __init__(self, rows: tuple[int, int], table: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(table[rows[0] : rows[1]].clone())
        self.on_lookup: list[Callable[[torch.Tensor], None]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inside = (ids >= self.rows[0]) & (ids < self.rows[1])
        local = ids[inside] - self.rows[0]
        for tell in self.on_lookup:
            tell(local)
        part = torch.zeros(len(ids), DIM)
        part = part.index_put((inside.nonzero().flatten(),), F.embedding(local, self.weight, sparse=True))
        whole: torch.Tensor = _Sum.apply(part)  # type: ignore[no-untyped-call]
        return whole


class Model(nn.Module):
    """A table cut by rows over the ranks, one that all ranks hold, a dense layer, and dropout of each rank's own."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        cuts = CUTS[world]
        self.user = RowShard((cuts[rank], cuts[rank + 1]), torch.randn(USERS, DIM))
        self.item = nn.Embedding(ITEMS, DIM)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, mine: slice) -> torch.Tensor:
        joined = torch.cat([self.user(users)[mine], self.item(items[mine])], dim=1)
        result: torch.Tensor = self.out(self.drop(joined))
        return result


def _find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RowShard):
            shard = whole_shard(f"{name}.weight", module.weight, optimizers)
            found.append(dataclasses.replace(shard, num_rows=USERS, rows=module.rows))
    return found


@dataclass
class _Hook:
    calls: list[Callable[[torch.Tensor], None]]
    call: Callable[[torch.Tensor], None]

    def remove(self) -> None:
        self.calls.remove(self.call)


def _follow(model: nn.Module, tracker: RowTracker) -> list[Handle]:
    hooks: list[Handle] = []
    for shard in _find(model, []):
        module = model.get_submodule(shard.table.removesuffix(".weight"))
        assert isinstance(module, RowShard)

        def tell(ids: torch.Tensor, name: str = shard.name) -> None:
            tracker.lookup(name, ids)

        module.on_lookup.append(tell)
        hooks.append(_Hook(module.on_lookup, tell))
    return hooks


register_library("by hand", ShardingLibrary(find=_find, follow=_follow, unwrap=lambda _: None))


class RankTraining:
    """One rank of a training in which each rank learns from its own part of every batch."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(1)
        self.rank, self.world = rank, world
        self.model = Model(rank, world)
        self.averaged = [self.model.item.weight, *self.model.out.parameters()]
        self.optimizers = [
            RowWiseAdagrad([self.model.user.weight], 0.1),
            torch.optim.SGD([self.model.item.weight], 0.1),
            torch.optim.Adagrad(self.model.out.parameters(), 0.1),
        ]
        torch.manual_seed(100 + rank)

    def train(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        users = torch.randint(0, USERS, (BATCH * self.world,), generator=generator)
        items = torch.randint(0, ITEMS, (BATCH * self.world,), generator=generator)
        labels = torch.rand(BATCH * self.world, 1, generator=generator)
        mine = slice(BATCH * self.rank, BATCH * (self.rank + 1))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (self.model(users, items, mine) - labels[mine]).square().mean().backward()
        for parameter in self.averaged:
            assert parameter.grad is not None
            of_ranks = [torch.empty_like(parameter.grad) for _ in range(self.world)]
            dist.all_gather(of_ranks, parameter.grad)
            parameter.grad = torch.stack(of_ranks).sum(0)
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything that this rank's training depends on."""
        state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        state["user.momentum1"] = self.optimizers[0].state[self.model.user.weight]["momentum1"].clone()
        for name, parameter in self.model.out.named_parameters():
            state[f"out.{name}.sum"] = self.optimizers[2].state[parameter]["sum"].clone()
        state["rng"] = torch.get_rng_state()
        return {name: tensor.numpy() for name, tensor in state.items()}


@dataclass
class Calls:
    """The storage calls of a rank since `arm`; at one of them it may be killed, others along with it, or sleep."""

    job: dict[str, Any]
    rank: int
    is_armed: bool = False
    seen: list[str] = field(default_factory=list)

    def patch(self) -> None:
        for name in ("_read", "_put", "_create", "_list_objects", "_list_folders", "_delete"):
            setattr(LocalStorage, name, self._counted(name, getattr(LocalStorage, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(storage: LocalStorage, key: Any, *arguments: Any) -> Any:
            if not self.is_armed:
                return original(storage, key, *arguments)
            index = len(self.seen)
            self.seen.append(re.sub(r"[0-9a-f]{8}([0-9a-f]{24})?\b", "*", f"{name[1:]} {key}"))
            self._reach(index, "before")
            result = original(storage, key, *arguments)
            self._reach(index, "after")
            return result

        return call

    def _reach(self, index: int, when: When) -> None:
        if self.job.get("kill") == [self.rank, index, when]:
            for rank in self.job.get("along", ()):
                os.kill(noted(Path(self.job["folder"]), self.job["name"], rank, "pid")[0], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job.get("slow") == [self.rank, index, when]:
            time.sleep(self.job["sleep_s"])
            note(self.job, self.rank, "woke", time.monotonic())


def note(job: dict[str, Any], rank: int, name: str, value: Any) -> None:
    with open(Path(job["folder"]) / f"{job['name']}-r{rank}-{name}.jsonl", "a") as file:
        file.write(json.dumps(value) + "\n")


def noted(folder: Path, run: str, rank: int, name: str) -> list[Any]:
    path = folder / f"{run}-r{rank}-{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def log_state(job: dict[str, Any], training: RankTraining, step: int) -> None:
    np.savez(Path(job["folder"]) / f"{job['name']}-r{training.rank}-s{step}.npz", **training.state())  # type: ignore[arg-type]


def logged_state(folder: Path, run: str, rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(folder / f"{run}-r{rank}-s{step}.npz") as file:
        return dict(file)


def join(job: dict[str, Any], rank: int, world: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{job['folder']}/{job['name']}-meet", rank=rank, world_size=world,
        timeout=dt.timedelta(seconds=DEADLINE_S),
    )  # fmt: skip


def lose_rank_one(job: dict[str, Any], rank: int, world: int) -> int:
    """Two lines, on one of which every rank waits for rank 1; nobody leaves before all the others know it is lost."""
    join(job, rank, world)
    line = ProcessRanks(timeout_s=DEADLINE_S)
    other = line.another()
    for one in (line, other):
        one.exchange(b"here")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (other if rank == 3 else line).exchange(b"and now?")
    except RankLost as error:
        note(job, rank, "error", str(error))
    deadline = time.monotonic() + DEADLINE_S / 2
    while not all(noted(Path(job["folder"]), job["name"], one, "error") for one in (0, 2, 3)):
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.01)
    return 0


def managed(job: dict[str, Any], training: RankTraining) -> CheckpointManager:
    """Return the manager of a rank, with the options of the job."""
    return CheckpointManager(
        f"{job['folder']}/store",
        model=training.model,
        optimizer=training.optimizers,
        options=TableOptions(bits=4) if job.get("is_coded") else TableOptions.exact(),
        every_steps=job.get("every_steps", 1),
        save_policy=SavePolicy(policy=job.get("policy", "consecutive")),
        store_options=StoreOptions(
            threads=1,
            ranks=ProcessRanks(timeout_s=job.get("timeout_s", DEADLINE_S)),
            mirror=job.get("mirror", "memory"),
            peers=PeerCopies(**job["peers"]) if "peers" in job else None,
        ),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
    )


def spoil(survivor: Survivor) -> None:
    """Flip a bit of every object that a rank keeps for others."""
    for objects in survivor.copies.values():
        for data in objects.values():
            data[len(data) // 2] ^= 1


def run_recovering_rank(job: dict[str, Any], rank: int, world: int) -> int:
    """Train to ``job["steps"]``; if ranks are lost, the others keep their rows, and new processes take their places.

    States are logged by step; -1: that of a rank that survived, -2: that after the recovery.
    """
    calls = Calls(job if not job.get("is_new") else job | {"kill": None}, rank)
    calls.patch()
    torch.set_num_threads(1)
    training = RankTraining(rank, world)
    survivor: Survivor | None = None
    if not job.get("is_new"):
        join(job, rank, world)
        manager = managed(job, training)
        manager.restore()
        note(job, rank, "pid", os.getpid())
        dist.barrier()
        calls.is_armed = True
        try:
            for number in range(job["steps"]):
                if rank in job.get("dies", ()) and number == job["dies_before"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                training.train(number)
                log_state(job, training, number + 1)
                manager.step(reader_state={"next": number + 1})
                manager.wait_until_finished()
                note(job, rank, "kept", manager.peer_bytes)
                note(job, rank, "saved", [[report.version, report.step] for report in manager.history])
            manager.close()
        except (CnrStoreError, RuntimeError):
            survivor = manager.survivor()
            if job.get("spoils"):
                spoil(survivor)
            note(job, rank, "known", [[report.version, report.step] for report in manager.history])
            dist.destroy_process_group()
            log_state(job, training, -1)
        else:
            return 1  # nobody was lost
    calls.seen.clear()
    calls.is_armed = True
    join(job | {"name": f"{job['name']}-again"}, rank, world)
    manager = managed(job, training)
    restored = manager.restore(survivor=survivor)
    assert restored is not None
    note(job, rank, "recovered", [restored.step, restored.version, list(restored.lost_ranks), restored.stale_steps])
    note(job, rank, "calls", calls.seen)
    note(job, rank, "from a peer", restored.peer_bytes)
    log_state(job, training, -2)
    for number in range(restored.step, job["steps"]):
        training.train(number)
        log_state(job, training, number + 1)
        manager.step(reader_state={"next": number + 1})
    manager.save()
    for report in manager.history:
        note(job, rank, "acknowledged", [report.version, report.step])
    note(job, rank, "kinds", [report.kind for report in manager.history])
    manager.close()
    return 0


def run_rank(job: dict[str, Any], rank: int, world: int) -> int:
    """Restore what there is, train to ``job["steps"]``, save each step; 1 if it ended early, which is noted."""
    calls = Calls(job, rank)
    calls.patch()
    torch.set_num_threads(1)
    join(job, rank, world)
    training = RankTraining(rank, world)
    manager = managed(job, training)
    ended = 0
    acknowledged = 0
    try:
        restored = manager.restore()
        note(job, rank, "restored", 0 if restored is None else restored.step)
        calls.is_armed = True
        for number in range(0 if restored is None else restored.reader_state["next"], job["steps"]):
            training.train(number)
            log_state(job, training, number + 1)
            if job.get("damage") == number:
                damaged_mirror_is_refused(job, training, manager, number)
            else:
                manager.step(reader_state={"next": number + 1})
            for report in manager.history[acknowledged:]:
                note(job, rank, "acknowledged", [report.version, report.step])
            acknowledged = len(manager.history)
        manager.wait_until_finished()
    except (CnrStoreError, RuntimeError) as error:  # gloo's, where a collective of the training met it first
        ended = 1
        chain = [error, *([error.__cause__] if error.__cause__ else [])]
        note(job, rank, "error", [time.monotonic(), *(f"{type(one).__name__}: {one}" for one in chain)])
    try:
        manager.close()
    except CnrStoreError as error:
        ended = 1
        note(job, rank, "close", f"{type(error).__name__}: {error}; {error.__cause__!r}")
    for report in manager.history[acknowledged:]:
        note(job, rank, "acknowledged", [report.version, report.step])
    note(job, rank, "calls", calls.seen)
    return ended


def damaged_mirror_is_refused(
    job: dict[str, Any], training: RankTraining, manager: CheckpointManager, number: int
) -> None:
    """Change one code of rank 2's mirror; note how the save ends, and go on after a restore."""
    manager.wait_until_finished()
    before = manager.store.latest_version()
    if training.rank == 2:
        writer = manager._saver.writer.current
        assert writer is not None
        (shard,) = writer.shards(["user.weight"])["user.weight"]
        codes = writer.mirrors.get(shard)
        assert isinstance(codes, TableCodes)
        codes.arrays["codes"][0, 1] += 1
        if job["policy"] != "baseline":  # a baseline looks at all codes, a delta at the digest that is kept of them
            writer.mirrors.put(shard, codes, codes.digest())
    try:
        manager.step(reader_state={"next": number + 1})
        manager.wait_until_finished()
    except CnrStoreError as error:
        cause = error.__cause__
        note(job, training.rank, "refused", [type(error).__name__, type(cause).__name__, str(cause)])
    note(job, training.rank, "versions", [before, manager.store.latest_version()])
    restored = manager.restore()
    assert restored is not None
    assert restored.step == number
    for name, array in logged_state(Path(job["folder"]), job["name"], training.rank, number).items():
        assert np.array_equal(array, training.state()[name]), name
    training.train(number)
    manager.step(reader_state={"next": number + 1})
    manager.wait_until_finished()


def fork_rank(job: dict[str, Any], rank: int, world: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        # A launcher that is killed takes its ranks along; its pipes are not theirs.
        output = os.open(Path(job["folder"]) / f"{job['name']}-r{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run = lose_rank_one if job.get("lines") else run_recovering_rank if job.get("recovers") else run_rank
        code = run(job, rank, world)
    except BaseException:  # noqa: BLE001 (the test shows the file)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_job(job: dict[str, Any]) -> list[int | None]:
    """Run four ranks; returns their exit codes, minus the signal for one that was killed, None for one that hung.

    With ``recovers`` each rank that is killed is replaced, once.
    """
    children = [fork_rank(job, rank, 4) for rank in range(4)]
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + DEADLINE_S
    while not all(child in codes for child in children):
        for child in [*children]:
            if child in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if job.get("recovers") and codes[child] == -signal.SIGKILL:
                    rank = children.index(child)
                    children[rank] = fork_rank(job | {"is_new": True}, rank, 4)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.005)
    return [codes[child] for child in children]


def main(commands: TextIO, answers: TextIO) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    importlib.import_module("tests.support.warm_training")  # compiled code is loaded before ranks are forked
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # ranks that collect garbage would copy the memory of all that was imported
    for line in commands:
        answers.write(json.dumps(run_job(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
