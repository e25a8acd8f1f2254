"""Fused row-wise rows: equal bytes to the operators that take them, and tensors that change between batches only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cnr_store.errors import BadInput, BadRowIds, BadShape, NonFiniteValues, TableNotFound, Unsupported
from cnr_store.serving.rows.fused_kernels import (
    fuse_rows_4bit,
    fuse_rows_8bit,
    fused_row_bytes,
    half_bits,
    half_value,
    values_of_rows,
)
from cnr_store.serving.sinks import FusedRows, SinkState, SinkTable
from tests.support.launcher import Launcher, Program
from tests.support.serving_reference import fuse_rows

torch = pytest.importorskip("torch")

KERNELS = {8: fuse_rows_8bit, 4: fuse_rows_4bit}
CPU_FLAGS = Path("/proc/cpuinfo")
HAS_AVX2 = CPU_FLAGS.is_file() and " avx2 " in CPU_FLAGS.read_text()
needs_avx2 = pytest.mark.skipif(not HAS_AVX2, reason="the operators choose the sign of a zero bias by AVX2 lanes")


def fused(values: npt.NDArray[np.float32], bits: int) -> tuple[npt.NDArray[np.uint8], int]:
    out = np.zeros((len(values), fused_row_bytes(values.shape[1], bits)), np.uint8)
    return out, KERNELS[bits](values, out)


def rows_of_every_kind(dim: int) -> npt.NDArray[np.float32]:
    """Ordinary, constant, tiny, huge, subnormal and zero rows, and zeros of both signs in every lane."""
    rng = np.random.default_rng(dim)
    normal = rng.standard_normal((16, dim)).astype(np.float32)
    signs = np.where(rng.random((16, dim)) < 0.5, np.float32(-0.0), np.float32(0.0))
    far = np.float32(1000) + normal * (10.0 ** rng.integers(-7, 2, (16, 1))).astype(np.float32)
    kinds = [
        normal, np.repeat(normal[:, :1], dim, axis=1), normal * np.float32(1e-9), normal * np.float32(1e-41),
        normal * np.float32(1e4), np.where(normal > 1, normal, signs), np.where(normal < -1, normal, signs), signs, far,
        np.zeros((1, dim), np.float32), np.full((1, dim), -0.0, np.float32), np.full((1, dim), 65504, np.float32),
    ]  # fmt: skip
    return np.ascontiguousarray(np.concatenate(kinds), np.float32)


def assert_same_bytes(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], values: object) -> None:
    differs = np.flatnonzero((ours != theirs).any(axis=1))
    assert not len(differs), (differs[:3], ours[differs[:1]], theirs[differs[:1]], values)


@pytest.mark.parametrize("bits", [8, 4])
@given(
    values=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 40)),
        elements=st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 65504.0, 65520.0, -1e5, 3.4028234663852886e38]),
    )
)
@example(values=np.array([[0.0, 3.4028234663852886e38]], np.float32))
def test_kernel_equals_the_reference(bits: int, values: npt.NDArray[np.float32]) -> None:
    expected, refused = fuse_rows(values, bits)

    found, first = fused(values, bits)

    assert first == refused
    assert_same_bytes(found, expected, values)


@given(st.floats(width=32, allow_nan=False))
@example(65519.996)
@example(2.0**-25)
@example(6.1035e-05)
def test_half_floats_are_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.float16(np.float32(value))

    bits = half_bits(np.float32(value))

    assert bits == expected.view(np.uint16)
    if np.isfinite(expected):
        assert np.float32(half_value(bits)).view(np.uint32) == np.float32(expected).view(np.uint32)


@needs_avx2
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 65, 130])
def test_bytes_are_those_of_torch(dim: int) -> None:
    values = rows_of_every_kind(dim)

    for bits in (8, 4):
        prepack = getattr(torch.ops.quantized, {8: "embedding_bag_byte_prepack", 4: "embedding_bag_4bit_prepack"}[bits])
        found, first = fused(values, bits)

        assert first == -1
        if bits == 8 or dim % 2 == 0:  # the operator takes no odd number of columns at 4 bits
            assert_same_bytes(found, prepack(torch.from_numpy(values)).numpy(), values)


@needs_avx2
@given(st.integers(1, 24), st.integers(0, 2**32 - 1), st.integers(-38, 38))
def test_bytes_are_those_of_torch_at_any_magnitude(pairs: int, seed: int, magnitude: int) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        values = (rng.standard_normal((4, 2 * pairs)) * 10.0**magnitude).astype(np.float32)

    for bits in (8, 4):
        prepack = getattr(torch.ops.quantized, {8: "embedding_bag_byte_prepack", 4: "embedding_bag_4bit_prepack"}[bits])
        found, first = fused(values, bits)

        good = len(values) if first < 0 else first
        if good:
            expected = prepack(torch.from_numpy(values[:good])).numpy()
            assert_same_bytes(found[:good], expected, values)
            assert np.isfinite(values_of_rows(found[:good], 2 * pairs, bits)).all()


@needs_avx2
@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="fbgemm-gpu is not installed")
def test_bytes_are_those_of_fbgemm(launcher: Launcher, tmp_path: Path) -> None:
    # In a process of its own: fbgemm's modules warn while they are imported, and here warnings are errors.
    dims = [1, 4, 7, 8, 12, 36, 64, 128]
    for dim in dims:
        values = rows_of_every_kind(dim)
        np.save(tmp_path / f"values-{dim}.npy", values)
    program = """
