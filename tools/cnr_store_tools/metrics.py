"""A store's state as Prometheus metrics, by Prometheus' client: as text, in a file, or served on a port."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cnr_store import CnrStoreError, HeadStatus, LastMaintenance, StoreStatus
from cnr_store.errors import MissingDependency, StorageFailure
from cnr_store_tools.text import one_line

try:
    import prometheus_client
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ModuleNotFoundError as error:
    raise MissingDependency(
        "metrics need prometheus_client, which is not installed; pip install 'cnr-store[metrics]'",
        found="prometheus_client",
    ) from error

OUTCOMES = ("done", "stopped", "failed")
STATUS_LABELS = ["store"]
HEAD_LABELS = ["store", "branch"]

HEAD_GAUGES: dict[str, tuple[str, Callable[[HeadStatus], float | None]]] = {
    "cnr_head_version": ("Newest version of the log.", lambda head: head.version),
    "cnr_head_step": ("Training step of the newest state.", lambda head: head.step),
    "cnr_head_checkpoint": ("Number of checkpoints up to the newest state.", lambda head: head.checkpoint),
    "cnr_checkpoint_timestamp_seconds": (
        "When the newest checkpoint was committed.",
        lambda head: None if head.checkpoint_ms is None else head.checkpoint_ms / 1000,
    ),
    "cnr_chain_segments": ("Segments that a restore of the newest state reads.", lambda head: head.chain_length),
    "cnr_chain_bytes": ("Bytes that a restore of the newest state reads.", lambda head: head.chain_bytes),
    "cnr_restore_ratio": ("Those bytes as a multiple of the baseline's.", lambda head: head.restore_ratio),
    "cnr_live_versions": ("Versions that readers may open.", lambda head: head.live_versions),
    "cnr_pending_delete_transactions": ("Transactions that are pending delete.", lambda head: head.pending_delete),
}
"""Name -> (help, value); each has the labels ``store`` and ``branch``, which is empty for the store's own log."""

MAINTENANCE_GAUGES: dict[str, tuple[str, Callable[[LastMaintenance], float | None]]] = {
    "cnr_maintenance_timestamp_seconds": ("When the last maintenance ended.", lambda last: last.ended_ms / 1000),
    "cnr_maintenance_duration_seconds": ("How long it took.", lambda last: last.duration_s),
    "cnr_maintenance_rewritten_bytes": ("Bytes that it wrote by compaction.", lambda last: last.rewritten_bytes),
    "cnr_maintenance_deleted_bytes": ("Bytes that it deleted.", lambda last: last.deleted_bytes),
    "cnr_pending_delete_bytes": (
        "Bytes that were pending delete when it ended.",
        lambda last: last.pending_delete_bytes,
    ),
    "cnr_orphan_segments": ("Segments that no record referenced when it ended.", lambda last: last.orphans),
}
"""Name -> (help, value); each has the label ``store``."""


def status_metrics(status: StoreStatus) -> Iterator[Metric]:
    """Yield a store's metrics. A metric without a value (no checkpoint yet) has no sample. No I/O."""
    for name, (about, head_value) in HEAD_GAUGES.items():
        family = GaugeMetricFamily(name, about, labels=HEAD_LABELS)
        for head in status.heads:
            value = head_value(head)
            if value is not None:
                family.add_metric([status.url, head.branch or ""], value)
        yield family
    segments = GaugeMetricFamily("cnr_segments", "Segments in storage, needed or not.", labels=STATUS_LABELS)
    segments.add_metric([status.url], status.segments)
    yield segments
    last = status.last_maintenance
    for name, (about, last_value) in MAINTENANCE_GAUGES.items():
        family = GaugeMetricFamily(name, about, labels=STATUS_LABELS)
        value = None if last is None else last_value(last)
        if value is not None:
            family.add_metric([status.url], value)
        yield family
    outcomes = GaugeMetricFamily(
        "cnr_maintenance_outcome", "1 for the last maintenance's outcome, else 0.", labels=[*STATUS_LABELS, "outcome"]
    )
    if last is not None:
        for outcome in OUTCOMES:
            outcomes.add_metric([status.url, outcome], float(outcome == last.outcome))
    yield outcomes


class StoreCollector(Collector):
    """Reads a store at a scrape, and returns the same metrics for ``max_age_s`` after that.

    If the store cannot be read, the only metric is ``cnr_up 0``, and the reason is written to standard error.
    ``read`` returns None if the caller has reported that already.
    """

    def __init__(
        self,
        read: Callable[[], StoreStatus | None],
        url: str,
        *,
        max_age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._url = url
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._families: tuple[Metric, ...] = ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; read the store if the last reading is too old. Parallel scrapes read it once."""
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= self._max_age_s:
                self._families = tuple(self._fresh())
                self._read_at = now
            return self._families

    def _fresh(self) -> Iterator[Metric]:
        status = None
        try:
            status = self._read()
        except CnrStoreError as error:
            sys.stderr.write(f"error: {one_line(error.message)}\n")
        up = GaugeMetricFamily("cnr_up", "1 if the store could be read.", labels=STATUS_LABELS)
        up.add_metric([self._url], float(status is not None))
        yield up
        if status is not None:
            yield from status_metrics(status)


def registry_of(collector: StoreCollector) -> CollectorRegistry:
    """Return a registry with the store's metrics only, without metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def metrics_text(collector: StoreCollector) -> str:
    """Return the metrics in Prometheus' text format."""
    return prometheus_client.generate_latest(registry_of(collector)).decode()


def write_metrics(collector: StoreCollector, path: Path) -> None:
    """Atomically replace a file of metrics, for the textfile collector of node_exporter.

    Raises
    ------
    OSError
    """
    prometheus_client.write_to_textfile(str(path), registry_of(collector))


def serve_metrics(collector: StoreCollector, host: str, port: int, announce: Callable[[str, int], None]) -> None:
    """Serve metrics on a port (0: any free one) until SIGTERM; blocks.

    ``announce`` is called with the address when the port is open. Only the main thread may call this.

    Raises
    ------
    StorageFailure
        The port is in use, or the address is not this machine's.
    """
    # A pipe, not an Event: Event.set takes a lock, which this thread may have when the handler interrupts it.
    ended, end = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(end, b"."))
    try:
        try:
            server, thread = prometheus_client.start_http_server(port, host, registry_of(collector))
        except OSError as error:
            raise StorageFailure(f"cannot serve on {host}, port {port}: {error.strerror or error}") from error
        try:
            announce(host, server.server_port)
            os.read(ended, 1)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(ended)
        os.close(end)
