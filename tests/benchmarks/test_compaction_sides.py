"""The benchmark of compacting compares with a loop that reads every codec which a baseline may have."""

import bench_compaction
import harness
import pytest


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bare_loop_makes_the_codes_of_the_compact(tmp_path, bits):
    """It knew no int8 codes, which baselines of 4-bit quality have: the suite ended with a TypeError."""
    bench_compaction.write_stores(tmp_path, 2_000, bits)
    sides = bench_compaction.Sides(tmp_path)
    codec = sides.readers[0].manifest.parts[0].set.arrays["codes"].codec
    report = harness.Report("compact")

    bench_compaction.time_all(report, sides, 2)  # exits where the two differ

    sides.close()
    assert codec == {4: "zstd", 8: "pcodec"}[bits]
    assert report.lines[-1].name.startswith("speed of the compaction")
