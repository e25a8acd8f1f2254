"""Deltas of dense tensors under thresholded gradients: elements that were sent, against the store's differences."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping

import harness
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import zstandard
from torch import nn
from wire_model import GENERATED, ClickModel
from wire_ranks import WORLD, on_ranks, steps_of_sgd
from wire_thresholds import BOTTOM, TOP

from cnr_store import TableOptions, segment_sizes
from cnr_store.communication import Meter, ThresholdedGradients
from cnr_store.training import CheckpointManager, PrecisionPolicy, StoreOptions

KEEP, BEFORE = 0.005, 200
INTERVALS = (1, 10, 100)
STORED = {
    "whole, exact": None,
    "differences, exact": TableOptions.exact(),
    "differences, 8 bits": TableOptions(bits=8),
}
"""How the store writes dense tensors: as it does by default, and by ``dense=``."""
Arrays = Mapping[str, npt.NDArray[np.float32]]


def record(folder: str, optimizer: str, before: int) -> list[int]:
    """Train, and write the dense part and its optimizer's state as of the steps ``before`` and each of `INTERVALS` on.

    Returns the elements of gradients that were not 0, over the steps of each interval.
    """
    torch.manual_seed(0)
    model = ClickModel(GENERATED, BOTTOM, TOP)
    hook = ThresholdedGradients(keep=KEEP)
    parameters = dict(model.named_parameters())
    del parameters["tables"]
    adam = torch.optim.Adam(parameters.values(), lr=1e-3) if optimizer == "Adam" else None
    sent, counts = 0, []
    for step, _ in steps_of_sgd(GENERATED, model, hook, Meter(), 0, before + max(INTERVALS), adam):
        done = step + 1 - before
        if done > 0:
            sent += sum(int(one.grad.count_nonzero()) for one in parameters.values() if one.grad is not None)
        if done in INTERVALS:
            counts.append(sent)
        if done in (0, *INTERVALS) and dist.get_rank() == 0:
            found = {name: one.detach().numpy() for name, one in parameters.items()}
            for name, one in parameters.items() if adam else ():
                assert adam is not None
                found |= {f"{what}/{name}": adam.state[one][what].numpy() for what in ("exp_avg", "exp_avg_sq")}
            np.savez(f"{folder}/{optimizer}-{done}.npz", **found)
    return counts


class Holder(nn.Module):
    """Weights with an optimizer, as they were recorded."""

    def __init__(self, arrays: Arrays, optimizer: str) -> None:
        super().__init__()
        names = [name for name in arrays if "/" not in name]
        self.weights = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(torch.empty(0)) for name in names})
        for name in names:
            self.weights[name.replace(".", "_")] = nn.Parameter(torch.from_numpy(arrays[name].copy()))
        self.optimizer: torch.optim.Optimizer
        if optimizer == "Adam":
            self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.put(arrays)

    @torch.no_grad()
    def put(self, arrays: Arrays) -> None:
        """Take over weights and optimizer state."""
        for name, array in arrays.items():
            what, _, of = name.rpartition("/")
            parameter = self.weights[of.replace(".", "_")]
            if not what:
                parameter.copy_(torch.from_numpy(array))
            else:
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.zeros(()))
                state[what] = torch.from_numpy(array.copy())


def stored(before: Arrays, after: Arrays, optimizer: str, dense: TableOptions | None) -> tuple[int, float]:
    """Return the bytes of weights and state in a delta that a manager writes, and its CPU seconds."""
    holder = Holder(before, optimizer)
    with (
        tempfile.TemporaryDirectory(dir=harness.DATA_FOLDER) as folder,
        CheckpointManager(
            f"{folder}/store", model=holder.weights, optimizer=holder.optimizer,
            precision=PrecisionPolicy(dense=dense, dense_above_bytes=1 << 10), store_options=StoreOptions(threads=1),
        ) as manager,
    ):  # fmt: skip
        for arrays in (before, after):
            holder.put(arrays)
            manager.step()
            started = time.process_time()
            manager.save()
            manager.wait_until_finished()
            seconds = time.process_time() - started
        sizes = segment_sizes(manager.store.snapshot().manifests[-1])
    return sizes.rows + sizes.codes + sizes.scales + sizes.slots + sizes.dense, seconds


def sparse(before: Arrays, after: Arrays) -> tuple[int, float]:
    """Return the bytes of index and value of every element that changed, each kind compressed, and CPU seconds."""
    started = time.process_time()
    compressor = zstandard.ZstdCompressor(level=3)
    size = 0
    for name, array in after.items():
        changed = np.flatnonzero(array.view(np.uint32) != before[name].view(np.uint32))
        gaps = np.diff(changed, prepend=0)
        width = np.uint8 if gaps.max(initial=0) < 1 << 8 else np.uint16 if gaps.max() < 1 << 16 else np.uint32
        size += len(compressor.compress(gaps.astype(width).tobytes()))
        size += len(compressor.compress(array.ravel()[changed].view(np.uint8).reshape(-1, 4).T.tobytes()))
    return size, time.process_time() - started


def deltas(report: harness.Report, options: argparse.Namespace) -> None:
    """Report bytes and CPU time of deltas of dense tensors, for SGD and for Adam."""
    before = 5 if options.quick else BEFORE
    rows = []
    for optimizer in ("SGD", "Adam"):
        with tempfile.TemporaryDirectory(dir=harness.DATA_FOLDER) as folder:
            counts = on_ranks(WORLD, "wire_deltas", "record", folder, optimizer, before)
            first, *later = (dict(np.load(f"{folder}/{optimizer}-{one}.npz")) for one in (0, *INTERVALS))
        for dense in STORED.values():
            stored(first, later[0], optimizer, dense)  # compiles what later calls measure
        for interval, after, count in zip(INTERVALS, later, counts, strict=True):
            weights = [name for name in after if "/" not in name]
            elements = sum(after[name].size for name in weights)
            changed = sum(int((after[name] != first[name]).sum()) for name in weights) / elements
            found = {name: stored(first, after, optimizer, dense) for name, dense in STORED.items()}
            found["changed elements"] = sparse(first, after)
            cells = [f"{size / 1e3:.1f} ({1e3 * seconds:.0f})" for size, seconds in found.values()]
            rows.append([optimizer, interval, f"{100 * changed:.1f}", *cells, f"{8 * count / 1e3:.1f}"])
            fewer = found["changed elements"][0] / found["differences, exact"][0]
            report.add(f"{optimizer}, {interval} steps: index and value / exact differences, bytes", fewer)
    columns = ["optimizer", "steps", "changed, %", *STORED, "index and value, exact", "sent gradients of all steps"]
    report.table(f"kB (and ms of CPU) of a delta of {elements:,} weights and their state, {KEEP:.1%} sent by each of "
                 f"{WORLD} ranks", columns, rows)  # fmt: skip
