"""AUC and logloss of predicted click probabilities, in numpy and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the share of (click, non-click) pairs that the scores order correctly; ties count half.

    Both (num_samples,); labels are 0 or 1. O(n log n), by the rank sum of the clicks.

    Raises
    ------
    BadInput
        The lengths differ, one class is missing, or a score is NaN.
    """
    clicked, ranked = _checked(labels, scores)
    num_clicks = int(clicked.sum())
    num_others = clicked.size - num_clicks
    if num_clicks == 0 or num_others == 0:
        raise BadInput(f"AUC needs both classes: found {num_clicks} clicks and {num_others} others")
    _, group, count = np.unique(ranked, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2.0
    rank_sum = float(mean_rank[group][clicked].sum())
    return (rank_sum - num_clicks * (num_clicks + 1) / 2.0) / (num_clicks * num_others)


def logloss(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """Return the mean negative log likelihood in nats; probabilities (num_samples,) are clipped to [1e-7, 1 - 1e-7]."""
    clicked, given = _checked(labels, probabilities)
    if clicked.size == 0:
        raise BadInput("logloss of no samples is undefined")
    clipped = np.clip(given, 1e-7, 1.0 - 1e-7)
    return float(-np.where(clicked, np.log(clipped), np.log1p(-clipped)).mean())


def _checked(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    clicked, given = np.asarray(labels) > 0.5, np.asarray(scores, dtype=np.float64)
    if clicked.shape != given.shape or clicked.ndim != 1:
        raise BadInput(f"labels {clicked.shape} and scores {given.shape} must be vectors of one length")
    if np.isnan(given).any():
        raise BadInput("a score is NaN: the model has diverged")
    return clicked, given
