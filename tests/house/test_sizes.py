"""How large files, classes and constructors may be, how long names of tests, and one meaning for one class name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.rooms import GPU, LIBRARY, TOOLS, sources

TESTS = Path(__file__).parents[1]

MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_CLASS = 400
MOST_PARAMETERS = 12
MOST_LETTERS_OF_A_TEST = 70
MOST_LINES_OF_COMMUNICATION = 2050


def files() -> list[Path]:
    return [file for folder in (LIBRARY, GPU, TOOLS) for file in sources(folder)]


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the library, the GPU package or the command, and the parameters of its own constructor."""

    file: str
    name: str
    lines: int
    parameters: int


@cache
def classes() -> tuple[Class, ...]:
    return tuple(
        Class(file.name, node.name, (node.end_lineno or 0) - node.lineno + 1, parameters_of_constructor(node))
        for file in files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def parameters_of_constructor(node: ast.ClassDef) -> int:
    methods = (method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__")
    return max((parameters_of(method) for method in methods), default=0)


def parameters_of(function: ast.FunctionDef) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def test_files_and_classes_can_be_read_in_one_sitting() -> None:
    long = {
        file.name for file in [*files(), *sources(TESTS)] if len(file.read_text().splitlines()) > MOST_LINES_OF_A_FILE
    }
    long |= {one.name for one in classes() if one.lines > MOST_LINES_OF_A_CLASS}

    assert long == set()


def test_the_communication_room_stays_small() -> None:
    lines = sum(len(file.read_text().splitlines()) for file in sources(LIBRARY / "communication"))

    assert 1000 < lines <= MOST_LINES_OF_COMMUNICATION


def test_names_of_tests_are_one_short_sentence() -> None:
    names = {
        name for file in sources(TESTS) for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)
    }

    assert len(names) > 2000
    assert {name for name in names if len(name) > MOST_LETTERS_OF_A_TEST} == set()


def test_constructors_take_few_parameters() -> None:
    many = [one.name for one in classes() if one.parameters > MOST_PARAMETERS]

    assert many == []


def test_a_class_name_has_one_meaning() -> None:
    found = defaultdict(list)
    for one in classes():
        found[one.name.lstrip("_")].append(one.file)

    assert {name: places for name, places in found.items() if len(places) > 1} == {}
