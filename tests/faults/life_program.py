"""Processes that write stores until they are killed, and processes that race; one launcher forks them all.

Loading the library takes a second of a core, so the launcher does it once. It speaks lines of JSON::

    python -m tests.faults.life_program
    {"job": "live", "folder": "/tmp/x", "rounds": 3}                          ->  {"code": 0, "took_s": {"save": [...]}}
    {"job": "live", "folder": "/tmp/x", "phase": "save", "skip": 2, "delay_s": 0.01}   ->  {"code": -9, ...}
    {"job": "beside", "folder": "/tmp/x", "rounds": 30, "seed": 1, "most_s": 1}    ->  {"code": 0, "kills": 12, ...}
    {"job": "race", "racers": [{...}, {...}]}                                 ->  {"codes": [0, 0]}

A life writes what every save holds to a file before it saves, and what was acknowledged to another one behind it: that
is what a later process compares the store with.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cnr_store import Conflict, Store, TableOptions
from cnr_store.errors import CommitStateUnknown
from cnr_store.format.layout import COMMITS
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.compaction.plan import CompactionPolicy
from cnr_store.maintenance.compaction.run import compact_run
from cnr_store.maintenance.gc.run import collect_garbage
from cnr_store.storage import CreateOutcome, Storage
from tests.faults.life_model import LifeModel, State, read_state

ROWS = 2000
SEED = 5
EVERY_FULL = 16
"""Number of steps from one baseline to the next."""
PHASES = ("save", "compact", "gc")
EVERY_MAINTENANCE = 3
"""Number of steps from one compaction and collection to the next."""


@dataclass
class Life:
    """A training that continues from the newest state, and reports what it does next."""

    folder: Path
    tell: Callable[[str], None]
    model: LifeModel = field(init=False)
    step: int = 0

    def live(self, rounds: int | None, *, maintains: bool = True) -> None:
        """Save without end, or for some rounds; with or without compactions and collections."""
        store = Store.open(str(self.folder / "store"), threads=2)
        writer = store.writer()
        writer.restore()
        self.step = writer.head.record.step
        self.model = model_at(self.step)
        while rounds is None or rounds > 0:
            rounds = None if rounds is None else rounds - 1
            self.step += 1
            advance(self.model, self.step)
            write_values(self.folder, self.step, self.model.expected())
            with self.phase("save"), writer.begin(self.step, "baseline" if is_full(self.step) else "delta") as txn:
                self.model.write(txn)
            self.model.saved()
            note(self.folder / "acknowledged.jsonl", [txn.version, self.step])
            if maintains and self.step % EVERY_MAINTENANCE == 0:
                with self.phase("compact"):
                    compact_all(store, self.step)
                with self.phase("gc"):
                    collect(store)
        store.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.tell(name)
        yield
        self.tell("")


def compact_all(store: Store, step: int) -> None:
    """Compact until nothing is left to do: in turn deltas alone, and deltas with their baseline."""
    policy = CompactionPolicy(max_restore_ratio=20 if step % 2 else 1.05, fanout=2)
    # A compaction that was killed keeps its lease: nobody else is at work here, so it need not run out.
    while compact_run(store, policy=policy, force=True).outcome != "nothing":
        pass


def collect(store: Store) -> None:
    """Expire all but the newest checkpoints and delete what no version needs, without a grace period."""
    policy = RetentionPolicy(keep_last=2)
    report = collect_garbage(store, policy=policy, grace_s=0, orphan_age_s=0, dry_run=False, force=True)
    assert report.outcome in ("clean", "collected"), report


def maintain(folder: Path, step: int) -> None:
    """Compact and collect during a training, without end; saves in progress are kept."""
    with Store.open(str(folder / "store"), threads=2) as store:
        while True:
            step += 1
            policy = CompactionPolicy(max_restore_ratio=20 if step % 2 else 1.05, fanout=2)
            compact_run(store, policy=policy, force=True)
            collect_garbage(
                store, policy=RetentionPolicy(keep_last=2), grace_s=0, orphan_age_s=3600, dry_run=False, force=True
            )


def is_full(step: int) -> bool:
    return step % EVERY_FULL == 1


def advance(model: LifeModel, step: int) -> None:
    """The training of one step; the same whenever it is done."""
    model.train(SEED, step)
    if is_full(step):
        model.revive()


def model_at(step: int) -> LifeModel:
    """Return the values of the training after a saved step."""
    model = LifeModel.fresh(SEED, ROWS)
    for one in range(1, step + 1):
        advance(model, one)
    model.saved()
    return model


def create_life(folder: Path) -> None:
    """A store for a life, before its first step."""
    with Store.create(str(folder / "store"), threads=2) as store, store.writer() as writer:
        model = LifeModel.fresh(SEED, ROWS)
        write_values(folder, 0, model.expected())
        with writer.begin(0) as txn:
            model.write(txn)
        note(folder / "acknowledged.jsonl", [txn.version, 0])


def write_values(folder: Path, step: int, state: State) -> None:
    """Write the values of the next save, atomically."""
    temporary = folder / "values.tmp"
    with temporary.open("wb") as file:
        np.savez(file, **{name.replace("/", "."): array for name, array in state.items()})  # type: ignore[arg-type]
    temporary.replace(folder / f"{step}.npz")


def read_values(folder: Path, step: int) -> State:
    """Read the values that were written for a save."""
    with np.load(folder / f"{step}.npz") as arrays:
        return {name.replace(".", "/"): arrays[name] for name in arrays.files}


def note(path: Path, what: Any) -> None:
    """Append a line with one system call, so that a kill leaves whole lines."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


