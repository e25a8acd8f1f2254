"""What users ask of a table, and the schema that it becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from cnr_store import BadInput, ChunkCache, CompactionPolicy, RetentionPolicy, Store, TableOptions
from cnr_store.encodings.choose import REFERENCE_SETTINGS
from cnr_store.encodings.sampling import SAMPLE_ROWS, RowSample
from cnr_store.errors import BadDtype, BadShape
from cnr_store.runtime.threads import Workers, check_rate
from cnr_store.types import Affine, FloatBits, Lattice, Raw
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.schema_choice import check_options, choose_encoding, table_dtype, table_schema

SAMPLE = (0.1 * np.random.default_rng(1).standard_normal((500, 8))).astype(np.float32)


def chosen(dtype: Any = "float32", **options: Any) -> Any:
    return choose_encoding(TableOptions(**options), dtype, SAMPLE)


def test_defaults_by_dtype() -> None:
    assert isinstance(chosen(), Lattice)
    assert chosen("float16") == FloatBits(mantissa_bits=10)
    assert chosen("bfloat16") == FloatBits(mantissa_bits=7)
    assert chosen(encoding="raw") == Raw()
    assert chosen(encoding="affine", bits=4) == Affine(bits=4)


def test_a_scale_is_taken_a_largest_error_is_halved_and_bits_are_measured() -> None:
    assert chosen(scale=0.25) == Lattice(scale=0.25)
    assert chosen(max_error=0.25) == Lattice(scale=0.5)
    steps = [chosen(bits=bits).scale for bits in (2, 3, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert chosen().scale == steps[-1]


@pytest.mark.parametrize(("restores", "bits"), [(0, 2), (1, 2), (2, 3), (3, 3), (4, 4), (20, 4), (21, 8), (1000, 8)])
def test_automatic_bits_follow_the_expected_restores(restores: float, bits: Any) -> None:
    assert chosen(bits="auto", expected_restores=restores) == chosen(bits=bits)
    affine = chosen(encoding="affine", bits="auto", expected_restores=restores)
    assert affine.bits == bits


def test_exact_keeps_every_bit_of_tables_and_slots() -> None:
    options = TableOptions.exact()
    schema = table_schema(
        "t", options, num_rows=500, dim=8, dtype="float32", sample=SAMPLE,
        slots={"m": SAMPLE[:, 0], "v": SAMPLE, "h": SAMPLE[:, 0].astype(np.float16)},
    )  # fmt: skip
    assert schema.encoding == FloatBits(mantissa_bits=23)
    assert [slot.encoding.mantissa_bits for slot in schema.slots.values()] == [23, 23, 10]  # type: ignore[union-attr]
    assert [slot.kind for slot in schema.slots.values()] == ["row", "element", "row"]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "scale": 0.5},
        {"bits": 4, "max_error": 0.5},
        {"scale": 0.5, "max_error": 0.5},
        {"bits": "auto"},
        {"bits": 5},
        {"bits": 0},
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"max_error": float("inf")},
        {"encoding": "float_bits", "bits": 4},
        {"encoding": "float_bits", "scale": 0.5},
        {"encoding": "float_bits", "mantissa_bits": -1},
        {"encoding": "float_bits", "mantissa_bits": 24},
        {"encoding": "raw", "max_error": 0.5},
        {"encoding": "affine", "scale": 0.5},
        {"encoding": "affine", "bits": 7},
        {"encoding": "lattice", "mantissa_bits": 7},
        {"encoding": "zip"},
        {"slot_bits": 5},
        {"slot_bits": "all"},
        {"slot_bits": {"sum": 16}},
        {"nonfinite": "hide"},
        {"fill": float("nan")},
        {"fill": 1e39},
        {"bits": 4.0},
        {"bits": True},
        {"max_error": -1.0},
        {"max_error": "0.1"},
        {"bits": 4, "mantissa_bits": 7},
        {"search": "greedy"},
        {"encoding": "affine", "search": "fast"},
        {"encoding": "affine", "param_dtype": "float64"},
        {"bits": "auto", "expected_restores": -1},
        {"bits": "auto", "expected_restores": "three"},
    ],
)
def test_contradictions_and_nonsense_are_refused_where_they_are_given(options: dict[str, Any]) -> None:
    """They were accepted, and failed at the first save."""
    with pytest.raises(BadInput):
        TableOptions(**options)


def test_numbers_of_numpy_become_pythons_own_for_they_are_stored() -> None:
    options = TableOptions(bits=np.int64(4), fill=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(options.bits), type(options.fill)) == (int, float)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"bits": 4}, "float16"),
        ({"mantissa_bits": 12}, "float32"),
        ({"encoding": "float_bits", "mantissa_bits": 12}, "float16"),
    ],
)
def test_what_only_the_dtype_decides_is_refused_once_that_is_known(options: dict[str, Any], dtype: Any) -> None:
    with pytest.raises(BadInput, match="'t'"):
        check_options("t", TableOptions(**options), dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetentionPolicy(keep_last=0),
        lambda: RetentionPolicy(keep_last=2.5),  # type: ignore[arg-type]
        lambda: RetentionPolicy(keep_within_s=float("inf")),
        lambda: RetentionPolicy(keep_every="daily"),  # type: ignore[arg-type]
        lambda: CompactionPolicy(max_chain=True),
        lambda: CompactionPolicy(fanout=1),
        lambda: CompactionPolicy(max_restore_ratio="2"),  # type: ignore[arg-type]
        lambda: ChunkCache(1.5),  # type: ignore[arg-type]
        lambda: Workers(0),
        lambda: Workers(1.5),  # type: ignore[arg-type]
        lambda: check_rate(float("nan")),
        lambda: check_rate("fast"),  # type: ignore[arg-type]
    ],
)
def test_other_records_and_arguments_are_checked_where_they_are_given(make: Callable[[], object]) -> None:
    with pytest.raises(BadInput):
        make()


def test_bits_of_a_half_precision_table_need_an_encoding_that_has_them() -> None:
    with pytest.raises(BadInput, match=r"stored as float_bits by default.* name the encoding.*Options by table"):
        check_options("t", TableOptions(bits=4), "float16")
    assert isinstance(chosen("float16", encoding="lattice", bits=4), Lattice)


def test_rows_beyond_the_range_do_not_refuse_a_scale_if_they_may_escape() -> None:
    """A table with one value beyond the range could not be created although its rows were to escape."""
    sample = SAMPLE.copy()
    sample[7, 3] = 1e30
    assert choose_encoding(TableOptions(scale=0.5, nonfinite="escape"), "float32", sample) == Lattice(scale=0.5)
    with pytest.raises(BadInput, match="2\\^21"):
        choose_encoding(TableOptions(scale=0.5), "float32", sample)


def test_affine_parameters_widen_where_half_precision_does_not_reach() -> None:
    large = np.full((3, 2), 1e6, np.float32)
    assert choose_encoding(TableOptions(encoding="affine"), "float32", large).param_dtype == "float32"  # type: ignore[union-attr]


def test_the_greedy_search_alone_has_settings_which_are_those_of_its_bits() -> None:
    greedy = chosen(encoding="affine", bits=4, search="greedy")
    assert (greedy.num_bins, greedy.ratio) == REFERENCE_SETTINGS[4]
    assert chosen(encoding="affine", bits=4, search="minmax").num_bins is None


def test_dtypes_of_tables_and_slots() -> None:
    assert [table_dtype(np.zeros(1, d), "t") for d in ("f4", "f2", "u2")] == ["float32", "float16", "bfloat16"]
    with pytest.raises(BadDtype, match="float64"):
        table_dtype(np.zeros(1), "t")
    with pytest.raises(BadShape, match="dimensions"):
        table_schema(
            "t", TableOptions(scale=1.0), num_rows=1, dim=8, dtype="float32", sample=SAMPLE,
            slots={"m": np.zeros((1, 2, 3), np.float32)},
        )  # fmt: skip


@pytest.mark.parametrize(("keys", "num_rows"), [("dense", 5), ("hashed", 0)])
def test_a_schema_counts_the_rows_of_dense_tables_alone(keys: Literal["dense", "hashed"], num_rows: int) -> None:
    schema = table_schema(
        "t", TableOptions(scale=1.0), num_rows=5, dim=8, dtype="float32", sample=SAMPLE, slots={}, keys=keys
    )

    assert schema.num_rows == num_rows


def test_a_sample_is_repeatable_and_bounded() -> None:
    values = np.arange(2 * SAMPLE_ROWS, dtype=np.float32).reshape(-1, 1)
    sample = RowSample(values, "float32").rows()
    assert len(sample) == SAMPLE_ROWS
    assert np.array_equal(sample, RowSample(values, "float32").rows())
    assert np.array_equal(RowSample(values[:5], "float32").rows(), values[:5])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_scales_chosen_together_on_threads_are_those_chosen_table_by_table(tmp_path: Path, threads: int) -> None:
    rng = np.random.default_rng(2)
    tables = {f"t{n}": rng.lognormal(0, 1, (300 + 50 * n, 1 + n)).astype(np.float32) for n in range(9)}
    options = TableOptions(bits=4)
    with Store.create(str(tmp_path / "alone")) as store, store.writer().begin(0, "baseline") as txn:
        for name, values in tables.items():
            txn.write_table(name, values, options=options)
        alone = dict(txn.scale_choices)

    with Store.create(str(tmp_path / "together"), threads=threads) as store, store.writer().begin(0, "baseline") as txn:
        txn.declare_tables({name: [Declaration(values, {}, options)] for name, values in tables.items()})
        for name, values in tables.items():
            txn.write_table(name, values)

    assert txn.scale_choices == alone
    assert {table.generation for table in txn.tables.values()} == {1}


def test_a_writer_of_whole_tables_declares_each_as_one_matrix(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store")) as store:
        for wrong in ([Declaration(SAMPLE), Declaration(SAMPLE)], [Declaration(SAMPLE[0])], []):
            txn = store.writer().begin(0, "baseline")
            with pytest.raises(BadInput, match="one array"):
                txn.declare_tables({"t": wrong})
