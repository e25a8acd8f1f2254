"""What ranks send to each other while they train, with fewer bytes: hooks, optimizers, their state, and a meter.

It never touches a store: `CheckpointManager(communication=[...])` saves the state that `state` describes, each rank's
own, and restores it on the same or another number of ranks. Open `state` first.
"""

from __future__ import annotations

from cnr_store.communication.meter import Meter, Traffic
from cnr_store.communication.state import CommunicationState, RankState, StateTensor, chunk, reshard
from cnr_store.communication.thresholding import ThresholdedGradients, ThresholdReport

__all__ = [
    "CommunicationState",
    "Meter",
    "RankState",
    "StateTensor",
    "ThresholdReport",
    "ThresholdedGradients",
    "Traffic",
    "chunk",
    "reshard",
]
