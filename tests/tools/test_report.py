"""``cnr report``: one page that loads nothing, escapes every name, and shows the content of the store."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions, compact
from cnr_store_tools.report.charts import MOST_BARS, Bar, NamedBar, bar_chart, thinned
from tests.tools.cli_runner import cnr

HOSTILE = "<script>alert(1)</script>&\"'"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A baseline, six deltas of two tables (one with a hostile name), a tag, a channel and a branch."""
    random = np.random.default_rng(0)
    values = random.normal(size=(400, 8)).astype(np.float32)
    with Store.create(str(tmp_path / "run"), fsync=False) as store:
        with store.writer() as writer:
            for step in range(7):
                with writer.begin(step) as txn:
                    for table in ("user", HOSTILE):
                        if step == 0:
                            sums = np.ones(400, np.float32)
                            txn.write_table(table, values, slots={"sum": sums}, options=TableOptions(bits=4))
                        else:
                            rows = np.sort(random.choice(400, 20 * step, replace=False))
                            sums = np.full(20 * step, 1.0 + step, np.float32)
                            txn.write_rows(table, rows, values[rows] + 1, slots={"sum": sums})
        store.tag("good", 4)
        store.set_channel("serving", 6)
        store.fork("experiment", 5).close()
    return store.url


class Checked(HTMLParser):
    """Check that every tag is closed in order, and that nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Checked:
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "url(" not in page
    assert "@import" not in page
    return parser


def test_a_report_shows_versions_tables_and_names(url: str, tmp_path: Path) -> None:
    done = cnr("report", url, "-o", tmp_path / "report.html", "--verify", "--json")

    page = (tmp_path / "report.html").read_text()
    tags = checked(page).tags
    assert done.document["problems"] == 0
    assert done.document["versions"] == 12  # the beginning, a fence, seven saves, a tag, a channel, and the fork
    assert "script" not in tags
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 1
    assert all(f">{name}<" in page for name in ("user", "good", "serving", "experiment", "deltas"))
    assert len(re.findall(r'<rect class="delta"[^>]*><title>version \d+, step \d+[^<]*delta, ', page)) == 6 * 2
    assert "every object that a version needs was read" in page


def test_a_key_names_the_kinds_that_are_drawn(url: str, tmp_path: Path) -> None:
    def keys() -> str:
        cnr("report", url, "-o", tmp_path / "report.html")
        return (tmp_path / "report.html").read_text().split("What a restore of each version reads")[1][:900]

    before = keys()
    with Store.open(url) as store:
        compact(store)

    assert "compaction" not in before
    assert "compaction" in keys()


def test_a_report_shows_what_compaction_did(url: str, tmp_path: Path) -> None:
    with Store.open(url) as store:
        assert next(one.outcome for one in compact(store)) == "committed"

    cnr("report", url, "-o", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    checked(page)
    assert len(re.findall(r'<rect class="compact"[^>]*><title>[^<]*in 1 segment', page)) == 1
    assert ">deltas<" not in page, "a column without a value"


def test_a_report_shows_stalls_and_ages(tmp_path: Path) -> None:
    rows = np.ones((4, 2), np.float32)
    with Store.create(str(tmp_path / "run"), fsync=False) as store, store.writer() as writer:
        for step, timing in enumerate(
            [{"stall_s": 2.0, "encode_s": 3.0}, {"stall_s": 0.004}, {"stall_s": "<b>"}, None]
        ):
            with writer.begin(step, kind="baseline") as txn:
                txn.write_table("t", rows)
                txn.note({"timing": timing})

    cnr("report", store.url, "-o", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    checked(page)
    assert re.findall(r"<title>version \d+, step (\d)[^<]*: baseline, ([\d.]+ m?s)</title>", page) == [
        ("0", "2.00 s"), ("1", "4.0 ms"),
    ]  # fmt: skip
    ages = re.findall(r"step (\d)[^<]*: ([\d.]+) (m?s) old when the next one came", page)
    assert [step for step, _, _ in ages] == ["0", "1", "2"]
    assert float(ages[0][1]) >= 3


def test_a_report_shows_damage(url: str, tmp_path: Path) -> None:
    files = [path for path in (Path(url) / "data").rglob("*") if path.is_file() and ".json" not in path.name]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(b"x" + largest.read_bytes()[1:])

    done = cnr("report", url, "-o", tmp_path / "report.html", "--verify", "--json")

    page = (tmp_path / "report.html").read_text()
    checked(page)
    assert done.document["problems"] > 0
    assert largest.name in page
    assert "Undamaged versions: " in page


def test_a_report_of_an_empty_store_and_of_none(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "empty")).close()

    done = cnr("report", tmp_path / "empty", "-o", tmp_path / "report.html")
    missing = cnr("report", tmp_path / "nothing", "-o", tmp_path / "other.html")
    refused = cnr("report", tmp_path / "empty", "-o", tmp_path / "no" / "folder.html")

    assert (done.code, missing.code, refused.code) == (0, 3, 4)
    assert "nothing to draw" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "other.html").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_under_a_report_is_a_failure_of_the_storage(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "empty")).close()

    done = cnr("report", tmp_path / "empty", "-o", "/dev/full")

    assert done.code == 7
    assert "cannot be written to /dev/full: No space left on device" in done.err


@pytest.mark.parametrize("count", [1, MOST_BARS, MOST_BARS + 1, 10_000])
def test_long_logs_are_drawn_with_few_bars_that_keep_the_largest(count: int) -> None:
    bars = [Bar(float(1 + at % 997), "delta", str(at)) for at in range(count)]

    drawn, marks = thinned(bars, [NamedBar(count - 1, "last")])

    assert len(drawn) <= MOST_BARS
    assert max(bar.value for bar in drawn) == max(bar.value for bar in bars)
    assert 0 <= marks[0].at < len(drawn)
    chart = bar_chart(bars, label="bytes", unit=str, ends=("a", "b"), is_log=True)
    assert chart.count("<rect") == len(drawn)
    checked(chart)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_draws_the_report_light_and_dark(url: str, tmp_path: Path) -> None:
    cnr("report", url, "-o", tmp_path / "report.html")
    shots = [tmp_path / "dark.png", tmp_path / "light.png"]

    for scheme, shot in enumerate(shots):
        subprocess.run(
            [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1600",
             f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / shot.stem}",
             f"--screenshot={shot}", f"file://{tmp_path / 'report.html'}"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip

    dark, light = (shot.read_bytes() for shot in shots)
    assert dark[:8] == light[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(len(dark), len(light)) > 30_000  # a blank page of this size has below 10,000 bytes
    assert dark != light


def test_a_page_can_be_printed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: it was written to a file with the name -."""
    monkeypatch.chdir(tmp_path)

    done = cnr("report", url, "-o", "-")

    assert done.code == 0
    assert done.out.startswith("<!")
    assert done.out.rstrip().endswith("</html>")
    assert not Path("-").exists()
    assert cnr("report", url, "-o", "-", "--json").code == 4
