"""The data sets that quality is measured on: a past to train on, the later samples that a model is judged by.

Generated clicks have a known truth: the click probability of each held-out sample. The real ones are in time order:
MovieLens-100k, Criteo's sample or Amazon Beauty. Seeds of a run change the model's initial
values and never the data, so the spread over seeds is that of the training alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from real_sets import DATA_FOLDER, by_appearance, read_criteo, read_movielens, read_pairs
from run_config import RunConfig

from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks, plant_teacher

TEST_SHARE = 0.15
MAX_TABLES = 3
"""Id columns of a file that become tables: those with the most distinct ids. A table costs the same few kilobytes and
milliseconds in each checkpoint however small it is, and small ones say little about embeddings."""

BEAUTY_USERS = 12_000
"""Of the 40,226: a sample of them, for a run of seconds."""

_FILES = {"movielens": ("ml-100k.inter",), "beauty": ("beauty_pairs.txt",)} | {
    "criteo": ("criteo_kaggle_tiny_train.csv", "criteo_kaggle_tiny_test.csv")
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where samples come from: plain data, so that a worker process can load it.

    Attributes
    ----------
    name
        ``generated``, ``movielens``, ``criteo`` or ``beauty``.
    samples
        Generated clicks; of real sets the first so many in time, 0 for all.
    """

    name: str
    samples: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Samples and the run that trains on them.

    Attributes
    ----------
    past, future
        To train on, and to judge by: later than all of ``past``.
    truth
        float64 (len(future),): true click probabilities; None where nobody knows them.
    config
        The run; its ``seed`` is that of the model.
    """

    source: Source
    past: ClickLog
    future: ClickLog
    truth: npt.NDArray[np.float64] | None
    config: RunConfig


@lru_cache(maxsize=8)
def load(source: Source) -> Case:
    """Return the samples of a source; kept, because each worker asks for the same one many times."""
    if source.name == "generated":
        return _generated(source)
    log, batch_size, dim = _READERS[source.name](DATA_FOLDER)
    if source.samples:
        log = log.part(0, source.samples)
    past, future = split_by_time(log, TEST_SHARE)
    return Case(source, past, future, None, _config(batch_size, dim, table_lr=0.1))


def real_sources(samples: int = 0) -> list[Source]:
    """Return the real sets that lie beside this checkout."""
    return [
        Source(name, samples) for name, files in _FILES.items() if all((DATA_FOLDER / file).is_file() for file in files)
    ]


def _generated(source: Source) -> Case:
    traffic = TrafficConfig(
        table_rows=(12_000, 6_000, 2_000), num_samples=source.samples, drift_every=16_384, drift_share=0.01,
        teacher_scale=2.5,
    )  # fmt: skip
    log = generate_clicks(traffic)
    past, future = split_by_time(log, TEST_SHARE)
    # The teacher is what the generator draws first; it sees dense features as they were before they were standardised.
    teacher = plant_teacher(traffic, np.random.default_rng(traffic.seed))
    later = log.part(len(past), len(log))
    logits = teacher.logits(later.ids, later.dense).astype(np.float64)
    return Case(source, past, future, 1.0 / (1.0 + np.exp(-logits)), _config(512, 32, table_lr=0.1))


def _movielens(folder: Path) -> tuple[ClickLog, int, int]:
    return read_movielens(folder / _FILES["movielens"][0]), 256, 16


def _criteo(folder: Path) -> tuple[ClickLog, int, int]:
    first, second = (read_criteo(folder / name) for name in _FILES["criteo"])
    joined = ClickLog(
        ids=np.concatenate([first.ids, second.ids]),
        dense=np.concatenate([first.dense, second.dense]),
        labels=np.concatenate([first.labels, second.labels]),
        table_rows=[max(rows) for rows in zip(first.table_rows, second.table_rows, strict=True)],
        names=first.names,
    )
    return _columns_of(joined), 64, 16


def _beauty(folder: Path) -> tuple[ClickLog, int, int]:
    log = read_pairs(folder / _FILES["beauty"][0])
    kept = log.ids[:, 0] < BEAUTY_USERS
    return _columns_of(replace(log, ids=log.ids[kept], dense=log.dense[kept], labels=log.labels[kept])), 512, 16


_READERS: dict[str, Callable[[Path], tuple[ClickLog, int, int]]] = {
    "movielens": _movielens,
    "criteo": _criteo,
    "beauty": _beauty,
}


def _columns_of(log: ClickLog) -> ClickLog:
    """Return the log with its `MAX_TABLES` richest id columns, rows numbered without gaps by first appearance."""
    numbered = [by_appearance(column) for column in log.ids.T]
    kept = sorted(sorted(range(len(numbered)), key=lambda index: -numbered[index][1])[:MAX_TABLES])
    return replace(
        log,
        ids=np.stack([numbered[index][0] for index in kept], axis=1),
        table_rows=[numbered[index][1] for index in kept],
        names=[log.names[index] for index in kept],
    )


def _config(batch_size: int, dim: int, *, table_lr: float) -> RunConfig:
    return RunConfig(
        traffic=None, steps=0, batch_size=batch_size, save_every=0, test_share=TEST_SHARE, dim=dim, top_hidden=(32,),
        table_lr=table_lr,
    )  # fmt: skip
