"""The kernels three times: the torch reference here, Triton in its interpreter, Triton compiled on a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cnr_store.errors import BadDtype, BadInput, BadShape
from cnr_store_gpu import kernels
from tests.gpu.kernels.checks import CHECKS

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]

needs_triton = pytest.mark.skipif(
    not kernels.dispatch.has_triton(), reason="triton is not installed: only the torch reference was tested"
)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA GPU here: the kernels ran in the interpreter only"
)


def _run(script: str, **environment: str) -> Any:
    folders = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "gpu"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "PYTHONPATH": folders, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_reference(check: str) -> None:
    CHECKS[check]("cpu")


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return _run("checks.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_triton_in_the_interpreter(check: str, interpreted: Any) -> None:
    assert interpreted["triton_ran"]
    assert interpreted["failures"][check] is None, interpreted["failures"][check]


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _run("assembly.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


@needs_triton
def test_every_kernel_compiles_for_every_architecture(assembly: Any) -> None:
    folder = REPOSITORY / "gpu" / "cnr_store_gpu" / "kernels" / "device"
    # Without arguments to the decorator it is no kernel, only called by one.
    decorated = re.compile(r"@triton\.jit\([^()]*\)\ndef (\w+)")
    entries = {name for path in folder.glob("*.py") for name in decorated.findall(path.read_text())}
    found = {(build["kernel"], build["architecture"]) for build in assembly}
    assert found == {(name, architecture) for name in entries for architecture in (80, 90, 100)}
    assert len(entries) == 6


@needs_triton
def test_no_kernel_spills_registers(assembly: Any) -> None:
    assert {build["build"]: build["stack_bytes"] for build in assembly if build["stack_bytes"]} == {}
    assert max(build["registers"] for build in assembly) <= 128


@needs_triton
def test_no_quantizer_fuses_or_divides_inexactly(assembly: Any) -> None:
    exact = [build for build in assembly if build["is_exact"]]
    assert {build["kernel"] for build in exact} == {"lattice_codes"}
    for build in exact:
        assert build["fused"] == [], build["build"]
        assert build["inexact_divisions"] == [], build["build"]
        assert build["flushes_subnormals"] == [], build["build"]


@needs_triton
def test_rows_and_words_are_read_sixteen_bytes_at_a_time(assembly: Any) -> None:
    wide = {"gather_rows", "lattice_codes", "count_bits", "emit_and_clear"}
    for build in assembly:
        if build["kernel"] in wide and "x 13" not in build["build"]:
            assert build["wide_loads"] > 0, build["build"]


@needs_triton
def test_marks_test_the_word_behind_the_first_level_cache(assembly: Any) -> None:
    for build in assembly:
        if build["kernel"].startswith("mark"):
            assert any(".cg." in load for load in build["loads"]), build["build"]
            assert set(build["atomics"]) == {"atom.global.gpu.relaxed.or.b32"}, build["build"]
        if build["kernel"] in ("count_bits", "emit_and_clear"):
            assert build["population_counts"] > 0, build["build"]


@needs_triton
def test_new_sizes_offsets_and_scales_compile_nothing_after_the_warmup(tmp_path: Path) -> None:
    found = _run("launching.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert set(found["warm"]) == {
        "mark_ids", "mark_slices", "count_bits", "emit_and_clear", "gather_rows", "lattice_codes"
    }  # fmt: skip
    assert found["launches"] > 60
    assert found["later"] == []


@pytest.fixture(scope="module")
def warm_gpu() -> str:
    kernels.warmup("cuda", dims=(8, 64), num_tables=(3,), num_slices=(5,))
    return "cuda"


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_triton_on_the_gpu(check: str, warm_gpu: str) -> None:
    assert kernels.uses_triton(torch.empty(0, device=warm_gpu))
    CHECKS[check](warm_gpu)


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_marks_can_be_captured_in_a_cuda_graph(warm_gpu: str) -> None:
    words, ids = torch.zeros(64, dtype=torch.int32, device="cuda"), torch.zeros(100, dtype=torch.int64, device="cuda")
    ends, firsts, sizes = (torch.tensor(x, device="cuda") for x in ([0, 60, 100], [0, 32], [1024, 1024]))
    kernels.mark(words, ids, 0, 1024)
    kernels.mark_slices(words, ids, ends, firsts, sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.mark(words, ids, 0, 1024)
        kernels.mark_slices(words, ids, ends, firsts, sizes)

    words.zero_()
    ids.copy_(torch.arange(100))
    graph.replay()

    rows, _ = kernels.take_rows(words, [(0, 32), (32, 32)])
    assert rows[0].tolist() == list(range(100))
    assert rows[1].tolist() == list(range(60, 100))


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_marking_and_quantizing_do_not_wait_for_the_gpu(warm_gpu: str) -> None:
    words, ids = torch.zeros(64, dtype=torch.int32, device="cuda"), torch.zeros(100, dtype=torch.int64, device="cuda")
    table, flag = torch.ones((100, 64), device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    out, codes = torch.empty_like(table), torch.empty((100, 64), dtype=torch.int16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.mark(words, ids, 0, 1024)
        kernels.gather_rows(table, ids, out)
        kernels.lattice_quantize(out, 0.5, codes, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(flag) == 0


@needs_triton
def test_importing_the_kernels_imports_no_triton(interpreted: Any) -> None:
    assert interpreted["triton_imported_early"] is False


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    words, ids = torch.zeros(64, dtype=torch.int32), torch.arange(4)
    table, flag = torch.zeros((4, 8)), torch.zeros(1, dtype=torch.int32)

    with pytest.raises(BadDtype):
        kernels.mark(words.to(torch.int64), ids, 0, 64)
    with pytest.raises(BadDtype):
        kernels.mark(words, ids.to(torch.float32), 0, 64)
    with pytest.raises(BadShape):
        kernels.mark(words, ids.view(2, 2), 0, 64)
    with pytest.raises(BadInput):
        kernels.mark(words, ids, 32, 1025)
    with pytest.raises(BadShape):
        kernels.mark_slices(words, ids, [0, 4], [0, 32], [64, 64])
    with pytest.raises(BadInput):
        kernels.take_rows(words, [(16, 8)])
    with pytest.raises(BadInput):
        kernels.take_rows(words, [(0, 40), (32, 32)])
    with pytest.raises(BadShape):
        kernels.gather_rows(table, ids, torch.empty((3, 8)))
    with pytest.raises(BadDtype):
        kernels.gather_rows(table, ids, torch.empty((4, 8), dtype=torch.float16))
    with pytest.raises(BadShape):
        kernels.gather_rows(table, ids, torch.zeros((8, 4)).t())
    with pytest.raises(BadDtype):
        kernels.lattice_quantize(table, 1.0, torch.empty((4, 8), dtype=torch.int64), flag)
    assert int(words.count_nonzero()) == 0
