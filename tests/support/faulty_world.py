"""What the schedules of several processes share: files, views of them that fail, puts that land late, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from cnr_store.errors import CorruptStore
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash

STORE = "5" * 32
ROOT = "/root"
FAULTS = [
    FaultKind.FAIL_BEFORE,
    FaultKind.FAIL_AFTER,
    FaultKind.LOST_REPLY,
    FaultKind.DUPLICATE,
    FaultKind.DELAYED_PUT,
    FaultKind.SHORT_READ,
    FaultKind.CRASH,
    FaultKind.CRASH_AFTER,
]
OnCall = Callable[[Call], None]


@dataclass
class FaultyWorld:
    """The files of a store, and the views of them that processes have. Only one actor moves at a time: no locks."""

    random: Random
    files: IsolatedMemoryFileSystem = field(default_factory=IsolatedMemoryFileSystem)
    views: list[FaultyFileSystem] = field(default_factory=list)
    counter: int = 0

    def number(self) -> int:
        """A number that nobody else gets."""
        self.counter += 1
        return self.counter

    def view(self, on_call: OnCall | None = None, fault: Fault | None = None) -> FaultyFileSystem:
        """The files as a new process sees them; now and then a call of it lets puts under way land."""

        def at_call(call: Call) -> None:
            if on_call is not None:
                on_call(call)
            if self.random.random() < 0.02:
                self.deliver_delayed()

        view = FaultyFileSystem(self.files, fault=fault, on_call=at_call)
        self.views.append(view)
        return view

    def log(self, on_call: OnCall | None = None, fault: Fault | None = None) -> CommitLog:
        """The log as a new process sees it, whose waiting takes no time."""
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        return CommitLog(
            storage_from_filesystem(self.view(on_call, fault), ROOT),
            STORE,
            retry=RetryPolicy(deadline_s=0.3),
            monotonic_s=lambda: now[0],
            sleep=sleep,
            random=self.random,
        )

    def deliver_delayed(self) -> int:
        """Puts under way land at any time, their senders alive or not."""
        return sum(view.deliver_delayed() for view in self.views)

    def fault(self, *, within: int) -> Fault | None:
        """What goes wrong in one life of an actor, in its first so many calls."""
        if self.random.random() < 0.3:
            return None
        return Fault(
            self.random.choice(FAULTS),
            at=self.random.randrange(within),
            calls=self.random.choice((1, 1, 2, 40)),
            delay_calls=self.random.choice((1, 3, 12, 10**6)),
        )


World = TypeVar("World", bound=FaultyWorld)


def restarting(
    world: World, life: Callable[[World, CommitLog], None], *, within: int, ends: Iterable[type[Exception]]
) -> Callable[[OnCall], None]:
    """An actor that is started again when it dies or gives up by one of ``ends``, the last time without faults."""
    given_up = (SimulatedCrash, *ends)

    def actor(on_call: OnCall) -> None:
        for fault in (world.fault(within=within), world.fault(within=within), None):
            try:
                life(world, world.log(on_call, fault))
            except given_up:
                continue
            except CorruptStore:
                if fault is None or fault.kind is not FaultKind.SHORT_READ:
                    raise

    return actor


def run_worlds(run_world: Callable[[int], World], seeds: Iterable[int]) -> list[World]:
    """Run a world for each seed; an AssertionError names the seed."""
    worlds = []
    for seed in seeds:
        try:
            worlds.append(run_world(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return worlds
