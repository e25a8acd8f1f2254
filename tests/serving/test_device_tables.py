"""Tables on a device: a loader's rows, of one version in each lookup, however lookups and updates meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import Store, TableOptions
from cnr_store.errors import BadInput, BadRowIds, TableNotFound, Unsupported, VersionNotFound
from cnr_store.serving import Loader
from cnr_store.serving.sinks import DeviceTables, SinkState, SinkTable
from tests.support.accelerator import DEVICE, STREAMS, needs_accelerator

torch = pytest.importorskip("torch")

DEVICES = [
    "cpu",
    pytest.param(
        str(DEVICE),
        marks=[pytest.mark.gpu, needs_accelerator],
    ),
]
ROWS, DIM = 500, 8


class Saves:
    """A store with two tables, every row of which has the step as its values, or values of one's own."""

    def __init__(self, url: str) -> None:
        self.store = Store.create(url)
        self.writer = self.store.writer()
        self.step = 0
        with self.writer.begin(0) as txn:
            for table in ("user", "item"):
                txn.write_table(table, np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=0.5))

    def save(self, rows: npt.NDArray[np.int64] | None = None) -> None:
        self.step += 1
        chosen = np.arange(ROWS) if rows is None else rows
        with self.writer.begin(self.step) as txn:
            for table in ("user", "item"):
                txn.write_rows(table, chosen, np.full((len(chosen), DIM), self.step, np.float32))


@pytest.fixture
def saves(request: pytest.FixtureRequest) -> Iterator[Saves]:
    made = Saves(f"memory://{request.node.name}")
    yield made
    made.writer.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_version_is_the_loaders(saves: Saves, device: str, dtype: str) -> None:
    tables = DeviceTables(device, dtype=dtype)  # type: ignore[arg-type]  # one of them
    random = np.random.default_rng(0)
    with Loader(saves.store) as loader:
        feed = loader.add_sink(tables, start=False)
        feed.push()
        for changed in (7, 100, ROWS, 3):
            saves.save(np.sort(random.choice(ROWS, changed, replace=False)))
            loader.poll()
            feed.push()
            ids = random.integers(0, ROWS, 64)

            batch = tables.lookup_many({"user": torch.from_numpy(ids).to(device), "item": ids})

            assert (batch.version, batch.step) == (loader.version, saves.step)
            for table in ("user", "item"):
                rows = batch.rows[table]
                assert (rows.device, rows.dtype) == (tables.device, getattr(torch, dtype))
                expected = torch.from_numpy(loader.lookup(table, ids)).to(rows.dtype)
                assert torch.equal(rows.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_no_lookup_mixes_versions(saves: Saves, device: str) -> None:
    tables = DeviceTables(device)
    failures: list[str] = []
    counts = [0] * 3
    ends = threading.Event()

    def look_up(number: int) -> None:
        random = np.random.default_rng(number)
        stream = STREAMS.Stream() if device != "cpu" else None
        found = []
        last = -1
        while not ends.is_set():
            ids = torch.from_numpy(random.integers(0, ROWS, 256)).to(device)
            with nullcontext() if stream is None else STREAMS.stream(stream):
                batch = tables.lookup_many({"user": ids, "item": ids})
                spread = torch.cat(list(batch.rows.values())).aminmax()
            found.append((batch.step, spread))
            counts[number] += 1
            if batch.version < last:
                failures.append(f"version {batch.version} after {last}")
            last = batch.version
        if stream is not None:
            stream.synchronize()
        failures.extend(f"{step}: {low} to {high}" for step, (low, high) in found if not low == high == step)

    with Loader(saves.store) as loader:
        feed = loader.add_sink(tables, start=False)
        feed.push()
        threads = [threading.Thread(target=look_up, args=(number,)) for number in range(len(counts))]
        for thread in threads:
            thread.start()
        for _ in range(25):
            saves.save()
            loader.poll()
            feed.push()
        ends.set()
        for thread in threads:
            thread.join()

    assert failures == []
    assert min(counts) > 10


def test_a_batch_is_seen_when_it_is_committed_and_not_before() -> None:
    tables = DeviceTables("cpu")
    shapes = {"t": SinkTable(2, 4)}
    with pytest.raises(VersionNotFound):
        tables.lookup("t", [0])
    with pytest.raises(BadInput, match="full one"):
        tables.begin(shapes, full=False)
    tables.begin(shapes, full=True)
    tables.put("t", np.arange(4), np.ones((4, 2), np.float32))
    tables.commit(SinkState("s", "", 3, 30))

    tables.begin(shapes, full=False)
    tables.put("t", np.array([1]), np.full((1, 2), 7, np.float32))
    before = tables.lookup("t", [1, 2])
    tables.delete("t", np.array([2]))
    tables.put("t", np.array([1]), np.full((1, 2), 8, np.float32))
    assert torch.equal(tables.lookup("t", [1, 2]), before)
    tables.commit(SinkState("s", "", 4, 40))

    assert (tables.version, tables.nbytes) == (4, 32)
    assert tables.lookup("t", [1, 2, 0]).tolist() == [[8, 8], [0, 0], [1, 1]]
    assert before.tolist() == [[1, 1], [1, 1]]  # a lookup's rows are its own
    tables.begin(shapes, full=False)
    tables.put("t", np.array([0]), np.full((1, 2), 9, np.float32))
    tables.abort()
    assert tables.lookup("t", [0]).tolist() == [[1, 1]]


def test_a_table_that_grows_is_replaced(saves: Saves) -> None:
    tables = DeviceTables("cpu")
    with Loader(saves.store) as loader:
        feed = loader.add_sink(tables, start=False)
        feed.push()
        with saves.writer.begin(9) as txn:
            txn.resize_table("user", ROWS + 2)
            txn.write_rows("user", np.array([ROWS + 1]), np.full((1, DIM), 5, np.float32))
        loader.poll()
        feed.push()

        assert tables.lookup("user", [ROWS + 1, ROWS]).tolist() == [[5.0] * DIM, [0.0] * DIM]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_that_are_not_there(saves: Saves, device: str) -> None:
    from cnr_store.serving.sinks.device import rows_or_nan

    tables = DeviceTables(device)
    with Loader(saves.store) as loader:
        loader.add_sink(tables, start=False).push()

    for ids in ([ROWS], [-1]):
        with pytest.raises(BadRowIds):
            tables.lookup("user", ids)
    for wrong in (torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1.5])):
        for ids in (wrong, wrong.to(device), wrong.tolist()):
            with pytest.raises(BadRowIds):
                tables.lookup("user", ids)
    with pytest.raises(TableNotFound):
        tables.lookup("nobody", [0])
    assert tables.lookup("user", []).shape == (0, DIM)
    # What a GPU does with ids that nobody has looked at.
    table = torch.ones(3, 2, device=device)
    found = rows_or_nan(table, torch.tensor([2, 3, -1], device=device)).cpu()
    assert found[0].tolist() == [1, 1]
    assert found[1:].isnan().all()
    assert rows_or_nan(table[:0], torch.tensor([0], device=device)).isnan().all()


def test_hashed_tables_and_unknown_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match="hashed"):
        DeviceTables("cpu").begin({"t": SinkTable(2, None)}, full=True)
    with pytest.raises(BadInput, match="cannot be used"):
        DeviceTables("no such device")
