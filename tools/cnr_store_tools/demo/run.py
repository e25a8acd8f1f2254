"""``cnr demo``: train, kill during a save, restore, finish, compare with an uninterrupted run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cnr_store import CnrStoreError, Store, fp32_bytes
from cnr_store.errors import NotAStore, StoreExists
from cnr_store_tools.demo.kill import KilledSave, kill_during_save
from cnr_store_tools.demo.processes import WorkerProcess

DEMO_TAG = "demo"
"""The tag of a store that a demonstration created, so that the next one may replace it."""

KILL_AFTER_COMMITS = 4
"""The training is killed in a save after this many commits."""

TRAINING_S = 3600.0
"""Maximum seconds for one training."""

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options; ``cnr demo --help`` explains each. ``seed`` is the random seed of the data and the model."""

    store: str = "./demo-store"
    is_exact: bool = False
    bits: Literal[2, 3, 4, 8] = 4
    policy: Literal["baseline", "consecutive", "one_shot", "intermittent"] = "consecutive"
    steps: int = 360
    force: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DemoCheckpoint:
    """One committed checkpoint. ``stall_s`` is None if the training was killed before it reported it.

    ``ratio`` is how many times smaller it is than a full fp32 checkpoint of the same state.
    """

    version: int
    step: int
    kind: str
    rows: int
    size_bytes: int
    ratio: float
    stall_s: float | None


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run, evaluated on samples after those that it was trained on."""

    steps: int
    auc: float
    logloss: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a demonstration.

    Attributes
    ----------
    checkpoints
        In the order of the log, before the kill and after it.
    restored_step, restored_version, restore_s
        The checkpoint from which the second process continued, and how long its restore took.
    fp32_bytes
        A baseline of the same state with every table and slot in fp32.
    uninterrupted, resumed
        The run without saves and kills, and the run that was killed.
    max_weight_difference
        Largest absolute difference of any weight between the two.
    """

    options: DemoOptions
    num_samples: int
    table_rows: int
    dim: int
    checkpoints: tuple[DemoCheckpoint, ...]
    kill: KilledSave
    restored_step: int
    restored_version: int
    restore_s: float
    fp32_bytes: int
    uninterrupted: FinishedRun
    resumed: FinishedRun
    max_weight_difference: float
    seconds: float


def run_demo(options: DemoOptions, print_line: PrintLine = lambda _: None) -> DemoReport:
    """Run the demonstration and return its result; blocks for about a minute.

    Parameters
    ----------
    print_line
        Called with one line of text before each long step.

    Raises
    ------
    StoreExists
        There is a store that is not from a demonstration, and ``force`` is not set.
    CnrStoreError
        A training process failed, or could not be killed during a save.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cnr-demo-"))
        store = stack.enter_context(make_store(options.store, force=options.force))
        weights = [str(Path(folder, name)) for name in ("uninterrupted.npz", "resumed.npz")]
        places = (None, options.store)
        reference, training = (
            WorkerProcess("training", _task(options, place, file)) for place, file in zip(places, weights, strict=True)
        )
        stack.callback(reference.stop)
        stack.callback(training.stop)
        print_line("training without interruption, for comparison")
        reference.start()
        loaded = reference.wait_for("ready", TRAINING_S)
        print_line(f"training and saving to {options.store}, waiting to kill it during a save")
        training.start()
        kill = kill_during_save(store, training, after_commits=KILL_AFTER_COMMITS)
        if kill is None:
            training.wait_for("finished", TRAINING_S)  # raises its error
            raise CnrStoreError("the training ended before it could be killed during a save; try more --steps")
        print_line(f"killed during a save ({kill.objects} objects, no commit record); restoring")
        training.start()
        resumed = training.wait_for("finished", TRAINING_S)
        uninterrupted = reference.wait_for("finished", TRAINING_S)
        restored = training.facts_of("restored")[0]
        _move_tag(store)
        full = fp32_bytes(store.snapshot().manifests[-1])
        return DemoReport(
            options=options, num_samples=loaded["num_samples"], table_rows=loaded["table_rows"], dim=loaded["dim"],
            checkpoints=_checkpoints(store, training, full), kill=kill, restored_step=restored["step"],
            restored_version=restored["version"], restore_s=restored["seconds"], fp32_bytes=full,
            uninterrupted=FinishedRun(**uninterrupted), resumed=FinishedRun(**resumed),
            max_weight_difference=_max_difference(*weights), seconds=time.perf_counter() - started,
        )  # fmt: skip


def _task(options: DemoOptions, store: str | None, weights: str) -> Mapping[str, Any]:
    return {
        "module": "cnr_store_tools.demo.trainer", "steps": options.steps, "seed": options.seed, "store": store,
        "policy": options.policy, "bits": options.bits, "is_exact": options.is_exact, "weights": weights,
    }  # fmt: skip


def make_store(url: str, *, force: bool) -> Store:
    """Return an empty store with the demo tag; replaces the store of an earlier demonstration.

    Raises
    ------
    StoreExists
        Something else is there; it is not changed.
    """
    is_local = "://" not in url
    try:
        old = Store.open(url)
    except NotAStore:
        if is_local and Path(url).exists() and any(Path(url).iterdir()):
            raise StoreExists(f"{url} contains other files; choose another place with --store", path=url) from None
    else:
        with old:
            if DEMO_TAG not in old.tags() and not force:
                raise StoreExists(
                    f"{url} contains a store that is not from a demo; choose another place with --store, or replace it "
                    "with --force",
                    path=url,
                )
            if not is_local:
                old.storage.delete([found.key for found in old.storage.list_objects("")])
        if is_local:
            shutil.rmtree(url)
    store = Store.create(url)
    store.tag(DEMO_TAG)
    return store


def _move_tag(store: Store) -> None:
    """Move the tag to the finished state; before, it only marked the store as a demo store."""
    head = store.head().record
    store.untag(DEMO_TAG)
    store.tag(DEMO_TAG, head.v)


def _checkpoints(store: Store, training: WorkerProcess, full_bytes: int) -> tuple[DemoCheckpoint, ...]:
    stalls = {facts["version"]: facts["stall_s"] for facts in training.facts_of("saved")}
    found = [
        DemoCheckpoint(
            version=record.v, step=record.step, kind=record.kind, rows=record.chain[-1].rows,
            size_bytes=record.chain[-1].size_bytes, ratio=full_bytes / record.chain[-1].size_bytes,
            stall_s=stalls.get(record.v),
        )
        for record in store.log()
        if record.kind in ("baseline", "delta")
    ]  # fmt: skip
    return tuple(reversed(found))


def _max_difference(one: str, other: str) -> float:
    """Return the largest absolute difference of two weight files; 0.0 only if all are equal, inf with NaN."""
    with np.load(one) as first, np.load(other) as second:
        differences = [np.abs(first[name] - second[name]) for name in first.files]
    return float(max(np.nan_to_num(difference, nan=np.inf).max() for difference in differences))
