"""A small DLRM: embedding tables, a bottom MLP for dense features, pairwise dots, a top MLP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model.

    Attributes
    ----------
    table_rows
        Rows of each table.
    table_names
        Name of each table, without a dot; table ``n`` is the parameter ``tables.n.weight``.
    dim
        Columns of every table, and width of the bottom MLP's output.
    num_dense
        Number of dense features; 0 omits the bottom MLP.
    bottom_hidden, top_hidden
        Hidden widths of the two MLPs.
    table_init
        Standard deviation of the initial table values.
    seed
        Random seed of all initial values; torch's global generator is not used.
    """

    table_rows: tuple[int, ...]
    table_names: tuple[str, ...]
    dim: int = 16
    num_dense: int = 0
    bottom_hidden: tuple[int, ...] = (32,)
    top_hidden: tuple[int, ...] = (64, 32)
    table_init: float = 0.05
    seed: int = 0


class SmallDLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019) with one looked-up row per table and sample.

    Gradients of the tables are sparse. Parameters: ``tables.<name>.weight`` (num_rows, dim) float32, and the
    dense ones under ``bottom.`` and ``top.``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)
        self.tables = nn.ModuleDict()
        for name, num_rows in zip(config.table_names, config.table_rows, strict=True):
            weight = torch.empty(num_rows, config.dim)
            weight.normal_(0.0, config.table_init, generator=generator)
            self.tables[name] = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self.bottom = _mlp((config.num_dense, *config.bottom_hidden, config.dim), generator)
        num_vectors = len(config.table_rows) + (1 if config.num_dense else 0)
        self.register_buffer("_pairs", torch.tril_indices(num_vectors, num_vectors, -1), persistent=False)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        # The looked-up rows go to the top MLP beside their dots: with dots alone a row that starts near zero
        # has almost no gradient.
        self.top = _mlp((num_vectors * config.dim + num_pairs, *config.top_hidden, 1), generator)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return click logits float32 (batch,) of rows int64 (batch, num_tables) and float32 (batch, num_dense)."""
        columns = ids.t().contiguous()
        vectors = [table(columns[index]) for index, table in enumerate(self.tables.values())]
        if self.config.num_dense:
            vectors.append(self.bottom(dense))
        stacked = torch.stack(vectors, dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = self.get_buffer("_pairs")
        features = torch.cat((stacked.flatten(1), dots[:, pairs[0], pairs[1]]), dim=1)
        logits: torch.Tensor = self.top(features).squeeze(1)
        return logits

    def table_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, weight) of each table, names as in ``named_parameters``."""
        for name, parameter in self.named_parameters():
            if name.startswith("tables."):
                yield name, parameter

    def dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of all parameters that are not tables."""
        for name, parameter in self.named_parameters():
            if not name.startswith("tables."):
                yield name, parameter


def _mlp(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them; no layer at all when the input has no features."""
    layers = nn.Sequential()
    if widths[0] == 0:
        return layers
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
        with torch.no_grad():
            linear.weight.normal_(0.0, math.sqrt(2.0 / (fan_in + fan_out)), generator=generator)
            linear.bias.zero_()
        if index:
            layers.append(nn.ReLU())
        layers.append(linear)
    return layers
