"""A relay that dies or fails at any storage call, of source or target: its readers see whole versions only."""

from __future__ import annotations

from typing import Any

import fsspec
import numpy as np
import pytest

from cnr_store import CnrStoreError, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.errors import NotAStore, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import is_live
from cnr_store.format.layout import COMMITS, DATA, RELAY_TRIMS, STATE, is_segment_name
from cnr_store.relay.relay import Relay
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultKind, FaultyFileSystem
from tests.support.memory import created, opened
from tests.support.snapshot_bytes import bytes_of
from tests.support.sweep import CI_FAULTS, survived

FAR, NEAR = "/far", "/near"
ROWS, DIM = 6, 2
KEEP = RetentionPolicy(keep_last=2)


def relay_of(fs: fsspec.AbstractFileSystem) -> Relay:
    return Relay(opened(fs, FAR), storage_from_filesystem(fs, NEAR), policy=KEEP, grace_s=0)


class Mirrored:
    """A relay that begins, goes on, passes versions over that went, follows a channel back, and lets versions go.

    The source is made before; what happens there between two looks comes from copies of the whole of it, so that every
    storage call that is swept is the relay's own.
    """

    def __init__(self) -> None:
        self.stages: list[dict[str, bytes]] = []
        self.truth: dict[int, dict[str, bytes]] = {}

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        store = created(fs, FAR)
        first = self.save(store, 1, "baseline")
        self.stage(fs)
        self.save(store, 2, "delta")
        for number in range(4):
            store.tag(f"{number}" + "x" * 900, first)
        self.stage(fs)
        for value in range(3, 7):
            self.save(store, value, "baseline")
        for number in range(4):
            store.untag(f"{number}" + "x" * 900)
        store.set_channel("serving", store.latest_version())
        self.note(store)
        for _ in range(2):
            collect_garbage(store, policy=RetentionPolicy(keep_last=1), grace_s=0, dry_run=False, force=True)
        self.stage(fs)
        back = store.channels()["serving"]
        for value in (7, 8, 9):
            self.save(store, value, "baseline")
        store.set_channel("trial", back)
        store.rollback(back)
        self.stage(fs)
        self.note(store)
        store.close()
        self.show(fs, 0)

    def save(self, store: Store, value: int, kind: Any) -> int:
        with store.writer() as writer:
            if kind == "delta":
                writer.restore()
            with writer.begin(value, kind=kind) as txn:
                table = np.full((ROWS, DIM), value, np.float32)
                if kind == "baseline":
                    txn.write_table("t", table, options=TableOptions(scale=1.0))
                else:
                    txn.write_rows("t", np.arange(2), table[:2])
        assert txn.version is not None
        return txn.version

    def note(self, store: Store) -> None:
        """Remember the states of all versions that are live now."""
        for version in range(store.latest_version() + 1):
            if is_live(store.head().record, version):
                self.truth[version] = bytes_of(store.snapshot(version))

    def stage(self, fs: fsspec.AbstractFileSystem) -> None:
        """Keep the source as it is now."""
        self.stages.append({path: fs.cat_file(path) for path in fs.find(FAR)})

    def show(self, fs: fsspec.AbstractFileSystem, stage: int) -> None:
        """Make the source that of a stage."""
        for path in set(fs.find(FAR)) - self.stages[stage].keys():
            fs.rm_file(path)
        for path, data in self.stages[stage].items():
            fs.pipe_file(path, data)

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        self.show(fs.inner, 0)
        relay: Relay | None = None
        for stage in range(len(self.stages)):
            self.show(fs.inner, stage)
            for _ in range(3):
                try:
                    relay = relay or relay_of(fs)
                    report = relay.advance()
                except CnrStoreError:
                    # As often as not another process goes on.
                    relay = relay if fs.count() % 2 else None
                    continue
                acknowledged.append((stage, report.version))
                break

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        assert isinstance(fs, FaultyFileSystem)
        fs = FaultyFileSystem(fs.inner.fork())  # the check goes on; a put still under way lands without it
        stage = next((n for n, kept in enumerate(self.stages) if set(fs.inner.find(FAR)) == kept.keys()), 0)
        self.check_readers(fs, acknowledged)
        # Whoever goes on, with the newest source there is, ends with all of it.
        self.show(fs.inner, len(self.stages) - 1 if stage == len(self.stages) - 1 else stage)
        for _ in range(2):
            relay_of(fs).advance()
        source, copy = opened(fs, FAR), opened(fs, NEAR)
        assert copy.head() == source.head()
        self.check_readers(fs, acknowledged)
        for key in (stat.key for folder in (COMMITS, STATE, DATA) for stat in copy.storage.list_objects(folder)):
            kept = [data for at in self.stages if (data := at.get(f"{FAR}/{key}")) is not None]
            assert copy.storage.read(key) in kept, key
        versions = list(range(copy.internals.log.first, copy.latest_version() + 1))
        assert [record.v for record in copy.log()] == versions[::-1]
        needed = {item.seg for item in copy.head().record.chain}
        for version in copy.channels().values():
            needed |= {item.seg for item in copy.record(version).chain}
        folders = {name for name in copy.storage.list_folders(DATA) if is_segment_name(name)}
        assert needed <= folders
        assert len(folders) <= 4 + len(needed), (folders, copy.storage.read(RELAY_TRIMS))

    def check_readers(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        """What is open at the relay is whole and what the source committed; anything else is refused by name."""
        try:
            copy = opened(fs, NEAR)
        except NotAStore:
            assert not acknowledged
            return
        newest = max((version for _, version in acknowledged if version is not None), default=0)
        head = copy.head()
        assert head.record.v >= newest
        assert self.bytes_at(copy, head.record.v) == self.truth[head.record.v]
        for version in range(copy.internals.log.first, head.record.v):
            found = self.bytes_at(copy, version)
            is_named = version in head.record.channels.values()
            assert found == self.truth[version] or (found is None and not is_named)

    def bytes_at(self, store: Store, version: int) -> dict[str, bytes] | None:
        """The state of a version; None if the relay does not hold it, or has not got to it yet."""
        try:
            return bytes_of(store.snapshot(version))
        except (VersionExpired, VersionNotFound):
            return None


def test_calm_run_is_right() -> None:
    scenario = Mirrored()
    report = survived(scenario, ())

    assert report.calls > 150


@pytest.mark.parametrize("fault", CI_FAULTS)
def test_a_relay_survives_a_fault_at_many_storage_calls(fault: FaultKind) -> None:
    survived(Mirrored(), (fault,), every=20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("calls_hit", [1, 40])
def test_a_relay_survives_every_fault_at_every_storage_call(calls_hit: int) -> None:
    survived(Mirrored(), calls_hit=calls_hit)
