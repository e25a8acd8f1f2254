"""Run a scenario once per storage call and fault, and ask a fresh process what it finds.

The law of every sweep: whatever call fails in whatever way, what was acknowledged is there, and what a reader
sees is exactly one committed state.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import fsspec

from cnr_store.errors import CnrStoreError, CommitStateUnknown, CorruptStore, StorageFailure, UnsafeBackend
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash

ALL_FAULTS: tuple[FaultKind, ...] = tuple(FaultKind)
CI_FAULTS = (FaultKind.CRASH, FaultKind.CRASH_AFTER, FaultKind.FAIL_BEFORE, FaultKind.LOST_REPLY)
"""Those that find most, for a small tier."""

_BRINGS: dict[FaultKind, tuple[type[CnrStoreError], ...]] = {
    FaultKind.FAIL_BEFORE: (StorageFailure, CommitStateUnknown),
    FaultKind.FAIL_AFTER: (StorageFailure, CommitStateUnknown),
    FaultKind.LOST_REPLY: (StorageFailure, CommitStateUnknown),
    FaultKind.DELAYED_PUT: (StorageFailure, CommitStateUnknown),
    FaultKind.DISK_FULL: (StorageFailure, CommitStateUnknown),
    FaultKind.SHORT_READ: (CorruptStore, CommitStateUnknown, StorageFailure, UnsafeBackend),
}
"""The errors that a fault may come out as; of the other kinds nobody may hear."""


class Unexplained(AssertionError):
    """An error that no fault was there for."""


class Scenario(Protocol):
    """What is swept. All memory of a run must hang on the objects that `run` makes."""

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        """Make the state that every run starts from; not swept, done once."""

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        """Do the work through ``fs`` and append each state to ``acknowledged`` when its call has returned.

        May stop with a `CnrStoreError` that the fault explains; a `SimulatedCrash` passes through.
        """

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        """Open the store as a fresh process through ``fs`` and raise AssertionError if something is wrong."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run whose check did not hold."""

    fault: Fault
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.fault.kind.value} at call {self.fault.at} ({self.where}): {self.problem}"


@dataclass(slots=True)
class SweepReport:
    """What a sweep did. ``runs`` is less than calls x faults: a short read cannot happen to a write."""

    calls: int
    faults: int
    runs: int = 0
    crashed: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        summary = (
            f"{self.calls} calls x {self.faults} faults = {self.runs} applicable runs: "
            f"{self.crashed} crashed, {self.refused} ended in an error, {len(self.failures)} failures"
        )
        return "\n".join([summary, *map(str, self.failures[:20])])


def sweep(
    scenario: Scenario,
    faults: Iterable[FaultKind] = ALL_FAULTS,
    *,
    calls_hit: int = 1,
    delay_calls: Iterable[int] = (1, 4),
    every: int = 1,
) -> SweepReport:
    """Return what happened when ``scenario`` was run once per (storage call, fault that applies to it).

    Each run starts from a copy of the prepared files; its check runs twice if a put is still under way, the
    second time after it has landed. The first run is without faults and only counts calls.

    Parameters
    ----------
    calls_hit
        How many calls in a row a fault hits, so that a retry fails too.
    delay_calls
        A delayed put is run once for each: after how many calls its bytes land.
    every
        Sweep each ``every``-th call, and one of each operation on each kind of object; for a small tier.
    """
    prepared = IsolatedMemoryFileSystem()
    scenario.prepare(prepared)
    kinds, delays = tuple(faults), tuple(delay_calls)
    calm = FaultyFileSystem(prepared.fork())
    acknowledged: list[Any] = []
    scenario.run(calm, acknowledged)
    scenario.check(FaultyFileSystem(calm.inner), acknowledged)
    report = SweepReport(calls=len(calm.calls), faults=len(kinds))
    for call in sampled(calm.calls, every):
        for kind in kinds:
            if not kind.applies_to(call.operation):
                continue
            for delay in delays if kind is FaultKind.DELAYED_PUT else (0,):
                fault = Fault(kind, call.index, calls=calls_hit, delay_calls=delay)
                _run_once(scenario, prepared.fork(), fault, f"{call.operation} {call.path}", report)
    return report


def sampled(calls: Sequence[Call], every: int) -> list[Call]:
    """Return each ``every``-th call, and the first of each operation on each kind of object that is not among those."""
    chosen = {call.index for call in calls[::every]}
    kinds = {(call.operation, kind_of(call.path)) for call in calls[::every]}
    for call in calls:
        if (call.operation, kind_of(call.path)) not in kinds:
            kinds.add((call.operation, kind_of(call.path)))
            chosen.add(call.index)
    return [call for call in calls if call.index in chosen]


def kind_of(path: str) -> str:
    """The path of an object without numbers and names of segments: alike for objects of one kind."""
    return re.sub(r"[0-9a-f-]*[0-9][0-9a-f-]*", "", path)


def survived(scenario: Scenario, faults: Iterable[FaultKind] = ALL_FAULTS, **options: Any) -> SweepReport:
    """Return the report of a `sweep` without a failure, and print it.

    Raises
    ------
    AssertionError
        A check did not hold; the text lists which.
    """
    report = sweep(scenario, faults, **options)
    sys.stdout.write(f"{report}\n")
    assert not report.failures, str(report)
    return report


@contextmanager
def explained(fs: FaultyFileSystem) -> Iterator[None]:
    """Let an error of the library through only if the fault hit within, and comes out as such errors.

    Raises
    ------
    Unexplained
        It is another one: of a state that an earlier fault left wrong, say.
    """
    hits = fs.hits
    try:
        yield
    except CnrStoreError as error:
        kind = None if fs.fault is None else fs.fault.kind
        if fs.hits == hits:
            raise Unexplained(f"no call failed, and yet {type(error).__name__}: {error}") from error
        if kind is None or not isinstance(error, _BRINGS.get(kind, ())):
            raise Unexplained(f"{kind} came out as {type(error).__name__}: {error}") from error
        raise


def _run_once(
    scenario: Scenario, inner: IsolatedMemoryFileSystem, fault: Fault, where: str, report: SweepReport
) -> None:
    fs = FaultyFileSystem(inner, fault=fault)
    acknowledged: list[Any] = []
    report.runs += 1
    try:
        try:
            with explained(fs):
                scenario.run(fs, acknowledged)
        except SimulatedCrash:
            report.crashed += 1
        except CnrStoreError:
            report.refused += 1
        scenario.check(FaultyFileSystem(inner), acknowledged)
        if fs.deliver_delayed():
            scenario.check(FaultyFileSystem(inner), acknowledged)
    except Exception as error:  # noqa: BLE001  a sweep reports every kind of failure and goes on
        report.failures.append(Failure(fault, where, f"{type(error).__name__}: {error}"))
