"""Publish to served: polled, told by a watch of the folder or by Redis, and by 100 loaders behind a relay far away.

Sections of `bench_serving`. A latency is from the acknowledgement of a commit to the first lookup (behind the relay: to
the moment at which a loader serves the version, looked at every 2 ms), all by one monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
from drifting import TABLE
from partners import Partner, Told
from serving_stores import NEWS, Size

from cnr_store import Store
from cnr_store.integrations.folder_watch import FolderWatch
from cnr_store.integrations.redis import RedisNews
from cnr_store.relay import Relay
from cnr_store.serving import Loader, LoaderOptions

STORES = str(Path(__file__).parent / "serving_stores.py")

GOAL_PUBLISH_S, GOAL_TOLD_S, GOAL_FAN_S = 1.0, 0.1, 2.4
"""Of polls every 0.5 s; of news; Ekko's, over the world."""

POLL_INTERVAL_S = LoaderOptions().poll_interval_s
LINK_BYTES_PER_S, LINK_DELAY_S = 125e6, 0.05
"""1 Gbit/s, and half of a round trip of 100 ms."""

LONGEST_S = 120.0

Listen = Callable[[Loader, ExitStack], object]


def measure_latency(report: harness.Report, folder: Path, size: Size) -> None:
    """From the acknowledgement of a commit to the first lookup that sees it, in another process, by polls."""
    _measure_at(report, f"polled every {POLL_INTERVAL_S} s, local disk", str(folder / "store"), size)
    with seaweed_bucket(folder) as (url, storage_options):
        _measure_at(report, f"polled every {POLL_INTERVAL_S} s, SeaweedFS", url, size, storage_options)


def measure_news(report: harness.Report, folder: Path, size: Size) -> None:
    """The same with a loader that is told, on a local disk."""
    from tests.support.servers import running_redis

    def watch(loader: Loader, stack: ExitStack) -> None:
        stack.enter_context(FolderWatch(loader.store, loader.wake))

    def listen(loader: Loader, stack: ExitStack) -> None:
        stack.enter_context(RedisNews.connect(server.url, NEWS)).listen(loader.wake)

    _measure_at(report, "watched folder", str(folder / "watched"), size, listen=watch, goal=GOAL_TOLD_S)
    with running_redis(folder) as server:
        _measure_at(
            report, "told by Redis, local disk", str(folder / "told"), size, listen=listen, redis_url=server.url,
            goal=GOAL_TOLD_S,
        )  # fmt: skip


def _measure_at(
    report: harness.Report, how: str, url: str, size: Size, storage_options: dict[str, Any] | None = None, *,
    listen: Listen | None = None, redis_url: str | None = None, goal: float = GOAL_PUBLISH_S,
) -> None:  # fmt: skip
    with ExitStack() as stack:
        writer = stack.enter_context(_writer(url, size, storage_options, redis_url))
        first = writer.hear()["version"]
        loader = stack.enter_context(Loader(url, storage_options=storage_options))
        loader.start()
        if listen is not None:
            listen(loader, stack)
        seen: list[tuple[int, float]] = []
        ends = threading.Event()
        watcher = threading.Thread(target=_watch, args=(loader, seen, ends))
        watcher.start()
        writer.say()
        acknowledged = [writer.hear() for _ in range(size.published)]
        deadline = time.monotonic() + LONGEST_S
        while loader.version < acknowledged[-1]["version"] and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        ends.set()
        watcher.join()
        metrics = loader.metrics()
    latencies = [_first_at(seen, one["version"]) - one["at_s"] for one in acknowledged if one["version"] > first]
    _report_latencies(report, f"publish to served, {how}", latencies, goal)
    report.note(
        f"      last apply {1000 * metrics.apply_s:.0f} ms; {metrics.polls} polls, {metrics.errors} errors"
    )  # fmt: skip


