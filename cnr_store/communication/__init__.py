"""What ranks send to each other while they train, with fewer bytes: hooks, optimizers, their state, and a meter.

It never touches a store: `CheckpointManager(communication=[...])` saves the state that `state` describes, each rank's
own, and restores it on the same or another number of ranks. Open `state` first.
"""

from __future__ import annotations

from cnr_store.communication.meter import Meter, Traffic
from cnr_store.communication.one_bit_adam import OneBitAdam
from cnr_store.communication.one_bit_lamb import OneBitLamb
from cnr_store.communication.partial_sums import PartialFirstLayer, PartialSums, SplitTable
from cnr_store.communication.powersgd import PowerSGD
from cnr_store.communication.quantizing import QuantizedGradients
from cnr_store.communication.state import CommunicationState, RankState, StateTensor, chunk, reshard
from cnr_store.communication.thresholding import ThresholdedGradients
from cnr_store.communication.top_k import TopKActivations

__all__ = [
    "CommunicationState",
    "Meter",
    "OneBitAdam",
    "OneBitLamb",
    "PartialFirstLayer",
    "PartialSums",
    "PowerSGD",
    "QuantizedGradients",
    "RankState",
    "SplitTable",
    "StateTensor",
    "ThresholdedGradients",
    "TopKActivations",
    "Traffic",
    "chunk",
    "reshard",
]
