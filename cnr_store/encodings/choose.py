"""Chooses what the affine encoding leaves open, on a sample of rows: greedy settings and the code width.

Pure computation: the caller reads the sampled rows. All ranks must agree, so one of them chooses for all.
The choice is stored with the table; readers do not derive it again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine
from cnr_store.types import AffineBits, Float32s

GREEDY_BINS = (10, 15, 20, 25, 30, 35, 40, 45, 50, 100, 200)
GREEDY_RATIOS = (0.1, 0.16, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Settings that `choose_greedy` tries."""

_UNMEASURED: dict[int, tuple[int, float]] = {2: (25, 1.0), 3: (25, 1.0), 4: (45, 0.2), 8: (45, 0.2)}
"""The paper's settings by bits, for a sample without rows."""

REFERENCE_SETTINGS: dict[AffineBits, tuple[int, float]] = {2: (35, 0.5), 3: (70, 0.4), 4: (100, 0.2), 8: (200, 0.1)}
"""By bits, the (num_bins, ratio) whose error stands for that of b-bit rows where nothing is stored as such.

Of 30 samples of rows (normal, uniform, Laplace, t, of different norms, mostly zeros; 8 to 128 columns) their squared
error was 1.001, 0.999, 1.003 and 0.999 times that of the settings of `choose_greedy` in the mean, 0.98 to 1.04 times in
each; to choose them took as long as all else that a scale needs, and three times as long for a small table."""

_SAMPLE_LIMIT, _SAMPLE_ELEMENTS = 256, 2_048
"""Of the rows that settings are tried on. With four times the elements the error was 1.0005 times smaller in the mean
of normal, uniform, Laplace and t distributed rows of 8 to 128 columns, and 1.011 times at most."""

_WORTH_THE_STEPS = 1.001
"""More greedy steps must lower the error by more than this factor to be taken."""


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


def choose_greedy(sample: Float32s, bits: int) -> tuple[int, float]:
    """Return (num_bins, ratio) of the greedy search with the least mean l2 error on a sample of rows.

    Of all settings within 0.1 % of the least error, the one with the fewest steps. At most 256 rows of the
    sample (fewer beyond 8 columns), evenly spaced, are used; rows that cannot be encoded are left out; without any
    row the paper's settings are returned.

    Parameters
    ----------
    sample
        float32, (n, dim). Read only.
    bits
        2, 3, 4 or 8.

    Notes
    -----
    Blocks for 0.1 to 0.5 ms. The rule, choice by mean l2 error on a uniform sample, is
    Check-N-Run's (arXiv 2010.08679).
    """
    rows = affine.codable(sample, param_dtype="float32")
    if rows.size == 0:
        return _UNMEASURED[bits]
    limit = min(_SAMPLE_LIMIT, max(1, _SAMPLE_ELEMENTS // rows.shape[1]))
    rows = np.ascontiguousarray(rows[:: -(-len(rows) // limit)])
    distances, steps = affine.greedy_distances(rows, bits, GREEDY_BINS, GREEDY_RATIOS)
    worthy = np.nonzero(distances <= distances.min() * _WORTH_THE_STEPS)
    chosen = np.lexsort((distances[worthy], steps[worthy]))[0]  # fewest steps, then least error
    num_bins, ratio = GREEDY_BINS[worthy[0][chosen]], GREEDY_RATIOS[worthy[1][chosen]]
    return num_bins, ratio


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
