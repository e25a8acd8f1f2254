"""Runs the suites of benchmarks and writes one page: ``make bench``, or ``make bench SUITES="size plan" QUICK=1``.

Each suite is a script that runs by itself too (``python tests/benchmarks/bench_size.py``). Its figures come as JSON
beside the page, its timings as pyperf's JSON (``python -m pyperf stats FILE``, ``compare_to``).

``make bench MODEL="zipf300/adam mlperf/adagrad"`` runs the suites that take models on these; results: the folder
``models``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import page
from models import add_model_option

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Suite:
    """One script and what it is about."""

    name: str
    script: str
    about: str
    no_model: str = ""
    """Why it takes none of `models`; empty: it takes them by ``--model``."""


_CLICKS = "trained on clicks; models have none"

SUITES = (
    Suite("size", "bench_size.py", "bytes on disk by policy and encoding"),
    Suite("quality", "bench_quality.py", "what restores cost in quality, and the fewest bytes that cost none", _CLICKS),
    Suite("slots", "bench_slots.py", "deltas of optimizers with a state per element", _CLICKS),
    Suite("cost", "bench_cost.py", "saves and loads beside what people use today, on a disk and an object store"),
    Suite("dense", "bench_dense.py", "dense parameters and their optimizer state at size", "not about tables"),
    Suite("frequency", "bench_frequency.py", "saves per hour that a training can afford, a save after every step"),
    Suite("models", "bench_models.py", "saves of models with 26 to 1,000 tables"),
    Suite("first", "bench_first_save.py", "a first save beside the training"),
    Suite("growth", "bench_growth.py", "what grows with rows, versions, tables and writers", "one size grows at once"),
    Suite("keys", "bench_keys.py", "tables that grow by key, beside 8-bit rows in Parquet", "one hashed table"),
    Suite("plan", "bench_plan.py", "a large model on many GPUs, computed from measured rates", "1 and 100 TB"),
    Suite("wire", "bench_wire.py", "fewer bytes between ranks: what they cost in quality and CPU time", _CLICKS),
    Suite("encode", "bench_delta.py", "encoding and committing a delta", "`models` has the saves of models"),
    Suite("restore", "bench_restore.py", "restoring a baseline and its deltas"),
    Suite("recovery", "bench_recovery.py", "replacing one of four ranks against restoring all"),
    Suite("load", "bench_load.py", "loading a compacted snapshot"),
    Suite("serving", "bench_serving.py", "lookups while deltas land"),
    Suite("online", "bench_online.py", "what fresh rows are worth, and how few bytes keep them fresh", _CLICKS),
    Suite("tracking", "bench_tracking.py", "marking the rows that a batch touches"),
    Suite("staging", "bench_staging.py", "the copy for which training stalls"),
    Suite("dcp", "bench_dcp.py", "saves by torch.distributed.checkpoint beside its own file writer"),
    Suite("compaction", "bench_compaction.py", "compacting deltas into baselines"),
    Suite("affine", "bench_affine.py", "the published row quantizer against torch's", "an encoder of rows"),
)
"""In the order of the page. `bench_gpu.py` needs a GPU and stands alone."""

_WITHOUT_MODEL = "; ".join(f"{suite.name} ({suite.no_model})" for suite in SUITES if suite.no_model)


def main() -> None:
    """Run the suites that were asked for and write the page of all results that lie in the folder.

    Exits with 1 if a suite failed; the others run all the same.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [suite.name for suite in SUITES]
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"which, by default all of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="small runs: whether they work, not how fast")
    parser.add_argument("--out", default="build/bench", type=Path, help="folder of the results and of the page")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="another folder for the page and its plots")
    add_model_option(parser)
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page of the results there are")
    parser.epilog = f"without --model: {_WITHOUT_MODEL}"
    options = parser.parse_args()
    wrong = sorted(set(options.suites) - set(known))
    if wrong:
        parser.error(f"no suite {wrong}; there are {', '.join(known)}")
    wanted = [suite for suite in SUITES if not options.suites or suite.name in options.suites]
    flags: list[str] = ["--quick"] if options.quick else []
    out: Path = options.out
    if options.model:
        flags += ["--model", *options.model, "--divided-by", str(options.divided_by)]
        out /= "models"
        for suite in [one for one in wanted if one.no_model]:
            print(f"{suite.name} takes no model: {suite.no_model}")
            wanted.remove(suite)
    chosen = [] if options.only_page else wanted
    failed = [suite.name for suite in chosen if not _run(suite, out, flags)]
    written = page.write(out, [(suite.name, suite.about, command(suite)) for suite in SUITES], options.page)
    print(f"\n{written}: {len(chosen) - len(failed)} of {len(chosen)} suites ran")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def command(suite: Suite) -> str:
    """Return the command that runs one suite."""
    return f"python tests/benchmarks/{suite.script}"


def _run(suite: Suite, out: Path, flags: Sequence[str]) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    print(f"\n== {suite.name}: {suite.about}", flush=True)
    started = time.monotonic()
    done = subprocess.run([sys.executable, HERE / suite.script, "--json", out / f"{suite.name}.json", *flags])
    print(f"   {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
