"""What a save by torch.distributed.checkpoint costs in a store: bytes and stall, beside DCP's own file writer.

Run: ``python tests/benchmarks/bench_dcp.py``. One process, one table with Adagrad's state per element, of which a part
of the rows is trained between saves. The stall is the time of ``dcp.async_save`` itself: copies into kept memory, by
DCP's DefaultStager or by ours. Sides alternate within one run.

``--model``: models instead of the table. Tables of fewer than 1,024 rows are dense tensors then, as by default.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from harness import Report, Timings, alternating, arguments, data_folder, disk_bytes
from models import BenchModel, add_model_option, chosen_models
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from trainee import Trainee

from cnr_store import TableOptions
from cnr_store.integrations.dcp import CnrStorageWriter
from cnr_store_gpu import Movement, RowTracker

DIM = 64
SHARES = (0.01, 0.1, 1.0)
BYTES_GOAL, STALL_GOAL = 0.05, 0.5  # at a tenth of the rows


class Training:
    """A table and a layer, trained on a random part of the rows at a time."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"emb": nn.Embedding(rows, DIM, sparse=True), "top": nn.Linear(DIM, 16)})
        with torch.no_grad():
            self.model["emb"].weight.mul_(0.1)  # type: ignore[operator]
        self.optimizers = [
            torch.optim.Adagrad(self.model["emb"].parameters(), lr=0.01, initial_accumulator_value=0.1),
            torch.optim.SGD(self.model["top"].parameters(), lr=0.01),
        ]
        self.tracker = RowTracker(self.model, optimizers=self.optimizers)
        self._random = np.random.default_rng(0)

    def step(self, share: float) -> None:
        """Train on a share of the rows."""
        rows = self.model["emb"].weight.shape[0]  # type: ignore[union-attr]
        ids = torch.from_numpy(self._random.choice(rows, max(1, int(rows * share)), replace=False))
        gradient = torch.randn(len(ids), DIM)
        (self.model["emb"](ids) * gradient).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the live state dict."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optim": optimizer}


class TouchedModel:
    """The same of a model, of which rows are moved and marked as if it were trained on them."""

    def __init__(self, model: BenchModel) -> None:
        self._trainee = Trainee(model)
        state, assume = self._trainee, {"RowWiseAdagrad": Movement.TOUCHED}
        self.tracker = RowTracker(state.model, optimizers=state.optimizers, assume=assume)

    def step(self, share: float) -> None:
        """Move a share of the rows."""
        for table, rows in self._trainee.touch(share).items():
            self.tracker.mark(table, rows)

    def state(self) -> dict[str, Any]:
        """Return the live state dict."""
        model, optimizer = get_state_dict(self._trainee.model, self._trainee.optimizers)
        return {"model": model, "optim": optimizer}


Make = Callable[[], Training | TouchedModel]


def added_bytes(folder: Path, save: Callable[[], object]) -> int:
    """Return how many bytes a save adds under a folder."""
    before = disk_bytes(folder)[0]
    save()
    return disk_bytes(folder)[0] - before


def bytes_of(make: Make, share: float, options: TableOptions, folder: Path) -> tuple[int, int]:
    """Return the bytes of one save: in a store that has the state before it, and by DCP's file writer."""
    training = make()
    training.step(1.0)
    with tempfile.TemporaryDirectory(dir=folder) as name, CnrStorageWriter(f"{name}/store", options=options) as writer:
        dcp.save(training.state(), storage_writer=writer)
        training.step(share)
        place = Path(name)
        theirs = added_bytes(place, lambda: dcp.save(training.state(), checkpoint_id=place / "files"))
        return added_bytes(place, lambda: dcp.save(training.state(), storage_writer=writer)), theirs


def bench_bytes(report: Report, what: str, make: Make, folder: Path) -> None:
    """Bytes of one save, as a part of what DCP's file writer writes."""
    table: list[tuple[str, str, float, float, float]] = []
    for name, options in (("8 bits", TableOptions(bits=8)), ("exact", TableOptions.exact())):
        for share in SHARES:
            ours, theirs = bytes_of(make, share, options, folder)
            table.append((name, f"{share:.0%}", ours / 1e6, theirs / 1e6, ours / theirs))
            goal = BYTES_GOAL if (share, name) == (0.1, "8 bits") else None
            report.add(f"{what}bytes / FileSystemWriter, {share:.0%} of rows, {name}", ours / theirs, goal=goal)
    columns = ("stored", "rows trained", "store, MB", "FileSystemWriter, MB", "ratio")
    report.table(f"{what}bytes of one save", columns, table)


def stalls_of(make: Make, share: float, repeats: int, folder: Path) -> dict[str, Timings]:
    """Return how long ``async_save`` holds the training up: with DCP's stager, tracked rows, and rows compared.

    CPU seconds are those of the calling thread: the upload begins before the call is over.
    """
    training = make()
    training.step(1.0)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    options = TableOptions(bits=8)
    tracked = CnrStorageWriter(folder / "tracked", tracker=training.tracker, options=options)
    compared = CnrStorageWriter(folder / "compared", options=options)
    futures: list[Any] = []

    def settle() -> None:
        while futures:
            futures.pop().result()
        shutil.rmtree(folder / "files", ignore_errors=True)

    cpu: dict[str, list[float]] = {}

    def saving(name: str, **how: Any) -> Callable[[], None]:
        def save() -> None:
            state, started = training.state(), time.thread_time()
            futures.append(dcp.async_save(state, **how))
            cpu.setdefault(name, []).append(time.thread_time() - started)

        return save

    sides = {
        "files": saving("files", checkpoint_id=folder / "files", async_stager=stager),
        "tracked": saving("tracked", storage_writer=tracked),
        "compared": saving("compared", storage_writer=compared),
    }
    for _ in range(3):  # a first save is whole, and the next ones take the memory that is kept
        training.step(share)
        for side in sides.values():
            side()
            settle()
    times = alternating(sides, repeats, before_round=lambda: training.step(share), before_each=settle)
    settle()
    for one in (tracked, compared, stager):
        one.close()
    return {name: Timings(one.wall, cpu[name][-repeats:]) for name, one in times.items()}


def bench_stall(report: Report, what: str, make: Make, repeats: int, folder: Path) -> None:
    """The stall beside that of DCP's stager, which is kept as well."""
    for share in SHARES:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            times = stalls_of(make, share, repeats, Path(name))
        goal = STALL_GOAL if share == 0.1 else None
        for side in ("tracked", "compared"):
            ours, theirs = times[side], times["files"]
            name = f"{what}stall / kept DefaultStager, {share:.0%}, {side}"
            report.add_ratio(name, ours, theirs, goal if side == "tracked" else None)
            report.add(f"{name}, CPU", statistics.median(ours.cpu) / statistics.median(theirs.cpu))


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, rows=500_000, repeats=5)
    add_model_option(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Sparse invariant checks")
    torch.set_num_threads(1)  # beside other work the threads of a copy wait for each other longer than it takes
    makers: dict[str, Make] = {f"{model.name}: ": partial(TouchedModel, model) for model in chosen_models(options)}
    what = "models" if makers else f"one table of {options.rows:,} x {DIM} float32 with Adagrad's sums"
    report = Report(f"DCP: {what}, saved by one process")
    report.start()
    with data_folder(options.folder) as folder:
        for name, make in (makers or {"": partial(Training, options.rows)}).items():
            bench_bytes(report, name, make, folder)
            bench_stall(report, name, make, options.repeats, folder)
    report.finish(options.json)


if __name__ == "__main__":
    main()
