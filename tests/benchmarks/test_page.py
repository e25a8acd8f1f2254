import json
from pathlib import Path

import harness
import page
import pytest
import suites

HERE = Path(__file__).parent


def report() -> harness.Report:
    made = harness.Report("a suite")
    made.start()
    made.add("a / b", 0.5, goal=0.45, low=0.4, high=0.6)
    made.add("faster", 3.0, goal=2.0, sense="at least")
    made.table("bytes", ["what", "bytes"], [["codes|rows", 1200], ["slots", None]], note="of the last delta")
    made.note("  a note")
    made.plot("growth", "bytes by rows", "rows", "bytes", {"ours": harness.Series([1, 10], [2, 3], [1, 2], [3, 4])})
    made.add_ratio("ours / theirs", harness.Timings([1.0, 2.0], [1.0, 1.0]), harness.Timings([2.0, 2.0], [1.0, 1.0]))
    made.headline("bytes against fp32", "52x", "50x", "python bench.py")
    return made


def test_the_page_holds_what_the_report_was_given(tmp_path, capsys):
    report().finish(str(tmp_path / "size.json"))
    written = page.write(tmp_path, [("size", "bytes", "python bench.py"), ("cost", "not run", "python other.py")])
    text = written.read_text()
    assert "| a / b | 0.5x | 0.4x to 0.6x | at most 0.45x | **missed** |" in text
    assert "| faster | 3x |  | at least 2x | met |" in text
    assert "| codes\\|rows | 1,200 |" in text
    assert "of the last delta" in text
    assert "    a note\n" in text
    assert "| bytes against fp32 | 52x | 50x | `python bench.py` |" in text
    assert "cost" not in text
    assert text.index("**bytes**") > text.index("| faster |")
    assert "1 of 2 goals met" in capsys.readouterr().out


def test_plots_are_drawn_and_the_same_each_time(tmp_path):
    for name in ("first", "second"):
        report().finish(str(tmp_path / name / "size.json"))
        page.write(tmp_path / name, [("size", "bytes", "python bench.py")])
    first, second = ((tmp_path / name / "size-growth.svg").read_bytes() for name in ("first", "second"))
    assert first == second
    assert b"<svg" in first
    assert b"bytes by rows" in first


def test_timings_can_be_read_by_pyperf(tmp_path):
    import pyperf

    report().finish(str(tmp_path / "size.json"))
    suite = pyperf.BenchmarkSuite.load(str(tmp_path / "size.pyperf.json"))
    assert suite.get_benchmark("ours / theirs: first").get_values() == (1.0, 2.0)


def test_rows_and_curves_of_wrong_lengths_are_refused():
    made = harness.Report("a suite")
    with pytest.raises(ValueError, match="2 columns"):
        made.table("t", ["a", "b"], [["only one"]])
    with pytest.raises(ValueError, match="lengths"):
        made.plot("p", "p", "x", "y", {"ours": harness.Series([1, 2], [1])})


def test_quick_makes_a_run_small_and_a_later_option_wins():
    parser = harness.arguments("d", rows=5_000_000, repeats=9)
    assert vars(parser.parse_args([]))["rows"] == 5_000_000
    quick = parser.parse_args(["--quick", "--rows", "7"])
    assert (quick.quick, quick.rows, quick.repeats) == (True, 7, harness.QUICK_REPEATS)


def test_every_suite_has_its_script():
    missing = [suite.script for suite in suites.SUITES if not (HERE / suite.script).exists()]
    assert missing == []


def test_a_json_of_a_run_is_json(tmp_path):
    report().finish(str(tmp_path / "deep" / "size.json"))
    document = json.loads((tmp_path / "deep" / "size.json").read_text())
    assert [line["met"] for line in document["lines"]] == [False, True, None]
    assert document["order"][0] == ["lines", 0]
