"""The life of a store on real servers behind a faulty network: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from cnr_store import CnrStoreError, Conflict, StorageFailure, Store, Writer, verify_store
from cnr_store.errors import CommitStateUnknown, DoesNotApply, NotAStore, StoreExists
from cnr_store.format.commit_record import DATA_KINDS, LogEntry, is_live
from cnr_store.format.layout import MANIFEST
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.compaction.plan import CompactionPolicy
from cnr_store.maintenance.compaction.run import compact_run
from cnr_store.maintenance.gc.run import collect_garbage
from cnr_store.storage import Storage, open_storage
from tests.faults.life_model import LifeModel, State, differing, read_state, unreferenced
from tests.support.fault_proxy import Aim, FaultProxy, NetworkFault, fault_proxy
from tests.support.servers import Place

pytestmark = pytest.mark.servers

RETRY = RetryPolicy(deadline_s=0.3, first_delay_s=0.01, max_delay_s=0.1)
SERVERS = ["s3", "azure"]
LIVES = 20
"""How many lives `make soak` lives on each server."""
PATIENCE = 40
"""How often a client asks again before it must have come through: longer than any fault lasts."""

COMMITS = ("PUT", "/commits/")
TARGETS = [
    COMMITS, COMMITS, ("GET", "/commits/"), ("PUT", "/data/"), ("GET", "/data/"), ("PUT", f"/{MANIFEST}"), ("", ""),
]  # fmt: skip
DELETIONS = [COMMITS, ("DELETE", "/data/"), ("DELETE", "/data/"), ("", "")]
"""What faults aim at: method and a part of the path."""

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """A place, and the way to it through the proxy."""

    place: Place
    proxy: FaultProxy

    def behind_proxy(self) -> Storage:
        """Storage whose client gives up soon, so that faults reach the code of the store."""
        options = dict(self.place.storage_options)
        if "endpoint_url" in options:
            options["endpoint_url"] = f"http://127.0.0.1:{self.proxy.port}"
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
        else:
            options["connection_string"] = re.sub(r":\d+/", f":{self.proxy.port}/", options["connection_string"])
        storage = open_storage(self.place.url, storage_options=options)
        _shorten_retries(storage)
        return storage

    def open(self) -> Store:
        return Store.open_on(self.behind_proxy(), threads=2, retry=RETRY)

    def create(self) -> Store:
        return Store.create_on(self.behind_proxy(), threads=2, retry=RETRY)

    def open_directly(self) -> Store:
        return Store.open(self.place.url, storage_options=self.place.storage_options, threads=2)


def _shorten_retries(storage: Storage) -> None:
    """One retry inside the client, at once; without this Azure's waits a quarter of a minute before each."""
    fs: Any = storage._fs  # type: ignore[attr-defined]
    if hasattr(fs, "retries"):
        fs.retries = 2
        return
    for policy in fs.service_client._pipeline._impl_policies:
        if hasattr(policy, "initial_backoff"):
            policy.total_retries, policy.initial_backoff = 1, 0.05
            policy.increment_base, policy.random_jitter_range = 0, 0


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    place: Place = request.getfixturevalue(f"{request.param}_place")
    with fault_proxy(_port(place)) as proxy:
        yield Backend(place, proxy)


def _port(place: Place) -> int:
    options = place.storage_options
    url = options.get("endpoint_url") or re.search(r"BlobEndpoint=([^;]+)", options["connection_string"]).group(1)  # type: ignore[union-attr]
    port = urlsplit(url).port
    assert port is not None
    return port


@dataclass
class Saved:
    """A save that was acknowledged: its version, and what a reader must see there."""

    version: int
    state: State
    model: LifeModel