def _writer(url: str, size: Size, storage_options: dict[str, Any] | None, redis_url: str | None) -> Partner:
    return Partner(
        STORES, "publish", url=url, rows=size.rows, deltas=size.published, least_pause_s=size.least_pause_s,
        most_pause_s=size.most_pause_s, storage_options=storage_options, redis_url=redis_url,
    )  # fmt: skip


def _report_latencies(report: harness.Report, name: str, latencies: Sequence[float], goal: float | None) -> None:
    _, median, worst = harness.spread(latencies)
    p99 = float(np.quantile(latencies, 0.99))
    report.add(f"{name}: p99 of {len(latencies)}", p99, goal=goal, unit=" s", high=worst)
    report.note(f"      p50 {median:.3f} s")


def _watch(loader: Loader, seen: list[tuple[int, float]], ends: threading.Event) -> None:
    version = -1
    while not ends.wait(0.0005):
        batch = loader.lookup_many({TABLE: [0]})
        if batch.version != version:
            version = batch.version
            seen.append((version, time.monotonic()))


def _first_at(seen: Sequence[tuple[int, float]], version: int) -> float:
    return next(at_s for found, at_s in seen if found >= version)


@contextmanager
def seaweed_bucket(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an empty root on a SeaweedFS of its own, and the options to open it with."""
    from tests.support.servers import running_seaweed

    place = folder / "seaweed"
    place.mkdir()
    with running_seaweed(place) as server:
        server.client().create_bucket(Bucket="serving")
        yield "s3://serving/store", server.storage_options


# ---- many loaders behind a relay


@dataclass(frozen=True, slots=True)
class Fan:
    """What a run of many loaders found: seconds of every loader and version, and bytes over the links."""

    latencies: list[float]
    direct: list[float]
    relay_bytes: int
    direct_bytes: int
    loaders: int


def measure_fanout(report: harness.Report, folder: Path, size: Size) -> None:
    """From a commit to every loader behind one relay, and to a loader without one, over a link of 100 ms a round trip.

    The writer is beside its store and its Redis, the loaders beside the relay. Every loader serves the whole table.
    """
    size = replace(size, rows=size.fan_rows)
    report.note(
        f"      {size.fan_processes} processes with {size.fan_each} loaders (threads) each, {size.rows:,} rows; link "
        f"{LINK_BYTES_PER_S * 8 / 1e9:g} Gbit/s, {2000 * LINK_DELAY_S:.0f} ms a round trip, a proxy"
    )
    for is_told in (False, True):
        place = folder / ("told" if is_told else "polled")
        place.mkdir()
        found = _fan_out(place, size, is_told=is_told)
        how = "told" if is_told else f"polled every {POLL_INTERVAL_S} s"
        goal = GOAL_FAN_S if is_told else None
        _report_latencies(
            report, f"publish to served, {found.loaders} loaders behind a relay, {how}", found.latencies, goal
        )
        _report_latencies(
            report, f"publish to served, a loader over the link without a relay, {how}", found.direct, None
        )
        each = found.relay_bytes / found.loaders / size.published
        alone = found.direct_bytes / size.published
        report.add(f"bytes over the link per loader and version, {how}", each / 1000, goal=None, unit=" kB")
        report.note(f"      {alone / 1000:.1f} kB for a loader without a relay, {alone / each:.0f}x")


def _fan_out(folder: Path, size: Size, *, is_told: bool) -> Fan:
    from tests.support.servers import S3Server, running_redis, running_seaweed
    from tests.support.throttled_proxy import throttled_proxy

    with ExitStack() as stack:
        far = stack.enter_context(running_seaweed(folder))
        far.client().create_bucket(Bucket="serving")
        redis = stack.enter_context(running_redis(folder))

        def link(port: int) -> Any:
            rate = LINK_BYTES_PER_S
            return stack.enter_context(throttled_proxy(port, rate, rate, delay_s=LINK_DELAY_S))

        links = [link(int(far.endpoint_url.rpartition(":")[2])) for _ in range(2)]
        over = [
            S3Server(f"http://127.0.0.1:{one.port}", far.access_key, far.secret_key).storage_options for one in links
        ]
        news_url = redis.url.replace(f":{redis.port}/", f":{link(redis.port).port}/") if is_told else None
        url, near = "s3://serving/store", str(folder / "near")
        writer = stack.enter_context(_writer(url, size, far.storage_options, redis.url if is_told else None))
        first = writer.hear()["version"]
        relay = stack.enter_context(
            Partner(__file__, "run_relay", url=url, near=near, storage_options=over[0], redis_url=news_url)
        )
        relay.hear()
        servers = [
            stack.enter_context(Partner(__file__, "serve", near=near, loaders=size.fan_each, is_told=is_told))
            for _ in range(size.fan_processes)
        ]
        for server in servers:
            server.hear()
        with Serving(url, 1, over[1], news_url) as direct:
            before = [sum(one.carried_bytes()) for one in links]
            writer.say()
            acknowledged = [one for one in (writer.hear() for _ in range(size.published)) if one["version"] > first]
            last = acknowledged[-1]["version"]
            for server in servers:
                server.say(until=last)
            seen = [told for server in servers for told in server.hear()["seen"]]
            direct_seen = direct.until(last)
            carried = [sum(one.carried_bytes()) - start for one, start in zip(links, before, strict=True)]

    def latencies(of: list[list[tuple[int, float]]]) -> list[float]:
        return [_first_at(one, entry["version"]) - entry["at_s"] for one in of for entry in acknowledged]

    return Fan(latencies(seen), latencies(direct_seen), carried[0], carried[1], len(seen))


def run_relay(told: Told, url: str, near: str, storage_options: dict[str, Any], redis_url: str | None) -> None:
    """The relay's process."""
    with Store.open(url, storage_options=storage_options) as source:
        relay = Relay(source, near)
        relay.advance()
        news = None if redis_url is None else RedisNews.connect(redis_url, NEWS)
        if news is not None:
            news.listen(relay.wake)
        told.tell(ready=True)
        relay.run(poll_interval_s=POLL_INTERVAL_S)


class Serving:
    """Loaders of this process that follow a store, and a thread that notes when each serves which version."""

    def __init__(
        self,
        url: str,
        count: int,
        storage_options: dict[str, Any] | None,
        redis_url: str | None,
        *,
        watches: bool = False,
        threads: int | None = None,
    ) -> None:
        # Codes take half the memory, of which there is one copy for each loader here.
        self._loaders = [
            Loader(url, options=LoaderOptions(kept_as="codes"), threads=threads, storage_options=storage_options)
            for _ in range(count)
        ]
        self._stack = ExitStack()
        if redis_url is not None:
            self._stack.enter_context(RedisNews.connect(redis_url, NEWS)).listen(self._wake)
        if watches:
            self._stack.enter_context(FolderWatch(self._loaders[0].store, self._wake))
        self._seen: list[list[tuple[int, float]]] = [[] for _ in self._loaders]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._note)
        for loader in self._loaders:
            loader.start()
        self._thread.start()

    def until(self, version: int) -> list[list[tuple[int, float]]]:
        """Wait until all serve this version; return (version, monotonic time) of each change, by loader."""
        deadline = time.monotonic() + LONGEST_S
        while any(not seen or seen[-1][0] < version for seen in self._seen) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._seen

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._stack.close()
        for loader in self._loaders:
            loader.close()

    def _wake(self) -> None:
        for loader in self._loaders:
            loader.wake()

    def _note(self) -> None:
        while not self._ends.wait(0.002):
            for loader, seen in zip(self._loaders, self._seen, strict=True):
                version = loader.version
                if not seen or seen[-1][0] != version:
                    seen.append((version, time.monotonic()))


def serve(told: Told, near: str, loaders: int, is_told: bool) -> None:
    """A process of loaders behind the relay: serve until an order names the last version, tell what was seen."""
    with Serving(near, loaders, None, None, watches=is_told, threads=1) as serving:
        told.tell(ready=True)
        told.tell(seen=serving.until(told.order()["until"]))
