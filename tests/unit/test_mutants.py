"""The kept list of mutations: every entry applies to the sources as they are, and the small tier is caught."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.mutations import ROOT, Mutation, read_mutations

MUTATIONS = read_mutations()


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_small_tier_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    status = run.main(["--tier", "small", "--jobs", "1"])

    assert status == 0, capfd.readouterr().out


def test_a_mutation_that_no_test_notices_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = "tests/unit/test_storage_digests.py::test_the_digest_is_xxh3_128_of_the_bytes"
    entries = {
        "caught": mutation("return xxhash.xxh3_128_hexdigest(data)", "return xxhash.xxh64_hexdigest(data)", own),
        "SURVIVED": mutation("if found_digest != digest:", "if False:", own),
        "does not apply": mutation("no such line", "", own),
        "tests that do not pass": mutation("if data is None:", "if False:", f"{own}_of_another"),
    }

    found = run.run(list(entries.values()), 1, tmp_path)

    assert [word[: len(expected)] for expected, (_, word) in zip(entries, found, strict=True)] == list(entries)
    assert "hexdigest(data)" in (ROOT / "cnr_store/storage/digests.py").read_text()


def mutation(old: str, new: str, *tests: str) -> Mutation:
    file = "cnr_store/storage/digests.py"
    return Mutation("area", "name", file, old, new, "why", tests, is_small=False, is_equivalent=False)
