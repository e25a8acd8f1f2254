"""What an encoding leaves open: which rows are a sample, the settings of greedy search, and the code width.

Pure: the same on every rank. What was chosen is stored with the table; readers do not derive it again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.types import AffineBits

REFERENCE_SETTINGS: dict[AffineBits, tuple[int, float]] = {2: (35, 0.5), 3: (70, 0.4), 4: (100, 0.2), 8: (200, 0.1)}
"""By bits, the (num_bins, ratio) of b-bit Check-N-Run rows: of those that are stored, and of those that a scale is
measured against.

Of 30 samples of rows (normal, uniform, Laplace, t, of different norms, mostly zeros; 8 to 128 columns) their squared
error was 1.001, 0.999, 1.003 and 0.999 times that of the best settings on each sample in the mean, 0.98 to 1.04 in
each (decision 0045)."""


def sample_rows(num_rows: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` distinct row numbers of a table of `num_rows`, evenly random and ascending.

    A table with no more rows than that gives all of them.

    Parameters
    ----------
    num_rows, count
        Not negative.
    seed
        Equal arguments give equal rows (under one version of numpy).

    Examples
    --------
    >>> sample_rows(3, 10, seed=0)
    array([0, 1, 2])
    """
    if count >= num_rows:
        return np.arange(num_rows, dtype=np.int64)
    chosen = np.random.default_rng(seed).choice(num_rows, size=count, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64))


def expected_bits(expected_restores: float) -> AffineBits:
    """Return Check-N-Run's code width for a run that expects that many restores: at least 0, not NaN.

    2 bits for up to 1, 3 for up to 3, 4 for up to 20, else 8.

    Examples
    --------
    >>> [expected_bits(restores) for restores in (0, 1, 2, 20, 20.5)]
    [2, 2, 3, 4, 8]
    """
    if expected_restores <= 1:
        return 2
    if expected_restores <= 3:
        return 3
    if expected_restores <= 20:
        return 4
    return 8
