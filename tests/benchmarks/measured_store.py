"""A store of one encoding under one policy, and what every save of a run costs it: bytes by kind, written and held.

Nothing is estimated: after each step of a save (the delta, the compaction, the collection of what nobody needs) new
segments are listed, and a file that is new or was written again counts with its length and with its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from dlrm_trace import SLOT, Interval

from cnr_store import RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import choose_scale
from cnr_store.format.layout import DATA, MANIFEST, RECEIPT
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.sizes import segment_sizes
from cnr_store.maintenance.compaction import CompactionPolicy
from cnr_store.maintenance.maintain import compact
from cnr_store.types import AffineBits, AffineSearch, Float32s, Precision, RowIds
from cnr_store.write.policy import CheckpointSize, Policy, decide

KINDS = ("rows", "codes", "scales", "slots", "metadata", "receipt", "record")
"""Of bytes that belong to tables: row ids, codes, row parameters, optimizer slots; ``zarr.json`` documents and the
manifest; the writers' receipts; the log and whatever else lies beside the segments."""

Choice = Callable[[Float32s], TableOptions]
"""From the rows of a table that the last interval touched, (n, dim), to how the table is stored from now on."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A way to store tables, named as in the results; ``choose`` is asked at every new generation."""

    name: str
    choose: Choice


def affine(bits: AffineBits, search: AffineSearch = "greedy") -> Encoding:
    """Check-N-Run's rows, with fp16 parameters."""
    options = TableOptions(encoding="affine", bits=bits, search=search)
    return Encoding(f"affine {bits} {search}", lambda _: options)


def lattice(bits: AffineBits) -> Encoding:
    """A lattice with the mean squared error of b-bit greedy affine rows on the rows that a delta holds.

    ``bits=`` alone samples the whole table, where rows that are never touched are smaller.
    """

    def choose(touched: Float32s) -> TableOptions:
        if len(touched) == 0:
            return TableOptions(bits=bits)
        sample: Float32s = np.ascontiguousarray(RowSample(touched, "float32").rows())
        return TableOptions(scale=_equal_scale(sample.tobytes(), sample.shape[1], bits))

    return Encoding(f"lattice {bits}", choose)


@lru_cache(maxsize=32)
def _equal_scale(sample: bytes, dim: int, bits: AffineBits) -> float:
    """The scale for float32 rows of ``dim`` columns; kept, since the stores of all policies ask for the same ones."""
    rows: Float32s = np.frombuffer(sample, np.float32).reshape(-1, dim)
    return choose_scale(rows, Precision(bits=bits))


RAW = Encoding("raw fp32", lambda _: TableOptions(encoding="raw", slot_bits="exact"))
EXACT = Encoding("exact", lambda _: TableOptions.exact())


@dataclass(frozen=True, slots=True)
class Saving:
    """What one save cost.

    Attributes
    ----------
    kind
        ``baseline`` or ``delta``.
    rows
        Rows that its segment holds.
    written
        Kind to bytes of everything that was written: file lengths, with compaction and collection.
    dense_bytes
        Bytes of the dense tensors and of their documents; in no kind.
    compacted_bytes
        Of ``written``, what compaction wrote.
    written_du, held_du
        As ``written`` and ``held_bytes``, in blocks of the disk; dense tensors included.
    peak_bytes, held_bytes
        File lengths of the store before and after what nobody needs was deleted, without dense tensors.
    """

    kind: str
    rows: int
    written: Mapping[str, int]
    dense_bytes: int
    compacted_bytes: int
    written_du: int
    peak_bytes: int
    held_bytes: int
    held_du: int

    @property
    def total(self) -> int:
        """Bytes written, without dense tensors."""
        return sum(self.written.values())


@dataclass(slots=True)
class Written:
    """Bytes of some files: of tables by kind, of dense tensors with their documents, and of all in blocks."""

    kinds: Counter[str] = field(default_factory=Counter)
    dense_bytes: int = 0
    blocks_bytes: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(
            self.kinds + other.kinds, self.dense_bytes + other.dense_bytes, self.blocks_bytes + other.blocks_bytes
        )


