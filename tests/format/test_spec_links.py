"""Every requirement of the specification has an id of its own, and tests in the table beside it that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from format_spec import vectors

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "format_spec" / "v1.md").read_text()
TABLE = (ROOT / "format_spec" / "tests.md").read_text()
ID = re.compile(r"^CNR-[A-Z]{2,4}-[0-9]+$")
HEADING = re.compile(r"^#{2,3} (?:Annex )?([A-Z]|\d+(?:\.\d+)?)[. ]", re.MULTILINE)
ROW = re.compile(r"^\| (CNR-\S+) \| (\S+) \| `([^`]+)` \|$", re.MULTILINE)


def by_section() -> dict[str, str]:
    """Number or letter of each section to its text, without that of its subsections."""
    found = HEADING.split(TEXT)
    return dict(zip(found[1::2], found[2::2], strict=True))


def items(text: str) -> list[tuple[str, str]]:
    """The id and the text of each requirement: a list item that may go on in indented lines."""
    return re.findall(r"^- \*\*(CNR-[^*]+)\*\* (.*(?:\n  .*)*)", text, re.MULTILINE)


def requirements() -> dict[str, str]:
    """Each requirement's id to its section."""
    return {identifier: section for section, text in by_section().items() for identifier, _ in items(text)}


def in_order(identifier: str) -> tuple[str, int]:
    prefix, _, number = identifier.rpartition("-")
    return prefix, int(number)


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(names)


def test_there_are_requirements_in_every_normative_section() -> None:
    chapters = {section.partition(".")[0] for section in requirements().values()}

    assert chapters >= {str(number) for number in range(2, 11)}
    assert len(requirements()) == len(re.findall(r"\*\*CNR-", TEXT)) > 90


def test_ids_are_well_formed_unique_and_ordered_in_their_section() -> None:
    listed = [identifier for identifier, _ in items(TEXT)]
    assert all(ID.match(identifier) for identifier in listed)
    assert len(set(listed)) == len(listed)
    for text in by_section().values():
        here = [in_order(identifier) for identifier, _ in items(text)]
        for prefix in {prefix for prefix, _ in here}:
            own = [key for key in here if key[0] == prefix]
            assert own == sorted(own)


def test_must_is_said_in_requirements_alone() -> None:
    for section, text in by_section().items():
        for _, item in items(text):
            text = text.replace(item, "")
        assert "MUST" not in text or section == "1", section


def test_every_requirement_has_tests_and_every_test_exists() -> None:
    rows = ROW.findall(TABLE)

    assert len(rows) == TABLE.count("\n| CNR-")
    assert {(identifier, section) for identifier, section, _ in rows} == set(requirements().items())
    assert rows == sorted(set(rows), key=lambda row: (in_order(row[0]), row[2]))
    for identifier, _, test in rows:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{identifier}: {path} is not there"
        assert name in names_in(path), f"{identifier}: {test} does not exist"


def test_vector_operations_and_error_kinds_are_those_of_the_code() -> None:
    operations = set(re.findall(r"^\| `(\w+)` `key`|^\| `(reseal)` \|", by_section()["A"], re.MULTILINE))
    last_cells = re.findall(r"\|([^|]*)\|$", by_section()["11.1"], re.MULTILINE)
    kinds = set(re.findall(r"`(\w+)`", " ".join(last_cells)))

    assert {first or second for first, second in operations} == set(vectors._OPERATIONS)
    assert kinds <= set(re.findall(r"`(\w+)`", by_section()["9"]))
    assert len(kinds) > 10


def test_sections_that_the_code_refers_to_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "cnr_store").rglob("*.py")]
    named = {n for text in sources for n in re.findall(r"\(?spec, sections? ([0-9.]+[0-9])", text)}
    named |= {
        n for text in sources for pair in re.findall(r"spec, sections ([0-9.]+) and ([0-9.]+)", text) for n in pair
    }
    named |= {letter for text in sources for letter in re.findall(r"spec[^()\n]* annex ([A-Z])", text)}

    assert len(named) > 10
    assert {n.rstrip(".") for n in named} <= set(by_section())
    cited = {identifier for text in sources for identifier in re.findall(r"CNR-[A-Z]+-\d+", text)}
    assert cited <= set(requirements())
