"""What a save must know of the saves before it: tables to be written whole, the chain's sizes, scales.

The training thread alone changes it: when a save is decided on, when its outcome is known, and behind a restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cnr_store.training.background import SaveJob
from cnr_store.training.lineage import Lineage
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.options import PrecisionPolicy
from cnr_store.training.precision.calibrating import QualityTarget
from cnr_store.training.precision.rate_control import RateControl
from cnr_store.training.precision.rate_status import ScaleChange
from cnr_store.training.resizing import Growing
from cnr_store_gpu import Cumulative


@dataclass(slots=True, eq=False)
class ChainState:
    """What this training knows of the chain that it goes on from.

    Attributes
    ----------
    rate
        How exact tables are stored.
    quality
        The calibration that comes before the first save; None where there is none, or it is done.
    lineage
        Sizes of the checkpoints since the baseline, and the rows changed since.
    growing
        Tables that have more rows than the stored ones.
    whole_next
        Tables that the next save must write whole; the same on all ranks once a save is decided on.
    """

    rate: RateControl
    quality: QualityTarget | None
    lineage: Lineage
    growing: Growing = field(default_factory=Growing)
    whole_next: set[str] = field(default_factory=set)

    def won(self, job: SaveJob, training: LiveTraining) -> Mapping[str, ScaleChange]:
        """Take notice that a save is committed; returns what it did to scales."""
        if job.declares:  # what is stored anew is that on all ranks, in one save
            self.whole_next -= training.tables
        self.lineage.add(job)
        self.growing.won()
        return self.rate.won(job.transaction)


def new_chain_state(training: LiveTraining, precision: PrecisionPolicy) -> ChainState:
    """Return the state of a training that has saved nothing. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        The options contradict each other in what they say of scales.
    """
    holdings, options = training.holdings, training.options
    rate = RateControl(options, holdings, precision.schedule)
    quality = QualityTarget.of(precision, options, training.declared, holdings.shards, training.ranks)
    lengths = {shard.name: shard.rows[1] - shard.rows[0] for shard in holdings.shards}
    return ChainState(rate, quality, Lineage(Cumulative(lengths)))
