"""One rank of a test: calls a function of a test module under ``torch.distributed``, and prints what it returns."""

from __future__ import annotations

import importlib
import json
import os

import torch
import torch.distributed as dist


def main(rank: str, function: str, world: str, meeting: str, arguments: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    module, name = function.split(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    dist.barrier()
    print("\n" + json.dumps(found), flush=True)  # noqa: T201
    dist.destroy_process_group()
    os._exit(0)  # the end of an interpreter that has imported torch takes a third of a second
