"""Restores against the length of the chain: as written, with compactions between deltas, merged into one segment."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import harness
from peers import Cnr
from places import Place
from trainee import Trainee

from cnr_store import CompactionPolicy
from cnr_store.types import AffineBits

BITS: AffineBits = 4
SHARE = 0.05
COMPACT_EVERY = 8
"""Deltas between two compactions: those of a cron job beside a training."""

WRITTEN, COMPACTED, ONE_SEGMENT = "as written", f"compacted every {COMPACT_EVERY} deltas", "compacted into one segment"


@dataclass(frozen=True, slots=True)
class Chain:
    """A store that stands at one checkpoint."""

    kind: str
    deltas: int
    url: str


def measure(
    report: harness.Report, place: Place, trainee: Trainee, deltas: tuple[int, ...], repeats: int
) -> dict[Chain, harness.Timings]:
    """Write the chains, restore each in turn, and report; ``deltas`` are those of the chains, at most 63.

    Raises
    ------
    SystemExit
        A compacted chain gives other bits than the chain as written.
    """
    chains = write(report, place, trainee, deltas)
    digests: dict[int, int] = {}
    segments: dict[Chain, list[int]] = {}
    timings = {chain: harness.Timings([], []) for chain in chains}
    for number in range(-1, repeats):
        for chain in chains[:: 1 if number % 2 == 0 else -1]:
            store = Cnr(BITS)
            store.open(place, trainee, chain.url)
            store.leave()
            trainee.forget()
            cpu = time.process_time()
            seconds = harness.timed(store.load)
            if number >= 0:
                timings[chain].wall.append(seconds)
                timings[chain].cpu.append(time.process_time() - cpu)
            else:
                segments[chain] = store.chain_bytes()
                found = _digest(trainee)
                if digests.setdefault(chain.deltas, found) != found:
                    raise SystemExit(f"{chain.deltas} deltas, {chain.kind}: not the state of the chain as written")
            store.leave()
    _report(report, place, timings, segments)
    for chain in chains:
        place.remove(chain.url)
    return timings


def write(report: harness.Report, place: Place, trainee: Trainee, deltas: tuple[int, ...]) -> list[Chain]:
    """Write the same deltas with and without compaction between them; keep a copy of each at each length."""
    found: list[Chain] = []
    for kind in (WRITTEN, COMPACTED):
        trainee.start_again()
        store = Cnr(BITS)
        store.open(place, trainee)
        store.save()()
        compacting_s = compacting_cpu_s = 0.0
        for number in range(1, max(deltas) + 1):
            store.touch(SHARE)
            store.save()()
            if kind == COMPACTED and number % COMPACT_EVERY == 0:
                cpu = time.process_time()
                compacting_s += harness.timed(store.compact)
                compacting_cpu_s += time.process_time() - cpu
            if number in deltas:
                found.append(Chain(kind, number, _copy(place, store.url)))
        if kind == COMPACTED:
            report.note(
                f"compaction beside {max(deltas)} deltas of {SHARE:.0%} at {BITS}-bit quality, every {COMPACT_EVERY}: "
                f"{compacting_s:.2f} s, CPU {compacting_cpu_s:.2f} s"
            )
        store.close()
    for chain in [one for one in found if one.kind == WRITTEN]:
        compacted = Chain(ONE_SEGMENT, chain.deltas, _copy(place, chain.url))
        store = Cnr(BITS)
        store.open(place, trainee, compacted.url)
        store.compact(CompactionPolicy(max_chain=1))
        store.leave()
        found.append(compacted)
    return found


def _copy(place: Place, url: str) -> str:
    """Copy a store by hard links: nothing that is committed is written again."""
    copy = place.new()
    shutil.copytree(Path(url), Path(copy), copy_function=os.link)
    return copy


def _digest(trainee: Trainee) -> int:
    total = 0
    for name in sorted(trainee.tensors):
        total = zlib.crc32(trainee.tensors[name].contiguous().numpy().data, total)
    return total


def _report(
    report: harness.Report, place: Place, timings: dict[Chain, harness.Timings], segments: dict[Chain, list[int]]
) -> None:
    rows: list[list[harness.Cell]] = []
    for chain, one in timings.items():
        low, middle, high = harness.spread(one.wall)
        rows.append([
            chain.deltas, chain.kind, len(segments[chain]), sum(segments[chain]) / 1e6,
            f"{harness.shown(middle)} ({harness.shown(low)} to {harness.shown(high)})", harness.spread(one.cpu)[1],
        ])  # fmt: skip
        report.timings(f"restore of {chain.deltas} deltas, {chain.kind}", one)
    rows.sort(key=lambda row: (row[0], row[1]))
    report.table(
        f"Restores of a baseline and deltas of {SHARE:.0%}, {BITS}-bit quality, {place.name}",
        ("deltas", "chain", "segments", "MB of them", "s", "CPU s"), rows,
        "A manager's restore: weights, slots, dense tensors, and the mirror that the next delta needs.",
    )  # fmt: skip
    series = {}
    for kind in (WRITTEN, COMPACTED, ONE_SEGMENT):
        points = sorted(
            (chain.deltas, harness.spread(one.wall)) for chain, one in timings.items() if chain.kind == kind
        )
        lows, middles, highs = ([spread[which] for _, spread in points] for which in range(3))
        series[kind] = harness.Series([float(count) for count, _ in points], middles, lows, highs)
    report.plot(
        f"restore-chain-{harness.slug(place.name)}", f"Restore against deltas since the baseline, {place.name}",
        "deltas", "s", series, log_x=True,
    )  # fmt: skip
    last = max(chain.deltas for chain in timings)
    by_kind = {chain.kind: one for chain, one in timings.items() if chain.deltas == last}
    for kind in (COMPACTED, ONE_SEGMENT):
        ratios = [a / b for a, b in zip(by_kind[kind].wall, by_kind[WRITTEN].wall, strict=True)]
        low, middle, high = harness.spread(ratios)
        report.add(f"restore of {last} deltas, {kind} / {WRITTEN}", middle, low=low, high=high)