import sys
import numpy as np, torch, fbgemm_gpu
folder = sys.argv[1]
for dim in map(int, sys.argv[2:]):
    values = torch.from_numpy(np.load(f"{folder}/values-{dim}.npy"))
    np.save(f"{folder}/8-{dim}.npy", torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values).numpy())
    if dim % 4 == 0:
        np.save(f"{folder}/4-{dim}.npy", torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values, 4).numpy())
"""
    arguments = ["-W", "ignore", "-c", program, str(tmp_path), *map(str, dims)]
    (done,) = launcher.run(Program(arguments), folder=tmp_path)
    assert done.returncode == 0, done.stderr

    for dim in dims:
        values = np.load(tmp_path / f"values-{dim}.npy")
        assert_same_bytes(fused(values, 8)[0], np.load(tmp_path / f"8-{dim}.npy"), values)
        if dim % 4 == 0:
            assert_same_bytes(fused(values, 4)[0], np.load(tmp_path / f"4-{dim}.npy"), values)


@pytest.mark.parametrize(
    ("bits", "bad"),
    [(8, [np.nan, 1, 2]), (8, [np.inf, 0, 0]), (8, [-np.inf, 0, 0]), (8, [3e38, -3e38, 0]), (4, [1, np.nan, 0]),
     (4, [1e6, 1e6, 1e6]), (4, [-65504, 2e6, 0])],
)  # fmt: skip
def test_a_row_that_is_not_finite_numbers_is_refused(bits: int, bad: list[float]) -> None:
    values = np.array([[1, 2, 3], bad, [4, 5, 6]], np.float32)

    found, first = fused(values, bits)

    assert first == 1
    assert found[0].any()
    assert not found[1:].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_slices_of_one_output_are_written_apart(bits: int) -> None:
    values = rows_of_every_kind(10)
    expected, _ = fused(values, bits)
    out = np.zeros_like(expected)

    for start in range(0, len(values), 7):
        assert KERNELS[bits](values[start : start + 7], out[start : start + 7]) == -1

    assert (out == expected).all()


TABLES = {"user": SinkTable(6, 40), "item": SinkTable(8, 9)}


def state(version: int) -> SinkState:
    return SinkState("store", "", version, 10 * version)


def some(rows: int, dim: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def filled(sink: FusedRows, version: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    values = {name: some(table.num_rows or 0, table.dim) for name, table in TABLES.items()}
    sink.open()
    sink.begin(TABLES, full=True)
    for name, rows in values.items():
        sink.put(name, np.arange(len(rows)), rows)
    sink.commit(state(version))
    sink.apply()
    return values


@pytest.mark.parametrize("bits", [8, 4])
def test_lookups_by_the_operators_equal_the_rows(bits: Literal[4, 8]) -> None:
    sink = FusedRows(bits=bits)
    filled(sink)
    bag = getattr(
        torch.ops.quantized, {8: "embedding_bag_byte_rowwise_offsets", 4: "embedding_bag_4bit_rowwise_offsets"}[bits]
    )
    ids = np.array([3, 39, 0, 3])

    found = bag(sink.tensors["user"], torch.from_numpy(ids), torch.arange(len(ids))).numpy()

    expected = values_of_rows(sink.tensors["user"].numpy()[ids], 6, bits)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(found - some(40, 6)[ids]).max() < {8: 0.02, 4: 0.3}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_delta_changes_just_its_rows_in_place_and_only_at_apply(bits: Literal[4, 8]) -> None:
    sink = FusedRows(bits=bits)
    values = filled(sink)
    tensor = sink.tensors["user"]
    before, address = tensor.clone(), tensor.data_ptr()
    fresh = some(2, 6, seed=1)

    sink.begin(TABLES, full=False)
    sink.put("user", np.array([4, 7]), fresh)
    sink.delete("user", np.array([9]))
    assert torch.equal(tensor, before)
    sink.commit(state(2))
    assert torch.equal(tensor, before)
    assert (sink.version, sink.open()) == (1, state(2))
    assert sink.apply()

    assert tensor.data_ptr() == sink.tensors["user"].data_ptr() == address
    values["user"][[4, 7]] = fresh
    expected, _ = fused(values["user"], bits)
    expected[9] = 0
    assert (tensor.numpy() == expected).all()
    assert sink.version == 2
    assert not sink.apply()


def test_with_publish_commit_the_commit_shows() -> None:
    sink = FusedRows(publish="commit")
    filled(sink)
    sink.begin(TABLES, full=False)
    sink.put("item", np.array([0]), some(1, 8, seed=1))
    sink.commit(state(2))

    assert sink.version == 2
    assert (sink.tensors["item"].numpy()[0] == fused(some(1, 8, seed=1), 8)[0][0]).all()


def test_an_aborted_or_interrupted_batch_leaves_nothing() -> None:
    sink = FusedRows()
    values = filled(sink)
    for end in (sink.abort, sink.open):
        sink.begin(TABLES, full=False)
        sink.put("user", np.array([4]), some(1, 6, seed=1))
        end()
        sink.apply()
    with pytest.raises(BadInput, match="begin"):
        sink.commit(state(2))

    assert (sink.tensors["user"].numpy() == fused(values["user"], 8)[0]).all()


def test_a_full_batch_leaves_rows_that_it_does_not_put_absent() -> None:
    sink = FusedRows()
    filled(sink)
    address = sink.tensors["user"].data_ptr()
    sink.begin(TABLES, full=True)
    sink.put("user", np.array([1]), some(1, 6, seed=1))
    sink.commit(state(5))
    sink.apply()

    expected = np.zeros((40, 14), np.uint8)
    expected[1] = fused(some(1, 6, seed=1), 8)[0]
    assert (sink.tensors["user"].numpy() == expected).all()
    assert not sink.tensors["item"].any()
    assert sink.tensors["user"].data_ptr() == address


@pytest.mark.parametrize("waits_from", [0, 1])
def test_many_versions_that_wait_equal_each_applied_at_once(waits_from: int) -> None:
    patient, prompt = FusedRows(), FusedRows(publish="commit")
    rng = np.random.default_rng(0)
    for sink in (patient, prompt):
        sink.begin(TABLES, full=True)
        sink.put("user", np.arange(40), some(40, 6))
        sink.commit(state(0))
    if waits_from:
        patient.apply()

    for version in range(1, 60):
        ids = np.flatnonzero(rng.random(40) < 0.1)
        gone = np.flatnonzero(rng.random(40) < 0.05)
        for sink in (patient, prompt):
            sink.begin(TABLES, full=False)
            sink.put("user", ids, some(len(ids), 6, seed=version))
            sink.delete("user", gone)
            sink.commit(state(version))
    patient.apply()

    assert patient.version == prompt.version == 59
    assert torch.equal(patient.tensors["user"], prompt.tensors["user"])


def test_what_cannot_be_fused_is_refused_by_table_and_row() -> None:
    sink = FusedRows()
    filled(sink)
    sink.begin(TABLES, full=False)

    with pytest.raises(NonFiniteValues, match=r"row 12 of table 'user'"):
        sink.put("user", np.array([3, 12]), np.array([[0] * 6, [np.nan] * 6], np.float32))
    with pytest.raises(BadShape, match="item"):
        sink.put("item", np.array([1]), some(1, 6))
    with pytest.raises(BadRowIds, match="user"):
        sink.put("user", np.array([40]), some(1, 6))
    with pytest.raises(TableNotFound, match="other"):
        sink.put("other", np.array([1]), some(1, 6))
    with pytest.raises(Unsupported, match="hashed"):
        sink.begin({"user": SinkTable(6, None)}, full=True)
    with pytest.raises(Unsupported, match="size"):
        sink.begin({"user": SinkTable(6, 41)}, full=True)
    with pytest.raises(BadInput, match="full"):
        FusedRows().begin(TABLES, full=False)
    with pytest.raises(BadInput, match="bits"):
        FusedRows(bits=2)  # type: ignore[arg-type]  # what a caller without types may do
