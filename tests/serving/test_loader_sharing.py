"""Where else the rows of a loader go: other processes, sinks; and rows that come from a relay."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import BadInput, Conflict, StorageFailure, VersionRefused
from cnr_store.errors import VersionNotFound
from cnr_store.relay import Relay
from cnr_store.serving import AttachedTables, HashShard, Loader, LoaderOptions
from cnr_store.serving.sinks import SinkState
from tests.serving.loaders import DIM, ROWS, Flaky, Training, caught_up, until
from tests.support.faulty import Fault, FaultKind
from tests.support.launcher import Launcher, Program
from tests.support.loader_checks import opened_loader
from tests.support.store_oracle import same_bits


def test_other_processes_look_up_in_its_memory(training: Training, tmp_path: Path) -> None:
    with Loader(training.open(), shared=tmp_path / "m") as loader:
        with AttachedTables(tmp_path / "m") as tables:
            for act in (training.save, training.full, training.save):
                act()
                caught_up(loader, training.store)
                batch = tables.lookup_many({"user": np.arange(ROWS)}, dense=["w"])
                assert batch.version == loader.version
                assert same_bits(batch.rows["user"], training.store.snapshot().table("user").read())
                assert batch.dense["w"].tolist() == [training.step] * 3
        with pytest.raises(BadInput):
            loader.bind(torch.nn.Embedding(ROWS, DIM))
        with pytest.raises(Conflict):
            Loader(training.open(), shared=tmp_path / "m")
    with pytest.raises(VersionNotFound):
        AttachedTables(tmp_path / "m")


def test_a_refused_or_failed_version_leaves_nothing_in_shared_memory(
    training: Training, fs: Flaky, tmp_path: Path
) -> None:
    with Loader(
        training.open(fs), shared=tmp_path / "m", options=LoaderOptions(validate=lambda c: c.step != 2)
    ) as loader:
        training.save()
        loader.poll()
        loader._queue.merge()
        before = sorted(path.name for path in (tmp_path / "m").rglob("*"))
        training.save()
        assert isinstance(loader.poll().error, VersionRefused)
        assert sorted(path.name for path in (tmp_path / "m").rglob("*")) == before
        training.save()
        for at in range(2, 7):  # behind the two records: of what it reads of the version
            fs.arm(Fault(FaultKind.FAIL_BEFORE, len(fs.calls) + at))
            assert isinstance(loader.poll().error, StorageFailure)
            assert sorted(path.name for path in (tmp_path / "m").rglob("*")) == before
        fs.arm(None)
        caught_up(loader, training.store)


def test_what_changed_is_forgotten_when_it_is_shown(training: Training, tmp_path: Path) -> None:
    """The ids of the last overlay kept all of its memory mapped until the next version came."""
    with Loader(training.open(), shared=tmp_path / "m") as loader:
        training.save()
        loader.poll()
        loader._queue.merge()
        gc.collect()
        gone = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert gone
        assert not [line for line in gone if line.endswith("(deleted)")]


FORKED = """
import os, signal, sys
import numpy as np
from cnr_store import CnrStoreError, Store
from cnr_store.serving import AttachedTables, Loader, LoaderOptions
store, shared = Store.create("memory://forked"), sys.argv[1] or None
writer = store.writer()

def save(step):
    with writer.begin(step) as txn:
        txn.write_table("t", np.full((9, 2), step, np.float32)) if step == 0 else txn.write_rows(
            "t", np.arange(9), np.full((9, 2), step, np.float32))

save(0)
loader = Loader(store, shared=shared, options=LoaderOptions(poll_interval_s=0.001))
if sys.argv[2]:
    loader.start()
readable, writable = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.read(readable, 1)
    loader.close()
    for call in (loader.poll, loader.pin, loader.start, lambda: print(loader.lookup("t", [1])[0, 0], flush=True)):
        try:
            call()
        except CnrStoreError as error:
            print(error.kind, flush=True)
    if shared:
        print(AttachedTables(shared).lookup("t", [1])[0, 0], flush=True)
    os._exit(0)
loader.stop()
for step in (1, 2, 3):
    save(step)
    loader.poll()
    loader._queue.merge()
