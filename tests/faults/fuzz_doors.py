"""Every way into a store that the fuzzer tries, and the judge of what came of it.

A door ends with right data or raises: an error of the library's tree is an answer, anything else is a failure. Data is
right if it is what the sound store held, or else what the independent reader finds in the damaged one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import typer
from click.testing import CliRunner

from cnr_store import (
    CnrStoreError,
    CompactionPolicy,
    CorruptStore,
    RetentionPolicy,
    collect_garbage,
    compact,
    export_snapshot,
    maintain,
    read_status,
    repair_store,
    verify_store,
)
from cnr_store.encodings.widths import carrier
from cnr_store.maintenance.compaction import compact_run
from cnr_store.read.snapshot import Snapshot
from cnr_store.types import Affine, Rectangle
from cnr_store_tools.cli import app
from cnr_store_tools.exits import ExitCode
from format_spec.reader import cnr_read
from format_spec.reader.compare import _compare_version
from tests.faults.fuzz_mutations import Case
from tests.faults.fuzz_stores import Place, State, opened
from tests.support.snapshot_bytes import bytes_of


class Wrong(Exception):
    """A door returned a wrong value."""


class Visit:
    """One damaged store, in a separate folder for each door, and the values that were read of its versions."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.chance = random.Random(case.seed)
        self.seen: dict[Place, State] = {}
        self.errors: dict[Place, CnrStoreError] = {}
        self._copies = 0
        self.newest: Place | None = None
        """The newest version when the store was read; None if it could not be read."""

    def fresh(self) -> Path:
        """A copy of the damaged store that a door may change."""
        self._copies += 1
        root = self.folder / f"s{self._copies}"
        root.mkdir(parents=True)
        self.case.put(root)
        return root

    @cached_property
    def shared(self) -> Path:
        """The damaged store for doors that write nothing."""
        return self.fresh()

    def judge(self, root: Path, snapshot: Snapshot, found: State, branch: str | None = None) -> None:
        """Raise if values are neither those of the sound store nor those of the independent reader."""
        held = self.case.sample.held
        if found == held.get((branch, snapshot.version)):
            return
        if self.case.is_damage:
            raise Wrong(f"version {snapshot.version} of {branch or 'the store'} reads otherwise than before the damage")
        if branch is not None or self.case.sample.source is not None:
            return  # the independent reader reads no branches and no relays
        try:
            _compare_version(snapshot, self._read_otherwise(root, snapshot.version), "")
        except cnr_read.Refused as error:
            read_together(snapshot)
            raise Wrong(
                f"version {snapshot.version} is read, and the independent reader refuses it: {error}"
            ) from error
        except AssertionError as error:
            if ", document " in str(error):
                return  # a tree that no encoder writes is read alike, and compared by how an encoder writes it
            message = f"version {snapshot.version} is read otherwise than by the independent reader{error}"
            raise Wrong(message) from error

    def _read_otherwise(self, root: Path, version: int) -> Any:
        """Return the independent reader's values; damaged records that are newer are deleted first."""
        try:
            return cnr_read.Store(root).snapshot(version)
        except cnr_read.Refused:
            copy = root.with_name(f"{root.name}-{version}")
            shutil.copytree(root, copy, dirs_exist_ok=True)
            for path in (copy / "commits").iterdir():
                if int(path.stem) > version:
                    path.unlink()
            return cnr_read.Store(copy).snapshot(version)

    def check_as_before(self, root: Path, *, any_state: bool = False) -> None:
        """The newest state equals one that was read before a door changed the store."""
        with opened(root) as store:
            try:
                snapshot = store.snapshot()
                found = bytes_of(snapshot)
            except CnrStoreError as error:
                if self.newest is not None and not any_state:
                    raise Wrong(
                        f"version {self.newest[1]} was read, and then the newest is refused: {error}"
                    ) from error
                return
            known = [*self.seen.values(), *self.case.sample.held.values()]
            if self.newest is not None and not any_state:
                known = [self.seen[self.newest]]
            if found not in known:
                self.judge(root, snapshot, found)

    # The doors

    def read(self) -> None:
        """Read every version, and the newest one by every name; keep the values."""
        root = self.shared
        with opened(root) as store:
            error: CnrStoreError | None = None
            places: list[Place] = sorted(self.case.sample.held, key=str)
            try:
                snapshot = store.snapshot()
                found = bytes_of(snapshot)
                self.judge(root, snapshot, found)
                self.newest = (None, snapshot.version)
                self.seen[self.newest] = found
            except CnrStoreError as caught:
                error = caught
            reads_all = self.case.kind == "vector" or self.chance.random() < 0.05
            chosen = places if reads_all else self.chance.sample(places, min(2, len(places)))
            for place in chosen:
                try:
                    log = store if place[0] is None else store.on_branch(place[0])
                    snapshot = log.snapshot(place[1])
                    found = bytes_of(snapshot)
                except CnrStoreError as caught:
                    self.errors[place] = caught.with_traceback(None)  # which holds what was read
                    continue
                self.judge(root, snapshot, found, place[0])
                self.seen[place] = found
            if error is not None:
                raise error

    def names(self) -> None:
        with opened(self.fresh()) as store:
            for act in (
                lambda: list(store.log()), store.tags, store.channels, store.branches, store.cursors,
                lambda: read_status(store), lambda: store.snapshot(tag=self.chance.choice([*store.tags(), "x"])),
                lambda: store.snapshot(channel=self.chance.choice([*store.channels(), "x"])),
                lambda: store.snapshot(step=self.chance.choice([0, 1, 100, 101])),
                lambda: store.snapshot(time=datetime.fromtimestamp(1_700_000_000 + self.chance.randrange(60), UTC)),
                lambda: store.lease(ttl_s=60).release(),
            ):  # fmt: skip
                each_error(act)
            for name in ("serving", "trial"):
                each_error(lambda name=name: store.on_branch(name).head())
            store.poll(store.head())

    def rows(self) -> None:
        """Rows read by ids, ranges or columns equal those of the whole table."""
        with opened(self.shared) as store:
            snapshot = store.snapshot()
            for name in snapshot.tables:
                view = snapshot.table(name)
                if view.schema.keys == "hashed":
                    keys, arrays = view.read_all()
                    ids = np.unique(keys[: self.chance.randrange(1, 9)])
                    expected = arrays["values"][np.searchsorted(keys, ids)]
                else:
                    whole = view.read()
                    drawn = [self.chance.randrange(len(whole)) for _ in range(3)] if len(whole) else []
                    ids = np.unique(np.asarray(drawn, np.int64))
                    expected = whole[ids]
                    middle = len(whole) // 2
                    same(view.read(middle), whole[middle:], f"rows from {middle} of {name}")
                same(view.read_rows(ids.astype(np.int64)), expected, f"rows {ids.tolist()} of {name}")

    def verify(self) -> None:
        with opened(self.shared) as store:
            verify_store(store, all_versions=self.chance.random() < 0.5)

    def verify_deep(self) -> None:
        """`verify` does not report a version as sound if a read finds it damaged."""
        with opened(self.shared) as store:
            report = verify_store(store, all_versions=True, deep=True, threads=1)
            for place, error in self.errors.items():
                if isinstance(error, CorruptStore) and report.is_sound:
                    raise Wrong(f"verify finds nothing, and {place} is refused: {error}") from error

    def repair_dry(self) -> None:
        with opened(self.shared) as store:
            repair_store(store, threads=1, dry_run=True)

    def repair(self) -> None:
        root = self.fresh()
        with opened(root) as store:
            repair_store(store, dry_run=False, threads=1)
        self.check_as_before(root, any_state=True)

    def _retention(self) -> RetentionPolicy:
        return RetentionPolicy(keep_last=self.chance.choice([1, 3]))

    def maintain(self) -> None:
        root = self.fresh()
        errors = []
        with opened(root) as store:
            for _ in range(2):
                report = maintain(
                    store, compaction=CompactionPolicy(max_chain=self.chance.choice([1, 2, 16])), workers=1,
                    retention=self._retention(), grace_s=0, orphan_age_s=0, force=True,
                )  # fmt: skip
                errors.append(report.error)
        self.check_as_before(root)
        raise_first(errors)

    def collect(self) -> None:
        root = self.fresh()
        despite = self.chance.random() < 0.5
        try:
            with opened(root) as store:
                for _ in range(2):
                    collect_garbage(
                        store, policy=self._retention(), grace_s=0, orphan_age_s=0, dry_run=False, force=True,
                        despite_damage=despite,
                    )  # fmt: skip
        finally:
            self.check_as_before(root)

    def compaction(self) -> None:
        root = self.fresh()
        try:
            with opened(root) as store:
                length = len(store.head().record.chain)
                if length > 1 and self.chance.random() < 0.7:
                    start = self.chance.randrange(length - 1)
                    compact_run(store, run=(start, self.chance.randrange(start + 2, length + 1)), workers=1)
                else:
                    compact(store, policy=CompactionPolicy(max_chain=1), workers=1)
        finally:
            self.check_as_before(root)

    def export(self) -> None:
        with opened(self.shared) as store:
            form = self.chance.choice(["safetensors", "npy"])
            export_snapshot(store.snapshot(), self.folder / f"out{self._copies}", format=form)

    def command(self) -> None:
        """Commands of `cnr` that print what is in the store."""
        root = self.shared
        for words in self.chance.sample(COMMANDS, 3):
            result = CliRunner().invoke(COMMAND, [words[0], str(root), *words[1:]])
            if result.exit_code not in (0, *list(ExitCode)) or result.exit_code == ExitCode.INTERNAL:
                raise Wrong(f"cnr {' '.join(words)} ends with {result.exit_code}: {result.output[-500:]}")

    def name(self) -> None:
        """Tags, channels, branches and rollbacks are written, and the state stays readable."""
        root = self.fresh()
        with opened(root) as store:
            versions = [version for branch, version in self.case.sample.held if branch is None]
            version = self.chance.choice(versions)
            for act in self.chance.sample(
                [
                    lambda: store.tag("fuzz", version), lambda: store.set_channel("fuzzed", version),
                    lambda: store.untag(self.chance.choice(sorted(store.tags()) or ["x"])),
                    lambda: store.fork("forked", version).close(), lambda: store.drop_branch("trial"),
                    lambda: store.register_cursor("fuzz", version), lambda: store.drop_channel("serving"),
                ], 3,
            ):  # fmt: skip
                each_error(act)
        self.check_as_before(root)
        with opened(root) as store:
            store.rollback(version)
        self.check_as_before(root, any_state=True)

    def writer(self) -> None:
        """A writer continues from the state that readers see; its save can be read."""
        root = self.fresh()
        with opened(root) as store:
            with store.writer() as writer:
                snapshot = writer.restore()
                before = bytes_of(snapshot)
                self.judge_any(root, snapshot, before)
                step = snapshot.step + 1
                if self.chance.random() < 0.3:
                    with writer.begin(step=step, kind="baseline") as txn:
                        for name, schema in snapshot.tables.items():
                            if schema.keys == "dense":
                                slots = {slot: snapshot.table(name).read(slot=slot) for slot in schema.slots}
                                txn.write_table(name, snapshot.table(name).read(), slots=slots)
                    return
                expected = self._move_rows(writer, snapshot, step)
            with opened(root) as again:
                for name, values in expected.items():
                    same(again.snapshot().table(name).read(), values, f"table {name} after a save")

    def _move_rows(self, writer: Any, snapshot: Snapshot, step: int) -> dict[str, Any]:
        expected = {}
        with writer.begin(step=step) as txn:
            for name, schema in snapshot.tables.items():
                if schema.keys != "dense" or isinstance(schema.encoding, Affine) or schema.num_rows < 2:
                    continue
                view = snapshot.table(name)
                values = view.read()
                rows = np.asarray([0, schema.num_rows - 1], np.int64)
                slots = {slot: view.read(slot=slot)[rows] for slot in schema.slots}
                values[rows] = values[rows[::-1]]
                txn.write_rows(name, rows, values[rows], slots=slots, nonfinite="escape")
                expected[name] = values
        return expected

    def judge_any(self, root: Path, snapshot: Snapshot, found: State) -> None:
        """The state that a writer restored is the newest one, although the writer's fence is newer."""
        if self.newest is not None:
            if found != self.seen[self.newest]:
                raise Wrong("a writer restores another state than readers see")
        elif found not in [*self.seen.values(), *self.case.sample.held.values()]:
            self.judge(root, snapshot, found)