def noted(path: Path) -> list[Any]:
    """Read the lines of `note`."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- racers


class Meeting:
    """A meeting point of two processes before each create of a log position, so that both try the same position.

    Who has lost a position, or won it, goes for the next one, and there is nothing else to go for: the two never miss
    each other. One that has ended is waited for no more.
    """

    def __init__(self, hears: int, tells: int) -> None:
        self._hears, self._tells = hears, tells
        self.lost = 0

    @staticmethod
    def pair() -> tuple[Meeting, Meeting]:
        """Return the two ends; each process closes that of the other."""
        to_first, to_second = os.pipe(), os.pipe()
        return Meeting(to_first[0], to_second[1]), Meeting(to_second[0], to_first[1])

    def attend(self, storage: Storage) -> None:
        """Wait before each create of a position, and count the creates that lost."""
        create = storage.create

        def meet_and_create(key: str, data: bytes) -> CreateOutcome:
            if not key.startswith(COMMITS):
                return create(key, data)
            with suppress(BrokenPipeError):
                os.write(self._tells, b"!")
                os.read(self._hears, 1)
            outcome = create(key, data)
            self.lost += outcome is not CreateOutcome.CREATED
            return outcome

        storage.create = meet_and_create  # type: ignore[method-assign]

    def leave(self) -> None:
        os.close(self._hears)
        os.close(self._tells)


def race(
    meeting: Meeting, *, kind: str, url: str, options: dict[str, Any], name: str, count: int, notes: str
) -> None:  # fmt: skip
    """Commit ``count`` records while another does the same, and note each that was acknowledged."""
    with Store.open(url, storage_options=options or None, threads=1) as store:
        meeting.attend(store.storage)
        (race_tags if kind == "tags" else race_saves)(store, name, count, Path(notes))
    note(Path(notes + ".lost"), meeting.lost)


def race_tags(store: Store, name: str, count: int, notes: Path) -> None:
    """Tag and untag in turn: these records commute, so none is refused, and both processes try every position."""
    for number in range(count):
        if number % 2:
            version = store.untag(f"{name}-{number - 1}")
        else:
            version = store.tag(f"{name}-{number}", 2)
        note(notes, [version, f"{name}-{number - number % 2}"])


def race_saves(store: Store, name: str, count: int, notes: Path) -> None:
    """Take the store over from the other process, and save: each commit is a fence and a baseline."""
    done, step = 0, 0
    while done < count:
        writer = store.writer()
        for _ in range(min(3, count - done)):
            step += 1
            try:
                with writer.begin(step, "baseline") as txn:
                    txn.write_table("t", np.full((4, 2), step, np.float32), options=TableOptions(scale=1.0))
                    txn.put_scalars({"by": name})
            except CommitStateUnknown:
                raise
            except Conflict:
                break
            note(notes, [txn.version, f"{name} {step}"])
            done += 1
        writer.close()


# ---- the launcher


def fork(work: Callable[[], None], log: Path) -> int:
    """Run a function in a child process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a child must not run into the launcher's loop
        with log.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def launch_life(job: dict[str, Any]) -> dict[str, Any]:
    """Run a life to its end, or kill it ``delay_s`` after the start of its ``skip``-th phase of that name."""
    folder = Path(job["folder"])
    reader, writer = os.pipe()

    def work() -> None:
        os.close(reader)
        Life(folder, lambda phase: tell(writer, phase)).live(job.get("rounds"))

    pid = fork(work, folder / "errors.txt")
    os.close(writer)
    took: dict[str, list[float]] = {}
    phase, since, skip = "", 0.0, int(job.get("skip", 0))
    with os.fdopen(reader) as lines:
        for line in lines:
            at, _, name = line.rstrip("\n").partition(" ")
            if phase and not name:
                took.setdefault(phase, []).append(float(at) - since)
            phase, since = name, float(at)
            if name and name == job.get("phase"):
                skip -= 1
                if skip < 0:
                    time.sleep(job["delay_s"])
                    os.kill(pid, signal.SIGKILL)
                    break
        left = [line.rstrip("\n").partition(" ")[2] for line in lines]
    # What it was at when it died: the kill may have come after the phase that it was meant for.
    return {"code": exit_code(pid), "took_s": took, "died_in": (left or [phase])[-1]}


