"""Bytes and quality of codecs of TorchRec's exchange of pooled outputs: its own, and that of the largest values."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import harness
import torch
from wire_cuts import train_cut
from wire_model import DIM
from wire_ranks import with_spread

from cnr_store.communication import TopKActivations

KEPT = (6, 3, 1)
"""Of the 16 values of a table's pooled output."""


class _Sent(torch.autograd.Function):
    """Values and gradients as they arrive: encoded and decoded, as between ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, codecs: Any) -> torch.Tensor:
        ctx.codec = codecs.backward
        return _arrived(rows, codecs.forward)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _arrived(gradient, ctx.codec), None


def _arrived(rows: torch.Tensor, codec: Any) -> torch.Tensor:
    context = codec.create_context()
    found: torch.Tensor = codec.decode(codec.encode(rows.contiguous().view(-1), context), context)
    return found.view_as(rows)


def _all_codecs() -> dict[str, Any]:
    with warnings.catch_warnings():  # TorchRec and fbgemm warn while they are imported
        warnings.simplefilter("ignore")
        from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

        from cnr_store.integrations.torchrec import top_k_codecs
    found = {f"TorchRec, {one}": get_qcomm_codecs(QCommsConfig(one, one)) for one in (CommType.FP16, CommType.INT8)}
    for count in KEPT:
        for dtype in (torch.float32, torch.float16):
            (codecs,) = top_k_codecs(TopKActivations(count / DIM, dtype=dtype), DIM).values()
            found[f"{count} of {DIM} values, {str(dtype).removeprefix('torch.')}"] = codecs
    return found


def codecs(report: harness.Report, options: argparse.Namespace) -> None:
    """Report bytes against quality of embedding outputs that codecs of TorchRec send, in both directions."""
    torch.set_num_threads(1)
    rows = [["none", "1", *_columns(None, options)]]
    for name, one in _all_codecs().items():
        sent = one.forward.encode(torch.randn(64 * DIM), one.forward.create_context()).nbytes
        rows.append([name, f"{64 * DIM * 4 / sent:.3g}", *_columns(one, options)])
        print(*rows[-1], flush=True)
    title = f"embedding outputs through codecs: {options.seeds} seeds, {options.steps} steps"
    report.table(title, ["codec", "fewer bytes", "logloss", "AUC"], rows)


def _columns(codecs: Any, options: argparse.Namespace) -> list[str]:
    cut = None if codecs is None else lambda rows: _Sent.apply(rows, codecs)
    runs = [train_cut("outputs" if cut else "", cut, seed, options.steps) for seed in range(options.seeds)]
    return [with_spread([run[at] for run in runs]) for at in (0, 1)]
