"""Which bytes a delta has, and what other ways to code them with the same codecs would save: ``bench_entropy.py``.

Deltas of trained models (the DLRM trace; public data sets in time order, where their files are there) and of the
drifting table. The scale of each table is that of `bits` at the touched rows of the save before. First what a store
writes, by kind, documents included; then each coding of `codings`, checked by decoding, in bytes and in time against
codes by row id, alternating in one run; the order of slots is what a store writes. A saving counts against everything
on disk, documents too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import codings
import dlrm_trace
import harness
import numpy as np
import numpy.typing as npt
from codings import Chunk, Coding
from drifting import TABLE, DriftingTable
from real_sets import DATA_FOLDER, present

from cnr_store import Store, TableOptions
from cnr_store.encodings.scale import choose_scale
from cnr_store.format.documents import unpack
from cnr_store.format.layout import MANIFEST, segment_prefix
from cnr_store.types import Float32s, Precision, RowIds
from tests.support.encoders import float_bits_codes

BITS = (2, 4, 8)
SLOT_MANTISSA = 7
ENOUGH_SAVED = 0.95
"""A coding is kept if everything on disk shrinks to this share."""
FAST_ENOUGH = 0.8
SAMPLE_ROWS = 20_000
QUICK_SETS = ("MovieLens-100k",)


@dataclass(frozen=True, slots=True)
class Moved:
    """One table of one interval: the touched rows, before and after; slots (n,)."""

    name: str
    num_rows: int
    rows: RowIds
    before: Float32s
    after: Float32s
    slots_before: Float32s
    slots_after: Float32s


@dataclass(frozen=True, slots=True)
class Source:
    """What changed in one interval of a run, and the rows that scales are chosen from."""

    name: str
    tables: tuple[Moved, ...]
    samples: tuple[Float32s, ...]

    def scales(self, bits: int) -> list[float]:
        """Return each table's lattice step."""
        return [choose_scale(sample, Precision(bits=cast(Any, bits))) for sample in self.samples]

    def chunks(self, bits: int) -> list[Chunk]:
        """Return what a delta stores of the rows whose codes changed."""
        found = []
        for table, scale in zip(self.tables, self.scales(bits), strict=True):
            step = np.float32(scale)
            codes = (np.rint(table.after / step) - np.rint(table.before / step)).astype(np.int16)
            now, before = (_slot_codes(slots) for slots in (table.slots_after, table.slots_before))
            slots = (now - before).astype(np.int16)
            kept = codes.any(axis=1) | (slots != 0)
            if kept.any():
                found += codings.cut(table.rows[kept], codes[kept], slots[kept], now[kept].astype(np.int16))
        return found


def main() -> None:
    parser = harness.arguments(__doc__, rows=1_000_000, repeats=5)
    parser.add_argument("--steps", type=int, default=1500, help="of the DLRM trace")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats, options.steps = 20_000, 2, 300
    widths = (4,) if options.quick else BITS
    report = harness.Report("bytes of a delta by kind, and other ways to code them")
    report.start()
    found = list(sources(options.steps, options.rows, options.seed, quick=options.quick))
    with harness.data_folder(options.folder) as folder:
        other = by_kind(report, found, widths, folder)
    compare(report, found, widths, other)
    times(report, found[0], widths, options.repeats)
    report.finish(options.json)


def sources(steps: int, rows: int, seed: int, *, quick: bool) -> Iterator[Source]:
    """Train, and yield the last interval of each run; the first is the DLRM trace."""
    config = dlrm_trace.trace_config(steps=steps, seed=seed)
    *_, before, after = dlrm_trace.train(config)
    yield source_of("DLRM trace", before, after)
    for one, path in present(DATA_FOLDER):
        log = None if path is None or (quick and one.name not in QUICK_SETS) else one.read(path)
        for dim in () if log is None else (16,) if quick else (16, 32, 64):
            assert log is not None
            *_, before, after = dlrm_trace.train_on(
                log, one.config(log, dim=dim, intervals=4 if quick else 9, seed=seed)
            )
            yield source_of(f"{one.name}, dim {dim}", before, after)
    yield from drifting(rows, seed)


