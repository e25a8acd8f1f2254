"""Launch without a GPU: triton specialises and compiles from the launchers' real arguments, and then does not launch.

Stands in for what only a GPU machine can show, that changing sizes, offsets and scales compile nothing new in the
middle of a training run. A script: it replaces triton's driver in its process. Prints, as JSON, what was compiled by
`warmup`, and what was compiled after it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cnr_store_gpu import kernels

LAUNCHERS = (kernels.marking, kernels.taking, kernels.copying, kernels.lattice, kernels.warming)


class NoDriver:
    """What triton asks of a driver up to the launch."""

    def get_current_device(self) -> int:
        """Return a device number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def compiling_only(found: list[tuple[str, str]]) -> Iterator[None]:
    """Compile what is launched on CPU tensors, and note it; outputs are not written."""
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel.hash))
        return kernel

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        # Counts that no kernel writes are read on the host.
        stack.enter_context(mock.patch.object(torch, "empty", torch.zeros))
        for launcher in LAUNCHERS:
            stack.enter_context(mock.patch.object(launcher, "uses_triton", return_value=True))
        yield


def train(num_rows: int, offset: int) -> None:
    """Launch everything once on tensors of this size, with ids that start ``offset`` elements into their memory."""
    words, flag = torch.zeros(1 << 12, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)[offset : offset + 1]
    ids = torch.zeros(num_rows + offset, dtype=torch.int64)[offset:]
    table, codes = torch.zeros((num_rows, 64)), torch.zeros((num_rows, 64), dtype=torch.int16)
    kernels.mark(words, ids, 32 * offset, num_rows, num_rows - 1)
    kernels.mark_slices(words, ids, [0, num_rows], [32 * offset], [num_rows])
    kernels.take_rows(words, [(32 * offset, -(-num_rows // 32))])
    kernels.gather_rows(table, ids, torch.zeros_like(table))
    kernels.lattice_quantize(table, 0.1 * num_rows, codes, flag)


def main() -> None:
    """Warm up, then train on changing sizes."""
    driver.set_active(NoDriver())
    found: list[tuple[str, str]] = []
    with compiling_only(found):
        kernels.warmup("cpu", dims=(64,), num_tables=(1,), num_slices=(1,))
        warm = set(found)
        for num_rows in (1, 2, 16, 17, 5000):
            for offset in (0, 1):
                train(num_rows, offset)
    result = {"warm": sorted({name for name, _ in warm}), "later": sorted({name for name, _ in set(found) - warm})}
    json.dump(result | {"launches": len(found)}, sys.stdout)


if __name__ == "__main__":
    main()
