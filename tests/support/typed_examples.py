"""The examples of the README and of docs/ as programs that a type checker can read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.pages import python_blocks

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# What the examples take from the reader's own program.
READERS_OWN = {
    "model": "model: torch.nn.Module",
    "optimizer": "optimizer: torch.optim.Optimizer",
    "loader": "loader: StatefulDataLoader[Any]",
    "unit": "unit: Any",
    "dataset": "dataset: torch.utils.data.Dataset[Any]",
    "batches": "batches: Iterable[Any]",
    "train_step": "def train_step(*given: Any) -> torch.Tensor: return torch.zeros(1)",
    "compute_loss": "def compute_loss(*given: Any) -> torch.Tensor: return torch.zeros(1)",
    "prefetch": "def prefetch(batches: Iterable[T]) -> Iterator[T]: return iter(batches)",
    "logloss": "def logloss(*given: Any) -> float: return 0.0",
    "validation": "validation: Any",
    "store": "store: Store",
    "manager": "manager: CheckpointManager",
    "zarr": "import zarr",
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
    "module": "module: Any",
    "rows": "rows: npt.NDArray[np.float32]",
    "state": "state: npt.NDArray[np.float32]",
    "keys": "keys: npt.NDArray[np.int64]",
    "mine": "mine: npt.NDArray[np.int64]",
    "evicted": "evicted: npt.NDArray[np.int64]",
    "step": "step: int",
    "dense": "dense: dict[str, npt.NDArray[Any]]",
    "adapter": "adapter: Any",
    "ranks": "ranks: Any",
    "group": "group: int",
    "stepper": "stepper: Any",
    "replicas": "replicas: Any",
    "build": "def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]: raise NotImplementedError",
}
PREAMBLE = """\
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import Store
from cnr_store.training import CheckpointManager

T = TypeVar("T")
"""
# Functions of an example have no annotations of their own; what they call of the library is checked all the same.
FOR_EXAMPLES = {"disallow_untyped_defs": False, "disallow_incomplete_defs": False, "disallow_untyped_calls": False}


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


def configuration(examples: list[str]) -> str:
    """mypy's, with the flags of `make check`: what that has found out about torch and others holds for these too."""
    flags = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mypy"]
    sections = [(override.pop("module"), override) for override in flags.pop("overrides")]
    for name in ("packages", "mypy_path", "explicit_package_bases"):
        del flags[name]
    sections += [(examples, FOR_EXAMPLES), (["duckdb.*", "redis.*"], {"ignore_missing_imports": True})]
    return "\n".join([_section("mypy", flags), *(_section(f"mypy-{','.join(names)}", own) for names, own in sections)])


def _section(name: str, flags: Mapping[str, Any]) -> str:
    values = {flag: ", ".join(value) if isinstance(value, list) else value for flag, value in flags.items()}
    return "\n".join([f"[{name}]", *(f"{flag} = {value}" for flag, value in values.items())])


def write_examples(folder: Path) -> list[str]:
    """Write the examples and the configuration of mypy to a folder; return the names of the programs."""
    for page in PAGES:
        for number, example in enumerate(python_blocks(page), 1):
            named = re.match(r"# (\w+\.py)\n", example)  # files of a tutorial import each other
            text = example if named else "\n".join([PREAMBLE, *readers_own(example), example])
            (folder / (named[1] if named else f"{page.stem.lower()}_{number}.py")).write_text(text)
    programs = sorted(path.name for path in folder.glob("*.py"))
    (folder / "mypy.ini").write_text(configuration([name.removesuffix(".py") for name in programs]))
    return programs
