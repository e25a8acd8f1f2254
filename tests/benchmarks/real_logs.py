"""Real interactions in the order in which they came, read from a folder beside the project; never part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.datasets import read_click_log

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"


def movielens(folder: Path = FOLDER) -> ClickLog | None:
    """Return MovieLens-100k, label rating >= 4; None where the file is not there."""
    path = folder / "ml-100k.inter"
    return read_click_log(path) if path.is_file() else None


def beauty(folder: Path = FOLDER, seed: int = 0) -> ClickLog | None:
    """Return the Amazon Beauty pairs with a drawn item as negative for each; None where the file is not there.

    The file has each user's items in time order but no times: users go through their items side by side, each at an
    even pace, which is as close to arrival order as the file allows.
    """
    path = folder / "beauty_pairs.txt"
    if not path.is_file():
        return None
    pairs = np.loadtxt(path, dtype=np.int64, ndmin=2)
    users, items = (np.unique(column, return_inverse=True)[1] for column in pairs.T)
    by_user = np.argsort(users, kind="stable")
    counts = np.bincount(users)
    within = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    pace = np.empty(len(users))
    pace[by_user] = within / np.repeat(counts, counts)
    order = np.argsort(pace, kind="stable")
    users, items = users[order], items[order]
    drawn = np.random.default_rng(seed).integers(0, items.max() + 1, len(items))
    ids = np.stack([np.repeat(users, 2), np.stack([items, drawn], axis=1).reshape(-1)], axis=1)
    return ClickLog(
        ids=np.ascontiguousarray(ids, dtype=np.int64),
        dense=np.zeros((len(ids), 0), np.float32),
        labels=np.tile(np.float32([1.0, 0.0]), len(items)),
        table_rows=[int(users.max()) + 1, int(items.max()) + 1],
        names=["user", "item"],
    )
