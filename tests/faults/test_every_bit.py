"""Each byte of a small store is flipped, each object removed, cut, emptied, swapped: verify names it, no restore lies.

The store has every kind of object: lattice, exact and affine tables with slots, set, add, delete and escape rows, dense
tensors, documents, a tag, a channel, a rollback, a superseded position, a compacted segment. One mutation at
a time: `verify_store(deep=True)` must name the object, and each version must restore what it held, or raise.

What need not be named, and may not matter either:

- ``*.receipt.json.zst``: superseded by the manifest, which has all of it; a reader never opens one.
- ``hint/latest.json``: a hint may be stale. (One that is unreadable or ahead of the log is named.)
- ``leases/``: they save work that would be done twice, and readers from haste; no decision about a state rests on them.

A removed newest record leaves a log that ends before it, which is named at the hint.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from cnr_store import CnrStoreError, Store, TableOptions, repair_store, verify_store
from cnr_store.format.layout import HINT, IDENTITY, MANIFEST, RECEIPT, commit_key
from cnr_store.maintenance.compaction import compact_run
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import created, opened
from tests.support.snapshot_bytes import bytes_of
from tests.support.sweep import kind_of

ROOT = "/s"
LEASES = "leases/"
SAMPLED = 100
"""Bytes flipped in the small tier, chosen by a seed, besides the first and last byte of an object of each kind."""


def build() -> IsolatedMemoryFileSystem:
    files = IsolatedMemoryFileSystem()
    numbers = np.random.default_rng(5)
    store = created(files, ROOT)
    lattice = numbers.integers(-9, 9, (6, 2)).astype(np.float32)
    exact, affine = numbers.normal(size=(5, 2)).astype(np.float32), numbers.normal(size=(4, 8)).astype(np.float32)
    slot = np.abs(numbers.normal(size=6)).astype(np.float32)
    writer = store.writer()
    with writer.begin(step=1) as txn:
        txn.write_table(
            "lattice", lattice, slots={"m": slot}, options=TableOptions(scale=1.0, nonfinite="escape")
        )  # fmt: skip
        txn.write_table("exact", exact, options=TableOptions.exact())
        txn.write_table("affine", affine, options=TableOptions(encoding="affine", bits=4))
        txn.put_dense({"w": numbers.normal(size=(2, 3)), "flag": np.asarray([1], np.uint8)}, {"flag": "bool"})
        txn.put_scalars({"lr": 0.5})
        txn.put_document("reader/0", {"at": (1, 2)})
    for step in (2, 3):
        rows = np.asarray([step, 5], np.int64)
        lattice[rows] += step
        exact[step] += 0.5
        with writer.begin(step=step) as txn:
            txn.write_rows("lattice", rows, lattice[rows], slots={"m": slot[rows]})
            txn.write_rows("exact", rows[:1], exact[rows[:1]])
            txn.put_dense({"w": numbers.normal(size=(2, 3))})
            txn.put_document("reader/0", {"at": step})
    store.tag("good", 3)
    assert compact_run(store, run=(1, 3)).version is not None
    with writer.begin(step=4) as txn:
        txn.delete_rows("lattice", np.asarray([0], np.int64))
        txn.write_rows(
            "lattice", np.asarray([1], np.int64), np.full((1, 2), np.inf, np.float32), slots={"m": slot[1:2]}
        )
        txn.write_rows("affine", np.asarray([2], np.int64), affine[:1])
    store.set_channel("serving", 4)
    files.pipe_file(f"{ROOT}/{commit_key(store.latest_version() + 1)}", b'{"torn')
    repair_store(store, dry_run=False)
    store.rollback(store.tags()["good"])
    store.close()
    return files


def build_overflow() -> IsolatedMemoryFileSystem:
    """A store of one small table, and more tags than a record has room for."""
    files = IsolatedMemoryFileSystem()
    store = created(files, ROOT)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", np.ones((2, 2), np.float32), options=TableOptions(scale=1.0))
    for number in range(9):
        store.tag(f"{number}{'x' * 1000}", 2)
    store.close()
    return files


def build_smallest() -> IsolatedMemoryFileSystem:
    """A baseline and a delta of one table, small enough to flip every byte of everything."""
    files = IsolatedMemoryFileSystem()
    store = created(files, ROOT)
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))
            txn.put_dense({"w": np.ones(2, np.float32)})
        with writer.begin(step=2) as txn:
            txn.write_rows("t", np.asarray([0, 3]), values[[0, 3]] + 1)
    store.close()
    return files


@dataclass
class Count:
    """The result of a sweep, by kind of mutation; `failures` describes the violations."""

    runs: dict[str, int] = field(default_factory=dict)
    unnamed: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        runs = ", ".join(f"{name} {number}" for name, number in self.runs.items())
        unnamed = ", ".join(f"{name} {number}" for name, number in self.unnamed.items())
        return "\n".join(
            [
                f"{sum(self.runs.values())} mutations ({runs}), {len(self.failures)} failures",
                f"without a name, and without effect: {unnamed or 'none'}",
                *self.failures[:20],
            ]
        )


class Sweep:
    """One store, and what its versions hold while nothing is wrong with it."""

    def __init__(self, build: Callable[[], IsolatedMemoryFileSystem] = build) -> None:
        self.files = build()
        self.objects = {path.removeprefix(f"{ROOT}/"): file.getvalue() for path, file in self.files.store.items()}
        self.count = Count()
        with self.open() as store:
            report = verify_store(store, all_versions=True, deep=True, threads=1)
            assert report.problems == ()
            self.newest = store.latest_version()
            self.tags = store.tags()
            self.base = {version: bytes_of(store.snapshot(version)) for version in report.restorable}
            chains = {tuple(e.seg for e in store.record(version).chain): version for version in sorted(self.base)}
        self.chains = {version: {f"data/{name}" for name in chain} for chain, version in chains.items()}

    def open(self) -> Store:
        return opened(self.files, ROOT)

    def put(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.files.rm_file(f"{ROOT}/{key}")
        else:
            self.files.pipe_file(f"{ROOT}/{key}", data)

    def mutate(self, what: str, changes: dict[str, bytes | None]) -> None:
        """Put other bytes in place, look, and heal."""
        changes = {key: data for key, data in changes.items() if data != self.objects[key]}
        if not changes:
            return
        self.count.runs[what] = self.count.runs.get(what, 0) + 1
        for key, data in changes.items():
            self.put(key, data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torn records
                self._look(what, changes)
        except Exception as error:  # noqa: BLE001  a sweep reports every kind of failure and goes on
            self.count.failures.append(f"{what} {sorted(changes)}: {type(error).__name__}: {error}")
        finally:
            for key in changes:
                self.put(key, self.objects[key])

    def _look(self, what: str, changes: dict[str, bytes | None]) -> None:
        try:
            store = self.open()
        except CnrStoreError:
            assert IDENTITY in changes, "cannot be opened"
            return
        with store:
            named = {problem.path for problem in verify_store(store, all_versions=True, deep=True, threads=1).problems}
            for key in changes.keys() - named:
                if key == commit_key(self.newest) and changes[key] is None:
                    assert HINT in named, f"{key} is not named, and nothing says that it is gone"
                    continue
                if any(key.startswith(f"{segment_of(one)}/") for one in named if one.endswith(MANIFEST)):
                    continue  # only its manifest says what the object should be, and that is named
                assert key == HINT or key.endswith(RECEIPT) or key.startswith(LEASES), (
                    f"{key} is not named, but {sorted(named)}"
                )
                kind = f"{key.rpartition('/')[2]} ({what})"
                self.count.unnamed[kind] = self.count.unnamed.get(kind, 0) + 1
            self._check_restore(store, None)
            for version in sorted(self._concerned(changes)):
                self._check_restore(store, version)

    def _concerned(self, changes: dict[str, bytes | None]) -> set[int]:
        """A version of each chain that has one of the objects, of all chains where it is no object of a segment.

        And those whose records are concerned.
        """
        folders = {"/".join(key.split("/")[:2]) for key in changes}
        in_segments = folders <= set().union(*self.chains.values())
        chains = {version for version, names in self.chains.items() if not in_segments or names & folders}
        return chains | {version for version in self.base if commit_key(version) in changes}

    def _check_restore(self, store: Store, version: int | None) -> None:
        try:
            snapshot = store.snapshot(version)
            found = bytes_of(snapshot)
        except CnrStoreError:
            return
        assert version in (None, snapshot.version)
        assert found == self.base[snapshot.version], f"version {snapshot.version} restores something else"

    def flip(self, places: Iterator[tuple[str, int, int]]) -> None:
        for key, at, bit in places:
            data = bytearray(self.objects[key])
            data[at] ^= 1 << bit
            self.mutate("flip", {key: bytes(data)})

    def whole_objects(self, chosen: Container[str] | None = None) -> None:
        """Remove, cut, empty and lengthen each object, and swap it with others: its neighbour, two of the same size."""
        keys = sorted(self.objects)
        for number, key in enumerate(keys):
            if chosen is not None and key not in chosen:
                continue
            data = self.objects[key]
            self.mutate("remove", {key: None})
            self.mutate("truncate", {key: data[: len(data) // 2]})
            self.mutate("cut one byte", {key: data[:-1]})
            self.mutate("empty", {key: b""})
            self.mutate("lengthen", {key: data + b"\n"})
            alike = [other for other in keys if other > key and len(self.objects[other]) == len(data)]
            for other in {keys[(number + 1) % len(keys)], *alike[:2]} - {key}:
                self.mutate("swap", {key: self.objects[other], other: data})


def segment_of(manifest: str) -> str:
    """The folder of a segment, by the key of its manifest."""
    return manifest.rpartition("/")[0]


def every_byte(objects: dict[str, bytes], bits: int, seed: int = 3) -> Iterator[tuple[str, int, int]]:
    """Each byte with ``bits`` of its bits, chosen by a seed."""
    chance = random.Random(seed)
    for key, data in sorted(objects.items()):
        for at in range(len(data)):
            for bit in chance.sample(range(8), bits):
                yield key, at, bit


def one_of_each_kind(objects: dict[str, bytes]) -> Container[str]:
    return {kind_of(key): key for key in objects}.values()


def sampled(objects: dict[str, bytes], number: int = SAMPLED) -> Iterator[tuple[str, int, int]]:
    """One bit of some bytes: the ends of an object of each kind, and a seeded choice of the others."""
    ends = one_of_each_kind(objects)
    everything = list(every_byte(objects, 1))
    chosen = set(random.Random(9).sample(range(len(everything)), min(number, len(everything))))
    for place, (key, at, bit) in enumerate(everything):
        if place in chosen or (key in ends and at in (0, len(objects[key]) - 1)):
            yield key, at, bit


def test_some_bytes_of_each_kind_of_object_are_named_and_never_restored() -> None:
    sweep = Sweep()

    sweep.flip(sampled(sweep.objects))

    report(sweep)


def test_an_object_of_each_kind_is_named_and_never_restored() -> None:
    sweep = Sweep()

    sweep.whole_objects(one_of_each_kind(sweep.objects))

    report(sweep)


@pytest.mark.soak
def test_every_object_is_named_and_never_restored() -> None:
    sweep = Sweep()

    sweep.whole_objects()

    report(sweep)


def test_damage_of_side_objects_is_named_and_never_restored() -> None:
    sweep = Sweep(build_overflow)
    sides = {key: data for key, data in sweep.objects.items() if key.startswith("state/")}
    assert len(sides) == 1

    sweep.flip(sampled(sides, 60))
    sweep.whole_objects(one_of_each_kind(sweep.objects))

    report(sweep)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(4))
def test_every_byte_of_the_smallest_store_is_named_and_never_restored(part: int) -> None:
    sweep = Sweep(build_smallest)

    sweep.flip(itertools.islice(every_byte(sweep.objects, 1), part, None, 4))

    report(sweep)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(8))
def test_every_byte_is_named_and_never_restored(part: int) -> None:
    """One seeded bit of every byte, and every bit of what is no text; in parts that may run at once."""
    sweep = Sweep()
    chunks = {key: data for key, data in sweep.objects.items() if not key.endswith(".json")}

    sweep.flip(itertools.islice(every_byte(sweep.objects, 1), part, None, 8))
    sweep.flip(itertools.islice(every_byte(chunks, 8), part, None, 8))

    report(sweep)


def report(sweep: Sweep) -> None:
    size = sum(map(len, sweep.objects.values()))
    print(f"{len(sweep.objects)} objects, {size} bytes: {sweep.count}")  # noqa: T201  shown with -s
    assert sweep.count.failures == []
