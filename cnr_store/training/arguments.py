"""The choices that a caller of the manager makes, and what they are turned into."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, Literal

from cnr_store.errors import BadInput, NotAStore
from cnr_store.mirrors import MirrorMode
from cnr_store.options import encoding_name
from cnr_store.policy import Policy
from cnr_store.store import Store
from cnr_store.thresholds import check_threshold
from cnr_store.types import TableDtype, TableOptions
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


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Return if ``value`` is one of ``allowed``.

    Raises
    ------
    BadInput
    """
    if value not in allowed:
        raise BadInput(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}", found=value)


def movements_of(assume: Mapping[str, Moves]) -> dict[str, Movement]:
    """Return what the caller says of optimizers in the tracker's words."""
    for name, moves in assume.items():
        check_one_of(f"assume[{name!r}]", moves, ("touched", "ever_touched", "all"))
    return {name: Movement[moves.upper()] for name, moves in assume.items()}


def options_by_table(
    options: TableOptions | Mapping[str, TableOptions] | None, tables: Collection[str]
) -> dict[str, TableOptions]:
    """Return the options of every table.

    Raises
    ------
    BadInput
        Options for a table that the model does not have.
    """
    if not isinstance(options, Mapping):
        return dict.fromkeys(tables, options or TableOptions())
    unknown = sorted(options.keys() - set(tables))
    if unknown:
        raise BadInput(f"options= names tables {unknown}; the model has {sorted(tables)}", table=unknown[0])
    return {table: options.get(table, TableOptions()) for table in tables}


def check_thresholds(
    options: Mapping[str, TableOptions], dtypes: Mapping[str, TableDtype], *, mirror: MirrorMode, policy: Policy
) -> None:
    """Return if rows can wait in every table whose options say so; ``dtypes`` are those of this rank's tables.

    Raises
    ------
    BadInput
    """
    for table in sorted(table for table, one in options.items() if one.threshold is not None):
        if policy != "consecutive":
            raise BadInput(
                f'table {table!r} has threshold=, and policy={policy!r} writes no deltas to the last checkpoint: no '
                'row would ever wait; choose policy="consecutive", or leave threshold out',
                table=table, expected="consecutive", found=policy,
            )  # fmt: skip
        chosen = options[table]
        if table in dtypes and chosen.threshold is not None:
            is_lattice = encoding_name(chosen, dtypes[table]) == "lattice"
            check_threshold(table, chosen.threshold, is_lattice=is_lattice, has_mirror=mirror != "none")


def open_or_create(
    url: str, storage_options: Mapping[str, Any] | None, threads: int | None, branch: str | None = None
) -> Store:
    """Return the store at a URL, created if there is none; or the branch of that name, which must be there. Blocks."""
    try:
        return Store.open(url, branch=branch, storage_options=storage_options, threads=threads)
    except NotAStore:
        if branch is not None:
            raise
        return Store.create(url, storage_options=storage_options, threads=threads)


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
