"""Public data sets as click logs in time order, and the small models that are trained on them.

The files are no part of the repository: they lie in a folder that is given, and a set whose file is missing is left
out aloud.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from run_config import RunConfig

from cnr_store_tools.demo.click_log import ClickLog

DATA_FOLDER = Path(__file__).parents[3] / "shared" / "data"
"""Where the files are looked for: beside the repository."""

DIMS = (16, 64)


@dataclass(frozen=True, slots=True)
class RealSet:
    """One data set.

    Attributes
    ----------
    name, file
        What it is called, and the name of its file.
    batch_size
        Samples per step: one pass over the log is some hundred steps.
    read
        From the path of the file to its samples in time order.
    """

    name: str
    file: str
    batch_size: int
    read: Callable[[Path], ClickLog]

    def config(self, log: ClickLog, *, dim: int, intervals: int, seed: int = 0) -> RunConfig:
        """Return one pass over the log in so many intervals of equal length, with row-wise Adagrad."""
        save_every = len(log) // self.batch_size // intervals
        return RunConfig(
            traffic=None, steps=save_every * intervals, batch_size=self.batch_size, save_every=save_every,
            test_share=0.0, dim=dim, seed=seed,
        )  # fmt: skip


def read_movielens(path: Path) -> ClickLog:
    """Return the ratings of a RecBole file in time order: one of 4 or more is a click; ids by first appearance."""
    ratings = np.loadtxt(path, skiprows=1, dtype=np.int64, ndmin=2)
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    columns = [by_appearance(column) for column in ratings[:, :2].T]
    return ClickLog(
        ids=np.stack([rows for rows, _ in columns], axis=1),
        dense=np.empty((len(ratings), 0), np.float32),
        labels=(ratings[:, 2] >= 4).astype(np.float32),
        table_rows=[count for _, count in columns],
        names=["user_id", "item_id"],
    )


def read_criteo(path: Path) -> ClickLog:
    """Return lines of label, 13 integers and 26 ids, which are rows; dense features are ``log(1 + max(x, 0))``."""
    lines = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    ids = np.ascontiguousarray(lines[:, 14:])
    return ClickLog(
        ids=ids,
        dense=np.log1p(np.maximum(lines[:, 1:14], 0.0)).astype(np.float32),
        labels=(lines[:, 0] > 0).astype(np.float32),
        table_rows=(ids.max(axis=0) + 1).tolist(),
        names=[f"c{number}" for number in range(1, ids.shape[1] + 1)],
    )


def by_appearance(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Return each value's number in the order in which values first appear, and how many there are."""
    _, first, place = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place], len(first)


def read_pairs(path: Path) -> ClickLog:
    """Return user-item pairs with one negative each: a file of ``user item`` lines, in time order within each user.

    The order between users is not known. The k-th of a user's n pairs is taken to come at (k + u) / n of the time,
    with u uniform per user, so that users are spread over the run and each one's own order stands. A negative is an
    item drawn uniformly; it stands behind its pair.
    """
    pairs = np.loadtxt(path, dtype=np.int64, ndmin=2)
    users, user_rows = np.unique(pairs[:, 0], return_inverse=True)
    items, item_rows = np.unique(pairs[:, 1], return_inverse=True)
    random = np.random.default_rng(0)
    by_user = np.argsort(user_rows, kind="stable")
    counts = np.bincount(user_rows)
    position = np.empty(len(pairs))
    position[by_user] = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts)
    times = (position + random.random(len(users))[user_rows]) / counts[user_rows]
    order = np.argsort(times, kind="stable")
    ids = np.empty((2 * len(pairs), 2), np.int64)
    ids[:, 0] = np.repeat(user_rows[order], 2)
    ids[0::2, 1] = item_rows[order]
    ids[1::2, 1] = random.integers(0, len(items), len(pairs))
    return ClickLog(
        ids=ids,
        dense=np.empty((len(ids), 0), np.float32),
        labels=np.tile(np.asarray([1, 0], np.float32), len(pairs)),
        table_rows=[len(users), len(items)],
        names=["user", "item"],
    )


def without_unused_rows(log: ClickLog) -> ClickLog:
    """Return the log with tables of the rows that occur in it, ids in their old order.

    An excerpt of a large log keeps that one's ids: most rows of its tables would be initial values for ever.
    """
    found = [np.unique(column, return_inverse=True) for column in log.ids.T]
    return replace(
        log, ids=np.stack([rows for _, rows in found], axis=1), table_rows=[len(values) for values, _ in found]
    )


def read_excerpt(path: Path) -> ClickLog:
    """Return Criteo's samples, with tables of the rows that occur in them."""
    return without_unused_rows(read_criteo(path))


SETS = (
    RealSet("MovieLens-100k", "ml-100k.inter", 128, read_movielens),
    RealSet("Criteo, 10,000 samples", "criteo_kaggle_tiny_train.csv", 64, read_excerpt),
    RealSet("Amazon Beauty", "beauty_pairs.txt", 1024, read_pairs),
)


def present(folder: Path) -> Iterator[tuple[RealSet, Path | None]]:
    """Yield each set with the path of its file, None where it is missing."""
    for one in SETS:
        path = folder / one.file
        yield one, path if path.is_file() else None
