"""What works where the system lacks POSIX calls: imports, and reading a store that is not a local folder."""

from __future__ import annotations

import ast
import importlib
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import mypy
import pyarrow.parquet as pq
import pytest

from tests.support.launcher import Launcher, Program

STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
SYSTEM_MODULES = ("os", "signal", "time", "errno", "select", "mmap")
USED_BY_OTHERS = {"O_TMPFILE"}  # by the standard library for Linux
NOT_ON_WINDOWS = ("fcntl", "grp", "pwd", "resource", "termios")
# Packages come first: here they are those for Linux.
PACKAGES = """
    asyncio concurrent.futures importlib json multiprocessing subprocess
    fsspec.implementations.memory numba numcodecs numpy pyarrow.parquet rich.console typer.testing zarr
"""
WITHOUT_POSIX = """
import importlib, json, sys, typer.testing
for module, names in json.loads(sys.argv[1]).items():
    for name in names:
        delattr(importlib.import_module(module), name)
for module in json.loads(sys.argv[2]):
    sys.modules[module] = None  # an import raises ImportError, as on Windows
import os
os.supports_dir_fd = set()
"""


def names_of(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a stub defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=imported):
            yield from (one.asname or one.name for one in imported)


def lacking_on_windows(module: str) -> list[str]:
    """What a module has here, and on Windows not, by the type stubs of the standard library."""
    stub = next(path for path in (STUBS / f"{module}.pyi", STUBS / module / "__init__.pyi") if path.exists())
    there: set[str] = set()
    absent: set[str] = set()

    def walk(body: Sequence[ast.stmt], found: set[str]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                elsewhere = "platform != 'win32'" in test or "platform == 'linux'" in test
                walk(statement.body, absent if elsewhere else found)
                walk(statement.orelse, absent if test == "sys.platform == 'win32'" else found)
            else:
                found.update(names_of(statement))

    walk(ast.parse(stub.read_text()).body, there)
    return sorted((absent - there - USED_BY_OTHERS) & set(dir(importlib.import_module(module))))


Run = Callable[[str], str]


@pytest.fixture(scope="module")
def with_packages() -> Iterator[Launcher]:
    with closing(Launcher(*PACKAGES.split())) as started:
        yield started


@pytest.fixture
def run(with_packages: Launcher, tmp_path: Path) -> Run:
    """Runs a script where these calls are missing; returns what it prints."""
    names = {module: lacking_on_windows(module) for module in SYSTEM_MODULES}

    def run(script: str) -> str:
        text = WITHOUT_POSIX + textwrap.dedent(script)
        program = Program(["-c", text, json.dumps(names), json.dumps(NOT_ON_WINDOWS)])
        (done,) = with_packages.run(program, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_store_is_read_where_posix_calls_are_missing(run: Run) -> None:
    """Once `cnr_store.serving` could not be imported on Windows, which has no `os.register_at_fork`."""
    printed = run(
        """
        import numpy as np
        import cnr_store.changes, cnr_store.relay, cnr_store.serving, cnr_store_tools.cli
        from cnr_store import Store
        store = Store.create("memory://other-system")
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", np.ones((9, 4), np.float32))
        print(Store.open("memory://other-system").snapshot().table("t").read().sum())
        with cnr_store.serving.Loader("memory://other-system") as loader:
            print(loader.lookup("t", [1]).shape)
        done = typer.testing.CliRunner().invoke(cnr_store_tools.cli.app, ["show", "memory://other-system"])
        print(done.exit_code)
        """
    )

    assert printed.splitlines() == ["36.0", "(1, 4)", "0"]


def test_a_compiled_kernel_is_kept_where_posix_calls_are_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "from cnr_store.runtime import jit\n\n\n@jit.njit()\ndef plus_one(x):\n    return x + 1\n"
    )

    assert run("import kernel; print(kernel.plus_one(1))") == "2\n"
    assert len(list((tmp_path / "__pycache__").glob("*.nbc"))) == 1


def test_changes_are_written_to_files_where_posix_calls_are_missing(run: Run, tmp_path: Path) -> None:
    """Once `cnr changes --to parquet:` failed on Windows, without `os.O_NOFOLLOW`; links are refused there."""
    (tmp_path / "elsewhere").write_bytes(b"not mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "__lock").symlink_to(tmp_path / "elsewhere")

    printed = run(
        """
        import types
        import numpy as np
        held = set()
        def locking(fd, mode, size):
            place = (os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR), size)
            if place in held:
                raise PermissionError(13, "Permission denied")
            held.add(place)
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        import cnr_store_tools.cli
        from cnr_store import Conflict, Store
        from cnr_store.changes import changes, write_parquet
        store = Store.create("memory://other-system")
        with store.writer() as writer:
            for step in (1, 2):
                with writer.begin(step, "baseline") as txn:
                    txn.write_table("t", np.full((9, 4), step, np.float32))
        call = ["changes", "memory://other-system", "--to"]
        done = typer.testing.CliRunner().invoke(cnr_store_tools.cli.app, [*call, "parquet:files"])
        print(done.exit_code)
        linked = typer.testing.CliRunner().invoke(cnr_store_tools.cli.app, [*call, "parquet:linked"])
        print(linked.exit_code, "symbolic link" in linked.output + str(linked.exception))
        try:
            write_parquet(changes(store), "files")
        except Conflict as error:
            print(error.kind)
        """
    )

    assert printed.splitlines() == ["0", "7 True", "conflict"]
    assert pq.read_table(next((tmp_path / "files" / "t").iterdir())).num_rows == 9
    assert (tmp_path / "elsewhere").read_bytes() == b"not mine"


def test_a_local_folder_is_refused_where_it_is_not_safe(run: Run, tmp_path: Path) -> None:
    printed = run(
        """
        from cnr_store import Store, Unsupported
        try:
            Store.create("here")
        except Unsupported as error:
            print(error.kind, "object store" in str(error))
        """
    )

    assert printed.split() == ["unsupported", "True"]
    assert not (tmp_path / "here").exists()
