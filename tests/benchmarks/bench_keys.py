"""A table that grows by key: bytes of its deltas against 8-bit rows in Parquet with zstd, applied rows per second.

``python tests/benchmarks/bench_keys.py``. Each save has the same keys: 1 % updated, 0.2 % admitted, as many evicted.
They are written as a table of hashed keys, and as a dense table whose rows a map gives to ids, as managed collision
does. Parquet has what TorchEasyRec's format has of a row: the key, 8-bit codes, fp16 scale and bias, a tombstone.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cnr_store import KeyShare, Store, TableOptions
from cnr_store.serving import Loader
from cnr_store.write.keyed_mirrors import KeyedMirror

DIM = 64
UPDATED, ADMITTED = 0.01, 0.002
STEP = 0.01
"""How far an update moves an element, in standard deviations of the table."""


@dataclass
class Change:
    """Rows of the dense table with their new ids and values, and the ids that they had before."""

    rows: Any
    keys: Any
    values: Any
    evicted: Any


class Stream:
    """Ids, each with a row of a table that stays as large; some are updated, some give their row to a new id."""

    def __init__(self, rows: int) -> None:
        self.random = np.random.default_rng(0)
        self.values = self.random.normal(scale=0.1, size=(rows, DIM)).astype(np.float32)
        self.keys = self.random.permutation(np.arange(rows, dtype=np.int64) * 7919)
        self._next = int(self.keys.max()) + 1

    def advance(self) -> Change:
        count = len(self.keys)
        updated, admitted = (max(1, int(share * count)) for share in (UPDATED, ADMITTED))
        rows = np.sort(self.random.permutation(count)[: updated + admitted])
        is_new = np.zeros(len(rows), np.bool_)
        is_new[self.random.permutation(len(rows))[:admitted]] = True
        evicted = np.sort(self.keys[rows[is_new]])
        self.keys[rows[is_new]] = self._next + np.arange(admitted)
        self._next += admitted
        self.values[rows[is_new]] = self.random.normal(scale=0.1, size=(admitted, DIM))
        moves = self.random.normal(scale=0.1 * STEP, size=(updated, DIM))
        self.values[rows[~is_new]] += moves.astype(np.float32)
        return Change(rows, self.keys[rows], self.values[rows], evicted)


def parquet_bytes(change: Change) -> int:
    """Bytes of a file of 8-bit rows: row-wise minimum and step in fp16, zstd at its default level."""
    low = change.values.min(axis=1, keepdims=True)
    step = np.maximum((change.values.max(axis=1, keepdims=True) - low) / 255, 1e-8)
    codes = np.rint((change.values - low) / step).clip(0, 255).astype(np.uint8)
    order, count = np.argsort(change.keys), len(change.evicted)
    codes = np.concatenate([codes[order], np.zeros((count, DIM), np.uint8)])
    numbers = np.concatenate([np.concatenate([step, low], axis=1)[order], np.zeros((count, 2))]).astype(np.float16)
    rows = pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIM), len(codes), [None, pa.py_buffer(codes.tobytes())])
    table = pa.table({
        "key": np.concatenate([change.keys[order], change.evicted]), "row": rows,
        "scale": pa.array(numbers[:, 0]), "bias": pa.array(numbers[:, 1]),
        "is_deleted": np.arange(len(codes)) >= len(order),
    })  # fmt: skip
    target = io.BytesIO()
    pq.write_table(table, target, compression="zstd", use_dictionary=False)
    return target.tell()


def hashed_store(folder: Path, name: str, stream: Stream, bits: Any) -> Store:
    store = Store.create(str(folder / name), fsync=False)
    order = np.argsort(stream.keys)
    with store.writer() as writer, writer.begin(0) as txn:
        txn.create_table("t", dim=DIM, options=TableOptions(bits=bits), sample=stream.values[:4096])
        txn.write_rows("t", stream.keys[order], stream.values[order])
    return store


@contextmanager
def timed_digest() -> Iterator[list[float]]:
    """While it is entered, the CPU seconds in which writers bring state digests up to date are appended to a list."""
    found: list[float] = []
    bare = KeyedMirror.digest_after

    def timed(mirror: KeyedMirror, *arguments: Any) -> int | None:
        begun = time.process_time()
        digest = bare(mirror, *arguments)
        found.append(time.process_time() - begun)
        return digest

    with patch.object(KeyedMirror, "digest_after", timed):
        yield found


def compared(report: harness.Report, folder: Path, rows: int, saves: int, bits: Any) -> None:
    """Sum the bytes of so many saves, written in each way."""
    stream = Stream(rows)
    hashed = hashed_store(folder, f"hashed{bits}", stream, bits)
    dense = Store.create(str(folder / f"dense{bits}"), fsync=False)
    with hashed.writer() as keyed, dense.writer() as mapped:
        keyed.restore()
        with mapped.begin(0) as txn:
            txn.write_table("t", stream.values, options=TableOptions(bits=bits))
        sizes = {"hashed": 0, "dense": 0, "parquet": 0}
        changed, saving = 0, 0.0
        with Loader(hashed) as loader, timed_digest() as digests:
            for step in range(1, saves + 1):
                change = stream.advance()
                order = np.argsort(change.keys)
                begun = time.process_time()
                with keyed.begin(step) as one:
                    one.write_rows("t", change.keys[order], change.values[order])
                    one.delete_rows("t", change.evicted)
                saving += time.process_time() - begun if step > 1 else 0.0
                with mapped.begin(step) as other:
                    other.write_rows("t", change.rows, change.values)
                    other.put_dense({"ids": change.keys, "rows": change.rows})
                sizes["hashed"] += one.size_bytes
                sizes["dense"] += other.size_bytes
                sizes["parquet"] += parquet_bytes(change)
                changed += len(change.keys) + len(change.evicted)
                if step == 1:
                    loader.poll()  # compiles kernels
                    changed_before = changed
            begun = time.process_time()
            loader.poll()
            seconds = time.process_time() - begun
        mirror = keyed.mirror_bytes / rows
    ratio = sizes["hashed"] / sizes["parquet"]
    report.add(f"{bits} bits, hashed keys: bytes / 8-bit Parquet with zstd", ratio, goal=0.5)
    report.add(f"{bits} bits, rows of a map, and the map: the same", sizes["dense"] / sizes["parquet"], goal=0.5)
    report.add(f"{bits} bits, hashed keys: bytes per changed key", sizes["hashed"] / changed, unit=" B")
    report.add(f"{bits} bits, hashed keys: mirror bytes per key, of which {2 * DIM} are codes", mirror, unit=" B")
    report.add(f"{bits} bits: changed keys saved per CPU second", (changed - changed_before) / saving, unit="")
    report.add(
        f"{bits} bits: state digest, share of a save's CPU", 100 * sum(digests[1:]) / saving, goal=10.0, unit="%"
    )
    report.add(f"{bits} bits: keys applied by a loader per CPU second", (changed - changed_before) / seconds, unit="")
    begun = time.process_time()
    parts = [hashed.snapshot().table("t").read_all(share=KeyShare(index, 4))[0] for index in range(4)]
    per_second = rows / (time.process_time() - begun)
    report.add(f"{bits} bits: keys restored by 4 ranks, one after the other, per CPU second", per_second, unit="")
    assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(stream.keys))
    hashed.close()
    dense.close()


def main() -> None:
    parser = harness.arguments(__doc__, rows=200_000, repeats=10)
    options = parser.parse_args()
    rows = 20_000 if options.quick else options.rows
    report = harness.Report("tables that grow by key")
    report.start()
    with harness.data_folder(options.folder) as folder:
        for bits in (8, 4):
            compared(report, folder, rows, 3 if options.quick else options.repeats, bits)
    report.finish(options.json)


if __name__ == "__main__":
    main()
