"""The benchmark of compacting compares with a loop that reads what a baseline has."""

import bench_compaction
import harness
import pytest


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bare_loop_makes_the_codes_of_the_compact(tmp_path, bits):
    bench_compaction.write_stores(tmp_path, 2_000, bits)
    sides = bench_compaction.Sides(tmp_path)
    report = harness.Report("compact")

    bench_compaction.time_all(report, sides, 2)  # exits where the two differ

    sides.close()
    assert report.lines[-1].name.startswith("speed of the compaction")
