"""What a commit costs as a store grows: after 10 and after 1,000 versions, with one and with ten tables.

``python tests/benchmarks/bench_growth.py``: 100 rows are committed in turn to a young store, to one of 1,000 versions
whose chain is as long, and to one of ten tables; then 100 rows spread over the ten. Requests and objects are counted
at the storage. Files are not fsynced unless ``--fsync`` is given: a disk's flush would hide what grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np

from cnr_store import Store, TableOptions
from cnr_store.layout import segment_prefix
from cnr_store.storage import CreateOutcome
from cnr_store.storage.base import ObjectStat
from cnr_store.storage.local import LocalStorage

DIM, ROWS, SAME = 16, 100, 1.2


class CountingStorage(LocalStorage):
    """Local files that count requests by kind, and the bytes put."""

    def __init__(self, root: str, *, fsync: bool) -> None:
        super().__init__(root, fsync=fsync)
        self.counts: Counter[str] = Counter()

    def take(self) -> Counter[str]:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        self.counts["get"] += 1
        return super()._read(key, start, stop)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        self.counts["put"] += 1
        super()._put(key, data)

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        self.counts["create"] += 1
        return super()._create(key, data)

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        self.counts["list"] += 1
        return super()._list_objects(folder)


class Growing:
    """A store of equal tables that takes one delta after the other."""

    def __init__(self, folder: Path, name: str, tables: int, rows: int, *, fsync: bool) -> None:
        self.storage = CountingStorage(str(folder / name), fsync=fsync)
        self.store = Store.create_on(self.storage)
        self.writer = self.store.writer()
        self.counts: Counter[str] = Counter()
        self._random = np.random.default_rng(0)
        self._rows = rows
        self._names = [f"table{number}" for number in range(tables)]
        self._values = {name: self._random.standard_normal((rows, DIM), dtype=np.float32) for name in self._names}
        with self.writer.begin(0, "full") as txn:
            for name, values in self._values.items():
                slots = {"momentum1": np.zeros(rows, np.float32)}
                txn.write_table(name, values, slots=slots, options=TableOptions(scale=0.01))

    @property
    def version(self) -> int:
        return self.writer.head.record.v

    @property
    def chain(self) -> int:
        """Segments in the chain of the head."""
        return len(self.writer.head.record.chain)

    def commit(self, tables: int = 1) -> None:
        """Commit 100 new rows, spread over so many tables."""
        count = ROWS // tables
        staged = []
        for name in self._names[:tables]:
            rows = np.sort(self._random.choice(self._rows, count, replace=False)).astype(np.int64)
            values = self._values[name][rows] + np.float32(0.1)
            self._values[name][rows] = values
            staged.append((name, rows, values, np.full(count, self.version + 1.0, np.float32)))
        self.storage.take()
        with self.writer.begin(self.version) as txn:
            for name, rows, values, slot in staged:
                txn.write_rows(name, rows, values, slots={"momentum1": slot})
        self.counts = self.storage.take()

    def objects_of_last(self) -> int:
        """Files of the last segment, receipt and manifest included."""
        folder = Path(self.store.url) / segment_prefix(self.writer.head.record.chain[-1].seg)
        return sum(path.is_file() for path in folder.rglob("*"))

    def requests_of_poll(self) -> int:
        """Requests of asking for news when there is none."""
        head = self.store.head()
        self.storage.take()
        self.store.poll(head)
        return sum(self.storage.take().values())

    def close(self) -> None:
        self.writer.close()
        self.store.close()


def budget(tables: int, arrays: int = 3) -> int:
    """Objects that the design allows a delta of one-chunk parts: rows, codes and one slot in each table."""
    return 2 + tables * (2 + 2 * arrays)


def main() -> None:
    parser = harness.arguments(__doc__, rows=100_000, repeats=40)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--fsync", action="store_true")
    options = parser.parse_args()
    how = "with fsync" if options.fsync else "no fsync"
    report = harness.Report(f"a commit of {ROWS} rows of {options.rows} x {DIM}, {how}")
    report.start()
    with harness.data_folder(options.folder) as folder:
        young, old, wide = (
            Growing(folder, name, tables, options.rows, fsync=options.fsync)
            for name, tables in (("young", 1), ("old", 1), ("wide", 10))
        )
        while old.version < options.versions or old.chain != 10:
            old.commit()
        for store in (young, wide):
            while store.chain != 10:
                store.commit()
        compare(report, young, old, wide, options.repeats)
        for store in (young, old, wide):
            store.close()
    report.finish(options.json)


def compare(report: harness.Report, young: Growing, old: Growing, wide: Growing, repeats: int) -> None:
    """Commit in turn, and compare seconds and requests."""
    versions = f"young {young.version}, old {old.version}, ten tables {wide.version}"
    report.note(f"versions: {versions}; chains of {young.chain}")
    stores = {"young": young, "old": old, "wide": wide}
    found = harness.alternating({name: store.commit for name, store in stores.items()}, repeats)
    counts = {name: store.counts for name, store in stores.items()}
    objects = {name: store.objects_of_last() for name, store in stores.items()}
    report.note(f"chains at the end: {young.chain}")
    report.add_ratio(f"after {old.version} versions / after {young.version}", found["old"], found["young"], SAME)
    report.add_ratio("ten tables / one table, 100 rows of one", found["wide"], found["young"], SAME)
    half = repeats // 2
    early, late = found["young"].part(0, half), found["young"].part(repeats - half, repeats)
    report.add_ratio(f"young store: last {half} commits / first {half}, by chain length", late, early)
    spread = harness.alternating({"spread": lambda: wide.commit(10)}, min(10, repeats))["spread"]
    counts["spread"], objects["spread"] = wide.counts, wide.objects_of_last()
    report.note(f"      100 rows over ten tables: {spread}")
    for name, label, tables in (
        ("young", "10 versions", 1), ("old", f"{old.version} versions", 1), ("wide", "ten tables, rows of one", 1),
        ("spread", "rows over ten tables", 10),
    ):  # fmt: skip
        count = counts[name]
        report.note(f"      {label}: {dict(count)}")
        report.add(f"{label}: objects of a delta, budget {budget(tables)}", objects[name], goal=budget(tables), unit="")
    for name, label in (("old", f"{old.version} versions"), ("wide", "ten tables")):
        ratio = sum(counts[name].values()) / sum(counts["young"].values())
        report.add(f"requests of a commit: {label} / 10 versions", ratio, goal=1.0)
    report.add("requests of a poll", max(s.requests_of_poll() for s in (young, old, wide)), goal=1.0, unit="")


if __name__ == "__main__":
    main()