class MeasuredStore:
    """One store; `save` takes the intervals of a run in turn.

    Parameters
    ----------
    folder
        Where the store is made.
    rescale_at
        Intervals, from 1, at which a baseline chooses options anew, as the first one does and every baseline that
        ``intermittent`` asks for.
    compaction
        Compact the chain after each save, as a job beside the training does.
    is_collected
        Where a save or a compaction replaced segments, expire all but the newest checkpoint and delete what older ones
        alone needed.

    Attributes
    ----------
    savings
        What each save cost.
    """

    def __init__(
        self,
        folder: Path,
        encoding: Encoding,
        policy: Policy = "consecutive",
        *,
        rescale_at: Collection[int] = (),
        compaction: CompactionPolicy | None = None,
        is_collected: bool = True,
    ) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.encoding = encoding
        self.policy: Policy = policy
        self.rescale_at = rescale_at
        self.compaction = compaction
        self.is_collected = is_collected
        self.savings: list[Saving] = []
        self.store = Store.create(str(folder), fsync=False)
        self._writer = self.store.writer()
        self._sizes: list[CheckpointSize] = []
        self._changed: dict[str, npt.NDArray[np.bool_]] = {}
        self._segments: dict[str, Written] = {}
        self._others: dict[Path, tuple[int, int, int]] = {}

    @property
    def name(self) -> str:
        """Policy and encoding, as the tables call them."""
        return f"{self.policy_name}, {self.encoding.name}"

    @property
    def policy_name(self) -> str:
        """The policy, with the job beside it."""
        return self.policy if self.compaction is None else f"{self.policy} + compaction"

    def save(self, interval: Interval) -> None:
        """Save one interval as the policy decides, then compact and collect as asked, and note what it cost."""
        number = len(self.savings) + 1
        length = len(self.store.head().record.chain)
        decision = decide(self.policy, self._sizes, chain_length=length)
        is_planned = self.policy == "intermittent" and decision.kind == "baseline"
        is_new = number == 1 or number in self.rescale_at or is_planned
        rows = self._rows(interval, is_full=is_new or decision.kind == "baseline", since_baseline=decision.base)
        with self._writer.begin(interval.step, "baseline" if is_new else decision.kind, base=decision.base) as txn:
            for table, values in interval.tables.items():
                slots = interval.slots[table]
                if txn.kind == "baseline":
                    options = self.encoding.choose(values[interval.touched[table]]) if is_new else None
                    txn.write_table(table, values, slots={SLOT: slots}, options=options)
                else:
                    changed = rows[table]
                    txn.write_rows(table, changed, values[changed], slots={SLOT: slots[changed]})
            txn.put_dense(interval.dense)
        if txn.kind == "baseline":
            self._sizes.clear()
        self._sizes.append(CheckpointSize(txn.kind, txn.size_bytes))
        kept_rows = int(self.store.head().record.chain[-1].rows or 0)
        written = self._take_new()
        compacted = Written()
        if self.compaction is not None:
            compact(self.store, policy=self.compaction)
            compacted = self._take_new()
            written += compacted
        peak_bytes = self._held()[0]
        is_replaced = txn.kind == "baseline" or decision.base == "baseline" or compacted.kinds["codes"] > 0
        if self.is_collected and is_replaced:
            # The first run gives up what nobody needs, the second deletes it.
            for _ in range(2):
                collect_garbage(self.store, policy=RetentionPolicy(keep_last=1), grace_s=0, dry_run=False, force=True)
            written += self._take_new()
        held_bytes, held_du = self._held()
        self.savings.append(
            Saving(
                kind=txn.kind, rows=kept_rows, written={name: written.kinds[name] for name in KINDS},
                dense_bytes=written.dense_bytes, compacted_bytes=compacted.kinds.total(),
                written_du=written.blocks_bytes,
                peak_bytes=peak_bytes, held_bytes=held_bytes, held_du=held_du,
            )
        )  # fmt: skip

    def error(self, interval: Interval) -> float:
        """Return the mean squared error of the touched rows as the store gives them back."""
        total, count = 0.0, 0
        snapshot = self.store.snapshot()
        for table, rows in interval.touched.items():
            if len(rows):
                difference = snapshot.table(table).read_rows(rows).astype(np.float64) - interval.tables[table][rows]
                total += float(np.square(difference).sum())
                count += difference.size
        return total / count

    def _rows(self, interval: Interval, *, is_full: bool, since_baseline: str) -> dict[str, RowIds]:
        """The rows of a delta: touched in this interval, or since the baseline."""
        if self.policy in ("baseline", "consecutive"):
            return interval.touched
        for table, touched in interval.touched.items():
            changed = self._changed.setdefault(table, np.zeros(len(interval.tables[table]), np.bool_))
            changed[touched] = True
            if is_full:
                changed[:] = False
        return {table: np.flatnonzero(changed).astype(np.int64) for table, changed in self._changed.items()}

    def _take_new(self) -> Written:
        """Count what is new or changed since the last call. A segment never changes, so each is listed once."""
        new = Written()
        home = self.folder / DATA
        for name in sorted({path.name for path in home.glob("*/")} - self._segments.keys()):
            self._segments[name] = _count_segment(home / name)
            new += self._segments[name]
        others = _listing(self.folder, below=home)
        changed = {path: stat for path, stat in others.items() if self._others.get(path) != stat}
        self._others = others
        for path, (length, blocks, _) in changed.items():
            new.kinds["metadata" if path.parent == home else "record"] += length
            new.blocks_bytes += blocks
        return new

    def _held(self) -> tuple[int, int]:
        """File lengths without dense tensors, and blocks, of all that is there."""
        there = [written for name, written in self._segments.items() if (self.folder / DATA / name / MANIFEST).exists()]
        others = _listing(self.folder, below=self.folder / DATA).values()
        length = sum(written.kinds.total() for written in there) + sum(stat[0] for stat in others)
        return length, sum(written.blocks_bytes for written in there) + sum(stat[1] for stat in others)


