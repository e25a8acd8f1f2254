"""The faulty file system applies a fault to one storage call, and to no other."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fsspec.exceptions import FSTimeoutError

from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.schedule import run_schedule
from tests.support.sweep import sweep


@pytest.fixture
def inner() -> IsolatedMemoryFileSystem:
    fs = IsolatedMemoryFileSystem()
    fs.pipe_file("/d/old", b"0123456789")
    return fs


def create(fs: FaultyFileSystem, path: str = "/d/new", data: bytes = b"new") -> None:
    fs.pipe_file(path, data, mode="create")


def test_without_a_fault_it_counts_and_passes_on(inner: IsolatedMemoryFileSystem) -> None:
    fs = FaultyFileSystem(inner)

    create(fs)
    with pytest.raises(FileExistsError):
        create(fs, data=b"other")
    assert fs.cat_file("/d/new") == b"new"
    assert fs.cat_file("/d/old", start=2, end=4) == b"23"
    assert set(fs.find("/d")) == {"/d/new", "/d/old"}
    fs.rm_file("/d/new")

    assert [call.operation for call in fs.calls] == ["create", "create", "read", "read", "list", "delete"]
    assert fs.count("create") == 2
    assert fs.paths("delete") == ["/d/new"]


@pytest.mark.parametrize(
    ("kind", "error", "lands"),
    [
        (FaultKind.FAIL_BEFORE, OSError, False),
        (FaultKind.FAIL_AFTER, OSError, True),
        (FaultKind.LOST_REPLY, FSTimeoutError, True),
        (FaultKind.DUPLICATE, FileExistsError, True),
        (FaultKind.DELAYED_PUT, FSTimeoutError, False),
        (FaultKind.DISK_FULL, OSError, False),
        (FaultKind.CRASH, SimulatedCrash, False),
        (FaultKind.CRASH_AFTER, SimulatedCrash, True),
    ],
)
def test_fault_hits_the_create_it_is_aimed_at(
    inner: IsolatedMemoryFileSystem, kind: FaultKind, error: type[BaseException], lands: bool
) -> None:
    fs = FaultyFileSystem(inner, fault=Fault(kind, at=1, delay_calls=10**6))
    create(fs, "/d/first")

    with pytest.raises(error):
        create(fs)

    assert inner.exists("/d/first")
    assert inner.exists("/d/new") == lands


def test_full_disk_says_so(inner: IsolatedMemoryFileSystem) -> None:
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.DISK_FULL, at=0))

    with pytest.raises(OSError) as full:
        fs.pipe_file("/d/new", b"x")

    assert full.value.errno == errno.ENOSPC


def test_crashed_process_stays_dead_and_its_files_stay(inner: IsolatedMemoryFileSystem) -> None:
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.CRASH, at=1))
    create(fs)
    calls: list[Callable[[], object]] = [
        lambda: fs.cat_file("/d/old"),
        lambda: create(fs, "/d/later"),
        lambda: fs.ls("/d"),
    ]

    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()

    assert fs.is_crashed
    assert FaultyFileSystem(inner).cat_file("/d/new") == b"new"
    assert not inner.exists("/d/later")


def test_delayed_create_lands_later_and_only_on_a_free_key(inner: IsolatedMemoryFileSystem) -> None:
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.DELAYED_PUT, at=0, calls=2, delay_calls=3))
    for path in ("/d/free", "/d/taken"):
        with pytest.raises(FSTimeoutError):
            create(fs, path, b"late")
    create(fs, "/d/taken", b"early")

    assert not inner.exists("/d/free")
    fs.cat_file("/d/old")
    assert inner.cat_file("/d/free") == b"late"
    fs.cat_file("/d/old")

    assert inner.cat_file("/d/taken") == b"early"
    assert fs.deliver_delayed() == 0


def test_short_read_and_stale_listing(inner: IsolatedMemoryFileSystem) -> None:
    for number in range(3):
        inner.pipe_file(f"/d/new{number}", b"x")

    short = FaultyFileSystem(inner, fault=Fault(FaultKind.SHORT_READ, at=0))
    stale = FaultyFileSystem(inner, fault=Fault(FaultKind.STALE_LISTING, at=0, calls=2))

    assert short.cat_file("/d/old") == b"01234"
    assert short.cat_file("/d/old") == b"0123456789"
    assert set(stale.find("/d")) == {"/d/old", "/d/new0"}
    assert set(stale.ls("/d", detail=False)) == {"/d/old", "/d/new0"}
    assert len(stale.find("/d")) == 4


def test_a_fault_may_be_aimed_at_one_operation(inner: IsolatedMemoryFileSystem) -> None:
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.FAIL_BEFORE, at=0, only="create"))
    fs.pipe_file("/d/put", b"x")

    with pytest.raises(OSError, match="injected"):
        create(fs)

    assert inner.find("/d") == ["/d/old", "/d/put"]


def test_stall_calls_its_hook_before_the_effect(inner: IsolatedMemoryFileSystem) -> None:
    stalled: list[str] = []
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.STALL, at=0), on_stall=lambda call: stalled.append(call.path))

    fs.cat_file("/d/old")
    fs.cat_file("/d/old")

    assert stalled == ["/d/old"]


def test_fork_is_a_copy(inner: IsolatedMemoryFileSystem) -> None:
    other = inner.fork()
    other.pipe_file("/d/old", b"changed")
    other.pipe_file("/d/more", b"x")

    assert inner.cat_file("/d/old") == b"0123456789"
    assert not inner.exists("/d/more")
    assert IsolatedMemoryFileSystem().find("/") == []


class Counter:
    """Puts three objects; claims the second too early."""

    def prepare(self, fs: IsolatedMemoryFileSystem) -> None:
        fs.pipe_file("/ready", b"")

    def run(self, fs: FaultyFileSystem, acknowledged: list[str]) -> None:
        for number in range(3):
            acknowledged.extend([f"/{number}"] if number == 1 else [])
            try:
                fs.pipe_file(f"/{number}", b"x")
            except OSError:
                continue
            acknowledged.append(f"/{number}")

    def check(self, fs: FaultyFileSystem, acknowledged: list[str]) -> None:
        assert all(fs.exists(path) for path in ["/ready", *acknowledged]), "lost"


def test_sweep_runs_every_call_with_every_fault_that_applies() -> None:
    report = sweep(Counter(), [FaultKind.FAIL_BEFORE, FaultKind.CRASH_AFTER, FaultKind.SHORT_READ])

    assert (report.calls, report.faults, report.runs, report.crashed) == (3, 3, 6, 3)
    assert [(failure.fault.kind, failure.fault.at) for failure in report.failures] == [(FaultKind.FAIL_BEFORE, 1)]
    assert "fail_before at call 1 (write /1): AssertionError: lost" in str(report)


def test_schedule_interleaves_actors_and_repeats_by_seed() -> None:
    def worlds_order(seed: int) -> list[str]:
        inner, seen = IsolatedMemoryFileSystem(), list[str]()

        def actor(name: str) -> Callable[..., None]:
            def act(on_call: Callable[..., None]) -> None:
                fs = FaultyFileSystem(inner, on_call=on_call)
                for number in range(4):
                    fs.pipe_file(f"/{name}{number}", b"")
                    seen.append(name)

            return act

        run_schedule([actor("a"), actor("b")], seed)
        return seen

    orders = [worlds_order(seed) for seed in range(20)]

    assert orders == [worlds_order(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 5
    assert all(sorted(order) == [*"aaaabbbb"] for order in orders)


def test_a_slow_actor_moves_seldom_while_others_do() -> None:
    def actor(on_call: Callable[..., None]) -> None:
        fs = FaultyFileSystem(IsolatedMemoryFileSystem(), on_call=on_call)
        for _ in range(100):
            fs.pipe_file("/x", b"")

    order = run_schedule([actor, actor], 1, speeds=(0.1, 1.0))

    assert order[:100].count(0) < 30
    assert len(order) == 202


def test_a_storage_call_of_an_actor_whose_turn_it_is_not_is_refused() -> None:
    pauses: list[Callable[..., None]] = []

    def owner(on_call: Callable[..., None]) -> None:
        pauses.append(on_call)

    def another_thread(on_call: Callable[..., None]) -> None:
        while not pauses:
            on_call(Call(0, "read", "/x"))
        pauses[0](Call(0, "read", "/x"))  # as a second thread of the owner would

    with pytest.raises(RuntimeError, match="several threads"):
        run_schedule([owner, another_thread], 1)


def test_error_of_an_actor_reaches_the_caller() -> None:
    def fails(on_call: Callable[..., None]) -> None:
        raise ValueError("broken actor")

    with pytest.raises(ValueError, match="broken actor"):
        run_schedule([fails, lambda on_call: None], 0)
