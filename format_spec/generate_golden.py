"""Write the golden stores: small stores of format 1 that every later version must read, and what is in them.

    python -m format_spec.generate_golden FOLDER

Names, times and values are fixed, so a change of the writer shows as a change of bytes. What a version holds is
computed here from the values that were given, by the formulas of section 5, not read back; only affine rows are read
back, by the independent reader. A released golden store is never written again: a new one is added beside it.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np

from cnr_store import TableOptions
from cnr_store.format import arrays
from cnr_store.log import branches
from cnr_store.log.author import writer_info
from cnr_store.segment import groups
from cnr_store.segment.codes import TableCodes
from cnr_store.segment.shards import Shard
from format_spec.golden_case import Golden, lattice, rounded
from format_spec.reader import cnr_read
from tests.support.ranks import ThreadRank, on_ranks

CHUNK_BYTES = 256
"""Instead of 8 MiB, so that small tables have several chunks."""


def lattice_case(folder: Path) -> None:
    """Deltas with slots, tags, rollback, dense references across segments, documents, an empty delta."""
    golden = Golden(folder)
    random = np.random.default_rng(1)
    scale, name = 0.0078125, "model.ebc/items:0"
    user = random.normal(0, 0.5, (40, 6)).astype(np.float32)
    momentum = random.exponential(1.0, 40).astype(np.float32)
    average = random.normal(0, 0.1, (40, 6)).astype(np.float32)
    items = random.laplace(0, 300.0, (30, 3)).astype(np.float32)
    square = random.exponential(0.01, (40, 6)).astype(np.float32)
    coarse = float(np.float32(np.sqrt(np.mean(np.square(average.astype(np.float64)))) / 16))
    options = TableOptions(scale=scale, slot_bits={"exp_avg_sq": 4})
    dense = {
        "layer.weight": random.normal(size=(3, 5)).astype(np.float32),
        "layer.bias": random.normal(size=5).astype(np.float16),
        "half": np.asarray([0x3F80, 0xBF80, 0x7F80], np.uint16),
        "steps": np.asarray(7, np.int64),
        "mask": np.asarray([1, 0, 1], np.uint8),
        "nothing": np.empty((0, 3), np.float32),
    }
    dtypes = {"half": "bfloat16", "mask": "bool"}
    document = {"position": 12, "shape": (2, 3), "raw": b"\x00\xff", "big": 2**70, "not": float("nan"), 3: "three",
                "state": np.arange(4, dtype=np.uint32)}  # fmt: skip
    order = {"seen": "0123456789" * 300}
    tree = {"$dict": [
        ["position", 12], ["shape", {"$tuple": [2, 3]}], ["raw", {"$bytes": "AP8="}],
        ["big", {"$int": "0x400000000000000000"}], ["not", {"$float": "nan"}], [3, "three"],
        ["state", {"$array": {"dtype": "<u4", "shape": [4], "data": "AAAAAAEAAAACAAAAAwAAAA=="}}],
    ]}  # fmt: skip

    def state():
        return {
            "user": {"values": lattice(user, scale), "momentum": rounded(momentum, 7),
                     "exp_avg": lattice(average, coarse), "exp_avg_sq": rounded(square, 2)},
            name: {"values": lattice(items, 0.5)},
        }  # fmt: skip

    def slots(rows=slice(None)):
        return {"momentum": momentum[rows], "exp_avg": average[rows], "exp_avg_sq": square[rows]}

    with golden.writer.begin(step=100) as txn:
        txn.write_table("user", user, slots=slots(), options=options)
        txn.write_table(name, items, options=TableOptions(scale=0.5))
        txn.put_dense(dense, dtypes)
        txn.put_scalars({"epoch": 1, "loss": 0.25})
        txn.put_document("reader/0", document)
        txn.put_document("order/0", order)  # too long for the manifest
        first = txn.commit(user={"note": "größer", "tiny": 1.5e-07, "list": [1e-05, 1e16, -0.0, None]})
    plain = {"documents": {"reader/0": tree, "order/0": order}, "scalars": {"epoch": 1, "loss": 0.25}}
    golden.expect(first, state(), dense=dense, **plain)
    kept = state(), {key: array.copy() for key, array in dense.items()}

    for step in (200, 300):
        rows = np.sort(random.choice(40, 12, replace=False)).astype(np.int64)
        user[rows] += random.normal(0, 0.02, (12, 6)).astype(np.float32)
        momentum[rows] *= np.float32(1.5)
        average[rows] *= np.float32(0.9)
        square[rows] *= np.float32(1.1)
        dense["layer.weight"] = dense["layer.weight"] + np.float32(step)
        with golden.writer.begin(step=step) as txn:
            txn.write_rows("user", rows, user[rows], slots=slots(rows))
            txn.put_document("reader/0", document)  # the first delta keeps it, and the second keeps it from there
            txn.put_document("order/0", order)
            if step == 300:
                items[[0, 1, 2, 29]] *= np.float32(70)  # some codes leave int16
                txn.write_rows(name, np.asarray([0, 1, 2, 29]), items[[0, 1, 2, 29]])
            txn.put_dense(dense, dtypes)
            version = txn.commit()
        golden.expect(version, state(), dense=dense, documents=plain["documents"])
    golden.store.tag("best", first)
    with golden.writer.begin(step=400) as txn:
        txn.put_dense(dense, dtypes)
        empty = txn.commit()
    golden.expect(empty, state(), dense=dense)
    rolled = golden.store.rollback(first)
    golden.expect(rolled, kept[0], dense=kept[1], **plain)
    golden.writer.close()
    with golden.store.writer(run_id="golden") as writer:
        writer.restore()
        user = kept[0]["user"]["values"].copy()
        momentum, average, square = (kept[0]["user"][slot].copy() for slot in ("momentum", "exp_avg", "exp_avg_sq"))
        items = kept[0][name]["values"].copy()
        user[3] += np.float32(1)
        with writer.begin(step=150) as txn:
            txn.write_rows("user", np.asarray([3]), user[3:4], slots=slots([3]))
            version = txn.commit()
    golden.expect(version, state(), dense=kept[1])
    golden.close()


def affine_case(folder: Path) -> None:
    """2, 3, 4 and 8 bits, both parameter types, rows padded to eight codes, 16-bit tables, an escape row."""
    golden = Golden(folder)
    random = np.random.default_rng(2)
    tables = {}
    with golden.writer.begin(step=1) as txn:
        for bits in (2, 3, 4, 8):
            values = random.normal(0, 0.3, (11, 5 if bits != 3 else 9)).astype(np.float32)
            values[4] = 0.125
            param = "float32" if bits == 3 else "float16"
            search = {2: "greedy", 8: "minmax"}.get(bits, "grid")
            options = TableOptions(encoding="affine", bits=bits, search=search, param_dtype=param, nonfinite="escape")
            if bits == 4:
                values[7, 2] = np.inf
                values = values.astype(np.float16)
            if bits == 8:
                values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            slots = {"momentum": np.arange(11, dtype=np.float32)} if bits == 2 else {}
            txn.write_table(f"a{bits}", values, options=options, slots=slots)
            tables[f"a{bits}"] = values
        full = txn.commit()
    rows = np.asarray([0, 4, 10])
    with golden.writer.begin(step=2) as txn:
        for name, values in tables.items():
            slots = {"momentum": np.asarray([5, 6, 7.5], np.float32)} if name == "a2" else {}
            txn.write_rows(name, rows, values[::-1][rows], slots=slots)
        delta = txn.commit()
    for version in (full, delta):
        found = cnr_read.Store(golden.folder / "store").snapshot(version)
        golden.expect(version, {name: found.read_table(name) for name in found.tables})
    golden.close()


def float_bits_case(folder: Path) -> None:
    """Exact fp32 with every odd value, 7 bits, fp16, bf16, and raw tables; absolute and difference rows."""
    golden = Golden(folder)
    random = np.random.default_rng(3)
    odd = np.asarray([0.0, -0.0, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, -3.4028235e38, 1.0, -1.0], np.float32)
    exact = np.concatenate([odd, random.normal(size=63).astype(np.float32)]).reshape(12, 6)
    coarse = random.normal(size=(12, 4)).astype(np.float32)
    half = random.normal(size=(12, 4)).astype(np.float16)
    brain = (random.normal(size=(12, 4)).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    raw = random.normal(size=(12, 3)).astype(np.float32)

    def state():
        return {
            "exact": {"values": exact, "sum": exact[:, 0]},
            "coarse": {"values": rounded(coarse, 7)},
            "half": {"values": half},
            "brain": {"values": brain},
            "raw": {"values": raw},
        }

    def write(txn, rows=None):
        tables = {"exact": exact, "coarse": coarse, "half": half, "brain": brain, "raw": raw}
        for name, values in tables.items():
            slots = {"sum": exact[:, 0]} if name == "exact" else {}
            if rows is not None:
                txn.write_rows(name, rows, values[rows], slots={key: slot[rows] for key, slot in slots.items()})
                continue
            options = {
                "exact": TableOptions.exact(),
                "coarse": TableOptions(encoding="float_bits", mantissa_bits=7),
                "raw": TableOptions(encoding="raw"),
            }
            txn.write_table(name, values, slots=slots, options=options.get(name, TableOptions()))

    with golden.writer.begin(step=1) as txn:
        write(txn)
        version = txn.commit()
    golden.expect(version, {name: {k: a.copy() for k, a in found.items()} for name, found in state().items()})
    exact[[0, 1, 5]] = exact[[1, 0, 6]]  # differences wrap
    exact[0, 0] = np.float32(-3.4028235e38)
    for values in (coarse, raw):
        values[[0, 3]] *= np.float32(-2)
    half[[2, 5]] = -half[[5, 2]]
    brain[[1, 5]] ^= np.uint16(0x8000)
    with golden.writer.begin(step=2) as txn:
        write(txn, np.asarray([0, 1, 2, 3, 5]))
        version = txn.commit()
    golden.expect(version, state())
    golden.close()


def rows_case(folder: Path) -> None:
    """Deleted, escaped, re-added rows; resize, dropped and new tables; one-shot delta; hashed keys; a scale halved."""
    golden = Golden(folder)
    random = np.random.default_rng(4)
    scale = 0.0625
    user = random.normal(size=(16, 4)).astype(np.float32)
    momentum = random.exponential(size=16).astype(np.float32)
    options = TableOptions(scale=scale, nonfinite="escape", fill=0.5)
    user[2, 1] = np.nan
    user[9, 0] = -np.inf
    expected, slot = lattice(user, scale), rounded(momentum, 7)
    expected[[2, 9]], slot[[2, 9]] = user[[2, 9]], momentum[[2, 9]]
    other = np.ones((2, 2), np.float32)
    hashed: dict[int, np.ndarray] = {}

    def put(rows, values, slots, txn):
        txn.write_rows("user", rows, values, slots={"momentum": slots})
        expected[rows], slot[rows] = lattice(values, scale), rounded(slots, 7)

    def note(version, **tables):
        keys = np.asarray(sorted(hashed), np.int64)
        found = {"user": {"values": expected.copy(), "momentum": slot.copy()}, **tables}
        if hashed:
            found["keys"] = {"keys": keys, "values": np.stack([hashed[int(key)] for key in keys])}
        golden.expect(version, found)

    with golden.writer.begin(step=1) as txn:
        txn.write_table("user", user, slots={"momentum": momentum}, options=options)
        txn.write_table("old", other, options=TableOptions(scale=0.5))
        note(txn.commit(), old={"values": other})
    with golden.writer.begin(step=2) as txn:
        txn.drop_table("old")
        txn.write_table("new", 3 * other, options=TableOptions(scale=0.5))
        txn.create_table("keys", dim=2, options=TableOptions(scale=0.25))
        keys = np.asarray([-(2**63), -5, 0, 7, 2**63 - 1])
        values = random.normal(size=(5, 2)).astype(np.float32)
        txn.write_rows("keys", keys, values)
        hashed.update(dict(zip(keys.tolist(), lattice(values, 0.25), strict=True)))
        txn.delete_rows("user", np.asarray([0, 2, 5]))
        expected[[0, 2, 5]], slot[[0, 2, 5]] = 0.5, 0.0
        put(np.asarray([1, 4]), user[[1, 4]] + 1, momentum[[1, 4]], txn)
        note(txn.commit(), new={"values": 3 * other})
    with golden.writer.begin(step=3) as txn:
        put(np.asarray([2, 3, 5, 9]), user[[10, 11, 12, 13]], momentum[[10, 11, 12, 13]], txn)  # re-added, un-escaped
        txn.delete_rows("keys", np.asarray([-5, 7]))
        del hashed[-5], hashed[7]
        note(txn.commit(), new={"values": 3 * other})
    with golden.writer.begin(step=4) as txn:
        txn.resize_table("user", 12)
        expected, slot = expected[:12], slot[:12]
        note(txn.commit(), new={"values": 3 * other})
    with golden.writer.begin(step=5) as txn:
        txn.resize_table("user", 14)
        expected = np.concatenate([expected, np.full((2, 4), 0.5, np.float32)])
        slot = np.concatenate([slot, np.zeros(2, np.float32)])
        rows, values, slots = np.asarray([3, 7, 12]), user[[7, 0, 8]], momentum[[7, 0, 8]]
        values[1] = [1e30, 0.1, -0.0, 2.0]  # beyond the codes: an escape row
        put(rows, values, slots, txn)
        expected[7], slot[7] = values[1], slots[1]
        txn.write_rows("keys", np.asarray([7]), np.asarray([[1.0, 2.0]], np.float32))
        hashed[7] = np.asarray([1.0, 2.0], np.float32)
        last = txn.commit()
    note(last, new={"values": 3 * other})
    halved_scale(golden, scale, user, momentum, expected, slot, note, other)
    golden.close()


def halved_scale(golden, scale, user, momentum, expected, slot, note, other) -> None:
    """A delta with ``shift`` 1, as the first save after a restore may write it: no writer does so yet, so by hand."""
    mirror = golden.writer.mirrors.get(Shard("user"))
    schema = msgspec.structs.replace(mirror.schema, shift=1)
    codes = TableCodes(schema, 0, mirror.stop, {**mirror.arrays, "codes": mirror.arrays["codes"] * np.int16(2)})
    codes.status, codes.escapes = mirror.status, mirror.escapes
    golden.writer.mirrors.put(Shard("user"), codes, codes.digest())
    with mock.patch("cnr_store.write.commit.check_receipts"), golden.writer.begin(step=6) as txn:
        txn._staged.schemas.tables["user"] = schema
        rows = np.asarray([1, 6])
        txn.write_rows("user", rows, user[rows], slots={"momentum": momentum[rows]})
        expected[rows], slot[rows] = lattice(user[rows], scale / 2), rounded(momentum[rows], 7)
        note(txn.commit(), new={"values": 3 * other})


def one_shot_case(folder: Path) -> None:
    """A one-shot delta takes the place of the deltas before it; a later baseline starts over at another scale."""
    golden = Golden(folder)
    random = np.random.default_rng(5)
    values = random.normal(size=(20, 3)).astype(np.float32)
    bias = np.arange(6, dtype=np.float32)
    with golden.writer.begin(step=1) as txn:
        txn.write_table("t", values, options=TableOptions(scale=0.125))
        txn.put_dense({"bias": bias, "same": bias})
        golden.expect(txn.commit(), {"t": {"values": lattice(values, 0.125)}}, dense={"bias": bias, "same": bias})
    for step, rows in ((2, [1, 5]), (3, [1, 5, 8])):
        values[rows] += np.float32(step)
        bias = bias + np.float32(1)
        with golden.writer.begin(step=step, base="baseline") as txn:
            txn.write_rows("t", np.asarray(rows), values[rows])
            txn.put_dense({"bias": bias, "same": np.arange(6, dtype=np.float32)})
            version = txn.commit()
        held = {"bias": bias, "same": np.arange(6, dtype=np.float32)}
        golden.expect(version, {"t": {"values": lattice(values, 0.125)}}, dense=held)
    with golden.writer.begin(step=4, kind="baseline") as txn:
        txn.write_table("t", values, options=TableOptions(scale=0.03125))
        golden.expect(txn.commit(), {"t": {"values": lattice(values, 0.03125)}}, dense=held)
    golden.close()


def overflow_case(folder: Path) -> None:
    """Tags beyond 8 KiB move to a side object, later changes beyond 2 KiB to another; one that is there is removed."""
    golden = Golden(folder)
    values = np.asarray([[1.0, -2.0]], np.float32)
    with golden.writer.begin(step=1) as txn:
        txn.write_table("t", values, options=TableOptions(scale=0.5))
        first = txn.commit()
    for index in range(12):
        golden.store.tag(f"{index % 10}" * (1000 + index), first)
    golden.store.untag("3" * 1003)
    with golden.writer.begin(step=2) as txn:
        txn.write_rows("t", np.asarray([0]), -values)
        golden.expect(txn.commit(), {"t": {"values": -values}})
    golden.expect(first, {"t": {"values": values}})
    golden.close()


def branches_case(folder: Path) -> None:
    """A channel that has moved, a branch that goes on, one that was dropped, one that was just forked."""
    golden = Golden(folder)
    store, options = golden.store, TableOptions(scale=0.5)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    with golden.writer.begin(step=1) as txn:
        txn.write_table("t", values, options=options)
        first = txn.commit()
    golden.expect(first, {"t": {"values": values}})
    store.set_channel("serving")
    store.fork("gone")
    trial = store.fork("trial", first)
    values, tried = values.copy(), values.copy()
    values[1] += np.float32(4)
    tried[2] -= np.float32(8)
    with golden.writer.begin(step=2) as txn:
        txn.write_rows("t", np.asarray([1]), values[[1]])
        second = txn.commit()
    golden.expect(second, {"t": {"values": values}})
    store.set_channel("serving", second)
    with trial.writer(run_id="golden") as writer:
        writer.restore()
        with writer.begin(step=2) as txn:
            txn.write_rows("t", np.asarray([2]), tried[[2]])
            version = txn.commit()
    golden.expect(0, {"t": {"values": np.arange(12, dtype=np.float32).reshape(4, 3)}}, branch="trial")
    golden.expect(version, {"t": {"values": tried}}, branch="trial")
    trial.tag("best", version)
    store.drop_branch("gone")
    head = store.head()
    branches.fork(store.internals.log, head, store.internals.log.read(second), "new", writer_info(), expires_ms=2**52)
    trial.close()
    golden.close()


def digits_case(folder):
    """Codes from one bit to sixteen, under whatever bases are smallest, in a baseline and in differences."""
    golden, random, scale = Golden(folder), np.random.default_rng(8), 0.25
    tables = {
        f"spread {spread}": random.laplace(0, spread * scale, (150, 6)).astype(np.float32)
        for spread in (0.3, 1.0, 4.0, 40.0, 3000.0)
    }
    with golden.writer.begin(step=1) as txn:
        for name, values in tables.items():
            txn.write_table(name, values, options=TableOptions(scale=scale))
        golden.expect(txn.commit(), {name: {"values": lattice(values, scale)} for name, values in tables.items()})
    rows = np.arange(0, 150, 2)
    with golden.writer.begin(step=2) as txn:
        for values in tables.values():
            values[rows] += random.permutation(values[rows])
        tables["spread 1.0"][4] = 1e6 * scale  # beyond 16 bits
        for name, values in tables.items():
            txn.write_rows(name, rows, values[rows])
        golden.expect(txn.commit(), {name: {"values": lattice(values, scale)} for name, values in tables.items()})
    golden.close()


def row_order_case(folder):
    """Codes of add rows in the order of the slot, and codes and a slot in that of classes."""
    golden, random, scale = Golden(folder), np.random.default_rng(16), 0.25
    values = random.normal(0, 3, (40, 4)).astype(np.float32)
    slots = random.uniform(0.5, 1, 40).astype(np.float32)
    sums = random.uniform(0.5, 1, (40, 4)).astype(np.float32)

    def expected():
        coded = lattice(values, scale)
        return {"t": {"values": coded, "momentum1": rounded(slots, 4)}, "u": {"values": coded, "sum": rounded(sums, 4)}}

    with mock.patch.object(groups, "LEAST_CODES", 1):
        with golden.writer.begin(step=0) as txn:
            txn.write_table("t", values, slots={"momentum1": slots}, options=TableOptions(scale=scale))
            txn.write_table("u", values, slots={"sum": sums}, options=TableOptions(scale=scale))
        for step in (1, 2):
            rows = np.flatnonzero(random.random(40) < 0.8)
            grown = random.uniform(0, 2, len(rows)).astype(np.float32)
            values[rows] += random.normal(0, 1, (len(rows), 4)).astype(np.float32) * grown[:, None]
            slots[rows] += np.square(grown)
            sums[rows] += np.square(random.normal(0, 1, (len(rows), 4)).astype(np.float32) * grown[:, None])
            with golden.writer.begin(step=step) as txn:
                txn.write_rows("t", rows, values[rows], slots={"momentum1": slots[rows]})
                txn.write_rows("u", rows, values[rows], slots={"sum": sums[rows]})
                version = txn.commit()
            golden.expect(version, expected())
    golden.close()


def shards_case(folder):
    """Arrays in shards of four chunks, the last one shorter; small tables that share such arrays; a dense pack."""
    golden, random, scale = Golden(folder), np.random.default_rng(29), 0.25
    values = random.normal(0, 3, (150, 8)).astype(np.float32)
    slots = random.uniform(0.5, 1, 150).astype(np.float32)
    small = {f"small{k}": random.normal(0, 3, (12, 8)).astype(np.float32) for k in range(8)}
    dense = {"layer.weight": random.normal(size=(20, 21)).astype(np.float32)}

    def expected():
        tables = {"t": {"values": lattice(values, scale), "momentum1": rounded(slots, 4)}}
        return tables | {name: {"values": lattice(one, scale)} for name, one in small.items()}

    with mock.patch.object(arrays, "SHARD_CHUNKS", 2), mock.patch.object(arrays, "SHARD_BYTES", 4 * CHUNK_BYTES):
        with golden.writer.begin(step=0) as txn:
            txn.write_table("t", values, slots={"momentum1": slots}, options=TableOptions(scale=scale))
            for name, one in small.items():
                txn.write_table(name, one, options=TableOptions(scale=scale))
            txn.put_dense(dense)
            version = txn.commit()
        golden.expect(version, expected(), dense=dense)
        rows = np.flatnonzero(random.random(150) < 0.7)
        values[rows] += random.normal(0, 1, (len(rows), 8)).astype(np.float32)
        slots[rows] += np.float32(0.25)
        with golden.writer.begin(step=1) as txn:
            txn.write_rows("t", rows, values[rows], slots={"momentum1": slots[rows]})
            version = txn.commit()
        golden.expect(version, expected(), dense=dense)
    golden.close()


class InTurn(ThreadRank):
    """A rank that goes on after an exchange when rank 0 waits in the next one, so that names are given in one order."""

    def exchange(self, message):
        found = super().exchange(message)
        line = self._line
        with line.lock:
            line.lock.wait_for(lambda: self.rank == 0 or line.has_left or 0 in line.messages.get(self._round, ()))
        return found


def keys_case(folder):
    """Two ranks write a hashed table: differences by key, evictions, re-admissions; one rank goes on with all keys."""
    golden, random, scale = Golden(folder), np.random.default_rng(31), 0.125
    options = TableOptions(scale=scale, nonfinite="escape", slot_bits="exact")
    held: dict[int, tuple[np.ndarray, np.float32]] = {}

    def state():
        keys = np.asarray(sorted(held), np.int64)
        values = np.stack([held[int(key)][0] for key in keys])
        return {"h": {"keys": keys, "values": values, "score": np.asarray([held[int(key)][1] for key in keys])}}

    def write(writer, step, rows, gone=(), kind="delta"):
        """One rank's share of a save: ``rows`` by key."""
        with writer.begin(step, kind) as txn:
            if "h" not in txn.tables:
                txn.create_table("h", dim=3, options=options, slots={"score": "row"})
            keys = np.asarray(sorted(rows), np.int64)
            keys = keys[writer.keys.holds(keys)]
            values = np.asarray([rows[int(key)][0] for key in keys], np.float32).reshape(-1, 3)
            scores = np.asarray([rows[int(key)][1] for key in keys], np.float32)
            txn.write_rows("h", keys, values, slots={"score": scores})
            gone = np.asarray(sorted(gone), np.int64)
            if len(gone) and kind == "delta":
                txn.delete_rows("h", gone[writer.keys.holds(gone)])
            return txn.commit()

    def row():
        return random.normal(size=3).astype(np.float32), np.float32(random.integers(1, 100))

    def stored(rows):
        found = {}
        for key, (values, score) in rows.items():
            found[key] = (lattice(values, scale) if np.isfinite(values).all() else values, score)
        return found

    first = {key: row() for key in (-(2**63), -7, -2, 0, 1, 2, 9, 40, 2**63 - 1)}
    moved = {key: (first[key][0] + np.float32(0.25) * row()[0], first[key][1] + 1) for key in (-7, 0, 2, 9, 40)}
    moved[1] = (np.asarray([0.5, np.nan, 1.0], np.float32), np.float32(3))
    again = {key: row() for key in (3, 5)}
    last = {-2: row(), 1: row(), 9: row(), 2**63 - 1: row()}
    saves = [(first, ()), (moved | again, (-2, -(2**63))), (last, (0, 3))]

    def rank_of(rank):
        mine = InTurn(rank.rank, rank._line)
        with golden.store.writer(run_id="golden", ranks=mine, shards={}) as writer:
            versions = [write(writer, step, rows, gone) for step, (rows, gone) in enumerate(saves)]
        ThreadRank.exchange(mine, b"")  # which the other one waits for
        return versions

    golden.writer.close()
    versions = on_ranks(2, rank_of)[0]
    for version, (rows, gone) in zip(versions, saves, strict=True):
        for key in gone:
            held.pop(key, None)
        held.update(stored(rows))
        golden.expect(version, state())
    with golden.store.writer(run_id="golden") as writer:
        writer.restore()
        rows = {key: (held[key][0] + np.float32(0.125), held[key][1] + 1) for key in (-7, 5, 9)}
        version = write(writer, 3, rows, (2,))
    del held[2]
    held.update(stored(rows))
    golden.expect(version, state())
    golden.close()


