"""The choices that a caller of the manager makes, and what they are turned into."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, Literal, get_args

from cnr_store.errors import BadInput, NotAStore
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_number
from cnr_store.runtime.threads import check_rate
from cnr_store.store import Store
from cnr_store.types import TableDtype
from cnr_store.write.mirrors import MirrorMode
from cnr_store.write.policy import Policy
from cnr_store.write.schema_choice import check_options
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import Movement

WhenBusy = Literal["wait", "skip", "refuse"]
"""What a save that is due does while one is under way: wait for it, leave its rows to the next one, or raise."""

OnError = Literal["raise", "warn"]
"""What a failed save does at the next `step`: stop the training or warn. Its rows stay dirty either way."""

FirstFull = Literal["stall", "copy"]
"""How a table that must be read whole is read: the training stalls until it is written, or a copy is made."""

Schedule = Literal["constant", "loss"]
"""Whether scales stay as they were chosen, or become finer as the loss falls (`CheckpointManager.report_loss`)."""

Moves = Literal["touched", "ever_touched", "all"]
"""Which rows a step of an optimizer changes: those looked up, those ever looked up, or all."""


_CHOICES: dict[str, tuple[object, ...]] = {
    "policy": get_args(Policy),
    "first_full": get_args(FirstFull),
    "when_busy": get_args(WhenBusy),
    "on_error": get_args(OnError),
    "mirror": get_args(MirrorMode),
    "on_bypass": ("warn", "raise"),
    "in_flight": ("refuse", "remark"),
    "schedule": get_args(Schedule),
    "save_on_sigterm": (False, True, "flag"),
}


def check_choices(**given: object) -> None:
    """Return if each of a manager's arguments, by name, is one of its choices.

    Raises
    ------
    BadInput
    """
    for name, value in given.items():
        checked_choice(name, value, _CHOICES[name])


def check_numbers(
    every_steps: object, every_seconds: object, bytes_per_s: float | None, threads: object, verify_rows: object
) -> None:
    """Return if the numbers that a manager is given can be meant; None is "not given".

    Raises
    ------
    BadInput
    """
    if every_steps is not None:
        checked_count("every_steps", every_steps, least=1)
    if every_seconds is not None:
        checked_number("every_seconds", every_seconds, above=0)
    check_rate(bytes_per_s)
    if threads is not None:
        checked_count("threads", threads, least=1)
    checked_count("verify_rows", verify_rows)


def movements_of(assume: Mapping[str, Moves]) -> dict[str, Movement]:
    """Return what the caller says of optimizers in the tracker's words."""
    for name, moves in assume.items():
        checked_choice(f"assume[{name!r}]", moves, ("touched", "ever_touched", "all"))
    return {name: Movement[moves.upper()] for name, moves in assume.items()}


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
        raise BadInput(f"options= names tables {unknown}; the model has {sorted(tables)}", table=unknown[0])
    return {table: given.get(table, TableOptions()) for table in tables}


def check_table_options(
    options: Mapping[str, TableOptions], dtypes: Mapping[str, TableDtype], *, mirror: MirrorMode, policy: Policy
) -> None:
    """Return if tables can be stored as their options say; ``dtypes`` are those of this rank's tables.

    Raises
    ------
    BadInput
    """
    for table, one in sorted(options.items()):
        if one.threshold is not None and policy != "consecutive":
            raise BadInput(
                f'table {table!r} has threshold=, and policy={policy!r} writes no deltas to the last checkpoint: no '
                'row would ever wait; choose policy="consecutive", or leave threshold out',
                table=table, expected="consecutive", found=policy,
            )  # fmt: skip
        if table in dtypes:
            check_options(table, one, dtypes[table], has_mirror=mirror != "none")


def open_or_create(
    url: str, storage_options: Mapping[str, Any] | None, threads: int | None, branch: str | None = None
) -> Store:
    """Return the store at a URL, created if there is none; or the branch of that name, which must be there. Blocks."""
    try:
        store = Store.open(url, branch=branch, storage_options=storage_options, threads=threads)
    except NotAStore:
        if branch is not None:
            raise
        return Store.create(url, storage_options=storage_options, threads=threads)
    store.internals.finish_creation()
    return store


def catch_sigterm(handler: Callable[[int, FrameType | None], None]) -> Any:
    """Install a handler and return the one before. Forked children inherit it and can be ended as without it.

    Raises
    ------
    BadInput
        Outside the main thread, where Python takes no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise BadInput("save_on_sigterm works in the main thread only; set manager.should_stop yourself")
    process = os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(number, frame)
            return
        # A forked child has no training to save. None: the handler before was not Python's, and cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        signal.raise_signal(signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    return previous
