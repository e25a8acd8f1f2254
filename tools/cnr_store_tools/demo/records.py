"""What a demonstration is asked to do and what it found: plain records between the parts that act and print."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

DEFAULT_STORE = "./demo-store"
DEMO_TAG = "demo"
"""Tag by which a store is known as one of ours, so that the next demonstration may replace it."""

Policy = Literal["full", "consecutive", "one_shot", "intermittent"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the caller chose.

    Attributes
    ----------
    data
        A RecBole ``.inter``, Criteo CSV or TSV, or Parquet file; None generates clicks.
    store
        Where the store is left; a folder or URL.
    is_exact
        Keep tables and slots bit for bit; then the resumed run equals the uninterrupted one.
    bits
        Precision of the tables otherwise: 2, 3, 4 or 8.
    policy
        See `cnr_store.write.policy`.
    steps
        Training steps; None for the default.
    force
        Replace a store that no demonstration left behind.
    seed
        Of the data and the model.
    """

    data: Path | None = None
    store: str = DEFAULT_STORE
    is_exact: bool = False
    bits: Literal[2, 3, 4, 8] = 4
    policy: Policy = "consecutive"
    steps: int | None = None
    force: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint. ``stall_s`` is None when the training died before it could tell.

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
class Kill:
    """How the training was killed: what of the unfinished save was in the store, and what was committed before.

    Attributes
    ----------
    segment
        Name of the half-written segment.
    objects, size_bytes
        What it held when the process was dead.
    committed_step
        Step of the newest commit record at that time.
    """

    segment: str
    objects: int
    size_bytes: int
    committed_step: int


@dataclass(frozen=True, slots=True)
class RunQuality:
    """A finished run on held-out samples of the future. NaN where those have one class only."""

    steps: int
    auc: float
    logloss: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What a demonstration found.

    Attributes
    ----------
    checkpoints
        In the order of the log, before the kill and after it.
    restored_step, restored_version, restore_s
        What the second process continued from.
    fp32_bytes
        A full checkpoint of the same state with every table and slot in fp32.
    uninterrupted, resumed
        The run that nobody saved or killed, and the one that was killed.
    max_weight_difference
        Largest absolute difference of any weight between the two.
    """

    options: DemoOptions
    num_samples: int
    table_rows: int
    dim: int
    checkpoints: tuple[Checkpoint, ...]
    kill: Kill
    restored_step: int
    restored_version: int
    restore_s: float
    fp32_bytes: int
    uninterrupted: RunQuality
    resumed: RunQuality
    max_weight_difference: float
    seconds: float

    def to_document(self) -> dict[str, Any]:
        """Return the report as plain data for ``--json``; JSON has no NaN, so it becomes None."""
        document = asdict(self)
        for run in (document["uninterrupted"], document["resumed"]):
            run.update({key: None for key in ("auc", "logloss") if math.isnan(run[key])})
        document["options"]["data"] = None if self.options.data is None else str(self.options.data)
        return document
