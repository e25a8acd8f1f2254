"""Prometheus metrics: printed, in a file, and over HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cnr_store import CorruptStore, HeadStatus, LastMaintenance, Store, StoreStatus, read_status
from cnr_store_tools.metrics import StoreCollector, metrics_text, status_metrics, write_metrics
from tests.tools.cli_runner import RunCode, cnr

Samples = dict[tuple[str, str | None], float]

HEAD = HeadStatus(
    branch="trial", version=9, step=40, checkpoint=4, checkpoint_ms=5_500, chain_length=3, chain_bytes=150,
    baseline_bytes=100, live_versions=6, pending_delete=2,
)  # fmt: skip
LAST = LastMaintenance(
    ended_ms=7_000,
    duration_s=1.5,
    outcome="stopped",
    rewritten_bytes=30,
    deleted_bytes=20,
    pending_delete_bytes=10,
    orphans=1,
)


def samples(text: str) -> Samples:
    """Map each name and last label, other than the store, to its value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            others = [value for key, value in sample.labels.items() if key != "store"]
            found[sample.name, others[-1] if others else None] = sample.value
    return found


@pytest.fixture
def served(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server on a free port of the loopback, and its address."""
    command = [str(Path(sys.executable).with_name("cnr")), "metrics", str(root), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--max-age", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline().strip()
    assert line.startswith("serving http://127.0.0.1:"), line
    try:
        yield process, line.removeprefix("serving ")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def scrape(address: str) -> Samples:
    with urllib.request.urlopen(address, timeout=60) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        return samples(reply.read().decode())


def test_a_served_store_is_read_at_each_scrape_and_sigterm_ends_the_server(
    root: Path, served: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = served
    first = scrape(address)
    with Store.open(str(root)) as store:
        store.tag("second")
    second = scrape(address)

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert (first["cnr_up", None], first["cnr_head_version", ""], first["cnr_chain_segments", ""]) == (1, 6, 4)
    assert second["cnr_head_version", ""] == 7
    assert second["cnr_checkpoint_timestamp_seconds", ""] == first["cnr_checkpoint_timestamp_seconds", ""]


def test_a_store_that_is_gone_is_down_and_the_server_stays(
    root: Path, served: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = served
    (root / "commits").rename(root / "moved")

    down = scrape(address)
    (root / "moved").rename(root / "commits")

    assert down == {("cnr_up", None): 0}
    assert scrape(address)["cnr_up", None] == 1
    assert process.poll() is None


def test_a_port_that_is_taken_is_one_line_and_no_hang(root: Path, served: tuple[subprocess.Popen[str], str]) -> None:
    port = served[1].rsplit(":", 1)[1].split("/")[0]

    done = cnr("metrics", root, "--listen", f"127.0.0.1:{port}")

    assert done.code == 7
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("address", ["9464", "host:", "host:x", "::1:9464", "host:65536", ":9464", "[]:1"])
def test_an_address_that_is_none_is_refused(root: Path, address: str) -> None:
    done = cnr("metrics", root, "--listen", address)

    assert done.code == 4
    assert "--listen takes HOST:PORT" in done.err


def test_metrics_are_printed_without_an_address(root: Path) -> None:
    done = cnr("metrics", root)

    found = samples(done.out)
    with Store.open(str(root)) as store:
        head = read_status(store).heads[0]
    assert (done.code, done.err) == (0, "")
    assert found["cnr_chain_bytes", ""] == head.chain_bytes
    assert found["cnr_live_versions", ""] == 7
    assert found["cnr_segments", None] == 4
    assert not [name for name, _ in found if not name.startswith("cnr_")]


def test_every_value_of_a_status_has_its_metric() -> None:
    status = StoreStatus(url="file:///s", heads=(HEAD,), segments=8, last_maintenance=LAST)

    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in status_metrics(status)
        for sample in family.samples
    }

    head = ("file:///s", "trial")
    assert found == {
        ("cnr_head_version", *head): 9, ("cnr_head_step", *head): 40, ("cnr_head_checkpoint", *head): 4,
        ("cnr_checkpoint_timestamp_seconds", *head): 5.5, ("cnr_chain_segments", *head): 3,
        ("cnr_chain_bytes", *head): 150, ("cnr_restore_ratio", *head): 1.5, ("cnr_live_versions", *head): 6,
        ("cnr_pending_delete_transactions", *head): 2,
        ("cnr_maintenance_timestamp_seconds", "file:///s"): 7, ("cnr_maintenance_duration_seconds", "file:///s"): 1.5,
        ("cnr_maintenance_rewritten_bytes", "file:///s"): 30, ("cnr_maintenance_deleted_bytes", "file:///s"): 20,
        ("cnr_pending_delete_bytes", "file:///s"): 10, ("cnr_orphan_segments", "file:///s"): 1,
        ("cnr_segments", "file:///s"): 8,
        ("cnr_maintenance_outcome", "file:///s", "done"): 0, ("cnr_maintenance_outcome", "file:///s", "stopped"): 1,
        ("cnr_maintenance_outcome", "file:///s", "failed"): 0,
    }  # fmt: skip


def test_what_has_no_value_yet_has_no_sample(tmp_path: Path) -> None:
    cnr("init", tmp_path / "s")

    found = samples(cnr("metrics", tmp_path / "s").out)

    assert ("cnr_checkpoint_timestamp_seconds", "") not in found
    assert ("cnr_restore_ratio", "") not in found
    assert not [name for name, _ in found if name.startswith("cnr_maintenance")]
    assert found["cnr_head_version", ""] == 0


def test_scrapes_within_the_age_are_answered_from_one_reading() -> None:
    now = [0.0]
    read: list[float] = []

    def reading() -> StoreStatus:
        read.append(now[0])
        return StoreStatus(url="u", heads=(), segments=0, last_maintenance=None)

    collector = StoreCollector(reading, "u", max_age_s=30, clock=lambda: now[0])
    for moment in (5.0, 6.0, 34.9, 35.0, 36.0):
        now[0] = moment
        collector.collect()

    assert read == [5.0, 35.0]


def test_a_failing_store_is_asked_again_only_after_the_age(capsys: pytest.CaptureFixture[str]) -> None:
    def reading() -> StoreStatus:
        raise CorruptStore("torn\nrecord")

    collector = StoreCollector(reading, "u", max_age_s=30, clock=lambda: 0.0)

    found = [samples(metrics_text(collector)) for _ in range(2)]

    assert found == [{("cnr_up", None): 0}] * 2
    assert capsys.readouterr().err == "error: torn record\n"


def test_a_metrics_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "cnr.prom"
    path.write_text("old")
    status = StoreStatus(url="u", heads=(HEAD,), segments=8, last_maintenance=LAST)

    write_metrics(StoreCollector(lambda: status, "u"), path)

    assert samples(path.read_text())["cnr_head_version", "trial"] == 9
    assert list(tmp_path.iterdir()) == [path]


def test_without_the_client_library_the_extra_to_install_is_named(run_code: RunCode, root: Path) -> None:
    done = run_code(
        "import sys; sys.modules['prometheus_client'] = None; from cnr_store_tools.cli import main; "
        f"sys.argv = ['cnr', 'metrics', {str(root)!r}]; main()"
    )

    assert done.returncode == 8
    assert "pip install 'cnr-store[metrics]'" in done.stderr
    assert done.stderr.count("\n") == 1
