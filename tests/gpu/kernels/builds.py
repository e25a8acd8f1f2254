"""Every kernel with the arguments it is launched with, compiled to machine code without a GPU.

The interpreter finds wrong results; only the compiler finds what spills, what loads one element at a time, and
what does not compile for a newer GPU. Importing this module imports triton, which must not be in interpreter mode.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from cnr_store_gpu.kernels import marking, taking
from cnr_store_gpu.kernels.device import compact, copy, lattice, mark
from cnr_store_gpu.kernels.dispatch import NO_FUSION, tile_of

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities times ten: A100, H100 and H200, B200."""


@dataclass(frozen=True, slots=True)
class Build:
    """One specialisation of a kernel.

    Attributes
    ----------
    name
        Kernel and what distinguishes the specialisation.
    kernel
        The Triton function.
    types
        Triton types of the runtime arguments, by name, in the order of the function.
    constants
        Values of its compile-time arguments.
    aligned
        Pointers that may be taken to be aligned to 16 bytes, as whole tensors are.
    num_warps
        As launched.
    is_exact
        Whether its floats must round as the CPU's do: no fused multiply-add.
    is_representative
        Whether one look at this build stands for its kernel (the others differ by a constant).
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    num_warps: int = 4
    is_exact: bool = False
    is_representative: bool = True


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a build: its PTX, registers per thread, and bytes of stack per thread (spilled registers)."""

    ptx: str
    registers: int
    stack_bytes: int


def builds() -> Iterator[Build]:
    """Yield every kernel, in the specialisations that differ in more than a number."""
    yield from _bitmap_builds()
    yield from _row_builds()


def _bitmap_builds() -> Iterator[Build]:
    blocks = {"block": marking.BLOCK, "rounds": marking.ROUNDS}
    for ids in ("i64", "i32"):
        numbers = dict.fromkeys(("num_ids", "first_word", "num_rows", "skip_row"), "i64")
        types = {"words": "*i32", "ids": f"*{ids}", **numbers}
        yield Build(f"mark_ids {ids}", mark.mark_ids, types, blocks, frozenset(), is_representative=ids == "i64")
    types = {"words": "*i32", "ids": "*i64", "ends": "*i64", "first_words": "*i64", "num_rows": "*i64"}
    types |= {"num_bits": "i64", "num_ids": "i64", "num_slices": "i64"}
    yield Build("mark_slices", mark.mark_slices, types, {"steps": 5, **blocks}, frozenset())
    constants = {"steps": 5, "block": taking.BLOCK}
    types = {"words": "*i32", "places": "*i64", "counts": "*i32", "num_tables": "i64"}
    yield Build("count_bits", compact.count_bits, types, constants, frozenset({"words"}))
    types = {"words": "*i32", "before": "*i32", "places": "*i64", "starts": "*i64", "rows": "*i64", "num_tables": "i64"}
    yield Build("emit_and_clear", compact.emit_and_clear, types, constants, frozenset({"words", "before"}))


def _row_builds() -> Iterator[Build]:
    for dim, element in ((64, "i32"), (64, "i16"), (13, "i8")):
        rows, columns = tile_of(dim)
        constants = {"dim": dim, "source_stride": dim, "block_rows": rows, "block_dim": columns}
        types = {"source": f"*{element}", "rows": "*i64", "target": f"*{element}"}
        types |= {"num_copied": "i64", "table_rows": "i64"}
        name, aligned = f"gather_rows {element} x {dim}", frozenset({"source", "target"})
        yield Build(name, copy.gather_rows, types, constants, aligned, is_representative=element == "i32")
    rows, columns = tile_of(64)
    tile = {"block_rows": rows, "block_dim": columns}
    for source in ("fp32", "bf16"):
        types = {"source": f"*{source}", "out": "*i16", "flag": "*i32", "num_coded": "i64", "scale": "fp32"}
        constants = {"dim": 64, "source_stride": 64, **tile}
        yield Build(
            f"lattice_codes {source}",
            lattice.lattice_codes,
            types,
            constants,
            frozenset({"source", "out"}),
            is_exact=True,
            is_representative=source == "fp32",
        )


def compiled(build: Build, architecture: int) -> Compiled:
    """Compile a build for a compute capability (times ten); no GPU, and no I/O but triton's cache.

    Raises
    ------
    triton.compiler.errors.CompilationError, subprocess.CalledProcessError
        The kernel does not compile, or a tool that triton brings along fails.
    """
    names = build.kernel.arg_names
    signature = {name: build.types.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = triton.compiler.ASTSource(
        fn=build.kernel, signature=signature, constexprs=dict(build.constants), attrs=attributes
    )
    target = GPUTarget("cuda", architecture, 32)
    found = triton.compile(source, target=target, options={"num_warps": build.num_warps, **NO_FUSION})
    registers, stack_bytes = _resources(found.asm["cubin"])
    return Compiled(found.asm["ptx"], registers, stack_bytes)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of stack, by the tool that triton brings along."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise ValueError(f"no resource usage in the report of cuobjdump: {report!r}")
    return int(found.group(1)), int(found.group(2))