def total_by_kind(savings: Iterable[Saving]) -> dict[str, int]:
    """Return the bytes of some saves by kind."""
    total: Counter[str] = Counter()
    for saving in savings:
        total.update(saving.written)
    return {kind: total[kind] for kind in KINDS}


def _count_segment(folder: Path) -> Written:
    """Count the files of one segment, by what its manifest says that they hold."""
    manifest = folder / MANIFEST
    sizes = segment_sizes(decode_manifest(manifest.read_bytes(), str(manifest)))
    counted = Written(Counter(rows=sizes.rows, codes=sizes.codes, scales=sizes.scales, slots=sizes.slots))
    for path, (length, blocks, _) in _listing(folder).items():
        counted.blocks_bytes += blocks
        if path.relative_to(folder).as_posix().partition(".")[2].startswith("dense."):
            counted.dense_bytes += length
        elif path.name.endswith(RECEIPT):
            counted.kinds["receipt"] += length
        else:
            counted.kinds["metadata"] += length
    # What was counted as metadata holds the arrays too.
    counted.kinds["metadata"] -= sizes.rows + sizes.codes + sizes.scales + sizes.slots
    return counted


def _listing(folder: Path, below: Path | None = None) -> dict[Path, tuple[int, int, int]]:
    """Path to length, bytes in blocks, time of change of every file below a folder, but not in folders of ``below``."""
    found = {}
    for path in folder.iterdir():
        if path.is_dir():
            found |= {} if folder == below else _listing(path, below)
        else:
            stat = path.stat()
            found[path] = (stat.st_size, 512 * stat.st_blocks, stat.st_mtime_ns)
    return found
