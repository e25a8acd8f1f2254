"""The model and the traffic of the processes that train."""

from __future__ import annotations

from dataclasses import replace

from cnr_store_tools.demo.click_log import ClickLog
from cnr_store_tools.demo.model import ModelConfig
from cnr_store_tools.demo.traffic import TrafficConfig, generate_clicks
from cnr_store_tools.serve_demo.tables import DIM, Tables
from cnr_store_tools.serve_demo.witness import NUM_WITNESSES

NUM_DENSE = 4
BATCH_SIZE = 256
NUM_SAMPLES = 400 * BATCH_SIZE


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
