"""The demonstration: train, kill in the middle of a save, restore, finish, compare with a run that nobody killed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cnr_store import CnrStoreError, NotAStore, Store, StoreExists, fp32_bytes
from cnr_store_tools.demo.children import Child
from cnr_store_tools.demo.kill import kill_during_save
from cnr_store_tools.demo.records import DEMO_TAG, Checkpoint, DemoOptions, DemoReport, Kill, RunQuality

KILL_AFTER_COMMITS = 4
"""The training is killed in the first save after so many that it can be caught in."""

Tell = Callable[[str], None]


def run_demo(options: DemoOptions, tell: Tell = lambda _: None) -> DemoReport:
    """Carry out the demonstration and return what it found; blocks for a minute or so.

    Parameters
    ----------
    tell
        Called with one line of text when something is about to take a while.

    Raises
    ------
    StoreExists
        There is a store that no demonstration left, and ``force`` is not set.
    BadInput, NotFound
        The data cannot be read.
    CnrStoreError
        A training process failed, or was never caught in the middle of a save.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cnr-demo-") as folder:
        weights = {name: str(Path(folder, f"{name}.npz")) for name in ("reference", "resumed")}
        tell("training without interruption, for comparison")
        reference = Child(_order(options, None, weights["reference"]))
        try:
            loaded = reference.wait_for("loaded")
            store = make_store(options)
            try:
                tell(f"training, saving to {options.store}, and waiting for a save to kill it in")
                killed, kill = _train_and_kill(options, store, weights["resumed"])
                tell(f"killed in the middle of a save ({kill.objects} objects, no commit record); restoring")
                resumed = _finish(options, weights["resumed"])
                uninterrupted = reference.wait_for("finished")
                _move_tag(store)
                saves = [event for event in (*killed, *resumed) if event["event"] == "saved"]
                checkpoints, full = _checkpoints(store, saves)
            finally:
                store.close()
        finally:
            reference.stop()
        difference = _max_difference(weights["reference"], weights["resumed"])
    restored = next(event for event in resumed if event["event"] == "restored")
    finished = next(event for event in resumed if event["event"] == "finished")
    return DemoReport(
        options=options, num_samples=loaded["num_samples"], table_rows=loaded["table_rows"], dim=loaded["dim"],
        checkpoints=checkpoints, kill=kill, restored_step=restored["step"], restored_version=restored["version"],
        restore_s=restored["seconds"], fp32_bytes=full, uninterrupted=_quality(uninterrupted),
        resumed=_quality(finished), max_weight_difference=difference, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _order(options: DemoOptions, store: str | None, weights: str) -> dict[str, Any]:
    return {
        "data": None if options.data is None else str(options.data), "steps": options.steps, "seed": options.seed,
        "store": store, "policy": options.policy, "bits": options.bits, "is_exact": options.is_exact,
        "weights": weights,
    }  # fmt: skip


def _train_and_kill(options: DemoOptions, store: Store, weights: str) -> tuple[list[dict[str, Any]], Kill]:
    child = Child(_order(options, options.store, weights))
    try:
        kill = kill_during_save(store, child.process, after_commits=KILL_AFTER_COMMITS)
        if kill is None:
            if child.process.wait() != 0:
                child.wait_for("finished")  # raises what went wrong
            raise CnrStoreError("the training ended before it could be killed in the middle of a save; try more steps")
    finally:
        child.stop()
    return child.events, kill


def _finish(options: DemoOptions, weights: str) -> list[dict[str, Any]]:
    child = Child(_order(options, options.store, weights))
    try:
        child.wait_for("finished")
    finally:
        child.stop()
    return child.events


def make_store(options: DemoOptions) -> Store:
    """Return an empty store with our tag; replaces what an earlier demonstration left.

    Raises
    ------
    StoreExists
        Something else is there, and stays.
    """
    is_local = "://" not in options.store
    try:
        old = Store.open(options.store)
    except NotAStore:
        if is_local and Path(options.store).exists() and any(Path(options.store).iterdir()):
            raise StoreExists(
                f"{options.store} holds other files; choose another place with --store", path=options.store
            ) from None
    else:
        if DEMO_TAG not in old.tags() and not options.force:
            old.close()
            raise StoreExists(
                f"{options.store} holds a store that no demonstration left; choose another place with --store, or "
                "replace it with --force",
                path=options.store,
            )
        if not is_local:
            old.storage.delete([found.key for found in old.storage.list_objects("")])
        old.close()
        if is_local:
            shutil.rmtree(options.store)
    store = Store.create(options.store)
    store.tag(DEMO_TAG)
    return store


def _move_tag(store: Store) -> None:
    """Let the tag name the finished state: until here it only said whose store it is."""
    head = store.head().record
    store.untag(DEMO_TAG)
    store.tag(DEMO_TAG, head.v)


def _checkpoints(store: Store, saves: list[dict[str, Any]]) -> tuple[tuple[Checkpoint, ...], int]:
    stalls: Mapping[int, float] = {event["version"]: event["stall_s"] for event in saves}
    full = fp32_bytes(store.snapshot().manifests[-1])
    found = [
        Checkpoint(
            version=record.v, step=record.step, kind=record.kind, rows=record.chain[-1].rows,
            size_bytes=record.chain[-1].bytes, ratio=full / record.chain[-1].bytes, stall_s=stalls.get(record.v),
        )
        for record in store.log()
        if record.kind in ("full", "delta")
    ]  # fmt: skip
    return tuple(reversed(found)), full


def _quality(event: Mapping[str, Any]) -> RunQuality:
    return RunQuality(event["steps"], event["auc"], event["logloss"])


def _max_difference(one: str, other: str) -> float:
    """Return the largest absolute difference of two weight files; 0.0 only if all are equal, inf with NaN."""
    with np.load(one) as first, np.load(other) as second:
        differences = [np.abs(first[name] - second[name]) for name in first.files]
    return float(max(np.nan_to_num(difference, nan=np.inf).max() for difference in differences))