@dataclass
class Life:
    """A store's life with a fault drawn for each of its acts."""

    backend: Backend
    seed: int
    model: LifeModel = field(init=False)
    saved: dict[int, Saved] = field(default_factory=dict)
    """By training step: each attempt has its own."""
    head: int = -1
    """The step whose state the head must be."""
    refused: set[int] = field(default_factory=set)
    """Steps whose saves failed for good: none may be in the log."""
    acts: Counter[str] = field(default_factory=Counter)
    """Acts that were acknowledged and put a record of that kind into the log."""
    errors: Counter[str] = field(default_factory=Counter)
    tags: dict[str, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    """Name to the step of the save that it points to, as for tags."""
    step: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.model = LifeModel.fresh(self.seed)
        self.proxy = self.backend.proxy

    # ---- acts under faults

    def aims(self, targets: list[tuple[str, str]] = TARGETS) -> list[Aim]:
        """A fault or two for one act."""
        aims = []
        for _ in range(self.random.choice((1, 1, 2))):
            method, part = self.random.choice(targets)
            aim = Aim(self.random.choice(list(NetworkFault)), method, part)
            aim.skip, aim.count = self.random.choice((0, 0, 1, 3, 8)), self.random.choice((1, 2, 3, 5, 12))
            aim.delay_s = self.random.uniform(0.005, 0.15)
            aims.append(aim)
        return aims

    def act(self, what: Callable[[], T], targets: list[tuple[str, str]] = TARGETS) -> T:
        """Do something until it is done: for acts that may be done twice."""
        with self.proxy.aimed(*self.aims(targets)):
            return self.patiently(what)

    def patiently(self, what: Callable[[], T], *fine: type[CnrStoreError]) -> T:
        for _ in range(PATIENCE):
            try:
                return what()
            except fine:
                raise
            except (StorageFailure, CommitStateUnknown) as error:
                self.errors[error.kind] += 1
        raise AssertionError("a fault that is over is still felt")

    def append(self, store: Store, kind: str, what: Callable[[], int]) -> int:
        """Commit a record that is no save, exactly once."""
        with self.proxy.aimed(*self.aims()):
            for _ in range(PATIENCE):
                try:
                    version = what()
                except CommitStateUnknown as error:
                    self.errors[error.kind] += 1
                    if store.internals.log.unresolved is None:
                        continue  # it was about an earlier record: nothing of this one was sent
                    entry = self.patiently(store.internals.log.resolve)
                    if entry is None:
                        continue
                    version = entry.record.v
                except StorageFailure as error:
                    self.errors[error.kind] += 1
                    continue
                self.acts[kind] += 1
                return version
        raise AssertionError("a fault that is over is still felt")

    def writer(self, store: Store) -> Writer:
        """Open a writer; each attempt may leave a fence behind, which changes nothing."""
        return self.act(store.writer)

    def save(self, writer: Writer, kind: Any = "delta") -> int:
        """Train a step and save it until it is acknowledged, each attempt under a step of its own."""
        self.step += 1
        self.model.train(self.seed, self.step)
        with self.proxy.aimed(*self.aims()):
            for _ in range(PATIENCE):
                if self.attempt(writer, kind):
                    return self.saved[self.step].version
                self.step += 1
        raise AssertionError("a fault that is over is still felt")

    def attempt(self, writer: Writer, kind: Any) -> bool:
        """One save: whether it was acknowledged."""
        if not writer.is_synced and self.saved:
            # The save before was acknowledged, and then its state could not be opened.
            self.errors["restored"] += 1
            self.restore(writer)
        try:
            with writer.begin(self.step, kind) as txn:
                self.model.write(txn)
            version = txn.version
            assert version is not None
        except CommitStateUnknown as error:
            self.errors[error.kind] += 1
            entry: LogEntry | None = self.patiently(writer.settle)
            if entry is None:
                self.refused.add(self.step)
                return False
            version = entry.record.v
        except Conflict:
            raise
        except CnrStoreError as error:
            self.errors[error.kind] += 1
            self.refused.add(self.step)
            if not writer.is_synced:
                self.restore(writer)
            return False
        self.model.saved()
        self.saved[self.step] = Saved(version, self.model.expected(), self.model.copy())
        self.head = self.step
        return True

    def restore(self, writer: Writer) -> None:
        """Load the head into a writer and compare it with what was acknowledged."""
        model = LifeModel.fresh(self.seed + 1)  # other values: what is not filled is seen

        def load() -> None:
            outputs = {name: {"values": table.values, **table.slots} for name, table in model.tables.items()}
            writer.restore(outputs)

        self.patiently(load)
        expected = self.saved[self.head].state if self.saved else None
        if expected is not None:
            for name, table in model.tables.items():
                for array, values in {"values": table.values, **table.slots}.items():
                    assert values.tobytes() == expected[f"{name}/{array}"].tobytes(), f"restored {name}/{array}"

    def check_reads(self, store: Store) -> None:
        """The head, and every tag and channel, through the faulty network: wrong never, late perhaps."""
        named = [({"tag": name}, step) for name, step in self.tags.items()]
        named += [({"channel": name}, step) for name, step in self.channels.items()]
        for given, step in [({}, self.head), *named]:
            seen = self.act(lambda given=given: read_state(store.snapshot(**given)))  # type: ignore[misc]
            assert differing(seen, self.saved[step].state) == [], f"{given or 'head'} of seed {self.seed}"

    # ---- the life

    def live(self) -> None:
        """Everything, stage by stage."""
        first = self.create()
        writer = self.writer(first)
        self.save(writer, "baseline")
        self.saves(writer, 2)
        self.tag(first, "good")
        self.move(first, "serving")
        self.saves(writer, 2)
        self.check_reads(first)

        second = self.act(self.backend.open)
        zombie, writer = writer, self.writer(second)
        self.act(lambda: self.restore(writer))
        self.saves(writer, 2)
        self.refuse(zombie)
        self.compact(first, CompactionPolicy(max_restore_ratio=50, fanout=3))  # deltas
        self.saves(writer, 1)
        self.move(second, "serving")
        self.check_reads(first)

        self.append(first, "rollback", lambda: first.rollback(self.saved[self.tags["good"]].version))
        self.head = self.tags["good"]
        self.model = self.saved[self.head].model.copy()
        writer = self.writer(first)
        self.act(lambda: self.restore(writer))
        self.saves(writer, 2)
        self.compact(second, CompactionPolicy(max_restore_ratio=1.1))  # baseline and deltas
        self.saves(writer, 1)
        self.collect(second)
        self.saves(writer, 1)
        self.save(writer, "baseline")
        self.saves(writer, 1)
        self.tag(second, "better")
        self.move(second, "serving")
        self.check_reads(second)

        third = self.act(self.backend.open)
        self.collect(third)
        writer = self.writer(third)
        self.act(lambda: self.restore(writer))
        self.saves(writer, 1)
        self.check_reads(third)
        self.collect(third)
        self.proxy.settle()

    def create(self) -> Store:
        """Create a store: an attempt that failed half-way is finished by opening it."""

        def create() -> Store:
            try:
                return self.backend.create()
            except StoreExists:
                return self.backend.open()
            except CommitStateUnknown:
                return self.backend.open()
            except NotAStore:
                return self.backend.create()

        return self.act(create)

    def saves(self, writer: Writer, count: int) -> None:
        for _ in range(count):
            self.save(writer)

    def tag(self, store: Store, name: str) -> None:
        self.append(store, "tag", lambda: store.tag(name, self.saved[self.head].version))
        self.tags[name] = self.head

    def move(self, store: Store, name: str) -> None:
        self.append(store, "channel", lambda: store.set_channel(name, self.saved[self.head].version))
        self.channels[name] = self.head

    def compact(self, store: Store, policy: CompactionPolicy) -> None:
        """Compact until the policy is content; at least once."""

        def compact() -> str:
            report = compact_run(store, policy=policy, force=True)
            assert report.outcome in ("committed", "nothing"), report
            return report.outcome

        before = len(store.head().record.chain)
        while self.act(compact) == "committed":
            pass
        assert len(store.head().record.chain) < before

    def collect(self, store: Store) -> None:
        """Expire and delete all that nothing keeps; nobody else writes meanwhile."""
        self.proxy.settle()
        self.act(lambda: collect(store), DELETIONS)
        self.proxy.settle()

    def refuse(self, zombie: Writer) -> None:
        """A writer that was fenced commits nothing, and is told so."""
        before, self.model = self.model, self.saved[self.head].model.copy()
        self.step += 1
        self.model.train(self.seed, self.step)
        with self.proxy.aimed(*self.aims()):
            for _ in range(PATIENCE):
                try:
                    acknowledged = self.attempt(zombie, "delta")
                except (Conflict, DoesNotApply) as error:
                    self.errors[error.kind] += 1
                    break
                assert not acknowledged, "a fenced writer was told that it committed"
                self.step += 1
            else:
                raise AssertionError("a fault that is over is still felt")
        self.refused.add(self.step)
        self.model = before

    # ---- what is there

    def check(self) -> None:
        """Compare the log and every version with what was acknowledged, without the proxy."""
        store = self.backend.open_directly()
        records = list(store.log())
        assert [record.v for record in records] == list(range(len(records)))[::-1]
        data = Counter(record.step for record in records if record.kind in DATA_KINDS and record.kind != "rollback")
        twice = {step: count for step, count in data.items() if count > 1}
        lost = self.saved.keys() - data.keys()
        ghosts = data.keys() - self.saved.keys()
        assert (twice, lost, ghosts) == ({}, set(), set()), f"seed {self.seed}"
        assert not data.keys() & self.refused
        for step, saved in self.saved.items():
            assert store.record(saved.version).step == step
        for kind in ("tag", "rollback", "channel"):
            assert sum(record.kind == kind for record in records) == self.acts[kind], kind
        assert {record.kind for record in records} >= {"compact", "expire"}
        for saved in self.saved.values():
            if is_live(records[0], saved.version):
                assert differing(read_state(store.snapshot(saved.version)), saved.state) == []
        assert differing(read_state(store.snapshot()), self.saved[self.head].state) == []
        assert store.tags() == {name: self.saved[step].version for name, step in self.tags.items()}
        assert store.channels() == {name: self.saved[step].version for name, step in self.channels.items()}
        for name, step in self.tags.items():
            assert differing(read_state(store.snapshot(tag=name)), self.saved[step].state) == []
        for name, step in self.channels.items():
            assert differing(read_state(store.snapshot(channel=name)), self.saved[step].state) == []
        collect(store)
        assert unreferenced(store) == []
        assert verify_store(store, all_versions=True, deep=True).problems == ()
        store.close()

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {sum(self.proxy.requests.values())} requests, faults {dict(self.proxy.faults)}, "
            f"errors {dict(self.errors)}, {len(self.saved)} saves acknowledged, {len(self.refused)} refused, "
            f"0 lost, 0 double"
        )


