"""The rooms of the house and the arrows between them, read from every import. Nothing is executed.

A room is a module or package directly under ``cnr_store``. Imports inside functions and under ``TYPE_CHECKING`` count:
they are knowledge too. ``python -m tests.support.rooms`` prints rooms, floors and arrows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "cnr_store"
GPU = REPOSITORY / "gpu" / "cnr_store_gpu"
TOOLS = REPOSITORY / "tools" / "cnr_store_tools"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module and the names from it; ``from a import b`` is ``a.b`` where that is a module."""

    file: Path
    line: int
    module: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line} imports {self.module} ({', '.join(self.names)})"


def is_module(dotted: str) -> bool:
    path = Path(*dotted.split("."))
    roots = (REPOSITORY, REPOSITORY / "gpu", REPOSITORY / "tools")
    return any((root / path).is_dir() or (root / path).with_suffix(".py").is_file() for root in roots)


@cache
def imports_in(source: str, file: Path) -> tuple[Import, ...]:
    return tuple(_imports_of(ast.parse(source), file))


def _imports_of(tree: ast.Module, file: Path) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: relative imports hide the arrow"
            module = node.module or ""
            names = []
            for alias in node.names:
                if is_module(f"{module}.{alias.name}") and module.startswith("cnr_store"):
                    yield Import(file, node.lineno, f"{module}.{alias.name}", ())
                else:
                    names.append(alias.name)
            if names:
                yield Import(file, node.lineno, module, tuple(names))
        elif isinstance(node, ast.Call) and call_name(node) in {
            "import_module",
            "__import__",
            "importorskip",
        }:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(file, node.lineno, first.value, ())


def calls_in(source: str, *words: str) -> list[ast.Call]:
    """Every call of a source that has one of these words. To parse those that have none would take long."""
    if not any(word in source for word in words):
        return []
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def call_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports_under(folder: Path) -> tuple[Import, ...]:
    return tuple(found for file in sources(folder) for found in imports_in(file.read_text(), file))


def room_of(file: Path) -> str:
    first = file.relative_to(LIBRARY).parts[0]
    return first.removesuffix(".py")


def target_room(found: Import) -> str | None:
    """The room of ``cnr_store`` that is imported, or None for another package."""
    top, _, rest = found.module.partition(".")
    if top != "cnr_store":
        return None
    return rest.split(".")[0] if rest else "__init__"


def arrows() -> dict[str, set[str]]:
    """Each room with the rooms that it imports."""
    found: dict[str, set[str]] = {room_of(file): set() for file in sources(LIBRARY)}
    for one in imports_under(LIBRARY):
        room, target = room_of(one.file), target_room(one)
        if target is not None and target != room:
            found[room].add(target)
    return found


def floors(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """The import depth of each room: 0 where nothing is imported. Rooms in a circle are absent."""
    depth: dict[str, int] = {}
    while ready := [room for room, below in arrows.items() if room not in depth and below <= depth.keys()]:
        depth |= {room: 1 + max((depth[one] for one in arrows[room]), default=-1) for room in ready}
    return depth


if __name__ == "__main__":
    found = arrows()
    depth = floors(found)
    for room in sorted(found, key=lambda room: (depth[room], room)):
        print(f"{depth[room]:2} {room:12} {' '.join(sorted(found[room]))}")
    arrow_count = sum(map(len, found.values()))
    print(f"{len(found) - 1} rooms and the face, {max(depth.values()) + 1} floors, {arrow_count} arrows")
