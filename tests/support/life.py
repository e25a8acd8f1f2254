"""A store's whole life as actors of a schedule: what they do, what they were told, and what must hold then.

The training is one table of a few rows whose values are numbers that no other step writes, so a state that was put
together wrongly is wrong in its values; the oracle is what each trainer held in memory when it saved.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from cnr_store.errors import (
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    Conflict,
    CorruptStore,
    DoesNotApply,
    Fenced,
    MissingObject,
    NotFound,
    StorageFailure,
)
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.layout import DATA, DATA_GROUP, MANIFEST, RECEIPT, segment_key, segment_prefix
from cnr_store.format.records import CommitRecord
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.gc import collect_garbage
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import TableCodes
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from cnr_store.store import Store
from cnr_store.write.table_options import TableOptions
from cnr_store.write.writer import Writer
from format_spec.generate_golden import in_turn
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.faulty_world import FAULTS, ROOT, FaultyWorld, OnCall
from tests.support.inline_workers import inline
from tests.support.schedule import Actor

ROWS, DIM = 4, 2
OPTIONS = TableOptions(scale=1.0)
TABLE = Shard("t")
LIFE_FAULTS = [*FAULTS, FaultKind.DELAYED_PUT]  # which alone makes an outcome unknown, so twice
Values = np.ndarray[Any, Any]


class Violation(AssertionError):
    """Something that must always hold does not."""


@dataclass
class World(FaultyWorld):
    """What the actors were told.

    Attributes
    ----------
    trained, base, owner
        By step (no two saves share one): what the trainer held, the step of the state that it trained from, its name.
    acknowledged, refused
        What the trainers were told of their saves.
    """

    trained: dict[int, Values] = field(default_factory=dict)
    base: dict[int, int] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    acknowledged: dict[int, LogEntry] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    tagged: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    stale: tuple[TableCodes, int | None] | None = None
    calls: int = 0
    opened: dict[int, FaultyFileSystem] = field(default_factory=dict)

    def hits(self, store: Store) -> int:
        """How many calls of a process have failed so far."""
        return self.opened[id(store)].hits

    def tell(self, kind: str, what: str) -> None:
        """Note what happened: the count by kind, and the story for a failing seed."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.told.append(what)

    def aimed_fault(self) -> Fault | None:
        """What goes wrong in one life of an actor."""
        if self.random.random() < 0.2:
            return None
        kind = self.random.choice(LIFE_FAULTS)
        # A life makes few creates, and they are what commits: half of the faults are aimed at them.
        aimed = kind.applies_to("create") and self.random.random() < 0.5
        # Of the puts that come late only one behind the other leaves an outcome unknown.
        calls = (40,) if aimed and kind is FaultKind.DELAYED_PUT else (1, 2, 40)
        return Fault(
            kind,
            at=self.random.randrange(40),
            calls=self.random.choice(calls),
            delay_calls=self.random.choice((1, 3, 12, 10**6)),
            only="create" if aimed else None,
        )

    def create(self) -> None:
        """Make the store."""
        Store.create_on(storage_from_filesystem(self.files, ROOT), threads=1).close()

    def open(self, on_call: OnCall | None = None, fault: Fault | None = None) -> Store:
        """Open the store in a process of its own, whose waiting takes no time."""

        def at_call(call: Call) -> None:
            self.calls += 1
            if on_call is not None:
                on_call(call)

        view = self.view(at_call, fault)
        storage = storage_from_filesystem(view, ROOT)
        store = inline(Store.open_on(storage, threads=1, retry=RetryPolicy(deadline_s=0.3)))
        self.opened[id(store)] = view
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        # What is asked of a storage has tests of its own.
        store.storage.probe = lambda: None  # type: ignore[method-assign]
        log = store.internals.log
        log._monotonic_s, log._sleep, log._random = lambda: now[0], sleep, self.random
        return store

    def look(self) -> Store:
        """Open the store as one who disturbs nobody and whom nothing disturbs."""
        return inline(Store.open_on(storage_from_filesystem(self.files, ROOT), threads=1))

    def check_read(self, record: CommitRecord, values: Values, dense: Values | None = None) -> None:
        """What was read of a version is what was trained."""
        if dense is not None and not np.array_equal(dense, dense_of(record.step)):
            raise Violation(f"version {record.v} ({record.kind}, step {record.step}) has dense tensor {dense.tolist()}")
        expected = self.trained.get(record.step)
        if expected is None or not np.array_equal(expected, values):
            raise Violation(
                f"version {record.v} ({record.kind}, step {record.step}) reads {values.tolist()}, trained was "
                f"{None if expected is None else expected.tolist()}"
            )

    def check_gone(self, version: int, error: MissingObject) -> None:
        """Only data that no live version needs may be gone."""
        with self.look() as store:
            if is_live(store.head().record, version):
                raise Violation(f"version {version} is live, and {error}")