os.write(writable, b"x")
assert os.waitpid(child, 0)[1] == 0
save(4)
assert loader.poll().error is None
assert loader.lookup("t", [1])[0, 0] == 4
"""


@pytest.mark.parametrize(
    ("shared", "started", "looked_up"),
    [
        pytest.param(True, True, ["version_not_found", "3.0"], id="shared"),
        pytest.param(False, True, ["version_not_found"], id="private"),
        pytest.param(False, False, ["0.0"], id="private, which nothing moves but the program itself"),
    ],
)
def test_a_forked_child_leaves_the_loader_to_its_parent(
    launcher: Launcher, tmp_path: Path, shared: bool, started: bool, looked_up: list[str]
) -> None:
    """Regressions: with shared memory a lookup of the child span for ever, and a poll of it wrote to its parent's rows;
    with private memory the child of a loader that follows served the rows of the fork for ever, as if they were new."""
    folder = str(tmp_path / "m") if shared else ""
    arguments = ["-W", "ignore", "-c", FORKED, folder, "start" if started else ""]
    (done,) = launcher.run(Program(arguments), folder=tmp_path, timeout_s=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [*["bad_input"] * 3, *looked_up]


class Rows:
    """A sink that keeps everything it was given, in order."""

    name = "rows"

    def __init__(self) -> None:
        self.shown: SinkState | None = None
        self.rows: dict[str, dict[int, list[float]]] = {}
        self.pending: list[Callable[[], None]] = []

    def open(self) -> SinkState | None:
        return self.shown

    def begin(self, tables: Any, *, full: bool) -> None:
        self.pending = [self.rows.clear] if full else []

    def put(self, table: str, row_ids: Any, values: Any) -> None:
        fresh = dict(zip(row_ids.tolist(), values.tolist(), strict=True))
        self.pending.append(lambda: self.rows.setdefault(table, {}).update(fresh))

    def delete(self, table: str, row_ids: Any) -> None:
        ids = row_ids.tolist()
        self.pending.append(lambda: [self.rows[table].pop(row, None) for row in ids] and None)

    def commit(self, state: SinkState) -> None:
        for change in self.pending:
            change()
        self.shown = state

    def abort(self) -> None:
        self.pending = []


@pytest.mark.parametrize("options", [{}, {"served": "bfloat16"}, {"shard": HashShard(0, 2)}, {"publish": "apply"}])
def test_a_sink_gets_what_changed_and_a_rollback_too(training: Training, options: dict[str, Any]) -> None:
    sink = Rows()
    with opened_loader(training.open(), **options) as loader:
        feed = loader.add_sink(sink, start=False)
        first = feed.push()
        assert first is not None
        assert first.is_full
        acts = [training.save, training.save, training.full, training.save]
        for act in (*acts, lambda: loader.rollback(loader.version - 1)):
            act()
            loader.poll()
            loader.apply()
            assert feed.push() is not None
            assert sink.shown is not None
            assert sink.shown.version == loader.version
            for table, rows in sink.rows.items():
                ids = sorted(rows)
                assert len(ids) == len(loader._queue.view.table(table).row_ids())
                values = training.store.snapshot(loader.version).table(table).read_rows(np.asarray(ids))
                assert [rows[row] for row in ids] == values.tolist()
        assert feed.metrics().full_pushes <= 2


def test_a_sink_that_fails_stops_nobody(training: Training) -> None:
    class Broken(Rows):
        def begin(self, tables: Any, *, full: bool) -> None:
            raise StorageFailure("away")

    with Loader(training.open()) as loader:
        feed = loader.add_sink(Broken())
        training.save()
        caught_up(loader, training.store)
        until(loader, lambda: feed.metrics().failures > 0)


def test_a_loader_reads_from_a_relay(training: Training, tmp_path: Path) -> None:
    training.save()
    relay = Relay(training.store, str(tmp_path / "near"))
    relay.advance()
    with Loader(tmp_path / "near", options=LoaderOptions(cursor="server")) as loader:
        for act in (training.save, training.full, training.save):
            act()
            relay.advance()
            caught_up(loader, training.store)
