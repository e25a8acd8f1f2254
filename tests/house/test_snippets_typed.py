"""mypy strict accepts every example of the README and of docs/, against the wheel that a user installs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.pages import python_blocks

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# What the examples take from the reader's own program.
READERS_OWN = {
    "model": "model: torch.nn.Module",
    "optimizer": "optimizer: torch.optim.Optimizer",
    "loader": "loader: StatefulDataLoader[Any]",
    "dataset": "dataset: torch.utils.data.Dataset[Any]",
    "batches": "batches: Iterable[Any]",
    "train_step": "def train_step(*given: Any) -> torch.Tensor: return torch.zeros(1)",
    "compute_loss": "def compute_loss(*given: Any) -> torch.Tensor: return torch.zeros(1)",
    "prefetch": "def prefetch(batches: Iterable[T]) -> Iterator[T]: return iter(batches)",
    "logloss": "def logloss(*given: Any) -> float: return 0.0",
    "validation": "validation: Any",
    "store": "store: Store",
    "manager": "manager: CheckpointManager",
    "dist": "import torch.distributed as dist",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
    "StatefulDistributedSampler": "from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler",
    "DistributedModelParallel": "from torchrec.distributed import DistributedModelParallel",
    "KeyedOptimizerWrapper": "from torchrec.optim.keyed import KeyedOptimizerWrapper",
    "CombinedOptimizer": "from torchrec.optim.keyed import CombinedOptimizer",
    "in_backward_optimizer_filter": "from torchrec.optim.optimizers import in_backward_optimizer_filter",
    "plan": "plan: Any",
    "sharders": "sharders: Any",
    "device": "device: torch.device",
}
PREAMBLE = """\
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import Store
from cnr_store.training import CheckpointManager

T = TypeVar("T")
"""
# Functions of an example have no annotations of their own; what they call of the library is checked all the same.
CONFIGURATION = """\
[mypy]
strict = True
check_untyped_defs = True
disallow_untyped_defs = False
disallow_incomplete_defs = False
disallow_untyped_calls = False
[mypy-duckdb.*,fbgemm_gpu.*,pyarrow.*,redis.*,safetensors.*,torchdata.*,torchrec.*]
ignore_missing_imports = True
"""


def readers_own(example: str) -> list[str]:
    """Declarations of what an example reads before it binds it, in the statement that binds it or earlier."""
    tree = ast.parse(example)
    bound: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.setdefault(node.name, 0)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0]: 0 for alias in node.names}
        elif isinstance(node, ast.arg):
            bound[node.arg] = 0
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = min(node.lineno, bound.get(node.id, node.lineno))
    read = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if node.lineno <= bound.get(node.id, node.lineno)
    }
    return [READERS_OWN[name] for name in sorted(read & READERS_OWN.keys())]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has this project as a wheel, and everything else from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(
        REPOSITORY, folder / "source",
        ignore=lambda at, names: set(names) - KEPT if Path(at) == REPOSITORY else {"__pycache__"} & set(names),
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source],
        check=True,
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    around = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "around.pth").write_text("\n".join(around))
    return folder / "env" / "bin" / "python"


KEPT = {"cnr_store", "gpu", "tools", "pyproject.toml", "README.md", "LICENSE"}


@pytest.mark.timeout(600)
def test_a_type_checker_accepts_every_example(installed: Path, tmp_path: Path) -> None:
    for page in PAGES:
        for number, example in enumerate(python_blocks(page), 1):
            named = re.match(r"# (\w+\.py)\n", example)  # files of a tutorial import each other
            text = example if named else "\n".join([PREAMBLE, *readers_own(example), example])
            (tmp_path / (named[1] if named else f"{page.stem.lower()}_{number}.py")).write_text(text)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    examples = sorted(path.name for path in tmp_path.glob("*.py"))

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--python-executable", installed, *examples],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert len(examples) > 30
    assert done.stdout.splitlines()[-1] == f"Success: no issues found in {len(examples)} source files", done.stdout
