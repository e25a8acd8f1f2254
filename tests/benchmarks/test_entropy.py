import bench_entropy
import codings
import harness
import numpy as np
import pytest


def chunks(num_rows: int, dim: int, *, seed: int = 0) -> list[codings.Chunk]:
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(3 * num_rows, num_rows, replace=False)).astype(np.int64)
    slots = random.integers(0, 60, num_rows).astype(np.int16)
    codes = np.rint(random.normal(size=(num_rows, dim)) * (0.2 + slots[:, None] / 20)).astype(np.int16)
    return codings.cut(rows, codes, slots, (slots + 900).astype(np.int16))


@pytest.mark.parametrize("coding", codings.codings(), ids=lambda coding: coding.name)
@pytest.mark.parametrize("num_rows", [1, 2, 3000])
def test_every_coding_gives_a_chunk_back(coding: codings.Coding, num_rows: int) -> None:
    found = codings.total_bytes(coding, chunks(num_rows, 8))

    assert set(found) <= {"rows", "codes", "slots", "classes"}
    assert all(size > 0 for size in found.values())


def test_a_coding_that_loses_rows_is_refused() -> None:
    broken = codings.Coding("zeros", codings.by_id, lambda stored, shape: chunks(300, 8, seed=1)[0])

    with pytest.raises(ValueError, match="does not come back"):
        codings.total_bytes(broken, chunks(300, 8))


def test_slots_that_tell_the_energy_make_codes_smaller() -> None:
    made = {coding.name: coding for coding in codings.codings()}
    given = chunks(20_000, 16)

    ordered, plain = (codings.total_bytes(made[name], given) for name in ("order of slots", "by row id"))

    assert ordered["codes"] < 0.95 * plain["codes"]
    assert (ordered["rows"], ordered["slots"]) == (plain["rows"], plain["slots"])


def test_what_a_store_writes_is_counted_by_kind(tmp_path) -> None:
    source = next(bench_entropy.drifting(4000, 0))
    report = harness.Report("bytes")

    other = bench_entropy.by_kind(report, [source], (4,), tmp_path)

    [table, documents] = report.tables
    kinds = dict(zip(table.columns, table.rows[0], strict=True))
    on_disk = harness.disk_bytes(max((tmp_path / "0-4" / "data").glob("*/")))[0]
    assert kinds["total"] - kinds["record"] == on_disk
    assert other[source.name, 4] == sum(kinds[kind] for kind in ("zarr.json", "manifest", "record"))
    assert documents.rows[0][1] > documents.rows[0][2]


def test_the_comparison_counts_documents_too(capsys) -> None:
    source = next(bench_entropy.drifting(2000, 0))
    report = harness.Report("bytes")
    chunks_bytes = sum(codings.total_bytes(codings.codings()[0], source.chunks(4)).values())

    bench_entropy.compare(report, [source], (4,), {(source.name, 4): 3 * chunks_bytes})

    by_name = {row[0]: row[1] for row in report.tables[-1].rows}
    assert by_name["by row id"] == 1
    assert 0.9 < by_name["bytes under zstd level 1"] < 1.5
