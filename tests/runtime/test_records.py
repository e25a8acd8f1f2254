"""Record types are looked at by msgspec when their module is imported."""

import ast
import gc
from pathlib import Path

import msgspec
import pytest

import cnr_store
import cnr_store_gpu
import cnr_store_tools
from cnr_store.runtime.records import converter

SOURCES = [
    path
    for package in (cnr_store, cnr_store_gpu, cnr_store_tools)
    for path in sorted(Path(package.__path__[0]).rglob("*.py"))
]


def is_looked_at(kind: type[msgspec.Struct]) -> bool:
    return any(type(one).__name__ == "StructInfo" for one in gc.get_referents(kind))


def test_two_threads_that_convert_first_at_once_do_not_crash() -> None:
    """msgspec 0.22 crashed the process there; what it finds at a first look is found before a converter returns."""

    class Inner(msgspec.Struct):
        number: int

    class Outer(msgspec.Struct):
        inner: Inner
        others: list[Inner] = []

    assert not is_looked_at(Outer)
    converted = converter(Outer)
    assert is_looked_at(Outer)
    assert is_looked_at(Inner)
    assert converted({"inner": {"number": 1}}) == Outer(Inner(1))
    with pytest.raises(msgspec.ValidationError, match=r"\$\.inner"):
        converted({"inner": 1})


def test_no_function_makes_a_thread_look_at_a_type() -> None:
    """`msgspec.convert`, ``decode(type=)`` and decoders look at their type on the thread that calls."""
    found = []
    for path in SOURCES:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        calls = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in calls:
            name, typed = ast.unparse(call.func), [ast.unparse(one.value) for one in call.keywords if one.arg == "type"]
            looks = name == "msgspec.convert" or name.endswith("Decoder") or typed not in ([], ["dict[str, Any]"])
            if name.startswith("msgspec.") and looks and path.name != "records.py":
                found.append(f"{path.name}:{call.lineno}")

    assert found == []
