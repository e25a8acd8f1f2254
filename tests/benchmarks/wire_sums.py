"""Bytes of partial sums against those of rows and their gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import harness
import torch
import torch.distributed as dist
from wire_ranks import WORLD, on_ranks

from cnr_store.communication import Meter, PartialFirstLayer, PartialSums


def count_partial_sums(batch: int, fields: int, rows: int, dim: int, hidden: int) -> dict[str, int]:
    """Return received bytes per rank of a factorization machine and a first layer, and of a parameter server's rows."""
    meter = Meter()
    group = meter.group()
    pairs = PartialSums(fields * rows, dim, group=group)
    first = PartialFirstLayer([rows] * fields, dim, hidden, group=group)
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(WORLD * batch, fields, generator=generator) ** 4 * rows).long()
    whole = (ids + torch.arange(fields) * rows).flatten()
    found = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "machine": lambda: pairs.factorized(whole, torch.arange(0, len(whole), fields)),
        "first": lambda: first(ids.flatten(), torch.arange(len(whole))),
    }
    for name, call in calls.items():
        meter.reset()
        call().sum().backward()
        found[name] = meter.total.received_bytes
    own = whole.view(WORLD, -1)[dist.get_rank()].unique()
    # A worker of a parameter server pulls the rows of its share of the batch, and pushes their gradients.
    return found | {"rows": len(own) * dim * 4 * 2}


SUMS = [(batch, fields, 10_000, dim, 256) for dim in (16, 64) for fields in (26, 100) for batch in (64, 512)]


def count_all_sums() -> list[dict[str, int]]:
    """Return `count_partial_sums` of each of `SUMS`."""
    return [count_partial_sums(*one) for one in SUMS]


def des(report: harness.Report, _: argparse.Namespace) -> None:
    """Bytes per step of partial sums against the transfer of the touched rows."""
    rows = []
    for (batch, fields, _, dim, _), found in zip(SUMS, on_ranks(WORLD, "wire_sums", "count_all_sums"), strict=True):
        fewer = {name: 100 * (1 - found[name] / found["rows"]) for name in ("machine", "first")}
        rows.append([dim, fields, batch, f"{found['rows']:,}", *(f"{found[n]:,} ({fewer[n]:.1f} %)" for n in fewer)])
        if (dim, fields, batch) == (16, 26, 512):
            for name, what in (("machine", "a factorization machine"), ("first", "a first layer of 256")):
                report.add(f"fewer bytes: {what}", fewer[name], goal=68.7, sense="at least", unit=" %")
    columns = ["dim", "fields", "batch per rank", "rows, bytes", "machine, bytes", "first layer of 256, bytes"]
    report.table(f"bytes that one of {WORLD} ranks receives per step", columns, rows, "published: up to 68.7 % fewer")
