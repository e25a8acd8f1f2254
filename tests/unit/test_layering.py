"""Who may know whom: the arrows of the design, held by reading every import (nothing is executed).

A room is a module or package directly under ``cnr_store``. Imports inside functions and under
``TYPE_CHECKING`` count: they are knowledge too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "cnr_store"
GPU = REPOSITORY / "gpu" / "cnr_store_gpu"
TOOLS = REPOSITORY / "tools" / "cnr_store_tools"

WORDS = {"errors", "types", "limits", "fields", "arguments"}
DOCUMENTS = WORDS | {
    "layout", "nesting", "records", "documents", "commit_record", "identity", "manifest", "manifest_checks",
    "chain_checks", "layers",
}  # fmt: skip
PARTS = DOCUMENTS | {"storage", "local_files", "compiled", "encodings", "rows", "arrays", "workers"}
LOG = {"author", "rebase", "beginning", "clock", "side_objects", "log", "newest", "expiry", "at_time"}
FORMAT = PARTS | LOG | {"segment", "table_codes", "replay_plan", "replay", "tree"}
CODEC = PARTS | {"segment", "table_codes"}
KEEPING = {"cached_reader", "chunk_lru"}
READING = FORMAT | KEEPING | {"read_ahead", "settled", "restore", "snapshot"}
STAGING = READING | {
    "placement", "agreement", "ranks", "options", "narrowing", "encode", "changes", "baseline", "mirrors", "planning",
    "inputs", "assembly", "thresholds", "ordering", "table_options",
}  # fmt: skip
WRITING = STAGING | {"session", "committing", "transaction", "writer"}
DECISIONS = {"policy", "retention", "planning", "rate"}
ENGINE = WRITING | DECISIONS | {"branches", "leases", "store", "sizes"}
MAINTENANCE = {"compaction", "gc", "verify", "repair"}

# Room -> rooms that it may import. A new module needs a row here, and so a thought about its place.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "limits": set(),  # how large and how deep documents may be, and what is in them
    "fields": {"limits"},  # the same as types
    "nesting": set(),  # how deep a document is
    "arguments": {"errors"},  # what a caller gives, checked where it is given
    "local_files": {"errors"},  # files that are no objects of a store
    "compiled": set(),  # how kernels are compiled and kept
    "layout": {"errors", "limits", "fields"},
    "records": WORDS,  # types alone
    "documents": WORDS | {"nesting", "records"},
    "commit_record": WORDS | {"layout", "records", "documents"},
    "layers": WORDS | {"records", "documents", "commit_record"},  # pure: the lists of records
    "identity": WORDS | {"records", "documents"},
    "manifest_checks": WORDS | {"layout", "records"},
    "manifest": WORDS | {"records", "documents", "manifest_checks"},
    "chain_checks": WORDS | {"records", "manifest"},
    "storage": {"errors", "layout"},
    "author": {"errors", "records", "clock"},  # pure: who wrote a record
    "rebase": DOCUMENTS | {"author"},  # pure: what becomes of a draft behind the record that won
    "beginning": {"errors", "layout", "storage"},
    "clock": {"errors", "storage"},
    "side_objects": DOCUMENTS | {"storage", "clock"},
    # Nothing about tables.
    "log": DOCUMENTS | {"author", "rebase", "storage", "beginning", "clock", "side_objects"},
    "newest": DOCUMENTS | {"log"},
    "expiry": DOCUMENTS | {"log"},
    "at_time": DOCUMENTS,  # pure
    "branches": DOCUMENTS | {"rebase", "log"},
    "leases": DOCUMENTS | {"storage", "clock", "log"},
    "encodings": WORDS | {"compiled"},
    "rows": WORDS | {"encodings"},
    "arrays": DOCUMENTS,
    "workers": WORDS,
    "segment": PARTS,
    "ordering": CODEC,  # pure: in which order codes are stored
    "cached_reader": PARTS | {"segment"},
    "chunk_lru": PARTS | {"segment", "cached_reader"},
    "table_codes": DOCUMENTS | {"encodings", "rows", "workers"},
    "replay_plan": PARTS | {"table_codes"},
    "replay": PARTS | {"segment", "table_codes", "replay_plan"},
    "policy": WORDS | {"records", "rows"},
    "retention": WORDS | {"records", "rows"},
    "ranks": WORDS,
    "placement": WORDS | {"records"},
    "planning": WORDS | {"records", "rows", "placement"},
    "agreement": WORDS | {"records", "table_options", "options", "encodings"},
    "rate": WORDS | {"records", "encodings"},
    "tree": WORDS,
    "sizes": DOCUMENTS,
    "tensor_file": WORDS | {"nesting", "local_files"},
    "exporting": READING | {"tensor_file"},
    "importing": WRITING | {"store", "tensor_file", "exporting"},
    "read_ahead": CODEC | {"replay_plan", "replay"},
    "settled": CODEC | {"replay_plan", "replay", "read_ahead"},
    "restore": CODEC | {"replay_plan", "replay", "read_ahead", "settled"},
    "snapshot": FORMAT | KEEPING | {"restore", "placement"},  # no writing below this line
    "narrowing": PARTS,
    "table_options": WORDS | {"encodings"},
    "thresholds": WORDS | {"encodings", "table_options"},  # pure: which rows wait
    "options": WORDS | {"records", "encodings", "table_options", "thresholds"},
    "encode": CODEC,
    "changes": CODEC | {"encode", "table_options", "thresholds"},
    "baseline": CODEC | {"encode", "changes", "narrowing", "placement"},
    "mirrors": CODEC | {"placement", "table_options", "thresholds"},
    "inputs": CODEC | {"table_options"},
    "assembly": READING | {"encode", "changes", "baseline", "placement", "ordering"},
    "session": READING | {"mirrors", "placement", "ranks"},
    "committing": READING | {"planning", "ranks", "session"},
    "transaction": STAGING | {"session", "committing"},
    "writer": STAGING | {"session", "committing", "transaction"},
    "store": WRITING | DECISIONS | {"branches", "leases"},
    "compaction": ENGINE,
    "gc": ENGINE,
    "verify": ENGINE,
    "lost_lists": DOCUMENTS | {"storage", "side_objects", "log"},
    "repair": ENGINE | {"verify", "lost_lists"},
    "status": DOCUMENTS | {"storage", "store"},  # for monitors; decides nothing
    "maintenance": ENGINE | MAINTENANCE | {"status"},
    "training": ENGINE | {"verify", "repair"},  # going back to what is whole
    "consume": ENGINE,
    "integrations": ENGINE | {"training", "consume", "tensor_file"},
    "testing": WORDS | {"layout", "storage"},
    # The face of the library: whatever loads no torch.
    "__init__": ENGINE | MAINTENANCE | {"exporting", "importing", "status", "maintenance"},
}

# The same inside `consume`, which is six rooms: what a consumer holds, how that moves on, and who uses it for what.
CONSUME_MAY_IMPORT: dict[str, set[str]] = {
    "rows": set(),
    "moves": {"rows"},
    "sinks": {"rows"},
    "stream": {"rows", "moves"},
    "relay": set(),
    "serve": {"rows", "moves", "sinks"},
    "__init__": {"rows", "serve", "sinks", "stream", "relay"},
}

WITH_TORCH = {"training", "consume", "integrations"}
GPU_MAY_IMPORT = {"cnr_store.compiled", "cnr_store.errors", "cnr_store.types"}
TOOLS_MAY_IMPORT = {
    "cnr_store",
    "cnr_store.errors",
    "cnr_store.training",
    "cnr_store.consume",
    "cnr_store.integrations",
    "cnr_store.testing",
}

# Packages that belong to some rooms only. Tools may use whatever they like of these, except backends.
ONLY_IN: dict[str, set[str]] = {
    package: rooms
    for packages, rooms in [
        ("torch torchdata torchrec fbgemm_gpu triton cnr_store_gpu", WITH_TORCH),
        ("fsspec s3fs gcsfs adlfs botocore aiobotocore", {"storage", "testing"}),
        ("hypothesis pytest", {"testing"}),
        ("ray", {"compaction"}),
        ("redis", {"consume"}),
        ("typer click rich tqdm cnr_store_tools", set[str]()),
    ]
    for package in packages.split()
}

CODE_RUNNING_FORMATS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


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


def imports_in(source: str, file: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
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


def call_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports_under(folder: Path) -> Iterator[Import]:
    for file in sources(folder):
        yield from imports_in(file.read_text(), file)


def room_of(file: Path) -> str:
    first = file.relative_to(LIBRARY).parts[0]
    return first.removesuffix(".py")


def arrow_problem(room: str, found: Import) -> str | None:
    """Why this import may not stand in this room of ``cnr_store``, or None."""
    top, _, rest = found.module.partition(".")
    if top == "cnr_store":
        target = rest.split(".")[0] if rest else "__init__"
        if target != room and target not in MAY_IMPORT[room]:
            return f"{found}: {room} may not know {target}"
    elif room not in ONLY_IN.get(top, {room}):
        return f"{found}: {top} does not belong in {room}"
    return None


def public_names(module: str) -> set[str]:
    """``__all__`` of a package of the library, read from its source; errors are those of the library."""
    if module == "cnr_store.errors":
        module = "cnr_store"
    init = LIBRARY.joinpath(*module.split(".")[1:]) / "__init__.py"
    for node in ast.parse(init.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return set(ast.literal_eval(node.value))
    return set()


def tools_problem(found: Import) -> str | None:
    """Why this import may not stand in the command line, or None."""
    top = found.module.split(".")[0]
    if top == "cnr_store_gpu" or top in {"fsspec", "s3fs", "gcsfs", "adlfs"}:
        return f"{found}: the command line asks the library for this"
    if top != "cnr_store":
        return None
    if found.module not in TOOLS_MAY_IMPORT:
        return f"{found}: not a public module"
    private = sorted(set(found.names) - public_names(found.module))
    return f"{found}: {', '.join(private)} not in __all__" if private else None


def code_running_problems(source: str, file: Path) -> Iterator[str]:
    """Uses of formats that can run code when they are read."""
    for found in imports_in(source, file):
        if found.module.split(".")[0] in CODE_RUNNING_FORMATS:
            yield str(found)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {kw.arg: kw.value.value for kw in node.keywords if isinstance(kw.value, ast.Constant)}
        if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") is not True:
            yield f"{file.name}:{node.lineno} calls torch.load without weights_only=True"
        if keywords.get("allow_pickle") is True:
            yield f"{file.name}:{node.lineno} allows pickle"


def test_every_room_has_its_row() -> None:
    rooms = {room_of(file) for file in sources(LIBRARY)}

    assert rooms - MAY_IMPORT.keys() == set()


def test_the_table_has_no_cycle() -> None:
    remaining = {room: set(allowed) - {room} for room, allowed in MAY_IMPORT.items()}
    while ground := {room for room, allowed in remaining.items() if not allowed}:
        remaining = {room: allowed - ground for room, allowed in remaining.items() if room not in ground}

    assert remaining == {}


def test_library_imports_follow_the_arrows() -> None:
    found = ((room_of(one.file), one) for one in imports_under(LIBRARY))

    problems = [problem for room, one in found if (problem := arrow_problem(room, one))]

    assert problems == []


def test_the_rooms_of_the_consumers_follow_their_arrows() -> None:
    consume = LIBRARY / "consume"
    problems = []
    for found in imports_under(consume):
        room = found.file.relative_to(consume).parts[0].removesuffix(".py")
        parts = found.module.split(".")
        if parts[:2] == ["cnr_store", "consume"]:
            target = parts[2] if len(parts) > 2 else "__init__"
            if target != room and target not in CONSUME_MAY_IMPORT[room]:
                problems.append(f"{found}: {room} may not know {target}")

    assert problems == []


def test_gpu_package_knows_only_words_and_errors() -> None:
    problems = [
        str(found)
        for found in imports_under(GPU)
        if found.module.split(".")[0] in {"cnr_store", "cnr_store_tools", "typer", "rich"}
        and found.module not in GPU_MAY_IMPORT
    ]

    assert problems == []


def test_command_line_uses_public_names_only() -> None:
    problems = [problem for found in imports_under(TOOLS) if (problem := tools_problem(found))]

    assert problems == []


def test_nothing_is_printed_outside_the_command_line() -> None:
    printed = [
        f"{file.name}:{node.lineno}"
        for folder in (LIBRARY, GPU)
        for file in sources(folder)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}
    ]

    assert printed == []


def test_nothing_can_run_code_from_a_store() -> None:
    problems = [
        problem
        for folder in (LIBRARY, GPU, TOOLS)
        for file in sources(folder)
        for problem in code_running_problems(file.read_text(), file)
    ]

    assert problems == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("log", "from cnr_store.rows import compose"),
        ("types", "from cnr_store.errors import BadInput"),
        ("layout", "from cnr_store import records"),
        ("segment", "from cnr_store import Store"),
        ("store", "def load():\n    import torch"),
        ("store", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("verify", "torch = importlib.import_module('torch')"),
        ("rows", "import fsspec.asyn"),
        ("compaction", "from rich.progress import Progress"),
        ("store", "from cnr_store_gpu import bitmap"),
        ("training", "from cnr_store.compaction import fold"),
    ],
)
def test_a_wrong_arrow_is_seen(room: str, line: str) -> None:
    assert [one for one in imports_in(line, LIBRARY / f"{room}.py") if arrow_problem(room, one)]


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("log", "import json\nfrom cnr_store.storage import Storage"),
        ("encodings", "import numba\nfrom cnr_store.encodings import lattice"),
        ("training", "import torch\nfrom cnr_store_gpu import bitmap\nfrom cnr_store.store import Store"),
    ],
)
def test_a_right_arrow_is_let_through(room: str, line: str) -> None:
    assert [one for one in imports_in(line, LIBRARY / f"{room}.py") if arrow_problem(room, one)] == []


def test_private_names_in_the_command_line_are_seen() -> None:
    lines = """
from cnr_store import CnrStoreError
from cnr_store import layout, _rebuild
import cnr_store.records
"""

    problems = [problem for one in imports_in(lines, TOOLS / "cli.py") if (problem := tools_problem(one))]

    assert len(problems) == 3


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from joblib import load", "torch.load(path)", "torch.load(path, weights_only=False)",
     "np.load(path, allow_pickle=True)"],
)  # fmt: skip
def test_code_running_formats_are_seen(line: str) -> None:
    assert list(code_running_problems(line, LIBRARY / "store.py"))


def test_weights_only_loading_is_let_through() -> None:
    assert list(code_running_problems("torch.load(path, weights_only=True)", TOOLS / "cli.py")) == []
