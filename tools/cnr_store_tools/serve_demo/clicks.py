"""The model and the traffic that all processes of the demonstration agree on, made from rows and seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.model import ModelConfig
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.serve_demo.witness import NUM_WITNESSES

DIM = 16
SHARES = {"user": 0.6, "item": 0.3, "place": 0.1}
NUM_DENSE = 4
BATCH_SIZE = 256
NUM_SAMPLES = 400 * BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables as a store names them, and how many rows of each the traffic looks up; witnesses come behind these."""

    rows: dict[str, int]

    @property
    def parameters(self) -> dict[str, int]:
        """Name of the parameter, as in the store, to the rows that traffic looks up."""
        return {parameter_of(name): count for name, count in self.rows.items()}


def parameter_of(name: str) -> str:
    """Return the name under which a store knows a table."""
    return f"tables.{name}.weight"


def make_tables(rows: int) -> Tables:
    """Return the tables of ``rows`` rows together, without the witnesses."""
    return Tables({name: max(1, round(rows * share)) for name, share in SHARES.items()})


def make_model_config(tables: Tables, seed: int) -> ModelConfig:
    """Return the model that fits the tables with their witnesses."""
    return ModelConfig(
        table_rows=tuple(count + NUM_WITNESSES for count in tables.rows.values()), table_names=tuple(tables.rows),
        dim=DIM, num_dense=NUM_DENSE, bottom_hidden=(16,), top_hidden=(32,), seed=seed,
    )  # fmt: skip


def make_clicks(tables: Tables, seed: int) -> ClickLog:
    """Return the traffic: popular ids that drift, and clicks that a model can learn."""
    traffic = TrafficConfig(
        table_rows=tuple(tables.rows.values()), num_samples=NUM_SAMPLES, num_dense=NUM_DENSE,
        drift_every=16 * BATCH_SIZE, seed=seed,
    )  # fmt: skip
    return replace(generate_clicks(traffic), names=list(tables.rows))