def collect(store: Store) -> None:
    report = collect_garbage(
        store, policy=RetentionPolicy(keep_last=2), grace_s=0, orphan_age_s=0, dry_run=False, force=True
    )
    assert report.outcome in ("clean", "collected"), report


def live(backend: Backend, seed: int) -> Life:
    life = Life(backend, seed)
    life.live()
    life.check()
    sys.stdout.write(f"{life}\n")
    return life


@pytest.mark.slow
@pytest.mark.parametrize("backend", SERVERS, indirect=True)
def test_a_life_on_a_faulty_network_loses_and_doubles_nothing(backend: Backend) -> None:
    life = live(backend, 1)

    assert sum(backend.proxy.faults.values()) > 20
    assert life.errors


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", SERVERS, indirect=True)
def test_many_lives_on_a_faulty_network_lose_and_double_nothing(
    backend: Backend,
) -> None:
    failures, saves = [], 0
    for seed in range(100, 100 + LIVES):
        place = Place(f"{backend.place.url}-{seed}", backend.place.storage_options)
        try:
            saves += len(live(Backend(place, backend.proxy), seed).saved)
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    counts = f"{LIVES} lives, {saves} saves acknowledged, {sum(backend.proxy.faults.values())} faults"
    report = "\n".join([f"{counts} {dict(backend.proxy.faults)}, failures {len(failures)}", *failures])
    sys.stdout.write(f"{report}\n")
    assert not failures, report


