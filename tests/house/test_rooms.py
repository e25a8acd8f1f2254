"""Who may know whom: the arrows of the design, held by reading every import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rooms import (
    GPU,
    LIBRARY,
    REPOSITORY,
    TOOLS,
    Import,
    arrows,
    call_name,
    calls_in,
    floors,
    imports_in,
    imports_under,
    room_of,
    sources,
    target_room,
)

# Room -> rooms that it may import: all of them stand above it in this table.
MAY_IMPORT: dict[str, set[str]] = {
    room: set(below.split())
    for room, below in {
        "errors": "",
        "types": "",
        "runtime": "errors",
        "format": "errors types runtime",
        "storage": "errors",
        "encodings": "errors types runtime",
        "testing": "errors storage",
        "log": "errors format runtime storage",  # nothing about tables
        "segment": "errors types format runtime storage encodings",
        "read": "errors types format runtime storage encodings segment",  # never the log, never write
        "write": "errors types format runtime storage encodings log segment read",
        "store": "errors types format runtime storage log segment read write",
        "transfer": "errors types format runtime storage encodings log segment read write store",
        "relay": "errors format runtime storage log segment store",
        "maintenance": "errors types format runtime storage encodings log segment read write store",
        "serving": "errors types format runtime storage encodings log segment read store",
        "changes": "errors types format runtime storage encodings log segment read write store serving",
        "communication": "errors types runtime",  # never a store
        "training": "errors types format runtime storage encodings log segment read write store maintenance changes "
        "communication",
        "integrations": "errors types format runtime storage segment read write store transfer serving training "
        "changes communication",
        # The face of the library: whatever loads no torch.
        "__init__": "errors types format runtime encodings log segment read write store maintenance transfer",
    }.items()
}

# The same inside `serving`: what lookups read, how that becomes another version, and places that it is pushed to.
SERVING_MAY_IMPORT: dict[str, set[str]] = {"rows": set(), "update": {"rows"}, "sinks": {"rows"}}

WITH_TORCH = {"communication", "training", "serving", "changes", "integrations"}
GPU_MAY_IMPORT = {"cnr_store.runtime", "cnr_store.errors", "cnr_store.types"}
TOOLS_MAY_IMPORT = {
    "cnr_store",
    "cnr_store.errors",
    "cnr_store.training",
    "cnr_store.serving",
    "cnr_store.changes",
    "cnr_store.relay",
    "cnr_store.integrations.checkpoints",
    "cnr_store.integrations.folder_watch",
    "cnr_store.integrations.ray",
    "cnr_store.integrations.redis",
    "cnr_store.integrations.torcheasyrec",
}

# Packages that belong to some rooms only. Tools may use whatever they like of these, except backends.
ONLY_IN: dict[str, set[str]] = {
    package: rooms
    for packages, rooms in [
        ("torch torchdata torchrec fbgemm_gpu triton cnr_store_gpu", WITH_TORCH),
        ("fsspec s3fs gcsfs adlfs botocore aiobotocore", {"storage", "testing"}),
        ("hypothesis pytest", {"testing"}),
        ("ray", {"integrations"}),
        ("redis watchdog", {"integrations"}),
        ("lightning accelerate", {"integrations"}),
        ("typer click rich tqdm cnr_store_tools", set[str]()),
    ]
    for package in packages.split()
}

CODE_RUNNING_FORMATS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

MOST_ROOMS, MOST_FLOORS = 22, 12


def arrow_problem(room: str, found: Import) -> str | None:
    """Why this import may not stand in this room of ``cnr_store``, or None."""
    target = target_room(found)
    top = found.module.split(".")[0]
    if target is not None:
        if target != room and target not in MAY_IMPORT[room]:
            return f"{found}: {room} may not know {target}"
    elif room not in ONLY_IN.get(top, {room}):
        return f"{found}: {top} does not belong in {room}"
    return None


def public_names(module: str) -> set[str]:
    """``__all__`` of a package of the library, read from its source; the classes of the module of errors."""
    if module == "cnr_store.errors":
        errors = ast.parse((LIBRARY / "errors.py").read_text()).body
        return {node.name for node in errors if isinstance(node, ast.ClassDef)}
    path = LIBRARY.joinpath(*module.split(".")[1:])
    init = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
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
    for node in calls_in(source, "load", "allow_pickle"):
        keywords = {kw.arg: kw.value.value for kw in node.keywords if isinstance(kw.value, ast.Constant)}
        loads = call_name(node) == "load" and ast.unparse(node.func) == "torch.load"
        if loads and keywords.get("weights_only") is not True:
            yield f"{file.name}:{node.lineno} calls torch.load without weights_only=True"
        if keywords.get("allow_pickle") is True:
            yield f"{file.name}:{node.lineno} allows pickle"


def test_every_room_has_its_row() -> None:
    assert {room_of(file) for file in sources(LIBRARY)} == MAY_IMPORT.keys()


def test_arrows_of_the_table_point_up_to_earlier_rows() -> None:
    rows = list(MAY_IMPORT)

    assert [room for at, room in enumerate(rows) if not MAY_IMPORT[room] <= set(rows[:at])] == []


def test_the_page_of_the_house_names_files_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:[\w]+/)*[\w]+\.py)`", page)
    files = [
        str(file.relative_to(REPOSITORY))
        for folder in (LIBRARY, GPU, TOOLS, REPOSITORY / "tests")
        for file in sources(folder)
    ]

    assert len(named) > 50
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []


def test_the_house_stays_small() -> None:
    found = arrows()
    depth = floors(found)

    assert found.keys() - depth.keys() == set(), "a circle"
    assert len([room for room in found if room != "__init__"]) + len([GPU, TOOLS]) <= MOST_ROOMS
    assert max(depth.values()) + 1 <= MOST_FLOORS


def test_library_imports_follow_the_arrows() -> None:
    found = ((room_of(one.file), one) for one in imports_under(LIBRARY))

    problems = [problem for room, one in found if (problem := arrow_problem(room, one))]

    assert problems == []


def test_the_packages_of_serving_follow_their_arrows() -> None:
    problems = []
    for package, may_import in SERVING_MAY_IMPORT.items():
        for found in imports_under(LIBRARY / "serving" / package):
            parts = found.module.split(".")
            if parts[:2] == ["cnr_store", "serving"]:
                target = parts[2] if len(parts) > 2 else "__init__"
                if target != package and target not in may_import:
                    problems.append(f"{found}: {package} may not know {target}")

    assert problems == []


def test_gpu_package_knows_only_words_and_errors() -> None:
    problems = [
        str(found)
        for found in imports_under(GPU)
        if found.module.split(".")[0] in {"cnr_store", "cnr_store_tools", "typer", "rich"}
        and ".".join(found.module.split(".")[:2]) not in GPU_MAY_IMPORT
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
        for node in calls_in(file.read_text(), "print", "sys.stdout", "sys.stderr")
        if call_name(node) in {"print", "write"}
        if ast.unparse(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}
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
        ("log", "from cnr_store.segment.rows import check_row_ids"),
        ("types", "from cnr_store.errors import BadInput"),
        ("format", "from cnr_store import log"),
        ("segment", "from cnr_store import Store"),
        ("store", "def load():\n    import torch"),
        ("store", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("maintenance", "torch = importlib.import_module('torch')"),
        ("segment", "import fsspec.asyn"),
        ("maintenance", "from rich.progress import Progress"),
        ("store", "from cnr_store_gpu import bitmap"),
        ("communication", "from cnr_store.store import Store"),
        ("read", "from cnr_store.write.encode import encode_block"),
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
from cnr_store import log
from cnr_store import _rebuild
import cnr_store.log.rebase
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
