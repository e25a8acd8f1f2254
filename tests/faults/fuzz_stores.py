"""The stores that the fuzzer damages: golden ones, which have every kind of row and document, and three that are made.

A sample is its objects as bytes by key, so that a case begins with a dict and ends with a folder that is thrown away.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from cnr_store import (
    CnrStoreError,
    CompactionPolicy,
    RetentionPolicy,
    Store,
    TableOptions,
    collect_garbage,
    compact,
    maintain,
)
from cnr_store.format import arrays
from cnr_store.maintenance.compaction import compact_run
from cnr_store.relay import Relay
from tests.support.rectangles import Model, Parts, schema_of, tiling
from tests.support.snapshot_bytes import bytes_of

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"

State = dict[str, bytes]
Objects = dict[str, bytes]
Place = tuple[str | None, int]
"""A version of the store's own log (None), or of a branch."""


@dataclass(frozen=True)
class Sample:
    """A sound store and the values of each version; ``source`` has the objects of the store that a relay copied."""

    name: str
    objects: Objects
    held: dict[Place, State]
    source: Objects | None = None


def opened(root: Path) -> Store:
    return Store.open(str(root), fsync=False, threads=1)


def put_all(root: Path, objects: Objects) -> None:
    """Write objects as files."""
    folders = {key.rpartition("/")[0] for key in objects}
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for key, data in objects.items():
        (root / key).write_bytes(data)


def read_all(root: Path) -> Objects:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def places_of(store: Store) -> Iterator[Place]:
    """Return every position of every log that can be read."""
    for branch in (None, *sorted(store.branches())):
        log = store if branch is None else store.on_branch(branch)
        yield from ((branch, version) for version in range(log.latest_version() + 1))


def state_of(store: Store, place: Place) -> State:
    log = store if place[0] is None else store.on_branch(place[0])
    return bytes_of(log.snapshot(place[1]))


def held_by(root: Path) -> dict[Place, State]:
    held: dict[Place, State] = {}
    with opened(root) as store:
        for place in places_of(store):
            try:
                held[place] = state_of(store, place)
            except CnrStoreError:
                continue  # expired, superseded, or without a state
    return held


def kept_case(root: Path) -> None:
    """Compacted and expired versions, a cursor, a lease, and the notes of a compaction and of maintenance."""
    shutil.copytree(GOLDEN / "lattice" / "store", root)
    with opened(root) as store:
        with store.writer(run_id="fuzz") as writer:
            rows = np.asarray([1, 4], np.int64)
            snapshot = writer.restore()
            for step in range(3):
                name, view = next((n, snapshot.table(n)) for n in snapshot if snapshot.table(n).schema.keys == "dense")
                slots = {slot: view.read(slot=slot)[rows] for slot in view.schema.slots}
                with writer.begin(step=1000 + step) as txn:
                    txn.write_rows(name, rows, view.read()[rows[::-1]] + np.float32(step), slots=slots)
        compact_run(store, run=(1, 3))
        for number in range(9):
            store.tag(f"{number}{'x' * 1000}", store.latest_version())
        store.set_channel("serving")
        store.register_cursor("consumer", store.latest_version())
        lease = store.lease(ttl_s=3600)
        kept = next((root / "leases" / "readers").iterdir())
        note = kept.read_bytes()
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=2), grace_s=0, orphan_age_s=0, dry_run=False, force=True
        )
        maintain(store, compaction=CompactionPolicy(max_chain=3), retention=RetentionPolicy(keep_last=2))
        lease.release()
        put_all(root, {kept.relative_to(root).as_posix(): note})


def parts_case(root: Path) -> None:
    """Tables of many rectangles; some have rows that are escape rows in some columns only."""
    with Store.create(str(root), fsync=False, threads=1) as store:
        random_numbers = np.random.default_rng(4)
        ranges = ((0, 2), (2, 5))
        parts = Parts(store, Model(schema_of(20, 5, row_slot=True), ranges), 4)
        for number in range(4):
            parts.save(tiling(random_numbers, 20, ranges, free=False), full=number == 0)
        parts.close()


def groups_case(root: Path) -> None:
    """Tables that share arrays, also in shards; deltas that omit most of them, drop some and end some."""
    numbers, coded = np.random.default_rng(9), TableOptions(scale=0.25)
    tables = {f"t{k}": numbers.normal(0, 3, (9 + k, 4)).astype(np.float32) for k in range(5)}
    wide = {f"w{k}": numbers.normal(0, 3, (6, 3)).astype(np.float32) for k in range(2)}
    small_chunks = mock.patch.multiple(arrays, MAX_CHUNK_ROWS=16, SHARD_CHUNKS=2)
    with small_chunks, Store.create(str(root), fsync=False, threads=1) as store, store.writer(run_id="fuzz") as writer:
        with writer.begin(step=1) as txn:
            for name, values in {**tables, **wide}.items():
                txn.write_table(name, values, slots={"sum": np.ones(len(values), np.float32)}, options=coded)
            txn.put_dense({"bias": np.arange(5, dtype=np.float32), "mean": np.ones(3, np.float32)})
        for step, touched in ((2, ("t0", "t3", "w1")), (3, ("t1",)), (4, ()), (5, tuple(tables))):
            with writer.begin(step=step) as txn:
                for name in touched:
                    values = {**tables, **wide}[name]
                    rows = np.arange(step % 3, len(values), 2)
                    slots = {"sum": np.full(len(rows), step, np.float32)}
                    txn.write_rows(name, rows, values[rows] + np.float32(step), slots=slots)
                if step == 3:
                    txn.put_dense({"bias": np.ones(5, np.float32)})
                    txn.drop_dense("mean")
                if step == 4:
                    txn.drop_table("w0")


def relay_case(root: Path, source: Path) -> None:
    """A relay that dropped versions, and whose source has newer ones."""
    shutil.copytree(GOLDEN / "rows" / "store", source)
    with opened(source) as store:
        relay = Relay(store, str(root), start=4, policy=RetentionPolicy(keep_last=2), grace_s=1e6, fsync=False)
        relay.advance()
        compact(store, policy=CompactionPolicy(max_chain=1))
        relay.advance()
        store.set_channel("serving")
    with opened(root) as store:
        store.lease(ttl_s=3600)


@contextmanager
def same_names(seed: int) -> Iterator[None]:
    """Derive the names of transactions, branches and leases from a seed, so that a case is the same in each run."""
    numbers = random.Random(seed)
    with mock.patch("uuid.uuid4", side_effect=lambda: uuid.UUID(int=numbers.getrandbits(128), version=4)):
        yield


def golden(name: str) -> Sample:
    """A golden store."""
    root = GOLDEN / name / "store"
    return Sample(name, read_all(root), held_by(root))


def samples(folder: Path) -> list[Sample]:
    """Make all samples; ``folder`` is for their files and may be deleted afterwards."""
    names = ("rows", "affine", "float_bits", "branches", "overflow", "digits", "row_order", "one_shot", "shards")
    found = [golden(name) for name in names]
    makers: tuple[Callable[[Path], None], ...] = (kept_case, parts_case, groups_case)
    for make in makers:
        with same_names(1):
            make(folder / make.__name__)
        found.append(Sample(make.__name__, read_all(folder / make.__name__), held_by(folder / make.__name__)))
    with same_names(2):
        relay_case(folder / "relay", folder / "source")
    held = held_by(folder / "source") | held_by(folder / "relay")
    found.append(Sample("relay", read_all(folder / "relay"), held, read_all(folder / "source")))
    return found
