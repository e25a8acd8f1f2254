"""Lookups in tables that another process loads: no store, no network, one copy of the rows for all processes.

A reader writes one thing only: if its lookups take too long, it asks the owner to defer merging. The last view of an
owner that died stays complete; readers use it until a new owner serves in the folder.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cnr_store.errors import CorruptObject, StorageFailure, VersionNotFound
from cnr_store.format.limits import MAX_MANIFEST_BYTES
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.local_files import failing_at, read_at_most
from cnr_store.serving.rows.board import BOARD_BYTES, Board
from cnr_store.serving.rows.lookups import Lookups, TableLookups
from cnr_store.serving.rows.memory import Array
from cnr_store.serving.rows.served_table import BaseTable
from cnr_store.serving.rows.shared_memory import BOARD_FILE, current_generation, map_file
from cnr_store.serving.rows.view_file import ArrayRef, BaseRef, check_file_name, check_ref, parse_view, view_of
from cnr_store.serving.rows.views import View

RECHECK_S = 1.0
"""Seconds between checks for a new owner that took over from a killed one."""

RECHECK_ENDED_S = 0.05
"""The same after the owner ended."""

ATTACH_ATTEMPTS = 100

_ADVICE = {errno.EACCES: "only its loader's user may read what is in it: run both as one user"}


@dataclass(frozen=True, slots=True, eq=False)
class _Attachment:
    """What is mapped: replaced as a whole, so that lookups on other threads see one state of it.

    ``former``: files of the version before, which the next one may be in.
    """

    generation: int
    board: Board
    view: View
    files: Mapping[str, npt.NDArray[np.uint8]]
    former: Mapping[str, npt.NDArray[np.uint8]]
    base: Mapping[str, tuple[BaseRef, BaseTable]]


class AttachedTables(TableLookups, Closing):
    """The tables that the owner of ``folder`` serves, for lookups on any number of threads.

    >>> with AttachedTables("/dev/shm/model") as tables:  # doctest: +SKIP
    ...     batch = tables.lookup_many({"user": [3, 5]})
    """

    def __init__(self, folder: str | Path, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Attach; a process that cannot wait for the loader calls this again later.

        Raises
        ------
        VersionNotFound
            No loader serves in the folder (yet).
        NewerFormat
        CorruptObject
            The description of the view, or of the owner, is damaged.
        AccessDenied, StorageFailure
        """
        self.folder = Path(folder)
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._attached: _Attachment | None = None
        self._checked_at = monotonic_s()
        self._missed = 0
        self._lookups = Lookups(self)
        self._attach()

    @property
    def retries(self) -> int:
        """How often a view was merged under a lookup, which then read again."""
        return self._lookups.retries

    def _view(self) -> View:
        return self.newest_view()[0]

    def close(self) -> None:
        """Forget what is mapped; it is unmapped when no array of it is left. Rows of batches are copies and stay."""
        with self._lock:
            self._attached = None

    def newest_view(self) -> tuple[View, Board]:
        """Return the newest view, mapped, and its board; costs a look at the board where nothing is new.

        Raises
        ------
        VersionNotFound
            `close` was called; or the owner ended, and took away a view that was not mapped here yet.
        CorruptObject, AccessDenied, StorageFailure
        """
        attached = self._attached
        if attached is None:
            raise VersionNotFound(f"the tables in {self.folder} are not attached any more", path=str(self.folder))
        least = attached.board.shown
        if self._is_time_to_check(attached.board):
            attached = self._follow_owner(attached)
            least = attached.board.epoch
        # A view that was merged since reads as before, until the next version: mapping costs more than a lookup.
        if attached.view.epoch < least:
            attached = self._follow_epoch()
            if not attached.board.is_whole(attached.view.epoch):
                attached = self._leave(attached)
        return attached.view, attached.board

    def _is_time_to_check(self, board: Board) -> bool:
        wait = RECHECK_ENDED_S if board.has_ended else RECHECK_S
        return self._monotonic_s() - self._checked_at >= wait

    def _follow_owner(self, attached: _Attachment) -> _Attachment:
        """Attach to the generation that is current now, if it is another; else stay with what there is."""
        self._checked_at = self._monotonic_s()
        try:
            generation = current_generation(self.folder)
            if generation is None or generation == attached.generation:
                return attached
            return self._attach()
        except (VersionNotFound, CorruptObject, StorageFailure):
            return attached  # that owner has ended too, or what it left is damaged: what is mapped stays good

    def _leave(self, attached: _Attachment) -> _Attachment:
        """Go over to another owner at once: this one ended, and took the last view away before it was mapped here."""
        after = self._follow_owner(attached)
        if after is attached and attached.board.epoch == self._missed:
            raise VersionNotFound(
                f"the loader that served in {self.folder} has ended, and the last version was not mapped here before: "
                "attach again when a loader serves",
                path=str(self.folder),
            )
        return after

    def _follow_epoch(self) -> _Attachment:
        with self._lock, failing_at(self.folder, "attached", _ADVICE):
            attached = self._attached
            if attached is None:
                raise VersionNotFound(f"the tables in {self.folder} are not attached any more", path=str(self.folder))
            while (epoch := attached.board.epoch) != attached.view.epoch:
                try:
                    attached = self._mapped(attached.generation, attached.board, epoch, attached)
                except FileNotFoundError:
                    # The view went while it was mapped, and a newer one is there. Or all went with their owner, and
                    # what is mapped stays good.
                    if attached.board.epoch == epoch:
                        self._missed = epoch
                        break
            self._attached = attached
            return attached

    def _attach(self) -> _Attachment:
        with self._lock, failing_at(self.folder, "attached", _ADVICE):
            for _ in range(ATTACH_ATTEMPTS):
                generation = current_generation(self.folder)
                if generation is None:
                    break
                try:
                    board = Board(_board_cells(self._generation_path(generation) / BOARD_FILE))
                    self._attached = self._mapped(generation, board, board.epoch, None)
                    return self._attached
                except FileNotFoundError:
                    # Another owner took over between two looks, or a newer view came.
                    continue
            raise VersionNotFound(
                f"no loader serves in {self.folder}: start one with shared={str(self.folder)!r}", path=str(self.folder)
            )

    def _mapped(self, generation: int, board: Board, epoch: int, before: _Attachment | None) -> _Attachment:
        folder = self._generation_path(generation)
        path = folder / f"view-{epoch}"
        document = parse_view(read_at_most(path, MAX_MANIFEST_BYTES), str(path))
        known = {} if before is None else {**before.former, **before.files}
        files: dict[str, npt.NDArray[np.uint8]] = {}

        def array_of(ref: ArrayRef) -> Array:
            if ref.file not in files:
                check_file_name(ref.file)
                # A name is that of one file for ever, so one that is mapped already is the same.
                files[ref.file] = known[ref.file] if ref.file in known else _mapped_file(folder / ref.file)
            memory = files[ref.file]
            check_ref(ref, len(memory), f"{folder}/{ref.file}")  # not joined as paths: this is done within a lookup
            return np.ndarray(ref.shape, ref.dtype, buffer=memory.data, offset=ref.offset)

        view, base = view_of(document, array_of, {} if before is None else before.base)
        for ref, _ in base.values():
            files |= {name: known[name] for name in ref.files - files.keys()}
        former = {} if before is None or before.view.version == view.version else before.files
        former = {name: file for name, file in former.items() if name not in files}
        return _Attachment(generation, board, view, files, former, base)

    def _generation_path(self, generation: int) -> Path:
        path = self.folder / f"g{generation}"
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        return path


def _mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    return map_file(path, path.stat().st_size, create=False, writable=False)


def _board_cells(path: Path) -> npt.NDArray[np.int64]:
    try:
        return map_file(path, BOARD_BYTES, create=False).view(np.int64)
    except PermissionError:  # a reader that may not write can look all the same; it just cannot ask the owner to wait
        return map_file(path, BOARD_BYTES, create=False, writable=False).view(np.int64)
