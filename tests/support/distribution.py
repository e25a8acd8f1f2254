"""Builds this project's sdist and wheel, and environments that have the wheel but not the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = {"cnr_store", "gpu", "tools", "pyproject.toml", "README.md", "LICENSE"}
_BUILD_SDIST = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"


def build(folder: Path) -> tuple[Path, Path]:
    """Return an sdist of the working tree, and the wheel that pip makes of that sdist."""
    source = shutil.copytree(
        REPOSITORY, folder / "source",
        ignore=lambda at, names: set(names) - _SOURCES if Path(at) == REPOSITORY else {"__pycache__"} & set(names),
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", _BUILD_SDIST, folder], cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)
    (sdist,) = folder.glob("*.tar.gz")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def environment_with(wheel: Path, folder: Path) -> Path:
    """Return a Python that has the wheel, and everything else from the environment of the tests."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip(sys.executable, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "around.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


def fresh_environment(folder: Path, *requirements: str) -> Path:
    """Return a Python that has only these packages, at the pinned versions where there is one. Needs an index."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip(str(python), "install", "-c", str(REPOSITORY / "constraints.txt"), *requirements)
    return python


def pip(python: str, *arguments: str) -> None:
    """Run a Python's pip."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_outside(folder: Path, *command: str | Path) -> str:
    """Run a command in a folder, without anything that leads to the repository; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
