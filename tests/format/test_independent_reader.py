"""A second reader, written from the spec without the library, finds the same bits."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import Store, TableOptions, Writer, repair_store
from cnr_store.errors import CorruptRecord
from cnr_store.format.documents import pack, unpack
from cnr_store.format.layout import commit_key
from cnr_store.relay.relay import Relay
from cnr_store.storage import open_storage
from format_spec import vectors
from format_spec.reader import cnr_read
from format_spec.reader.compare import compare

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "format_spec" / "reader"
CASES = sorted(path.parent.name for path in (ROOT / "format_spec" / "golden").glob("*/expected.json"))


@pytest.mark.parametrize("case", CASES)
def test_both_readers_agree_on_every_version_of_a_golden_store(case: str) -> None:
    assert compare(ROOT / "format_spec" / "golden" / case / "store") > 0


@pytest.mark.parametrize("branch", ["trial", "new"])
def test_both_readers_agree_on_every_version_of_a_branch(branch: str) -> None:
    assert compare(ROOT / "format_spec" / "golden" / "branches" / "store", branch) > 0


def test_the_independent_reader_refuses_a_branch_that_is_not_its_pins(tmp_path: Path) -> None:
    root = shutil.copytree(ROOT / "format_spec" / "golden" / "branches" / "store", tmp_path / "store")
    with pytest.raises(cnr_read.Refused) as refused:
        cnr_read.Store(root, "gone")
    assert refused.value.args[0] == "branch_not_found"

    pins = {pin["name"]: uuid for uuid, pin in cnr_read.Store(root).records[-1]["pins"].items()}
    first = commit_key(0)
    shutil.copy(root / "branches" / pins["new"] / first, root / "branches" / pins["trial"] / first)

    with pytest.raises(cnr_read.Refused) as refused:
        cnr_read.Store(root, "trial")
    assert refused.value.args[0] == "corrupt_record"


@pytest.mark.parametrize("case", ["lattice", "overflow", "digits"])
def test_both_readers_agree_on_every_version_of_a_relay(case: str, tmp_path: Path) -> None:
    target = tmp_path / "relay"
    with Store.open(str(ROOT / "format_spec" / "golden" / case / "store"), threads=1) as source:
        first = source.latest_version() - 1
        Relay(source, open_storage(str(target)), start=first).advance()

    assert compare(target) > 0
    with pytest.raises(cnr_read.Refused) as refused:
        cnr_read.Store(target).snapshot(first - 1)
    assert refused.value.args[0] == "version_expired"
    (target / commit_key(first)).unlink()
    with pytest.raises(cnr_read.Refused) as refused:
        cnr_read.Store(target)
    assert refused.value.args[0] == "corrupt_store"


@pytest.mark.parametrize("case", ["lattice", "affine"])
def test_a_field_that_is_missing_has_the_default_of_the_schema(case: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(ROOT / "format_spec" / "golden" / case / "store", root)
    removed = 0
    for path in root.glob("data/*/_segment.json.zst"):
        manifest = json.loads(unpack(path.read_bytes(), path.name))
        fields = ("groups", "dense", "dense_arrays", "documents", "small", "scalars")
        empty = [name for name in fields if not manifest[name]]
        removed += len([manifest.pop(name) for name in empty])
        path.write_bytes(pack(manifest))

    vectors.apply(root, [{"op": "reseal"}])

    assert removed > 5
    assert compare(root) > 0


@pytest.mark.parametrize("at", [["encoding"], ["slots", "momentum", "encoding"], ["slots", "exp_avg"]])
def test_a_field_of_a_newer_minor_version_ends_no_generation(at: list[str], tmp_path: Path) -> None:
    root = shutil.copytree(ROOT / "format_spec" / "golden" / "lattice" / "store", tmp_path / "store")
    place = {"key": "@9/_segment.json.zst", "at": ["tables", "user", *at, "from_the_future"]}

    vectors.apply(root, [{"op": "set", **place, "value": 1}, {"op": "reseal"}])

    assert compare(root) > 0


@pytest.mark.parametrize("module", ["cnr_read", "documents", "encodings"])
def test_a_module_of_the_reader_has_at_most_300_lines_and_knows_no_library(module: str) -> None:
    text = (READER / f"{module}.py").read_text()
    imported = {
        name
        for node in ast.walk(ast.parse(text))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }
    others = {name for name in imported if not name.startswith("format_spec.reader")}

    assert len(text.splitlines()) <= 300
    assert {name.split(".")[0] for name in others} - set(sys.stdlib_module_names) <= {
        "jsonschema",
        "numpy",
        "xxhash",
        "zstandard",
    }


def test_the_script_writes_arrays_and_refuses_what_is_no_store(tmp_path: Path) -> None:
    store = ROOT / "format_spec" / "golden" / "lattice" / "store"

    def dump(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "format_spec.reader.dump", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = dump(store, "--version", "2", "--out", tmp_path)
    bad = dump(tmp_path)

    assert good.stdout.startswith("version 2 step 100 chain 1\n")
    assert "table user values: float32 (40, 6)" in good.stdout
    assert len(list(tmp_path.glob("*.npy"))) == good.stdout.count("\n") - 1
    assert (bad.returncode, bad.stderr[:11]) == (1, "not_a_store")


def test_both_readers_pass_over_superseded_positions(tmp_path: Path) -> None:
    root = shutil.copytree(ROOT / "format_spec" / "golden" / "lattice" / "store", tmp_path / "store")
    with Store.open(str(root), threads=1) as store:
        torn = store.latest_version() + 1
        for version, data in ((torn, b'{"aborted"'), (torn + 1, b"")):
            (root / commit_key(version)).write_bytes(data)
        with pytest.raises(cnr_read.Refused) as refused:
            cnr_read.Store(root)
        assert refused.value.args[0] == "corrupt_record"

        repair_store(store, dry_run=False)
        store.tag("behind", 2)

    assert [record is None for record in cnr_read.Store(root).records[torn:]] == [True, True, False, False]
    assert compare(root) > 0
    (root / commit_key(torn)).write_bytes(b'{"aborted":')
    with pytest.raises(cnr_read.Refused):
        cnr_read.Store(root)


def test_both_readers_take_a_record_that_is_too_long_for_torn(tmp_path: Path) -> None:
    root = shutil.copytree(ROOT / "format_spec" / "golden" / "lattice" / "store", tmp_path / "store")
    with Store.open(str(root), threads=1) as store:
        torn = store.latest_version() + 1
        (root / commit_key(torn)).write_bytes((root / commit_key(torn - 1)).read_bytes().ljust(100_000))

        repair_store(store, dry_run=False)
        store.tag("behind", 2)

    assert [record is None for record in cnr_read.Store(root).records[torn:]] == [True, False, False]
    assert compare(root) > 0
    with (root / commit_key(torn)).open("r+b") as file:
        file.truncate(65_537)  # all that counts of it
    assert compare(root) > 0


@pytest.mark.parametrize(
    ("written", "is_canonical"),
    [
        ("18446744073709551616", True),
        ("5e-324", True),
        ("1e23", True),
        ('"\u2028\x7f"', True),
        ("-0", False),
        ("4.9e-324", False),
        ("1e400", False),
        ("1e+16", False),
        (r'"\/"', False),
        (r'"\u007f"', False),
        (r'"\ud800"', False),
    ],
)
def test_both_readers_take_the_same_texts_and_numbers_as_canonical(
    written: str, is_canonical: bool, tmp_path: Path
) -> None:
    root = shutil.copytree(ROOT / "format_spec" / "golden" / "affine" / "store", tmp_path / "store")
    path = max((root / "commits").iterdir())
    text = path.read_text().replace('"user":{}', f'"user":{{"note":{written}}}')
    check = json.loads(text)["check"]
    path.write_text(text.replace(check, xxhash.xxh3_128_hexdigest(text.replace(check, "").encode())))

    with Store.open(str(root), threads=1) as store, nullcontext() if is_canonical else pytest.raises(CorruptRecord):
        store.record(int(path.stem))
    with nullcontext() if is_canonical else pytest.raises(cnr_read.Refused) as refused:
        cnr_read.Store(root)

    assert is_canonical or refused.value.args[0] == "corrupt_record"


OPTIONS = {
    "lattice": TableOptions(scale=0.125, nonfinite="escape"),
    "exact": TableOptions.exact(nonfinite="escape"),
    "coarse": TableOptions(encoding="float_bits", mantissa_bits=5, nonfinite="escape"),
    "affine": TableOptions(encoding="affine", bits=3, nonfinite="escape"),
    "raw": TableOptions(encoding="raw", nonfinite="escape"),
}
OPERATIONS = ["write", "write", "delete", "resize", "baseline", "one_shot", "new", "drop", "keys", "dense", "rollback"]


class Life:
    """Random operations on one store; which rows and values is drawn from a seeded generator."""

    def __init__(self, root: Path, encoding: str, mirror: Any, seed: int) -> None:
        self.store = Store.create(str(root), fsync=False, threads=1)
        self.options = OPTIONS[encoding]
        self.random = np.random.default_rng(seed)
        self.mirror = mirror
        self.writer = self.store.writer(mirror=mirror)
        self.step = 0
        self.is_clean = False
        self.whole("first", 20)

    def values(self, count: int) -> np.ndarray[Any, Any]:
        values = self.random.normal(0, 3, (count, 5)).astype(np.float32)
        if count and not self.is_clean and self.random.random() < 0.3:
            values[self.random.integers(count), 2] = self.random.choice([np.nan, np.inf, -np.inf])
        return values

    def slots(self, count: int) -> dict[str, np.ndarray[Any, Any]]:
        return {
            "m": self.random.exponential(1, count).astype(np.float32),
            "v": self.random.normal(size=(count, 5)).astype(np.float32),
        }

    def whole(self, table: str, count: int) -> None:
        with self.begin() as txn:
            txn.write_table(table, self.values(count), slots=self.slots(count), options=self.options)

    def begin(self, **kind: Any) -> Any:
        self.step += 1
        return self.writer.begin(self.step, **kind)

    def run(self, operation: str) -> None:
        tables = self.writer.snapshot.tables
        dense = [name for name, schema in tables.items() if schema.keys == "dense"]
        table = str(self.random.choice(dense)) if dense else None
        count = tables[table].num_rows if table else 0
        rows = np.flatnonzero(self.random.random(count) < 0.4).astype(np.int64)
        if operation == "write" and table:
            with self.begin() as txn:
                half = len(rows) // 2
                txn.write_rows(table, rows[half:], self.values(len(rows) - half), slots=self.slots(len(rows) - half))
                txn.delete_rows(table, rows[:half][:2])
        elif operation == "delete" and table:
            with self.begin() as txn:
                txn.delete_rows(table, rows)
        elif operation == "resize" and table:
            with self.begin() as txn:
                txn.resize_table(table, int(self.random.integers(0, 30)))
        elif operation == "baseline":
            with self.begin(kind="baseline") as txn:
                for name in dense:
                    txn.write_table(name, self.values(20), slots=self.slots(20))
                for name in set(tables) - set(dense):
                    txn.drop_table(name)
        elif operation == "one_shot" and len(self.writer.head.record.chain) == 1 and table:
            with self.begin(base="baseline") as txn:
                txn.write_rows(table, rows, self.values(len(rows)), slots=self.slots(len(rows)))
        elif operation == "new":
            self.whole(f"new {self.step}/ü", int(self.random.integers(0, 9)))
        elif operation == "drop" and table:
            with self.begin() as txn:
                txn.drop_table(table)
        elif operation == "keys":
            with self.begin() as txn:
                if "keys" not in tables:
                    txn.create_table(
                        "keys", dim=5, options=self.options, slots={"m": "row", "v": "element"}, sample=self.values(3)
                    )
                keys = np.unique(self.random.integers(-9, 9, 12))
                txn.write_rows("keys", keys[:5], self.values(5), slots=self.slots(5))
                txn.delete_rows("keys", keys[5:])
        elif operation == "dense":
            with self.begin() as txn:
                txn.put_dense(
                    {"w": self.random.normal(size=3), "b": np.asarray(1.0, np.float32), "e": np.empty((2, 0), np.int64)}
                )
                txn.put_document("reader/0", {"at": self.step, "state": (1, b"x", None)})
        elif operation == "rollback":
            self.store.rollback(int(self.random.choice([r.v for r in self.store.log() if r.chain])))
            self.reopen()

    def reopen(self) -> None:
        self.is_clean = True  # what a table does with NaN is the writer's choice, not stored
        self.writer.close()
        self.writer: Writer = self.store.writer(mirror=self.mirror)
        self.writer.restore()


@settings(max_examples=25)
@given(
    encoding=st.sampled_from(sorted(OPTIONS)),
    mirror=st.sampled_from(["memory", "none"]),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_readers_agree_after_any_operations(
    tmp_path_factory: pytest.TempPathFactory, encoding: str, mirror: str, operations: list[str], seed: int
) -> None:
    root = tmp_path_factory.mktemp("random") / "store"
    life = Life(root, encoding, mirror, seed)

    for operation in operations:
        life.run(operation)

    assert compare(root) > 0
