"""Every requirement of the specification has an id of its own and names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "format_spec" / "v1.md").read_text()
ID = re.compile(r"^CNR-[A-Z]{2,4}-[0-9]+$")
REQUIREMENT = re.compile(r"^- \*\*(?P<id>[^*]+)\*\* (?P<text>.*?)(?:\[tests: (?P<tests>[^\]]+)\])?$", re.DOTALL)


def requirements() -> list[tuple[str, list[str]]]:
    """Each requirement is a list item that may go on in indented lines."""
    items = re.findall(r"^- \*\*CNR-.*(?:\n  .*)*", TEXT, re.MULTILINE)
    found = [REQUIREMENT.match(item.split(" [tests:")[0] + _tests_of(item)) for item in items]
    return [(m["id"], [test.strip() for test in (m["tests"] or "").split(",") if test.strip()]) for m in found if m]


def _tests_of(item: str) -> str:
    match = re.search(r"\[tests: [^\]]+\]", item)
    return match.group(0) if match else ""


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(names)


def test_there_are_requirements_in_every_normative_section() -> None:
    sections = re.split(r"^## (\d+)\. ", TEXT, flags=re.MULTILINE)
    with_requirements = {
        int(number) for number, body in zip(sections[1::2], sections[2::2], strict=True) if "**CNR-" in body
    }

    assert with_requirements == set(range(2, 11))
    assert len(requirements()) == len(re.findall(r"\*\*CNR-", TEXT)) > 90


def test_ids_are_well_formed_and_unique() -> None:
    ids = [identifier for identifier, _ in requirements()]

    assert all(ID.match(identifier) for identifier in ids)
    assert sorted(set(ids)) == sorted(ids)


def test_every_requirement_names_a_test_that_exists() -> None:
    for identifier, tests in requirements():
        assert tests, f"{identifier} has no test"
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"{identifier}: {path} is not there"
            assert name in names_in(path), f"{identifier}: {test} does not exist"


def test_sections_that_the_code_refers_to_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "cnr_store").rglob("*.py")]
    named = {n for text in sources for n in re.findall(r"\(?spec, sections? ([0-9.]+[0-9])", text)}
    named |= {
        n for text in sources for pair in re.findall(r"spec, sections ([0-9.]+) and ([0-9.]+)", text) for n in pair
    }
    headings = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)", TEXT, re.MULTILINE))

    assert named
    assert {n.rstrip(".") for n in named} <= headings
    cited = {identifier for text in sources for identifier in re.findall(r"CNR-[A-Z]+-\d+", text)}
    assert cited <= {identifier for identifier, _ in requirements()}
