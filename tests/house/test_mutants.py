"""The kept list of mutations: every entry applies to the sources as they are, and the small tier is caught."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants.mutations import ROOT, read_mutations

MUTATIONS = read_mutations(ROOT / "tests" / "mutants")


def test_every_mutation_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(one.name for one in MUTATIONS).items() if count > 1] == []
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.name) and one.why for one in MUTATIONS)


@pytest.mark.parametrize("area", sorted({one.area for one in MUTATIONS}))
def test_every_mutation_applies_and_names_tests_that_are_there(area: str) -> None:
    problems = []
    for mutation in MUTATIONS:
        if mutation.area == area:
            try:
                mutation.applied((ROOT / mutation.file).read_text())
            except (ValueError, OSError) as error:
                problems.append(str(error))
            problems += [f"{mutation.name}: {test} is not there" for test in mutation.tests if not is_there(test)]
            if not mutation.tests and not mutation.is_equivalent:
                problems.append(f"{mutation.name}: names no tests")

    assert problems == []


def is_there(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = ROOT / file
    if not path.is_file():
        return False
    source = path.read_text()
    return all(re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE) for name in names)


OWN = "tests/storage/test_digests.py::test_the_digest_is_xxh3_128_of_the_bytes"
ENTRY = """
[[mutation]]
name = "{name}"
file = "cnr_store/storage/base.py"
old = "{old}"
new = "{new}"
why = "an example"
tests = ["{test}"]
"""


RUNS = """
import sys
from tests.mutants.run import main

told, hangs = (["--lists", f"{sys.argv[1]}/{name}"] for name in ("told", "hangs"))
for options in (["--tier", "small"], told, [*hangs, "--timeout", "2"]):
    print("exit code", main(["--jobs", "1", *options]), flush=True)
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is printed of the small tier and of two lists of examples, by one process: it imports for seconds."""
    folder = tmp_path_factory.mktemp("lists")
    hangs = "__import__('time').sleep(60)"
    entries = {
        "told": [
            ENTRY.format(name="noticed", old="xxh3_128_hexdigest(data)", new="xxh64_hexdigest(data)", test=OWN),
            ENTRY.format(name="overlooked", old="if found != digest:", new="if False:", test=OWN),
            ENTRY.format(name="gone", old="no such line", new="", test=OWN),
            ENTRY.format(name="untested", old="if len(data) != size_bytes:", new="if False:", test=f"{OWN}_of_another"),
        ],
        "hangs": [ENTRY.format(name="hangs", old="xxhash.xxh3_128_hexdigest(data)", new=hangs, test=OWN)],
    }
    for name, of_list in entries.items():
        (folder / name).mkdir()
        (folder / name / "area.toml").write_text("".join(of_list))
    command = [sys.executable, "-c", RUNS, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.split(r"(?<=^exit code \d)\n", done.stdout, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_small_tier_is_caught(printed: list[str]) -> None:
    small, _, _, _ = printed

    assert small.endswith("exit code 0"), small


def test_a_mutation_that_no_test_notices_is_told(printed: list[str]) -> None:
    _, told, _, _ = printed

    assert told.endswith("exit code 1")
    assert re.search(r"^caught .* area: noticed$", told, re.MULTILINE)
    assert re.search(r"^SURVIVED .* area: overlooked$", told, re.MULTILINE)
    assert re.search(r"^does not apply: gone: `old` stands 0 times .* area: gone$", told, re.MULTILINE)
    assert re.search(r"^tests that do not pass without it: .* area: untested$", told, re.MULTILINE)
    assert "xxh3_128_hexdigest(data)" in (ROOT / "cnr_store/storage/base.py").read_text()


def test_a_test_that_runs_out_of_time_is_told_apart(printed: list[str]) -> None:
    """It was counted as caught, as on a machine that is too slow for it."""
    _, _, hung, _ = printed

    assert re.search(r"^TIMED OUT .* area: hangs$", hung, re.MULTILINE), hung
    assert re.search(r"^area +1 +0 +0 +1 +0 +0$", hung, re.MULTILINE)
    assert hung.endswith("exit code 3")