class _InlinePool:
    """Stands in for the pool of threads that deletes: an actor makes one call after the other."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.map = map

    def __enter__(self) -> _InlinePool:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


@contextmanager
def deterministic(random: Random) -> Iterator[None]:
    """Make what an actor does a function of the seed: names of transactions and records, and the order of deletes."""

    names = (uuid.UUID(int=random.getrandbits(128), version=4) for _ in itertools.count())
    with (
        mock.patch("uuid.uuid4", in_turn(names, uuid.uuid4)),
        mock.patch("cnr_store.storage.remote.ThreadPoolExecutor", _InlinePool),
        # Names that nobody needs leave the lists by a record of their own, which is for many of them otherwise.
        mock.patch("cnr_store.maintenance.gc.plan.CLEAN_UP_AT", random.choice((1, 64))),
    ):
        yield


Life = Callable[[World, Store], None]


def restarting(world: World, life: Life) -> Actor:
    """An actor that meets faults; a trainer is started again when it dies or gives up, the last time without any."""

    def actor(on_call: OnCall) -> None:
        lives = world.random.choice((0, 0, 1, 1, 2)) if life is trainer else 1
        faults = [world.aimed_fault() for _ in range(lives)]
        for fault in (*faults, None) if life is trainer else faults:
            try:
                with world.open(on_call, fault) as store:
                    life(world, store)
            except SimulatedCrash:
                world.tell("crash", f"a {life.__name__} crashed")
            except (Conflict, StorageFailure) as error:
                world.tell(error.kind, f"a {life.__name__} gave up: {error}")
            except CorruptStore:
                if fault is None or fault.kind is not FaultKind.SHORT_READ:
                    raise

    return actor


def alone(world: World, life: Life) -> None:
    """Run an actor that nobody disturbs, on a storage that loses replies: it must never hear of a conflict.

    Raises
    ------
    Violation
    """
    kind = world.random.choice((FaultKind.FAIL_AFTER, FaultKind.LOST_REPLY, FaultKind.DUPLICATE))
    fault = Fault(kind, at=world.random.randrange(40), calls=world.random.choice((1, 2, 4)))
    before = set(world.refused)
    abandoned, stale = world.counts.get("compaction abandoned", 0), world.counts.get("stale", 0)
    try:
        with world.open(fault=fault) as store:
            life(world, store)
    except Conflict as error:
        raise Violation(f"a {life.__name__} alone met a conflict: {error}") from error
    except StorageFailure:
        pass
    require(world.counts.get("compaction abandoned", 0) == abandoned, "a compaction alone was abandoned")
    if world.counts.get("stale", 0) == stale:
        met = [
            world.refused[step] for step in world.refused.keys() - before if "StorageFailure" not in world.refused[step]
        ]
        require(not met, f"a trainer alone was refused: {met}")


def trainer(world: World, store: Store) -> None:
    """Take over, restore, train, and save a few steps; each refusal is survived as a trainer survives it."""
    name = f"trainer {world.number()}"
    writer = store.writer(run_id=name)
    values = np.zeros((ROWS, DIM), np.float32)
    dirty: set[int] = set()
    base = take_state(world, writer, values)
    is_stale = False
    for _ in range(world.random.choice((1, 1, 2, 2))):
        if world.random.random() < 0.1:
            is_stale = take_stale_mirror(world, writer) or is_stale
        step = world.number()
        rows = sorted(world.random.sample(range(ROWS), world.random.choice((1, 2))))
        values[rows] = step, -step
        dirty |= set(rows)
        world.trained[step], world.base[step], world.owner[step] = values.copy(), base, name
        entry: LogEntry | None
        hits = world.hits(store)
        try:
            save(writer, step, values, dirty, world.random)
            entry = writer.head
        except CommitStateUnknown as error:
            require_cause(world, store, error, hits, is_stale=is_stale)
            entry = writer.settle()  # unknown again: this life ends
            if entry is None:
                refuse(world, step, error)
        except (Conflict, StorageFailure, CorruptStore) as error:
            require_cause(world, store, error, hits, is_stale=is_stale)
            refuse(world, step, error)
            if isinstance(error, Fenced):
                raise
            entry = None
        if entry is not None:
            world.acknowledged[step] = entry
            world.tell("acknowledged", f"{name} saved step {step} as version {entry.record.v}")
            base = step
            dirty.clear()
        elif not writer.is_synced or world.random.random() < 0.3:
            base = take_state(world, writer, values)
            dirty.clear()


def require_cause(world: World, store: Store, error: CnrStoreError, hits: int, *, is_stale: bool) -> None:
    """A save is refused for a call of its own that failed, for what others did, or for a mirror that is known wrong."""
    if isinstance(error, MissingObject) and error.version is not None:
        world.check_gone(error.version, error)
    elif isinstance(error, StorageFailure | CorruptStore | CommitStateUnknown):
        require(world.hits(store) > hits, f"no call failed, and yet {type(error).__name__}: {error}")
    elif isinstance(error, DoesNotApply) and error.version is None:
        require(is_stale, f"the mirror is of another state than the head: {error}")


def refuse(world: World, step: int, error: CnrStoreError) -> None:
    """Note that a save did not happen, and that it is not for a record of the trainer's own."""
    world.refused[step] = f"{type(error).__name__}: {error}"
    world.tell(error.kind, f"{world.owner[step]} was refused step {step}: {error}")
    if isinstance(error, Conflict) and error.version is not None:
        with world.look() as store:
            if store.record(error.version).writer.run_id == world.owner[step]:
                raise Violation(f"{world.owner[step]} met itself at step {step}: {error}")


