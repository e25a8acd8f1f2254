"""A target of bytes per checkpoint: what saves have cost, and what follows for thresholds and scales of the next one.

What is decided comes from `cnr_store.write.rate.steer`; rank 0 decides, since it alone sees what all ranks wrote, and
the others take it over (`SizeTarget.adopt`) with the messages by which ranks agree on a save.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from cnr_store.errors import BadInput
from cnr_store.format.records import Manifest
from cnr_store.training.document import RateDocument
from cnr_store.types import MAX_CHAIN, Lattice
from cnr_store.write.policy import CheckpointSize, Policy
from cnr_store.write.rate import Limits, SaveCost, Steering, TargetStatus, steer
from cnr_store.write.table_options import TableOptions, Threshold
from cnr_store.write.transaction import Transaction

_MOST_DOUBLINGS = 8
"""How much coarser scales may become as long as nobody has measured it; between 8 and 2 bits it is 5 or 6."""
_FULLS_MEASURED = 16
"""With the policy ``full``: saves until it is measured again how much coarser scales may become."""
_SAVES_KEPT = 64

logger = logging.getLogger(__name__)


class SizeTarget:
    """What one manager knows of its target of bytes. Call it from the thread that trains.

    Attributes
    ----------
    share
        Part of every threshold's ``keep`` that is in use.
    doublings
        By table, how much coarser its scale is than its options ask for, in powers of two; at the head.
    planned
        By table, doublings and scale that the next save gives it, if that is a full.

    Raises
    ------
    BadInput
        Other options rule over the scales.
    """

    def __init__(self, target_bytes: int, options: Mapping[str, TableOptions], policy: Policy, schedule: str) -> None:
        auto = sorted(table for table, one in options.items() if one.bits == "auto")
        if auto or schedule != "constant":
            other = f'bits="auto" of table {auto[0]!r}' if auto else f"schedule={schedule!r}"
            raise BadInput(
                f"target_bytes_per_checkpoint= and {other} would both choose the scales; leave out one of them"
            )
        self.target_bytes = target_bytes
        self.share = 1.0
        self.doublings: dict[str, int] = {}
        self.planned: dict[str, tuple[int, float]] = {}
        self._policy, self._options = policy, options
        waits = [one.threshold.max_wait for one in options.values() if one.threshold is not None]
        self._has_thresholds, self._settles = bool(waits), 1 + max(waits, default=0)
        self._lattices: set[str] = set()  # as stored: options say it only together with the dtype
        self._most_doublings, self._fulls_measured = _MOST_DOUBLINGS, 0
        self._costs: deque[SaveCost] = deque(maxlen=_SAVES_KEPT)
        self._steering = Steering(1.0, 0, False, "learning", "no save has told a size yet")
        self._is_told = False

    @property
    def level(self) -> int:
        """Doublings of the tables that have most."""
        return max(self.doublings.values(), default=0)

    @property
    def status(self) -> TargetStatus:
        """How the run stands to its target."""
        found = self._steering
        return TargetStatus(
            self.target_bytes, found.state, found.reason, found.size_bytes, self.share, dict(self.doublings)
        )

    def is_open(self, table: str) -> bool:
        """Whether a table is stored as a lattice that may become coarser: nobody has named an error or a step."""
        options = self._options.get(table)
        return (
            options is not None
            and table in self._lattices
            and options.encoding in (None, "lattice")
            and options.max_error is None
            and options.scale is None
        )

    def threshold(self, threshold: Threshold) -> Threshold:
        """Return the threshold that a save uses: the bounds are the user's, the share that goes out is ours."""
        return replace(threshold, keep=threshold.keep * self.share, refresh_every=1)

    def step_for(self, table: str, step: float | None) -> float | None:
        """Return the scale that a table written anew gets: planned, or as it is; None as its options say."""
        if table in self.planned:
            return self.planned[table][1]
        return step if self.doublings.get(table) else None

    # ---- one save

    def proposal(self, sizes: Sequence[CheckpointSize], chain_length: int) -> dict[str, Any]:
        """Return what rank 0 says of the next save, as plain JSON; that of other ranks does not count."""
        saves_to_full = {"full": 0, "consecutive": max(0, MAX_CHAIN - chain_length)}.get(self._policy)
        full = next((size.size_bytes for size in sizes if size.kind == "full"), None)
        most = self._most_doublings if any(map(self.is_open, self._options)) else 0
        limits = Limits(self._has_thresholds, self._settles, most, full, saves_to_full)
        found: dict[str, Any] = msgspec.to_builtins(
            steer(self.target_bytes, self._costs, self.share, self.level, limits)
        )
        return found

    def adopt(self, given: Mapping[str, Any]) -> Steering:
        """Take over what rank 0 said; the share holds from this save on. Says once that a target cannot be met."""
        self._steering = msgspec.convert(given, Steering)
        self.share = self._steering.share
        state = self._steering.state
        if state == "unreachable" and not self._is_told:
            logger.warning(
                "checkpoints cannot come to %d bytes: %s; save more seldom, or give thresholds, fewer bits or another "
                "target", self.target_bytes, self._steering.reason,
            )  # fmt: skip
        self._is_told = self._is_told or state == "unreachable"
        return self._steering

    def plan(self, doublings: int, steps: Mapping[str, float], coarsest: Mapping[str, float]) -> dict[str, float]:
        """Plan scales for a full; return those that change, by table.

        Parameters
        ----------
        steps, coarsest
            By table that is open: its scale, and that of 2-bit rows.
        """
        self.planned, found = {}, {}
        most = 0
        for table, step in steps.items():
            now = self.doublings.get(table, 0)
            room = now + math.floor(math.log2(coarsest[table] / step)) if table in coarsest else now
            most = max(most, room)
            wanted = max(0, min(doublings, room))
            if wanted != now:
                found[table] = math.ldexp(step, wanted - now)
                self.planned[table] = (wanted, found[table])
        self._most_doublings = most
        # Where every save is a full the next one would measure again, and its answer is the same.
        self._fulls_measured = _FULLS_MEASURED if self._policy == "full" else int(bool(found))
        return found

    def won(self, transaction: Transaction) -> None:
        """Take notice that a save is committed."""
        self._lattices = {table for table, schema in transaction.tables.items() if isinstance(schema.encoding, Lattice)}
        if transaction.kind == "full":
            if self._fulls_measured > 0:
                self._fulls_measured -= 1
            else:
                self._most_doublings = _MOST_DOUBLINGS  # rows may have grown: measured again when it is needed
            self.doublings |= {table: doublings for table, (doublings, _) in self.planned.items()}
            self.planned = {}
        counts = self._policy == "full" or transaction.kind == "delta"
        if transaction.manifest is None or not counts or (self._has_thresholds and not transaction.may_wait):
            return
        elements, code_bytes = self._of_codes(transaction.manifest)
        self._costs.append(SaveCost(transaction.size_bytes, elements, code_bytes, self.share, self.level))

    def _of_codes(self, manifest: Manifest) -> tuple[int, int]:
        """Elements of open tables in a segment, and the bytes of their codes."""
        elements, paths = 0, set[str]()
        for part in manifest.parts:
            if not self.is_open(part.table):
                continue
            for rows in (part.add, part.set):
                if rows is not None and "codes" in rows.arrays:
                    elements += rows.count * (part.columns[1] - part.columns[0])
                    paths.add(rows.arrays["codes"].path)
        return elements, sum(entry.size for entry in manifest.objects if entry.path.rpartition("/c/")[0] in paths)

    def added_to(self, document: RateDocument) -> RateDocument:
        """Return the document with share and scales as they are once the save in the making has won."""
        planned = {table: doublings for table, (doublings, _) in self.planned.items()}
        return msgspec.structs.replace(
            document, share=self.share, doublings=self.doublings | planned, target_bytes=self.target_bytes,
            target_state=self._steering.state,
        )  # fmt: skip

    def restored(self, document: RateDocument, kept: Mapping[str, float]) -> None:
        """Go on with the share and the scales of a checkpoint; sizes are learned anew, by its first delta.

        ``kept``: the scales of tables that go on as they are stored.
        """
        self.share = document.share
        self.doublings = {table: count for table, count in document.doublings.items() if table in kept}
        self._lattices = set(kept)
        self._most_doublings, self._fulls_measured = _MOST_DOUBLINGS, 0
        self.planned, self._is_told = {}, False
        self._costs.clear()
        self._steering = Steering(self.share, self.level, False, "learning", "no save since the restore")
