"""Assigns the users of a federated training to edges so that each edge sees all classes alike. Pure, no torch.

With equal shares of the classes at each edge, edges may average less often with the cloud. The problem is hard (users
are not divided), so users are placed one by one, the largest first, and then moved and swapped as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput

Floats = npt.NDArray[np.float64]
_GAIN = 1e-12
"""Changes below it are rounding, and would go on forever."""


def imbalance(samples: Floats) -> float:
    """Return the sum over edges of KL(classes of the edge || uniform), in nats; an edge without samples counts as 0.

    ``samples``: (edges, classes), how many of each class an edge has.
    """
    total = samples.sum(axis=1, keepdims=True)
    shares = np.divide(samples, total, out=np.zeros_like(samples), where=total > 0)
    logs = np.log(shares * samples.shape[1], out=np.zeros_like(samples), where=shares > 0)
    return float((shares * logs).sum())


def assign_users(samples: npt.ArrayLike, costs: npt.ArrayLike, bounds: npt.ArrayLike) -> list[int]:
    """Return the edge of each user: classes balanced over edges, within the bandwidth of each edge.

    No optimum: no move of one user and no swap of two would balance better. The same on every machine.

    Parameters
    ----------
    samples
        (users, classes): how many samples of each class a user has, 0 or more.
    costs
        (users, edges): bandwidth that a user takes at an edge; infinite where it cannot be reached in time.
    bounds
        (edges,): the bandwidth that an edge has.

    Raises
    ------
    BadInput
        The shapes do not fit, a number is negative, or no edge was left for a user.

    Examples
    --------
    >>> assign_users([[9, 0], [9, 0], [0, 9], [0, 9]], np.ones((4, 2)), [2, 2])
    [1, 0, 0, 1]
    """
    found = _Assignment(np.asarray(samples, float), np.asarray(costs, float), np.asarray(bounds, float))
    found.place()
    while any(found.improves(change) for change in found.changes()):
        pass
    return found.edge_of


class _Assignment:
    def __init__(self, samples: Floats, costs: Floats, bounds: Floats) -> None:
        if samples.ndim != 2 or costs.shape != (len(samples), *bounds.shape) or bounds.ndim != 1:
            raise BadInput(
                f"samples are (users, classes), costs (users, edges), bounds (edges,); found {samples.shape}, "
                f"{costs.shape}, {bounds.shape}"
            )
        if not ((samples >= 0).all() and np.isfinite(samples).all() and (costs >= 0).all() and (bounds >= 0).all()):
            raise BadInput("samples, costs and bounds are 0 or more, and samples are finite")
        self._samples, self._costs = samples, costs
        self._bounds = np.minimum(bounds, np.finfo(float).max)  # an infinite cost exceeds it
        self.edge_of = [-1] * len(samples)
        self._held = np.zeros((len(bounds), samples.shape[1]))
        self._used = np.zeros(len(bounds))

    def place(self) -> None:
        """Give each user the edge that it unbalances least, as far as the bounds allow."""
        # Users with few edges first, then the largest: those placed last have the choice that is left.
        choices_of = np.isfinite(self._costs).sum(axis=1)
        for user in sorted(range(len(self.edge_of)), key=lambda user: (choices_of[user], -self._samples[user].sum())):
            choices = np.flatnonzero(self._used + self._costs[user] <= self._bounds).tolist()
            if not choices:
                raise BadInput(
                    f"no edge has bandwidth left for user {user}; raise the bounds, or let it reach more edges",
                    found=user,
                )
            self._put(user, min(choices, key=lambda edge: (self._unbalance(user, edge), self._held[edge].sum())))

    def _unbalance(self, user: int, edge: int) -> float:
        """How much more imbalance an edge has with a user."""
        before = self._held[edge : edge + 1]
        return imbalance(before + self._samples[user]) - imbalance(before)

    def changes(self) -> Iterator[list[tuple[int, int]]]:
        """Moves of one user, and swaps of two: (user, new edge)."""
        for user, own in enumerate(self.edge_of):
            yield from ([(user, edge)] for edge in range(len(self._bounds)) if edge != own)
            for other in range(user + 1, len(self.edge_of)):
                if self.edge_of[other] != own:
                    yield [(user, self.edge_of[other]), (other, own)]

    def improves(self, change: list[tuple[int, int]]) -> bool:
        """Make a change if the bounds allow it and the imbalance becomes less; whether it did."""
        back = [(user, self.edge_of[user]) for user, _ in change]
        edges = sorted({edge for _, edge in change + back})
        held, used = self._held[edges], self._used[edges]
        self._move(change)
        if (self._used[edges] <= self._bounds[edges]).all() and imbalance(self._held[edges]) < imbalance(held) - _GAIN:
            return True
        for user, edge in back:
            self.edge_of[user] = edge
        self._held[edges], self._used[edges] = held, used
        return False

    def _move(self, change: list[tuple[int, int]]) -> None:
        for user, _ in change:
            self._put(user, self.edge_of[user], -1)
        for user, edge in change:
            self._put(user, edge)

    def _put(self, user: int, edge: int, sign: int = 1) -> None:
        self._held[edge] += sign * self._samples[user]
        self._used[edge] += sign * self._costs[user, edge]
        self.edge_of[user] = edge
