"""The sdist and the wheel: what is in them, and what a user does with them in an environment without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.distribution import REPOSITORY, build, environment_with, fresh_environment, run_outside
from tests.support.pages import python_blocks
from tests.support.typed_examples import write_examples

PACKAGES = {"cnr_store": ".", "cnr_store_gpu": "gpu", "cnr_store_tools": "tools"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(built[1], tmp_path_factory.mktemp("env"))


def check_types(python: Path, folder: Path, mypy_of: Path) -> None:
    """mypy strict accepts every example of the README and of docs/."""
    examples = write_examples(folder)
    found = REPOSITORY / ".mypy_cache"  # by `make check`
    if found.is_dir():
        shutil.copytree(found, folder / ".mypy_cache")
    command = [mypy_of, "-m", "mypy", "--config-file", "mypy.ini", "--python-executable", python, *examples]

    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    assert len(examples) > 30
    assert done.stdout.splitlines()[-1] == f"Success: no issues found in {len(examples)} source files", done.stdout


def test_a_wheel_made_of_the_sdist_has_every_module_and_nothing_else(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    modules = {
        path.relative_to(REPOSITORY / folder).as_posix()
        for package, folder in PACKAGES.items()
        for path in (REPOSITORY / folder / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}

    assert packed == modules
    assert {"cnr_store", "gpu", "tools", "LICENSE", "README.md", "pyproject.toml"} <= top
    assert not {"tests", "docs", "format_spec"} & top


def test_the_wheel_brings_the_command(installed: Path, tmp_path: Path) -> None:
    assert run_outside(tmp_path, installed.parent / "cnr", "--version").startswith("cnr-store ")


@pytest.mark.timeout(600)
def test_a_type_checker_accepts_every_example(installed: Path, tmp_path: Path) -> None:
    check_types(installed, tmp_path, Path(sys.executable))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_fresh_environment_runs_the_readme(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Installs every dependency anew, so it needs an index: `make dist-check`."""
    python = fresh_environment(tmp_path / "env", f"{built[1]}[train,s3,metrics,redis]", "mypy")
    cnr = python.parent / "cnr"
    training, serving = python_blocks(REPOSITORY / "README.md")

    first, again = (run_outside(tmp_path, python, "-c", training).splitlines()[0] for _ in range(2))

    assert (first, again) == ("start", "continue after step 50")
    assert run_outside(tmp_path, python, "-c", serving) == "(2, 32) of step 50\n"
    assert run_outside(tmp_path, cnr, "--version").startswith("cnr-store ")
    assert "baseline" in run_outside(tmp_path, cnr, "log", "ten-lines-store")
    check_types(python, tmp_path, python)