CASES = {
    "lattice": lattice_case,
    "affine": affine_case,
    "float_bits": float_bits_case,
    "rows": rows_case,
    "one_shot": one_shot_case,
    "overflow": overflow_case,
    "branches": branches_case,
    "digits": digits_case,
    "row_order": row_order_case,
    "shards": shards_case,
    "keys": keys_case,
}


def in_turn(values, real):
    """Return a function that gives the library one value after the other, and everybody else what ``real`` gives.

    Others ask too, and not each time: numba names the files of its cache so when it compiles something.
    """

    def given():
        caller = sys._getframe(1).f_globals["__name__"]
        return next(values) if caller.partition(".")[0] == "cnr_store" else real()

    return given


def generate(folder: Path, cases=tuple(CASES)) -> None:
    """Write the cases into ``folder``, which must not hold them yet."""
    for number, name in enumerate(cases):
        (folder / name).mkdir(parents=True)
        uuids = (uuid.UUID(int=(number << 64) + count, version=4) for count in itertools.count(1))
        times = itertools.count(1_700_000_000_000_000_000, 1_000_000_000)
        with (
            mock.patch("uuid.uuid4", in_turn(uuids, uuid.uuid4)),
            mock.patch("time.time_ns", in_turn(times, time.time_ns)),
            mock.patch("cnr_store.log.sent_record.check_clock"),  # as the times above are not those of the disk
            mock.patch("cnr_store.store.creation.check_clock"),
            mock.patch("socket.gethostname", return_value="golden"),
            mock.patch("os.getpid", return_value=1),
            mock.patch.object(arrays, "CHUNK_BYTES", CHUNK_BYTES),
        ):
            CASES[name](folder / name)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