def drifting(rows: int, seed: int) -> Iterator[Source]:
    """Yield one step of the drifting table, whose rows all drift alike; slots say nothing about it."""
    table = DriftingTable(rows, seed)
    before_values = table.values.copy()
    touched = table.step()
    random = np.random.default_rng(seed)
    slots = random.uniform(1e-6, 1e-2, len(touched)).astype(np.float32)
    grown = slots * random.uniform(1.0, 1.5, len(touched)).astype(np.float32)
    moved = Moved(TABLE, rows, touched, before_values[touched], table.values[touched], slots, grown)
    yield Source("drifting table", (moved,), (before_values[:SAMPLE_ROWS],))


def source_of(name: str, before: dlrm_trace.Interval, after: dlrm_trace.Interval) -> Source:
    """Return the rows that an interval touched; scales are of the rows that the one before touched."""
    tables = tuple(
        Moved(
            table, len(values), rows, before.tables[table][rows], values[rows],
            before.slots[table][rows], after.slots[table][rows],
        )
        for table, values in after.tables.items()
        if len(rows := after.touched[table])
    )  # fmt: skip
    samples = tuple(before.tables[t.name][before.touched[t.name]][:SAMPLE_ROWS] for t in tables)
    return Source(name, tables, samples)


def by_kind(
    report: harness.Report, found: Sequence[Source], widths: Sequence[int], folder: Path
) -> dict[tuple[str, int], int]:
    """Report what a store writes for each delta; returns the bytes that are no array, by source and bits."""
    kinds = ("codes", "slots", "rows", "zarr.json", "manifest", "record")
    lines: list[list[harness.Cell]] = []
    other: dict[tuple[str, int], int] = {}
    packed: list[list[harness.Cell]] = []
    for number, source in enumerate(found):
        for bits in widths:
            sizes, manifest = write(source, bits, folder / f"{number}-{bits}")
            total = sum(sizes.values())
            other[source.name, bits] = total - sum(sizes.get(kind, 0) for kind in kinds[:3])
            lines.append([source.name, bits, *(sizes.get(kind, 0) for kind in kinds), total])
        packed.append([source.name, len(manifest), sizes["manifest"], _largest_fields(manifest)])
    note = "one writer; scales chosen from touched rows; no dense tensors, no reader documents"
    report.table("bytes of the last delta, by kind", ["delta", "bits", *kinds, "total"], lines, note)
    columns = ["delta", "as JSON", "stored", "largest fields of the manifest"]
    report.table("the manifest (8 bits)", columns, packed)
    return other


def write(source: Source, bits: int, folder: Path) -> tuple[dict[str, int], bytes]:
    """Write the interval as a delta of a store; returns its bytes by kind, and the manifest."""
    store = Store.create(str(folder), fsync=False)
    writer = store.writer()
    for number in range(2):
        with writer.begin(number) as txn:
            for table, scale in zip(source.tables, source.scales(bits), strict=True):
                values, slots = ((table.before, table.slots_before), (table.after, table.slots_after))[number]
                if number == 0:
                    whole = np.zeros((table.num_rows, values.shape[1]), np.float32)
                    whole_slots = np.zeros(table.num_rows, np.float32)
                    whole[table.rows], whole_slots[table.rows] = values, slots
                    options = TableOptions(scale=scale)
                    txn.write_table(table.name, whole, slots={dlrm_trace.SLOT: whole_slots}, options=options)
                else:
                    txn.write_rows(table.name, table.rows, values, slots={dlrm_trace.SLOT: slots})
    segment = folder / segment_prefix(store.snapshot().record.chain[-1].seg)
    newest = max((folder / "commits").iterdir())
    sizes = {"record": newest.stat().st_size}
    names = {MANIFEST: "manifest", "zarr.json": "zarr.json"}
    for path in (path for path in segment.rglob("*") if path.is_file()):
        array = path.relative_to(segment).as_posix().partition("/c/")[0].split(".")
        kind = names.get(path.name) or array[2]  # after the writer and the row list
        sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
    store.close()
    return sizes, unpack((segment / MANIFEST).read_bytes(), MANIFEST)


