"""The options of a manager, such as what a save that is due does while another runs; and options by table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_number, some_of
from cnr_store.runtime.ranks import Ranks
from cnr_store.runtime.threads import check_rate
from cnr_store.training.background import SaveReport
from cnr_store.training.dynamic_tables import DynamicTable
from cnr_store.training.precision.rate_control import Schedule
from cnr_store.types import KeyRule, TableDtype
from cnr_store.write.mirrors import MirrorMode
from cnr_store.write.policy import Policy
from cnr_store.write.schema_choice import check_options
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import Movement
from cnr_store_gpu.tracker import InFlight

WhenBusy = Literal["wait", "later", "skip", "refuse"]
"""What a due save does while another one is running.

``wait``: the training waits for that one. ``later``: the save begins at the first step after that one is over, and has
the rows of all steps since; with ``every_steps=1`` saves follow each other as fast as they are written, and no step
waits. ``skip``: its rows are left to the next save that is due. ``refuse``: raise.
"""

OnError = Literal["raise", "warn"]
"""What a failed save does at the next `step`: stop the training or warn. Its rows stay dirty either way."""

DEFAULT_OVERHEAD = 0.01
"""Share of the training time that saves may cost with ``every_steps="auto"``."""

FirstBaseline = Literal["stall", "live"]
"""How a table that must be read whole is read: while the training waits, or while it continues."""

DenseCopies = Literal["lazy", "stall"]
"""When dense tensors are copied: while the training goes on, until its next step, or while it waits."""

Moves = Literal["touched", "ever_touched", "all"]
"""Which rows a step of an optimizer changes: those looked up, those ever looked up, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When a `CheckpointManager` saves, how much of the tables, and what a save that cannot be made does.

    Attributes
    ----------
    policy
        ``baseline``, ``consecutive``, ``one_shot`` or ``intermittent`` (`cnr_store.write.policy`).
    every_seconds
        A save is also due this long after the last one, in addition to ``every_steps``. For trainings of one rank.
    overhead
        With ``every_steps="auto"``: the share of the training time that saves may cost, `DEFAULT_OVERHEAD` if None. The
        manager measures the stall, CPU time and writing of its saves, and the time of a step; `CheckpointManager.rate`
        says what it chose. A save that is due does not wait, but begins at the first step after the one before it is
        over, whatever ``when_busy`` says.
    first_baseline
        How tables are read that must be written whole: in the first save, with a new slot or another scale. ``live``:
        while the training goes on; rows that it changes meanwhile are copied at the first step behind that, and the
        checkpoint is of that step. Every writer of a row must mark it, as the library's hooks do. Tables without a
        full mirror (``mirror="none"``, affine rows) stall all the same.
    dense_copies
        When dense parameters of optimizers, and their state, in host memory are copied: while the training waits
        (``stall``), or by the background until the next step of an optimizer (``lazy``). Lazy is right where nothing
        but steps of `torch.optim` optimizers writes them from one save to the next step. What else writes a tensor is
        noticed, once by its bits and from then on by its version, which gives the save up; writes through ``.data`` or
        numpy that begin later are not noticed.
    when_busy, on_error
        See `WhenBusy` and `OnError`.
    save_on_sigterm
        On SIGTERM the next `step` saves and raises SystemExit(143); with ``"flag"`` it saves and returns True. Several
        ranks do so together, at the next step that is a multiple of 16 after one of them got it.
    git
        Whether the commit that is checked out around the working directory is recorded with each save, if there is one.
    rng
        Whether the random generators of Python, numpy and torch are saved and restored.
    on_save
        Called with the `SaveReport` of each committed save, on the thread that trains, when `step`, `save`,
        `wait_until_finished` or `close` finds that the save is committed. An error that it raises is logged.

    Raises
    ------
    BadInput
        A choice that is none, or a number that is not positive.
    """

    policy: Policy = "consecutive"
    every_seconds: float | None = None
    overhead: float | None = None
    first_baseline: FirstBaseline = "stall"
    dense_copies: DenseCopies = "stall"
    when_busy: WhenBusy = "wait"
    on_error: OnError = "raise"
    save_on_sigterm: bool | Literal["flag"] = False
    git: bool = True
    rng: bool = True
    on_save: Callable[[SaveReport], object] | None = None

    def __post_init__(self) -> None:
        checked_choice("policy", self.policy, get_args(Policy))
        checked_choice("first_baseline", self.first_baseline, get_args(FirstBaseline))
        checked_choice("dense_copies", self.dense_copies, get_args(DenseCopies))
        checked_choice("when_busy", self.when_busy, get_args(WhenBusy))
        checked_choice("on_error", self.on_error, get_args(OnError))
        checked_choice("save_on_sigterm", self.save_on_sigterm, (False, True, "flag"))
        if self.every_seconds is not None:
            checked_number("every_seconds", self.every_seconds, above=0)
        if self.overhead is not None:
            checked_number("overhead", self.overhead, above=0, most=0.5)
        if self.on_save is not None and not callable(self.on_save):
            raise BadInput("on_save is called with each SaveReport; pass a function", found=type(self.on_save).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingOptions:
    """How a `CheckpointManager` finds out which rows changed, and copies them.

    Attributes
    ----------
    tables
        Names of parameters that are tables besides every ``nn.Embedding`` and ``nn.EmbeddingBag``.
    dynamic_tables
        Tables that grow by key in a library of their own, by a name that no table of the model has; every rank has the
        same, each with its own keys (``StoreOptions.key_rule``). They know themselves which rows changed. A save copies
        those; a baseline copies all of them, to host memory, while the training waits. Not with the policies
        ``one_shot`` and ``intermittent``.
    assume
        What optimizers of your own do, by class name: ``touched``, ``ever_touched`` or ``all`` rows move in a step.
    in_flight
        As for `cnr_store_gpu.RowTracker`: ``remark`` where a pipeline always has batches between lookup and step.
    allow_dense, on_bypass, verify_rows
        As for `cnr_store_gpu.RowTracker`.
    quantize_on_device
        Turn the touched rows of tables that are stored as a lattice (``bits=``, ``max_error=``, ``scale=``) into codes
        before they leave the device: 2 bytes per element cross to the host instead of 4, and the background has
        divisions less to do. What is stored is the same. For tables on an accelerator; those with
        ``nonfinite="escape"`` and rows with a code beyond 16 bits cross as floats as before.

    Raises
    ------
    BadInput
    """

    tables: Sequence[str] = ()
    dynamic_tables: Mapping[str, DynamicTable] = field(default_factory=dict)
    assume: Mapping[str, Moves] = field(default_factory=dict)
    in_flight: InFlight = "refuse"
    allow_dense: bool = False
    on_bypass: Literal["warn", "raise"] = "warn"
    verify_rows: int = 0
    quantize_on_device: bool = False

    def __post_init__(self) -> None:
        for name, moves in self.assume.items():
            checked_choice(f"assume[{name!r}]", moves, get_args(Moves))
        checked_choice("in_flight", self.in_flight, get_args(InFlight))
        checked_choice("on_bypass", self.on_bypass, ("warn", "raise"))
        checked_count("verify_rows", self.verify_rows)

    @property
    def movements(self) -> dict[str, Movement]:
        """``assume`` in the tracker's words."""
        return {name: Movement[moves.upper()] for name, moves in self.assume.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """How exactly a `CheckpointManager` stores tables during the run; `TableOptions` set how exactly at the beginning.

    Attributes
    ----------
    schedule
        ``loss``: lattices become finer as the loss that is given to `CheckpointManager.report_loss` falls, in powers
        of two, in the first save after a restore, as far as codes have room (``mirror="none"`` has none).
    max_quality_loss, validate
        Choose the scales by `calibrate` before the first save, unless something was restored: ``validate()`` may become
        so much larger, as a share. It must not train; it is called some ten times, while that save blocks the training,
        with the model in evaluation mode and a host copy of the tables beside it.
    dense, dense_above_bytes
        Store large dense layers as tables are stored, by these options: every two-dimensional parameter in float32,
        float16 or bfloat16 that no embedding has and that takes at least so many bytes. All its rows are in every save,
        as differences to the one before, and so is the optimizer's state. None stores dense tensors exactly, whole
        whenever they changed.
    residual_bits
        Store what each rank holds back of compressed communication in so many bits per value, 2 to 16, by the
        largest value of each tensor. None stores it exactly, so that the same ranks go on bit for bit.

    Raises
    ------
    BadInput
    """

    schedule: Schedule = "constant"
    max_quality_loss: float | None = None
    validate: Callable[[], float] | None = None
    dense: TableOptions | None = None
    dense_above_bytes: int = 1 << 20
    residual_bits: int | None = None

    def __post_init__(self) -> None:
        checked_choice("schedule", self.schedule, get_args(Schedule))
        checked_count("dense_above_bytes", self.dense_above_bytes)
        if self.residual_bits is not None:
            checked_choice("residual_bits", self.residual_bits, tuple(range(2, 17)))
        if not isinstance(self.dense, TableOptions | None):
            raise BadInput(f"dense= takes TableOptions or None; found {self.dense!r}", found=self.dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCopies:
    """Copies in the host memory of other ranks, from which a replaced rank reads its rows (`Survivor`).

    Each rank keeps the objects with rows that others put, of the chain of the newest version. What does not fit, and
    what was saved before the manager was made or by a compaction, is read from the store.

    Attributes
    ----------
    copies
        How many ranks keep what a rank puts, each on another host than it (on one host: any other ranks).
    memory_bytes
        Most bytes that a rank keeps for others. In a save it needs as many again at most for what it puts itself, until
        that is passed on.

    Raises
    ------
    BadInput
    """

    memory_bytes: int
    copies: int = 1

    def __post_init__(self) -> None:
        checked_count("memory_bytes", self.memory_bytes, least=1)
        checked_count("copies", self.copies, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a `CheckpointManager` opens its store and writes to it.

    Attributes
    ----------
    branch, storage_options, threads
        Only with a URL: the branch to train on (`Store.fork`), and as for `Store.open`.
    mirror, mirror_folder, bytes_per_s
        As for `Store.writer`.
    ranks
        The ranks that train together; None for all of ``torch.distributed``, or this process alone.
    peers
        Copies in other ranks' memory; None for none.
    key_rule, keyed_mirror_bytes
        Which rank owns a key of a dynamic table, and the limit on this rank's mirrors of them, as for `Store.writer`.

    Raises
    ------
    BadInput
    """

    branch: str | None = None
    storage_options: Mapping[str, Any] | None = None
    threads: int | None = None
    mirror: MirrorMode = "memory"
    mirror_folder: str | None = None
    bytes_per_s: float | None = None
    ranks: Ranks | None = None
    peers: PeerCopies | None = None
    key_rule: KeyRule = "modulo"
    keyed_mirror_bytes: int | None = None

    def __post_init__(self) -> None:
        checked_choice("mirror", self.mirror, get_args(MirrorMode))
        checked_choice("key_rule", self.key_rule, get_args(KeyRule))
        check_rate(self.bytes_per_s)
        if self.threads is not None:
            checked_count("threads", self.threads, least=1)
        if self.keyed_mirror_bytes is not None:
            checked_count("keyed_mirror_bytes", self.keyed_mirror_bytes, least=0)


def options_by_table(
    options: TableOptions | Mapping[str, TableOptions] | None, tables: Collection[str]
) -> dict[str, TableOptions]:
    """Return the options of every table.

    Raises
    ------
    BadInput
        No `TableOptions`, or those of a table that the model does not have.
    """
    given = TableOptions() if options is None else options
    for one in given.values() if isinstance(given, Mapping) else (given,):
        if not isinstance(one, TableOptions):
            raise BadInput(f"options= takes TableOptions, for all tables or by table; found {one!r}", found=one)
    if isinstance(given, TableOptions):
        return dict.fromkeys(tables, given)
    unknown = sorted(given.keys() - set(tables))
    if unknown:
        raise BadInput(
            f"options= names tables {some_of(unknown)}; the model has {some_of(tables, unknown[0])}",
            table=unknown[0],
        )
    return {table: given.get(table, TableOptions()) for table in tables}


def check_table_options(options: Mapping[str, TableOptions], dtypes: Mapping[str, TableDtype]) -> None:
    """Return if tables can be stored by their options; ``dtypes`` are those of this rank's tables.

    Raises
    ------
    BadInput
    """
    for table, one in sorted(options.items()):
        if table in dtypes:
            check_options(table, one, dtypes[table])
