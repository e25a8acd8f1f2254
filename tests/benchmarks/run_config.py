"""One training run of a benchmark: its data, its model and its learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.model import ModelConfig
from cnr_store_tools.demo.traffic import TrafficConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run, apart from where its data comes from.

    Attributes
    ----------
    traffic
        The generated traffic to train on; None when a file is given.
    steps, batch_size
        Training steps and samples per step.
    save_every
        Steps between two checkpoints.
    test_share
        Share of the log, its last part, that is held out.
    dim, bottom_hidden, top_hidden, table_init
        See :class:`ModelConfig`.
    table_lr, dense_lr
        Learning rates of the tables and of the dense parameters.
    num_threads
        For ``torch.set_num_threads``: part of what makes two runs equal bit for bit.
    seed
        Of the model's initial values.
    """

    traffic: TrafficConfig | None
    steps: int
    batch_size: int
    save_every: int
    test_share: float
    dim: int
    bottom_hidden: tuple[int, ...] = (32,)
    top_hidden: tuple[int, ...] = (64, 32)
    table_init: float = 0.05
    table_lr: float = 0.05
    dense_lr: float = 0.01
    num_threads: int = 1
    seed: int = 0

    def model_config(self, log: ClickLog) -> ModelConfig:
        """Return the shape of the model that fits ``log``."""
        return ModelConfig(
            table_rows=tuple(log.table_rows), table_names=tuple(log.names), dim=self.dim, num_dense=log.num_dense,
            bottom_hidden=self.bottom_hidden, top_hidden=self.top_hidden, table_init=self.table_init, seed=self.seed,
        )  # fmt: skip


def demo_config(*, steps: int = 360, seed: int = 0) -> RunConfig:
    """Return a run like that of ``cnr demo``: 85,000 rows x 16 in four tables, generated traffic, nine checkpoints."""
    batch_size, test_share = 1024, 0.15
    traffic = TrafficConfig(
        table_rows=(50_000, 20_000, 10_000, 5_000), drift_every=16 * batch_size, seed=seed,
        num_samples=round(steps * batch_size / (1.0 - test_share)) + batch_size,
    )  # fmt: skip
    return RunConfig(
        traffic=traffic, steps=steps, batch_size=batch_size, save_every=max(1, steps // 9), test_share=test_share,
        dim=16, seed=seed,
    )  # fmt: skip