@pytest.fixture
def saved_once(backend: Backend) -> tuple[Store, Writer, LifeModel]:
    """A store with one baseline, its writer behind the proxy, and a step of training that is not saved."""
    store = backend.create()
    writer = store.writer()
    model = LifeModel.fresh()
    with writer.begin(0) as txn:
        model.write(txn)
    model.saved()
    model.train(1)
    return store, writer, model


def steps_of(backend: Backend) -> list[int]:
    """The steps of all saves in the log, oldest first."""
    with backend.open_directly() as store:
        return [record.step for record in store.log() if record.kind in ("baseline", "delta")][::-1]


def save(writer: Writer, model: LifeModel, step: int) -> None:
    with writer.begin(step) as txn:
        model.write(txn)


@pytest.mark.parametrize("backend", SERVERS, indirect=True)
def test_a_commit_whose_reply_is_lost_is_acknowledged_once(
    backend: Backend, saved_once: tuple[Store, Writer, LifeModel]
) -> None:
    _, writer, model = saved_once

    with backend.proxy.aimed(Aim(NetworkFault.LOST_REPLY, "PUT", "/commits/")):
        save(writer, model, 1)

    assert backend.proxy.faults["lost reply"] == 1
    assert steps_of(backend) == [0, 1]
    with backend.open_directly() as store:
        assert differing(read_state(store.snapshot()), model.expected()) == []