def compare(
    report: harness.Report, found: Sequence[Source], widths: Sequence[int], other: Mapping[tuple[str, int], int]
) -> None:
    """Report every coding's bytes, everything on disk counted, as a share of those by row id."""
    columns = [f"{source.name}, {bits}" for source in found for bits in widths]
    lines: list[list[harness.Cell]] = [[coding.name] for coding in codings.codings()]
    kinds: list[list[harness.Cell]] = []
    for source in found:
        for bits in widths:
            chunks = source.chunks(bits)
            plain = 0
            for line, coding in zip(lines, codings.codings(), strict=True):
                sizes = bytes_of(coding, chunks)
                total = sum(sizes.values()) + other[source.name, bits]
                plain = plain or total
                line.append(total / plain)
                if source is found[0] and bits == 4:
                    kinds.append([coding.name, *(sizes.get(k, 0) for k in ("rows", "slots", "classes", "codes"))])
    report.table(f"bytes by kind: {found[0].name}, 4 bits", ["coding", "rows", "slots", "classes", "codes"], kinds)
    for start in range(0, len(columns), len(widths)):
        stop = start + len(widths)
        part = [[line[0], *line[1 + start : 1 + stop]] for line in lines]
        report.table("everything on disk / by row id", ["coding", *columns[start:stop]], part)


def bytes_of(coding: Coding, chunks: list[Chunk]) -> dict[str, int]:
    """Return kind to bytes, those by row id for chunks that the coding does not fit."""
    if all(coding.fits(chunk) for chunk in chunks):
        return codings.total_bytes(coding, chunks)
    return codings.total_bytes(codings.codings()[0], chunks)


def times(report: harness.Report, source: Source, widths: Sequence[int], repeats: int) -> None:
    """Report the CPU seconds by row id over each coding's, to encode and to decode; above 1 is faster."""
    lines: list[list[harness.Cell]] = []
    for bits in widths:
        chunks = source.chunks(bits)
        fitting = [one for one in codings.codings() if all(map(one.fits, chunks))]
        encode = {one.name: partial(_encode, one, chunks) for one in fitting}
        stored = {one.name: _encode(one, chunks) for one in fitting}
        shapes = [(len(chunk.rows), chunk.codes.shape[1]) for chunk in chunks]
        decode = {one.name: partial(_decode, one, stored[one.name], shapes) for one in fitting}
        encoded, decoded = (harness.alternating(work, repeats) for work in (encode, decode))
        for name in encode:
            ratios = [_speed(found["by row id"], found[name]) for found in (encoded, decoded)]
            lines.append([bits, name, *ratios])
    report.table(
        f"speed, by row id = 1: {source.name}", ["bits", "coding", "encode", "decode"], lines,
        f"one thread, median of {repeats} rounds; a coding is kept at {FAST_ENOUGH} or more, and {ENOUGH_SAVED} of the "
        "bytes or fewer",
    )  # fmt: skip


def _encode(coding: Coding, chunks: list[Chunk]) -> list[codings.Stored]:
    return [coding.encode(chunk) for chunk in chunks]


def _decode(coding: Coding, stored: list[codings.Stored], shapes: list[tuple[int, int]]) -> None:
    for one, shape in zip(stored, shapes, strict=True):
        coding.decode(one, shape)


def _speed(plain: harness.Timings, other: harness.Timings) -> float:
    return float(np.median(np.array(plain.cpu) / np.maximum(np.array(other.cpu), 1e-9)))


def _slot_codes(slots: Float32s) -> npt.NDArray[np.int32]:
    return float_bits_codes(slots, SLOT_MANTISSA).reshape(-1).astype(np.int32)


def _largest_fields(manifest: bytes) -> str:
    sizes = {name: len(json.dumps(value)) for name, value in json.loads(manifest).items()}
    return ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items(), key=lambda one: -one[1])[:3])


if __name__ == "__main__":
    main()