def take_state(world: World, writer: Writer, values: Values) -> int:
    """Restore the head into ``values``; returns the step of that state, 0 for an empty store."""
    for _ in range(5):
        try:
            snapshot = writer.restore({"t": {"values": values}} if writer.head.record.chain else None)
        except MissingObject as error:
            world.check_gone(writer.head.record.v, error)
            continue
        if snapshot.is_empty:
            return 0
        if not np.array_equal(values, world.trained[snapshot.step]):
            world.check_read(snapshot.record, values)
        return snapshot.step
    raise StorageFailure("the head's data went away five times while it was restored")


def dense_of(step: int) -> Values:
    """A tensor that does not change at every step, so that segments refer to the bytes of earlier ones."""
    return np.asarray([step // 4], np.float32)


def take_stale_mirror(world: World, writer: Writer) -> bool:
    """Let the writer hold the mirror of an earlier state, as a rank that has missed a commit does; whether it does."""
    mirror, digest = writer.mirrors.get(TABLE), writer.mirrors.digest(TABLE)
    if mirror is None or not writer.is_synced:
        return False
    before, world.stale = world.stale, (deepcopy(mirror), digest)
    if before is not None:
        world.tell("stale", "a trainer holds the mirror of another state")
        writer.mirrors.put(TABLE, *before)
    return before is not None


def save(writer: Writer, step: int, values: Values, dirty: set[int], random: Random) -> None:
    """Save what was trained: mostly deltas, at times a baseline or a delta to the baseline."""
    chosen = random.random()
    kind: Any = "baseline" if chosen < 0.15 else "delta"
    base: Any = "baseline" if chosen > 0.8 else "head"
    with writer.begin(step, kind, base=base) as txn:
        if txn.kind == "baseline":
            txn.write_table("t", values, options=None if "t" in txn.tables else OPTIONS)
        else:
            rows = np.arange(ROWS) if base == "baseline" else np.asarray(sorted(dirty), np.int64)
            txn.write_rows("t", rows, values[rows])
        txn.put_dense({"d": dense_of(step)})


def tagger(world: World, store: Store) -> None:
    """Name versions."""
    for _ in range(world.random.choice((1, 2))):
        head = store.head().record
        if not head.chain:
            continue
        name = f"tag-{world.number()}"
        try:
            store.tag(name, head.v)
        except NotFound as error:
            world.tell(error.kind, f"{name} of version {head.v}: {error}")
            continue
        except MissingObject as error:
            world.check_gone(head.v, error)
            continue
        world.tagged[name] = head.v
        world.tell("tagged", f"{name} is version {head.v}")


def mover(world: World, store: Store) -> None:
    """Point a channel to versions, and at times go back to one."""
    for _ in range(world.random.choice((1, 2))):
        head = store.head().record
        version = world.random.randrange(head.v + 1)
        try:
            if not store.record(version).chain:
                continue
            if world.random.random() < 0.3:
                store.rollback(version)
                world.tell("rollback", f"back to version {version}")
            else:
                store.set_channel("serving", version)
                world.tell("channel", f"the channel is version {version}")
        except NotFound as error:
            world.tell(error.kind, f"a channel to version {version}: {error}")
        except MissingObject as error:
            world.check_gone(version, error)


def compactor(world: World, store: Store) -> None:
    """Compact some run of the chain, even if another compaction seems to be at work."""
    for _ in range(world.random.choice((2, 4))):
        head = store.head().record
        if len(head.chain) < 2 or world.random.random() < 0.3:
            continue
        start = world.random.randrange(len(head.chain) - 1)
        stop = min(len(head.chain), start + world.random.choice((2, 3)))
        try:
            report = compact_run(store, run=(start, stop), force=world.random.random() < 0.7)
        except BadInput as error:  # the chain has become shorter
            world.tell(error.kind, f"compaction of {start} to {stop} of version {head.v}: {error}")
        except MissingObject as error:
            world.check_gone(head.v, error)
        else:
            told = f"compaction of {start} to {stop} of version {head.v}: {report.outcome} {report.reason}"
            world.tell(f"compaction {report.outcome}", told)


def collector(world: World, store: Store) -> None:
    """Expire all but the newest and delete at once what nobody needs, saves under way among it."""
    for _ in range(world.random.choice((1, 2))):
        policy = RetentionPolicy(keep_last=world.random.choice((1, 1, 2)))
        report = collect_garbage(store, policy=policy, grace_s=0, orphan_age_s=0, dry_run=False, force=True)
        world.tell(f"gc {report.outcome}", f"a collection deleted {report.deleted_segments} segments")


def reader(world: World, store: Store) -> None:
    """Read the newest state, or one that has a name, at times under a lease."""
    for _ in range(2):
        names = {**store.tags(), **store.channels()}
        name = world.random.choice(sorted(names)) if names and world.random.random() < 0.5 else None
        try:
            version = store.latest_version() if name is None else names[name]
            if world.random.random() < 0.5:
                with store.lease(version):
                    read_leased(world, store, version)
            else:
                read(world, store, version)
        except NotFound as error:
            world.tell(error.kind, f"a reader of {name or 'the head'}: {error}")
        except MissingObject as error:
            world.check_gone(version, error)


def read_leased(world: World, store: Store, version: int) -> None:
    """Read all of a version that this reader holds: it may have expired, but not its data."""
    try:
        read(world, store, version)
    except MissingObject as error:
        raise Violation(f"version {version} is leased, and {error}") from error


def read(world: World, store: Store, version: int) -> None:
    """Read all of a version."""
    snapshot = store.snapshot(version)
    if not snapshot.is_empty:
        world.check_read(snapshot.record, snapshot.table("t").read(), snapshot.read_dense("d"))
        world.tell("read", f"a reader read version {version}")


def check(world: World) -> None:
    """Every law of the log and of what it names.

    Raises
    ------
    Violation
    """
    with world.look() as store:
        newest = store.head()
        entries = {entry.record.v: entry for entry in store.internals.log.walk(newest)}
        check_log(world, entries)
        check_live(world, entries, store)


def check_log(world: World, entries: dict[int, LogEntry]) -> None:
    """The records: each acknowledged save once, none that was refused, each on the state that it was trained from."""
    newest = entries[max(entries)].record
    require(sorted(entries) == list(range(newest.v + 1)), "log positions are not contiguous")
    saves = [entry.record for entry in entries.values() if entry.record.kind in ("baseline", "delta")]
    steps = [record.step for record in saves]
    require(len(steps) == len(set(steps)), f"a save is in the log twice: {sorted(steps)}")
    for step, entry in world.acknowledged.items():
        found = entries.get(entry.record.v)
        require(found is not None and found.digest == entry.digest, f"the acknowledged save of step {step} is lost")
    for step in steps:
        require(step not in world.refused, f"step {step} is in the log, and was refused: {world.refused.get(step)}")
    holder = ""
    for version in range(1, newest.v + 1):
        before, record = entries[version - 1].record, entries[version].record
        where = f"version {version} ({record.kind})"
        require(record.epoch == before.epoch + (record.kind == "fence"), f"{where} is in epoch {record.epoch}")
        require(record.ts_ms > before.ts_ms, f"{where} is not later than the one before")
        require(record.tags == before.tags or record.kind == "tag", f"{where} has other tags")
        require(record.channels == before.channels or record.kind == "channel", f"{where} has other channels")
        require(record.floor >= before.floor, f"{where} has a lower floor")
        if record.kind == "fence":
            holder = record.writer.run_id
        if record.kind in ("baseline", "delta"):
            at = before.step if before.chain else 0
            require(world.base[record.step] == at, f"{where} was trained from {world.base[record.step]}, sits on {at}")
            require(world.owner[record.step] == holder, f"{where} is of {world.owner[record.step]} after {holder}")
        elif record.kind == "rollback":
            require(record.step == entries[record.target or 0].record.step, f"{where} is not at its target's step")
        else:
            require(record.step == before.step, f"{where} changed the training state")
    require(world.tagged.items() <= newest.tags.items(), "a tag is lost")


def check_live(world: World, entries: dict[int, LogEntry], store: Store) -> None:
    """Every live version restores to what was trained."""
    newest = entries[max(entries)].record
    for name, version in (*newest.tags.items(), *newest.channels.items()):
        require(is_live(newest, version), f"{name} names version {version}, which has expired")
    require(is_live(newest, newest.v), "the head has expired")
    seen: set[tuple[tuple[str, ...], int]] = set()
    known: dict[str, Any] = {}
    for version, entry in entries.items():
        state = tuple(link.seg for link in entry.record.chain), entry.record.step
        if not state[0] or state in seen or not is_live(newest, version):
            continue
        seen.add(state)
        try:
            snapshot = Snapshot(store.storage, entry, store.internals.workers, known=known)
            known |= {reader.name: reader for reader in snapshot.readers}
            values, dense = snapshot.table("t").read(), snapshot.read_dense("d")
        except CorruptStore as error:
            raise Violation(f"live version {version} cannot be read: {error}") from error
        world.check_read(entry.record, values, dense)


def check_no_orphans(world: World) -> None:
    """After calm maintenance the objects of segments are those that live versions need, and no others.

    Raises
    ------
    Violation
    """
    end_leases(world.files)
    with world.look() as store:
        for _ in range(2):
            collect_garbage(
                store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, dry_run=False, force=True
            )
        there, needed = listed(world.files), referenced(store)
    require(there == needed, f"orphans: {sorted(there - needed)[:3]}, missing: {sorted(needed - there)[:3]}")


def end_leases(files: IsolatedMemoryFileSystem) -> None:
    """Let the time of what readers hold be over: those that died still hold it, rightly, until then."""
    for path in files.find(f"{ROOT}/leases/readers"):
        files.rm_file(path)


def listed(files: IsolatedMemoryFileSystem) -> set[str]:
    """Every object of a segment that there is."""
    return {path.removeprefix(f"{ROOT}/") for path in files.find(f"{ROOT}/data")}


def referenced(store: Store) -> set[str]:
    """Every object of a live version: manifests, what they list, and the receipts there are of who wrote that."""
    head = store.head().record
    there = {stat.key for stat in store.storage.list_objects(DATA)}
    keys = {DATA_GROUP}
    for entry in {entry for record in store.log() if is_live(head, record.v) for entry in record.chain}:
        manifest = SegmentReader.open(store.storage, entry).manifest
        keys |= {segment_key(entry.seg, path) for path in (MANIFEST, *(item.path for item in manifest.objects))}
        keys |= {key for key in there if key.startswith(segment_prefix(entry.seg)) and key.endswith(RECEIPT)}
    return keys


def require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` unless the law holds."""
    if not holds:
        raise Violation(otherwise)
