"""What each kernel must give, on any device: the launchers against numpy, the CPU codes and the torch reference.

Run as a script under ``TRITON_INTERPRET=1`` it checks the Triton kernels without a GPU and prints one JSON object:
the failure of each check, or null. That variable is read when the kernels are defined, so it needs its own process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.encodings import kernels as cpu_kernels
from cnr_store_gpu import kernels, words
from cnr_store_gpu.kernels import reference
from tests.support.ties import SCALES, lattice_ties

SIZES = (0, 1, 31, 33, 1023, 1025)
DIMS = (1, 3, 8, 13, 64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Array = npt.NDArray[Any]


def _ints(array: Array, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype, copy=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def _values(random: np.random.Generator, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape, np.float32)).to(device, dtype)


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(_bytes(found), _bytes(expected))


def _as_float32(tensor: torch.Tensor) -> Array:
    return np.ascontiguousarray(tensor.to(torch.float32).cpu().numpy())


# ---- marks


def marks_equal_the_cpu_kernel(device: str) -> None:
    random = np.random.default_rng(0)
    for size in SIZES:
        for dtype, num_rows, skip_row in ((torch.int64, 1025, -1), (torch.int32, 31, 3), (torch.int64, 0, -1)):
            ids = random.integers(-5, num_rows + 40, size)
            expected = np.zeros(160, np.uint32)
            expected[::7] = 0x80000001
            found, by_torch = (_ints(expected.view(np.int32), device, torch.int32) for _ in range(2))

            words.mark_words(expected, ids, 64, num_rows, skip_row)
            kernels.mark(found, _ints(ids, device, dtype), 64, num_rows, skip_row)
            reference.mark(by_torch, _ints(ids, device, dtype), 64, num_rows, skip_row)

            np.testing.assert_array_equal(found.cpu().numpy().view(np.uint32), expected)
            _same_bits(by_torch, found)


def a_hot_row_is_marked_once_and_ids_outside_never(device: str) -> None:
    found = torch.zeros(96, dtype=torch.int32, device=device)

    kernels.mark(found, torch.full((20000,), 31, device=device), 32, 32)
    kernels.mark(found, torch.tensor([-1, 32, -(2**40), 2**40, 2**62], device=device), 32, 32)

    expected = torch.zeros(96, dtype=torch.int32)
    expected[32] = -(2**31)
    _same_bits(found, expected)


def slices_are_marked_each_in_its_own_table(device: str) -> None:
    random = np.random.default_rng(1)
    firsts, sizes = np.array([0, 64, 0, 96, 64]), np.array([2048, 33, 2048, 1, 33])
    for ends in (
        [0, 0, 9000, 9000, 9400, 9999],
        [5, 5, 5, 5, 5, 5],
        [3, 4, 700, 701, 8000, 9000],
        [0, 1, 2, 3, 4, 20000],
    ):
        for dtype in (torch.int32, torch.int64):
            ids = random.integers(-5, 2100, 9999)
            expected = np.zeros(128, np.uint32)
            for k in range(5):
                words.mark_words(expected, ids[ends[k] : ends[k + 1]], int(firsts[k]), int(sizes[k]))

            found, by_torch = (torch.zeros(128, dtype=torch.int32, device=device) for _ in range(2))
            kernels.mark_slices(found, _ints(ids, device, dtype), ends, firsts.tolist(), _ints(sizes, device))
            reference.mark_slices(
                by_torch,
                _ints(ids, device, dtype),
                torch.tensor(ends, device=device),
                _ints(firsts, device),
                _ints(sizes, device),
            )

            np.testing.assert_array_equal(found.cpu().numpy().view(np.uint32), expected)
            _same_bits(by_torch, found)


def slices_beyond_the_bitmap_mark_nothing_there(device: str) -> None:
    memory = torch.zeros(96, dtype=torch.int32, device=device)
    ids = torch.arange(2048, device=device)

    kernels.mark_slices(memory[:32], ids, [0, 1024, 2048], [0, 64], [2**40, 2**40])

    expected = torch.zeros(96, dtype=torch.int32)
    expected[:32] = -1
    _same_bits(memory, expected)


def taken_rows_are_sorted_and_cleared(device: str) -> None:
    random = np.random.default_rng(2)
    layouts = [[1], [0, 31, 33], [1023, 0, 1024, 1025, 0], [300_000, 5, 33_000]]
    for table_rows in layouts:
        for share in (0.0, 0.001, 0.3, 1.0):
            tables, first = [], 0
            for num_rows in table_rows:
                tables.append((first, words.words_of_rows(num_rows)))
                first += words.aligned_words(num_rows)
            bits = np.zeros(first, np.uint32)
            for (start, _), num_rows in zip(tables, table_rows, strict=True):
                words.mark_words(bits, np.flatnonzero(random.random(num_rows) < share), start, num_rows)
            live = _ints(bits.view(np.int32), device, torch.int32)

            rows, before = kernels.take_rows(live, tables)

            assert int(live.count_nonzero()) == 0
            np.testing.assert_array_equal(before.cpu().numpy().view(np.uint32), bits)
            for found, (start, size) in zip(rows, tables, strict=True):
                assert found.dtype == torch.int64
                np.testing.assert_array_equal(found.cpu().numpy(), words.rows_of(bits[start : start + size]))


def taking_some_tables_leaves_the_others(device: str) -> None:
    live = torch.full((192,), -1, dtype=torch.int32, device=device)

    rows, before = kernels.take_rows(live, [(96, 64), (32, 32)])

    assert [len(found) for found in rows] == [2048, 1024]
    taken = torch.zeros(192, dtype=torch.bool)
    taken[32:64] = taken[96:160] = True
    _same_bits(before, torch.where(taken, -1, 0).to(torch.int32))
    _same_bits(live, torch.where(taken, 0, -1).to(torch.int32))


# ---- rows


def gathered_rows_keep_every_bit(device: str) -> None:
    random = np.random.default_rng(3)
    dtypes = (torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64)
    cases = [(dtype, dim, 1025) for dtype in dtypes for dim in DIMS] + [(torch.float32, 300, 33)]
    cases += [(torch.float32, 8, size) for size in SIZES]
    for dtype, dim, size in cases:
        width = torch.empty(0, dtype=dtype).element_size()
        # Random bytes: NaN with payloads too. A bool holds 0 or 1 only.
        raw = torch.from_numpy(random.integers(0, 2 if dtype == torch.bool else 256, (700, dim * width), np.uint8))
        table = raw.view(dtype).to(device)
        wide = torch.zeros((700, dim + 5), dtype=dtype, device=device)
        columns = wide[:, 2 : 2 + dim]
        columns.copy_(table)
        rows = _ints(random.integers(0, 700, size), device)
        out, from_columns = (torch.empty((size, dim), dtype=dtype, device=device) for _ in range(2))

        kernels.gather_rows(table, rows, out)
        kernels.gather_rows(columns, rows, from_columns)

        _same_bits(out, table.cpu()[rows.cpu()])
        _same_bits(from_columns, out)


def slots_gather_like_columns(device: str) -> None:
    wide = torch.arange(4000, dtype=torch.float32, device=device).view(1000, 4)
    rows = torch.tensor([999, 0, 17, 500], device=device)
    for slot in (wide.reshape(-1), wide[:, 2]):
        out = torch.empty(4, device=device)
        kernels.gather_rows(slot, rows, out)
        _same_bits(out, slot[rows])


def weights_that_require_gradients_are_copied_without_them(device: str) -> None:
    weight = torch.nn.Parameter(torch.arange(12.0, device=device).view(4, 3))
    rows, out = torch.tensor([2, 0], device=device), torch.empty((2, 3), device=device)

    kernels.gather_rows(weight, rows, out)

    assert not out.requires_grad
    assert out.tolist() == [[6, 7, 8], [0, 1, 2]]


def places_beyond_two_billion_elements_are_reached(device: str) -> None:
    # Zeros that nobody touches take address space, not memory.
    table = torch.zeros((2**25 + 4, 64), dtype=torch.uint8, device=device)
    rows = torch.tensor([2**25 + 3, 0, 2**25], device=device)
    values = torch.arange(3 * 64, dtype=torch.uint8, device=device).view(3, 64)
    out = torch.empty_like(values)
    table[rows] = values
    kernels.gather_rows(table, rows, out)
    _same_bits(out, values)

    words = torch.zeros(2**26 + 32, dtype=torch.int32, device=device)
    kernels.mark(words, torch.tensor([2**31 + 1023, 2**31 + 31], device=device), 0, 2**31 + 1024)
    kernels.mark_slices(words, torch.tensor([5], device=device), [0, 1], [2**26], [6])
    (taken,), before = kernels.take_rows(words[2**26 :], [(0, 32)])
    assert taken.tolist() == [5, 31, 1023]
    assert before[0].item() == 32 - 2**31
    assert words[2**26 :].count_nonzero() == 0


# ---- lattice


def lattice_codes_equal_the_cpu_kernel(device: str) -> None:
    random = np.random.default_rng(4)
    cases = [(dtype, dim, 257) for dtype in FLOATS for dim in DIMS] + [(torch.float32, 13, size) for size in SIZES]
    for dtype, dim, size in cases:
        scale = float(np.float32(random.uniform(1e-4, 1e-2)))
        table = _values(random, (size + 9, dim + 3), device, dtype)[:, 1 : 1 + dim]
        table[:1] = torch.tensor(scale) * 2.5  # near ties
        rows = _ints(random.permutation(size + 9)[:size], device)
        values = table[rows]
        expected, flags = np.empty((size, dim), np.int32), np.zeros(size, np.uint8)
        cpu_kernels.lattice_encode(_as_float32(values), np.float32(scale), expected, flags)
        coded, strided, by_torch = (torch.empty((size, dim), dtype=torch.int16, device=device) for _ in range(3))
        flag = torch.zeros(1, dtype=torch.int32, device=device)

        kernels.lattice_quantize(values, scale, coded, flag)
        kernels.lattice_quantize(table[:size], scale, strided, torch.zeros_like(flag))
        reference.lattice_quantize(values, scale, by_torch, flag)

        is_coded = np.abs(expected) <= 32767
        assert int(flag) == (not is_coded.all())
        np.testing.assert_array_equal(coded.cpu().numpy(), np.where(is_coded, expected, 0))
        _same_bits(by_torch, coded)
        reference.lattice_quantize(table[:size], scale, by_torch, torch.zeros_like(flag))
        _same_bits(strided, by_torch)


def lattice_ties_go_to_even_and_slots_code_like_columns(device: str) -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0, 32766.5], device=device)
    out, flag = torch.empty(8, dtype=torch.int16, device=device), torch.zeros(1, dtype=torch.int32, device=device)

    kernels.lattice_quantize(values, 1.0, out, flag)

    assert out.tolist() == [0, 2, 2, 0, -2, -2, 0, 32766]
    assert int(flag) == 0


def lattice_ties_of_any_scale_are_those_of_the_cpu(device: str) -> None:
    for dim, scale in itertools.product((1, 8, 13), SCALES):
        values, expected = lattice_ties(scale, dim, largest=32_767)
        table = torch.from_numpy(values).to(device)
        coded, by_torch = (torch.empty(values.shape, dtype=torch.int16, device=device) for _ in range(2))
        flag = torch.zeros(1, dtype=torch.int32, device=device)

        kernels.lattice_quantize(table, float(scale), coded, flag)
        reference.lattice_quantize(table, float(scale), by_torch, flag)

        for found in (coded, by_torch):
            np.testing.assert_array_equal(found.cpu().numpy(), expected)
        assert int(flag) == 0


def lattice_flags_what_it_cannot_store(device: str) -> None:
    below = float(np.nextafter(np.float32(32767.5), np.float32(0)))
    cases = [
        ([1.0, float("nan")], 1, [1, 0]),
        ([float("-inf"), 2.0], 1, [0, 2]),
        ([32767.0, -32767.0, below, -below], 0, [32767, -32767, 32767, -32767]),
        ([-32767.5, 7.0], 1, [0, 7]),
        ([-32768.0, 1e30], 1, [0, 0]),
    ]
    for values, expected, codes in cases:
        for quantize in (kernels.lattice_quantize, reference.lattice_quantize):
            out = torch.empty((1, len(values)), dtype=torch.int16, device=device)
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            quantize(torch.tensor([values], device=device), 1.0, out, flag)
            assert (int(flag), out.tolist()) == (expected, [codes]), values


# ---- all


def warmup_launches_every_kernel_on_small_tables(device: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    kernels.warmup(device, dims=(1, 8), dtypes=dtypes, num_tables=(2,), num_slices=(3,))


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        marks_equal_the_cpu_kernel,
        a_hot_row_is_marked_once_and_ids_outside_never,
        slices_are_marked_each_in_its_own_table,
        slices_beyond_the_bitmap_mark_nothing_there,
        taken_rows_are_sorted_and_cleared,
        taking_some_tables_leaves_the_others,
        gathered_rows_keep_every_bit,
        slots_gather_like_columns,
        weights_that_require_gradients_are_copied_without_them,
        places_beyond_two_billion_elements_are_reached,
        lattice_codes_equal_the_cpu_kernel,
        lattice_ties_go_to_even_and_slots_code_like_columns,
        lattice_ties_of_any_scale_are_those_of_the_cpu,
        lattice_flags_what_it_cannot_store,
        warmup_launches_every_kernel_on_small_tables,
    )
}


def main() -> None:
    """Run the named checks (or all) and print what failed."""
    is_triton_imported = "triton" in sys.modules
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cuda under a memory checker, say")
    parser.add_argument("names", nargs="*", metavar="CHECK")
    options = parser.parse_args()
    failures: dict[str, str | None] = {}
    for name in options.names or CHECKS:
        try:
            CHECKS[name](options.device)
            failures[name] = None
        except Exception:  # noqa: BLE001 - every failure is reported by name, whatever it is
            failures[name] = traceback.format_exc()
    ran = {
        "triton_ran": kernels.uses_triton(torch.empty(0, device=options.device)),
        "triton_imported_early": is_triton_imported,
    }
    json.dump({**ran, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