def read_together(snapshot: Snapshot) -> None:
    """Read weights and slots together, as the independent reader does: the state digest covers all of them."""
    for name in snapshot.tables:
        view = snapshot.table(name)
        for low, high in view.column_cuts if view.schema.keys == "dense" else ():
            values = np.empty((view.schema.num_rows, high - low), carrier(view.schema.dtype))
            rectangle = Rectangle((0, view.schema.num_rows), (low, high))
            view.read_rectangle(rectangle, values=values, slots=dict.fromkeys(view.schema.slots))


def same(found: Any, expected: Any, what: str) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape or found.tobytes() != expected.tobytes():
        raise Wrong(f"{what} are not those of the whole table")


def each_error(act: Callable[[], Any]) -> None:
    try:
        act()
    except CnrStoreError:
        pass


def raise_first(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


COMMAND = typer.main.get_command(app)
COMMANDS = (
    ("show",), ("show", "--json"), ("log",), ("log", "--json"), ("verify",), ("verify", "--json"),
    ("repair", "--dry-run"),
    ("branches",), ("cursors",), ("metrics",), ("gc", "--dry-run"), ("gc", "--dry-run", "--json"),
    ("maintain", "--dry-run"),
    ("compact", "--dry-run"), ("changes",),
)  # fmt: skip
READING = ("command", "names", "rows", "verify", "verify_deep", "repair_dry", "export")
WRITING = ("repair", "maintain", "collect", "compaction", "name", "writer")