def tell(pipe: int, phase: str) -> None:
    os.write(pipe, f"{time.monotonic()} {phase}\n".encode())


def launch_beside(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and kill the processes that compact and collect meanwhile, two at a time, until the training ends."""
    folder, chance = Path(job["folder"]), random.Random(job["seed"])
    life = Life(folder, lambda phase: None)
    trainer = fork(lambda: life.live(job["rounds"], maintains=False), folder / "errors.txt")
    codes: list[int] = []
    while True:
        pids = [fork(lambda n=n: maintain(folder, n), folder / "errors.txt") for n in (0, 1)]  # type: ignore[misc]
        time.sleep(chance.uniform(0.05, job["most_s"]))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            codes.append(exit_code(pid))
        done, status = os.waitpid(trainer, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "kills": len(codes), "codes": sorted(set(codes))}


def launch_race(job: dict[str, Any]) -> dict[str, Any]:
    meetings = Meeting.pair()

    def work(own: int) -> None:
        meetings[1 - own].leave()
        race(meetings[own], **job["racers"][own])

    pids = [fork(partial(work, own), Path(job["racers"][own]["notes"] + ".txt")) for own in (0, 1)]
    for meeting in meetings:
        meeting.leave()
    return {"codes": [exit_code(pid) for pid in pids]}


def warm_up() -> None:
    """Load the kernels before forking, so that every child has them; leave no thread."""
    with Store.create("memory://warm-up", threads=1) as store, store.writer() as writer:
        model = LifeModel.fresh()
        for step in (1, 2):
            model.train(step)
            with writer.begin(step) as txn:
                model.write(txn)
        read_state(store.snapshot())


def main() -> None:
    warm_up()
    jobs = {"live": launch_life, "beside": launch_beside, "race": launch_race}
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.write(json.dumps(jobs[job["job"]](job)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
