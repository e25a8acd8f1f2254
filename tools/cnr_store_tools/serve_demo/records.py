"""What a serving demonstration is asked to do and what it found: plain records between the parts that act and print."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

TRAINER, MAINTENANCE, ONLINE = "trainer", "maintenance", "online training"
INFERENCE = ("inference 1", "inference 2")
NAMES = (TRAINER, MAINTENANCE, *INFERENCE, ONLINE)
"""The processes, in the order in which they start and are shown."""

DEFAULT_STORE = "./serve-demo-store"
LONG_RUN_S = 30.0
MIN_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the caller chose.

    Attributes
    ----------
    store
        Where the store is left; a folder or URL.
    seconds
        How long the processes run together, from the moment when all of them are ready.
    seed
        Of traffic, model and the times of the kills.
    kills
        How many processes are killed.
    rows
        Rows of all tables together.
    force
        Replace a store that no demonstration left behind.
    """

    store: str = DEFAULT_STORE
    seconds: float = 60.0
    seed: int = 0
    kills: int = 10
    rows: int = 100_000
    force: bool = False

    @property
    def save_every_s(self) -> float:
        """Seconds between two saves: short runs save more often, so that they have something to follow."""
        return 1.0 if self.seconds >= LONG_RUN_S else 0.4


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile of ``count`` values; NaN of none."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process over all its lives: how often it was started and killed, and how often it ended by itself.

    ``ready_s`` is from a start to being ready.
    """

    name: str
    starts: int
    kills: int
    crashes: int
    ready_s: Spread


@dataclass(frozen=True, slots=True)
class SavingReport:
    """What was saved and kept small.

    Attributes
    ----------
    versions, saved_bytes
        Full and delta commits in the log, and the bytes of their segments.
    folds, folded_bytes, deleted_bytes
        Compactions, the bytes that they wrote, and what garbage collection freed.
    acknowledged, lost
        Saves that the trainer was told are committed, and how many of these the log or a restore did not have.
    steps
        Training steps at the end.
    """

    versions: int
    saved_bytes: int
    folds: int
    folded_bytes: int
    deleted_bytes: int
    acknowledged: int
    lost: int
    steps: int


@dataclass(frozen=True, slots=True)
class ServingReport:
    """What the inference processes did, together.

    Attributes
    ----------
    lookups, rows
        Batches looked up, and the rows in them.
    torn
        Batches that showed rows of more than one version, or of another one than they said.
    retries
        Lookups that were repeated because the rows moved under them.
    versions_seen
        Moves to another version, by all processes.
    publish_to_served_s
        From the time in a commit record to the first lookup that saw it or a newer one.
    staleness_s
        Sampled: for how long the oldest save that was not served yet had been there; 0 if there was none.
    apply_s
        Time that the loader took to fetch and apply what was new.
    applied_rows, applied_bytes
        Rows and bytes that it applied.
    compared_rows, different_rows
        Rows of lookups that were compared bit for bit with the snapshot of the version that they named.
    errors
        Polls that failed; the old version went on serving.
    """

    lookups: int
    rows: int
    torn: int
    retries: int
    versions_seen: int
    publish_to_served_s: Spread
    staleness_s: Spread
    apply_s: Spread
    applied_rows: int
    applied_bytes: int
    compared_rows: int
    different_rows: int
    errors: int


@dataclass(frozen=True, slots=True)
class LearningReport:
    """What the online training did.

    Attributes
    ----------
    batches, rows
        Record batches of the change stream, and the rows in them.
    versions_seen
        Versions that its copy was moved to.
    steps
        Its own training steps.
    warm_starts, resumes
        Starts from a snapshot, and starts from its own copy and cursor.
    """

    batches: int
    rows: int
    versions_seen: int
    steps: int
    warm_starts: int
    resumes: int


@dataclass(frozen=True, slots=True)
class FinalCopy:
    """A consumer's whole copy against the last snapshot, bit for bit."""

    name: str
    version: int
    rows: int
    different_rows: int


@dataclass(frozen=True, slots=True)
class ServeReport:
    """What a serving demonstration found. ``problems`` is empty if all is well."""

    options: ServeOptions
    seconds: float
    last_version: int
    processes: tuple[ProcessReport, ...]
    saving: SavingReport
    serving: ServingReport
    learning: LearningReport
    finals: tuple[FinalCopy, ...]
    problems: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run stands: for whoever shows it while it goes on. ``elapsed_s`` counts from when all were ready."""

    phase: Literal["starting", "running", "finishing"]
    elapsed_s: float
    seconds: float
    states: tuple[tuple[str, str], ...]
    versions: int
    folds: int
    lookups: int
    torn: int
    retries: int
    served: tuple[tuple[str, int], ...]
    publish_to_served_s: Spread
    apply_s: Spread
    learned_rows: int
    news: tuple[str, ...]
