"""Run cases of the fuzzer in a separate process with limited memory; print a line of JSON for each.

    python -m tests.faults.fuzz_program --first 4711 --count 1 --verbose

A line is {"seed", "kind", "what", "sample", "doors": {door: outcome}, "failures": [...]}; before a case begins its seed
is written, so that whoever started the process knows in which one it died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from cnr_store import CnrStoreError
from tests.faults.fuzz_doors import Visit
from tests.faults.fuzz_followers import DOORS, FollowedVisit
from tests.faults.fuzz_mutations import Case, make_case, vector_case
from tests.faults.fuzz_stores import samples

if "--training" in sys.argv:  # takes torch, which takes seconds
    from tests.faults.fuzz_training import TRAINING_DOORS, TrainingVisit, training_samples

CPU_S = 20.0
"""Limit of CPU seconds for a door; doors take about 0.1 s."""

ENDLESS_CPU_S, ENDLESS_S = 60.0, 240.0
"""Seconds of CPU and of wall time after which a door is interrupted; the latter ends a wait without end."""

MEMORY_BYTES = 2 << 30
"""Memory that a process may use beyond that of the samples."""


class Endless(BaseException):
    """A door does not end."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Endless


def bound_memory() -> None:
    """Limit the memory: using more raises MemoryError, which no door may raise."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_case(visit: Visit, doors: list[str], verbose: bool) -> dict[str, Any]:
    case = visit.case
    found: dict[str, Any] = {
        "seed": case.seed, "sample": case.sample.name, "kind": case.kind, "what": case.what,
        "form": "damage" if case.is_damage else "sealed", "doors": {}, "failures": [],
    }  # fmt: skip
    for door in ("read", *doors):
        visit.chance = random.Random(f"{case.seed} {door}")
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, ENDLESS_CPU_S)
            signal.setitimer(signal.ITIMER_REAL, ENDLESS_S)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", RuntimeWarning)  # of torn records
                getattr(visit, door)()
            outcome = "right"
        except CnrStoreError as error:
            outcome = error.kind
            if verbose:
                traceback.print_exc()
        except (Exception, Endless) as error:  # noqa: BLE001  any other is what is looked for
            outcome = "FAILURE"
            found["failures"].append(f"{door}: {type(error).__name__}: {error}"[:600])
            if verbose:
                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        spent_s = time.process_time() - began
        if spent_s > CPU_S:
            outcome = "FAILURE"
            found["failures"].append(f"{door}: took {spent_s:.0f} s of CPU")
        found["doors"][door] = outcome
        if verbose:
            sys.stderr.write(f"{door}: {outcome}, {spent_s:.2f} s\n")
    return found


def chosen_doors(doors: tuple[str, ...], seed: int, count: int) -> list[str]:
    """Yield the doors in turn, so that each is used equally often."""
    return [doors[(seed * count + number) % len(doors)] for number in range(count or len(doors))]


def cases(arguments: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Yield the requested cases; print the seed of each before it is made."""
    (folder / "made").mkdir()
    for name in arguments.vectors:
        say({"begins": name})
        yield vector_case(name, folder / "made" / name)
    if not arguments.count:
        return
    made = training_samples(folder / "made") if arguments.training else samples(folder / "made")
    bound_memory()
    for number in range(arguments.count):
        seed = arguments.first + number * arguments.every
        say({"begins": seed})
        yield make_case(seed, made)


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="step from seed to seed")
    parser.add_argument("--vectors", nargs="*", default=(), help="negative vectors of the specification")
    parser.add_argument("--doors", type=int, default=3, help="of each case, besides reading; 0 is all")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--training", action="store_true", help="damage trainings, and restore them")
    arguments = parser.parse_args()
    kind, doors = (TrainingVisit, TRAINING_DOORS) if arguments.training else (FollowedVisit, DOORS)
    signal.signal(signal.SIGPROF, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    # Thousands of small files: in memory where there is such a file system.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        for case in cases(arguments, folder):
            if arguments.verbose:
                sys.stderr.write(f"{case.sample.name}: {case.kind}: {case.what}\n")
            visit = kind(case, folder / "case")
            found = run_case(visit, chosen_doors(doors, case.seed, arguments.doors), arguments.verbose)
            shutil.rmtree(folder / "case")
            say(found)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        say({"peak_mib": peak})


if __name__ == "__main__":
    main()
