"""Divide the readers' positions of one number of ranks among another: a ready ``redistribute=`` for `restore`.

It knows one kind of reader: torchdata's ``StatefulDataLoader`` over a map-style dataset, whose ranks take every N-th
sample of one order (``StatefulDistributedSampler``). Pure, no I/O.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_count
from cnr_store.training.reader import Redistribute

_REMEDY = "pass a redistribute= function of your own, or resume on the same number of ranks"


def share_evenly(world: int) -> Redistribute:
    """Return a ``redistribute=`` for a training that resumes on ``world`` ranks in the middle of an epoch.

    The ranks that saved have consumed the first samples of the epoch's order. Each new rank starts after an equal share
    of them. No sample is skipped; if the shares are not whole, fewer than ``world`` samples are trained twice. The
    sampler must have the epoch that was saved (``set_epoch``) and the same seed.

    Parameters
    ----------
    world
        Number of ranks that resume.

    Raises
    ------
    BadInput
        Here if ``world`` is not positive; in the restore if a state is not that of such a loader, if the ranks stopped
        at different positions, or if workers have a dataset with a state of its own.

    Examples
    --------
    >>> saved = {"_sampler_iter_state": {"samples_yielded": 30, "sampler_state": {"yielded": 30}},
    ...     "_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False, "dataset_state": None}
    >>> [state["_sampler_iter_state"]["sampler_state"]["yielded"] for state in share_evenly(3)([saved, saved])]
    [20, 20, 20]
    """
    checked_count("world", world, least=1)

    def redistribute(states: list[Any]) -> Sequence[Any]:
        positions = [_position(state) for state in states]
        if len({(position["_sampler_iter_yielded"], _samples(position)) for position in positions}) != 1:
            found = [_samples(position) for position in positions]
            raise BadInput(f"the ranks stopped after {found} samples, and share_evenly needs equal ones; {_REMEDY}")
        shared = []
        for rank in range(world):
            state = copy.deepcopy(states[min(rank, len(states) - 1)])
            _move(state, _position(state), len(states), world)
            shared.append(state)
        return shared

    return redistribute


def _position(state: Any) -> dict[str, Any]:
    """Return the part of a loader's state that has its position; the same object, so that it can be changed."""
    try:
        if "_snapshot" in state:  # with worker processes
            if state["_steps_since_snapshot"]:
                raise BadInput(f"the loader has snapshot_every_n_steps above 1, which has no exact position; {_REMEDY}")
            workers = state["_snapshot"]["_worker_snapshots"].values()
            datasets = [one["dataset_state"] for one in workers]
            position: dict[str, Any] = state["_snapshot"]["_main_snapshot"]
        else:
            position, datasets = state, [state["dataset_state"]]
        int(position["_sampler_iter_yielded"])
        _samples(position)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            "share_evenly takes states of StatefulDataLoader with a StatefulDistributedSampler; a rank saved another "
            f"one ({type(state).__name__}); {_REMEDY}",
            found=type(state).__name__,
        ) from error
    if any(dataset is not None for dataset in datasets):
        raise BadInput(f"the dataset has a state of its own, which belongs to one rank; {_REMEDY}")
    return position


def _samples(position: dict[str, Any]) -> int:
    """Return how many samples a rank has taken from its sampler in this epoch."""
    return int(position["_sampler_iter_state"]["sampler_state"]["yielded"])


def _move(state: dict[str, Any], position: dict[str, Any], saved: int, world: int) -> None:
    """Set a state to an equal share of what ``saved`` ranks have consumed, for one of ``world`` ranks."""
    sampler = position["_sampler_iter_state"]
    sampler["sampler_state"]["yielded"] = _samples(position) * saved // world
    sampler["samples_yielded"] = sampler["sampler_state"]["yielded"]
    position["_sampler_iter_yielded"] = position["_sampler_iter_yielded"] * saved // world
    if "_num_yielded" in state:
        state["_num_yielded"] = position["_sampler_iter_yielded"]
    else:
        state["_snapshot"]["_snapshot_step"] = position["_sampler_iter_yielded"]