@pytest.mark.parametrize("backend", SERVERS, indirect=True)
def test_a_commit_that_nothing_is_heard_of_is_unknown_until_it_is_settled(
    backend: Backend, saved_once: tuple[Store, Writer, LifeModel]
) -> None:
    _, writer, model = saved_once
    lost = Aim(NetworkFault.LOST_REPLY, "", "/commits/", count=10_000)

    with backend.proxy.aimed(lost), pytest.raises(CommitStateUnknown):
        save(writer, model, 1)
    assert steps_of(backend) == [0, 1]
    entry = writer.settle()

    assert entry is not None
    assert entry.record.step == 1
    model.saved()
    model.train(2)
    save(writer, model, 2)
    assert steps_of(backend) == [0, 1, 2]
    with backend.open_directly() as store:
        assert differing(read_state(store.snapshot()), model.expected()) == []


@pytest.mark.parametrize("backend", SERVERS, indirect=True)
def test_a_fence_stops_a_commit_that_is_still_under_way(
    backend: Backend, saved_once: tuple[Store, Writer, LifeModel]
) -> None:
    _, writer, model = saved_once
    straggler = Aim(NetworkFault.STRAGGLER, "PUT", "/commits/", count=10_000, delay_s=3)

    with backend.proxy.aimed(straggler), pytest.raises(CommitStateUnknown):
        save(writer, model, 1)
    with backend.open_directly() as other:
        other.writer().close()
    backend.proxy.settle()

    assert straggler.hits > 1
    assert writer.settle() is None
    assert steps_of(backend) == [0]
    with pytest.raises(Conflict):
        save(writer, model, 2)
    with backend.open_directly() as store:
        assert differing(read_state(store.snapshot()), LifeModel.fresh().expected()) == []
