"""Work on models of many tables, against as many elements in one table: what ``--model`` of a suite measures.

For suites whose other side is a bare loop over the files of one table.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import harness
import numpy as np
from models import BenchModel, chosen_models
from peers import Cnr
from places import local_disk
from trainee import Trainee

from cnr_store import CompactionPolicy, Store
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving import Loader
from cnr_store.types import AffineBits, RowIds

LOOKUP_ROWS, LOOKUPS = 1024, 100


class Side:
    """A store of one model with a baseline and some deltas, and what can be done with it.

    Parameters
    ----------
    share
        Of the rows of each table, in each delta.
    """

    def __init__(self, folder: Path, model: BenchModel, bits: AffineBits, *, deltas: int, share: float) -> None:
        folder.mkdir()
        self._written, self._copy = Cnr(bits), folder / "copy"
        self._written.open(local_disk(folder), Trainee(model))
        self._written.save()()
        for _ in range(deltas):
            self._written.touch(share)
            self._written.save()()
        self._written.leave()
        self._store, self._loader = Store.open(self._written.url), Loader(self._written.url)
        self._versions = [record.v for record in self._store.log() if record.chain][::-1]
        random = np.random.default_rng(0)
        self._ids: dict[str, RowIds] = {
            table: random.integers(0, schema.num_rows, max(1, LOOKUP_ROWS // len(model.tables)))
            for table, schema in self._store.snapshot().tables.items()
        }

    def nothing(self) -> None:
        """Be ready at once: most work can be done again and again."""

    def read(self) -> None:
        """Read every table into new memory."""
        self._store.snapshot().read_many()

    def restore(self) -> None:
        """Restore a training: weights, slots, dense tensors, mirrors."""
        self._written.load()

    def load(self) -> None:
        """Load all tables into a new loader."""
        Loader(self._written.url).close()

    def stand_at_baseline(self) -> None:
        """Have the loader serve the first version."""
        self._loader.pin(self._versions[0])

    def apply(self) -> None:
        """Have the loader apply the first delta."""
        self._loader.pin(self._versions[1])

    def look_up(self) -> None:
        """Look about `LOOKUP_ROWS` rows up, of all tables in one call, `LOOKUPS` times."""
        for _ in range(LOOKUPS):
            self._loader.lookup_many(self._ids)

    def compact_whole(self) -> None:
        """Compact the chain into one segment; the second time there is nothing to do."""
        self._written.compact(CompactionPolicy(max_chain=1))

    def copy(self) -> None:
        """Copy the store by hard links: nothing that is committed is written again."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._written.url, self._copy, copy_function=os.link)

    def compact(self, start: int = 0) -> None:
        """Compact the copy's chain, or its segments from ``start`` on, into one segment."""
        with Store.open(str(self._copy)) as store:
            compact_run(store, run=(start, len(store.head().record.chain)))

    def close(self) -> None:
        """End what is open, and remove the store."""
        self._loader.close()
        self._store.close()
        self._written.close()


Work = tuple[Callable[[Side], None], Callable[[Side], None]]
"""What makes a side ready, untimed, and what is measured."""


def run(
    options: argparse.Namespace, title: str, works: Mapping[str, Work], *, deltas: int, share: float, bits: AffineBits
) -> None:
    """Report what each work takes on each model that was asked for, against the same on one table."""
    report = harness.Report(f"{title} of models at {bits} bits; deltas of {share:.0%} behind a baseline: {deltas}")
    report.start()
    for model in chosen_models(options):
        with harness.data_folder(options.folder) as folder:
            measure(report, folder, model, works, deltas=deltas, share=share, bits=bits, repeats=options.repeats)
    report.finish(options.json)


def measure(
    report: harness.Report, folder: Path, model: BenchModel, works: Mapping[str, Work], *, deltas: int, share: float,
    bits: AffineBits, repeats: int,
) -> None:  # fmt: skip
    """Add the ratios of one model."""
    with ExitStack() as opened:
        sides = {
            name: opened.enter_context(closing(Side(folder / name, one, bits, deltas=deltas, share=share)))
            for name, one in (("tables", model), ("one", model.in_one_table()))
        }
        for name, (ready, work) in works.items():
            turns = {which: partial(work, side) for which, side in sides.items()}
            ready_all = partial(_on_each, ready, sides.values())
            harness.alternating(turns, 1, before_round=ready_all)  # compiled code and pages are there from then on
            found = harness.alternating(turns, repeats, before_round=ready_all)
            report.add_ratio(f"{model.name}: {name} / of one table", found["tables"], found["one"])


def _on_each(work: Callable[[Side], None], sides: Iterable[Side]) -> None:
    for side in sides:
        work(side)
