"""Assigns the users of a federated training to edges so that each edge sees all classes alike. Pure, no torch.

With equal shares of the classes at each edge, edges may average less often with the cloud. The problem is hard (users
are not divided), so users are placed one by one, the largest first, and then moved and swapped as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    problem = _checked(np.asarray(samples, float), np.asarray(costs, float), np.asarray(bounds, float))
    return _Assignment(problem).run()


@dataclass(frozen=True, slots=True)
class _UsersAndEdges:
    samples: Floats
    costs: Floats
    bounds: Floats


def _checked(samples: Floats, costs: Floats, bounds: Floats) -> _UsersAndEdges:
    if samples.ndim != 2 or costs.shape != (len(samples), *bounds.shape) or bounds.ndim != 1:
        raise BadInput(
            f"samples are (users, classes), costs (users, edges), bounds (edges,); found {samples.shape}, "
            f"{costs.shape}, {bounds.shape}"
        )
    if not ((samples >= 0).all() and np.isfinite(samples).all() and (costs >= 0).all() and (bounds >= 0).all()):
        raise BadInput("samples, costs and bounds are 0 or more, and samples are finite")
    return _UsersAndEdges(samples, costs, bounds)


class _Assignment:
    def __init__(self, problem: _UsersAndEdges) -> None:
        self._of = problem
        users, edges = problem.costs.shape
        self._edge = [-1] * users
        self._held = np.zeros((edges, problem.samples.shape[1]))
        self._used = np.zeros(edges)

    def run(self) -> list[int]:
        samples, costs = self._of.samples, self._of.costs
        # Users with few edges first, then the largest: those placed last have the choice that is left.
        order = sorted(range(len(samples)), key=lambda user: (np.isfinite(costs[user]).sum(), -samples[user].sum()))
        for user in order:
            choices = [edge for edge in range(len(self._used)) if self._fits(user, edge)]
            if not choices:
                raise BadInput(
                    f"no edge has bandwidth left for user {user}; raise the bounds, or let it reach more edges",
                    found=user,
                )
            self._put(user, min(choices, key=lambda edge: (self._with(user, edge), self._held[edge].sum())))
        while any(self._try(change) for change in self._changes()):
            pass
        return self._edge

    def _fits(self, user: int, edge: int, freed: float = 0.0) -> bool:
        return bool(self._used[edge] - freed + self._of.costs[user, edge] <= self._of.bounds[edge])

    def _with(self, user: int, edge: int) -> float:
        """How much more imbalance an edge has with a user."""
        before = self._held[edge : edge + 1]
        return imbalance(before + self._of.samples[user]) - imbalance(before)

    def _put(self, user: int, edge: int, sign: int = 1) -> None:
        self._held[edge] += sign * self._of.samples[user]
        self._used[edge] += sign * self._of.costs[user, edge]
        self._edge[user] = edge if sign > 0 else -1

    def _changes(self) -> Iterator[list[tuple[int, int]]]:
        """Moves of one user, and swaps of two, that the bounds allow: (user, new edge)."""
        costs = self._of.costs
        for user, own in enumerate(self._edge):
            for edge in range(len(self._used)):
                if edge != own and self._fits(user, edge):
                    yield [(user, edge)]
            for other in range(user + 1, len(self._edge)):
                edge = self._edge[other]
                if (
                    edge != own
                    and self._fits(user, edge, costs[other, edge])
                    and self._fits(other, own, costs[user, own])
                ):
                    yield [(user, edge), (other, own)]

    def _try(self, change: list[tuple[int, int]]) -> bool:
        """Make a change if the imbalance becomes less; whether it did."""
        back = [(user, self._edge[user]) for user, _ in change]
        edges = sorted({edge for _, edge in change + back})
        before = imbalance(self._held[edges])
        self._move(change)
        if imbalance(self._held[edges]) < before - _GAIN:
            return True
        self._move(back)
        return False

    def _move(self, change: list[tuple[int, int]]) -> None:
        for user, _ in change:
            self._put(user, self._edge[user], -1)
        for user, edge in change:
            self._put(user, edge)
