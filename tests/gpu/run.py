"""Runs all that needs a GPU, one thing after the other, and writes one page: ``make gpu GPU_PYTHON=...``.

Tests that need a device, the other tests of the collectors and of trainings with their models on it, the kernels under
a memory checker, and the benchmarks. Each has a limit of time, and all together have 40 minutes: what runs out of time
is ended and named on the page. Without a GPU it says so and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 40.0
ON_THE_DEVICE = (
    "tests/gpu/test_tracker.py", "tests/gpu/test_bitmap.py", "tests/gpu/test_operators.py",
    "tests/gpu/test_optimizers.py", "tests/gpu/test_memory.py", "tests/training",
)  # fmt: skip
"""Tests of the CPU that ``--device cuda`` runs on the GPU; tests/conftest.py skips those that cannot."""
CHECKED = (
    "marks_equal_the_cpu_kernel", "slices_are_marked_each_in_its_own_table", "taken_rows_are_sorted_and_cleared",
    "gathered_rows_keep_every_bit", "lattice_flags_what_it_cannot_store",
)  # fmt: skip
"""Checks of tests/gpu/kernels that run under the memory checker, which makes them many times slower."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command: its name, how long it may take, and what its environment has beside."""

    name: str
    command: Sequence[str]
    minutes: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step. ``code`` None: it was ended, because it was out of time."""

    step: Step
    code: int | None
    seconds: float


def plan(python: str, out: Path, sanitizer: str | None) -> list[Step]:
    """Return what is run, in order; ``sanitizer``: the path of compute-sanitizer, None leaves it out. Pure."""
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    steps = [
        Step(
            "tests-of-the-device", [*pytest, "-m", "gpu", f"--junitxml={out / 'tests-of-the-device.xml'}", "tests"], 6
        ),
        Step(
            "tests-on-the-device",
            [*pytest, "-m", "not soak and not gpu", "--device", "cuda",
             f"--junitxml={out / 'tests-on-the-device.xml'}", *ON_THE_DEVICE],
            11,
        ),
    ]  # fmt: skip
    if sanitizer is not None:
        # Torch's own cache of device memory would hide accesses between two tensors.
        command = [
            sanitizer,
            "--report-api-errors",
            "no",
            "--error-exitcode",
            "3",
            python,
            "tests/gpu/kernels/checks.py",
        ]
        steps.append(
            Step("memory-checker", [*command, "--device", "cuda", *CHECKED], 8, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        )
    gpu = [
        python,
        "tests/benchmarks/bench_gpu.py",
        "--rows",
        "10000000",
        "--repeats",
        "5",
        "--json",
        str(out / "gpu.json"),
    ]
    steps.append(Step("benchmark", gpu, 10))
    staging = [python, "tests/benchmarks/bench_staging.py", "--json", str(out / "staging.json")]
    steps.append(Step("benchmark-of-staging", staging, 4))
    return steps


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """Run a step for at most so long; what it prints goes to a file beside the page. Ends its children with it."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "gpu", "tools", "tests/benchmarks"))
    environment = {**os.environ, "PYTHONPATH": paths, **step.environment}
    started = time.monotonic()
    with (out / f"{step.name}.txt").open("wb") as log:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=max(0.0, min(60 * step.minutes, seconds)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also what it left behind. Its group has the number that the process had, and outlives it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return Outcome(step, code, time.monotonic() - started)


def page(machine: str, outcomes: Sequence[Outcome], left_out: Sequence[str], out: Path) -> str:
    """Return the page, as Markdown, from what the steps left in ``out``."""
    lines = ["# What ran on a GPU", "", machine, "", "| step | result | seconds | command |", "|---|---|---|---|"]
    for one in outcomes:
        shown = " ".join(part.replace(str(out), out.name) for part in one.step.command).replace(
            sys.executable, "python"
        )
        lines.append(f"| {one.step.name} | {result(one, out)} | {one.seconds:.0f} | `{shown}` |")
    lines += [f"\n{text}" for text in left_out]
    for one in outcomes:
        report = out / f"{one.step.name}.xml"
        if report.exists():
            lines += tests_section(one.step.name, report)
        else:
            printed = (out / f"{one.step.name}.txt").read_text(errors="replace").strip()
            lines += ["", f"## {one.step.name}", "", "```", printed, "```"]
    return "\n".join(lines) + "\n"


def result(outcome: Outcome, out: Path) -> str:
    """Return what became of a step in a few words."""
    words = {None: "out of time", 0: "passed"}.get(outcome.code, f"failed ({outcome.code})")
    if failures := failed_checks(outcome, out):
        words = f"failed: {', '.join(failures)}"
    report = out / f"{outcome.step.name}.xml"
    if not report.exists():
        return words
    counts = Counter(kind for kind, _, _ in cases(report))
    return f"{words}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def failed_checks(outcome: Outcome, out: Path) -> list[str]:
    """Return the checks of tests/gpu/kernels/checks.py that failed: it prints them, and exits with 0."""
    for line in (out / f"{outcome.step.name}.txt").read_text(errors="replace").splitlines():
        start = line.find('{"triton_ran"')
        if start >= 0:
            found = json.JSONDecoder().raw_decode(line[start:])[0]["failures"]
            return sorted(name for name, failure in found.items() if failure is not None)
    return []


def cases(report: Path) -> Iterator[tuple[str, str, str]]:
    """Yield of each test in a report of pytest: passed, failed or skipped, its name, and the first line of why."""
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if found is None:
            yield "passed", name, ""
        else:
            why = (found.get("message") or found.text or "").strip().splitlines() or [""]
            yield "skipped" if found.tag == "skipped" else "failed", name, why[0]


def tests_section(name: str, report: Path) -> Iterator[str]:
    """Yield which tests failed and why others were skipped."""
    found = list(cases(report))
    yield from ("", f"## {name}", "")
    yield from (f"- failed: `{test}`: {why}" for kind, test, why in found if kind == "failed")
    skipped = Counter(why for kind, _, why in found if kind == "skipped")
    yield from (f"- {count} skipped: {why}" for why, count in skipped.most_common())


def machine_or_reason() -> tuple[str | None, str]:
    """Return the GPU and the versions in one line, or None and why there is no GPU to run on."""
    try:
        import torch
    except ImportError:
        return None, f"{sys.executable} has no torch; make gpu GPU_PYTHON=python of an environment with its CUDA build"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return None, f"no GPU here: torch {torch.__version__} of {sys.executable} is a build without CUDA"
        return None, f"no GPU here: torch {torch.__version__} of {sys.executable} finds no CUDA device"
    device = torch.cuda.get_device_properties(0)
    try:
        import triton

        versions = f"triton {triton.__version__}"
    except ImportError:
        versions = "no triton"
    return (
        f"{torch.cuda.device_count()} x {device.name}, {device.total_memory / 2**30:.0f} GiB, "
        f"CUDA {torch.version.cuda}, torch {torch.__version__}, {versions}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores"
    ), ""


def main() -> None:
    """Run all steps and write the page. Exits with 1 if one failed, was out of time, or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the page and its files")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps together")
    options = parser.parse_args()
    machine, reason = machine_or_reason()
    if machine is None:
        sys.exit(f"make gpu: {reason}. Nothing was run, and no page was written.")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)  # a page shows one run
    out.mkdir(parents=True)
    sanitizer = shutil.which("compute-sanitizer")
    left_out = (
        [] if sanitizer else ["compute-sanitizer is not on the PATH, so the kernels ran without a memory checker."]
    )
    ends = time.monotonic() + 60 * options.minutes
    outcomes = []
    for step in plan(sys.executable, out, sanitizer):
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        outcomes.append(run(step, out, ends - time.monotonic()))
        print(f"   {result(outcomes[-1], out)}, {outcomes[-1].seconds:.0f} s", flush=True)
        # After each, so that a run that is ended leaves a page, too.
        (out / "report.md").write_text(page(machine, outcomes, left_out, out))
    print(f"\n{out / 'report.md'}")
    failed = [one.step.name for one in outcomes if one.code != 0 or failed_checks(one, out)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
