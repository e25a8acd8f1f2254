"""What works where the system lacks POSIX calls: imports, and reading a store that is not a local folder."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import mypy
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
SYSTEM_MODULES = ("os", "signal", "time", "errno", "select", "mmap")
USED_BY_OTHERS = {"O_TMPFILE"}  # by the standard library for Linux
NOT_ON_WINDOWS = ("fcntl", "grp", "pwd", "resource", "termios")
# Packages come first: here they are those for Linux.
WITHOUT_POSIX = """
import asyncio, concurrent.futures, importlib, json, multiprocessing, subprocess, sys
import fsspec.implementations.memory, numba, numcodecs, numpy, pyarrow.parquet, rich.console, typer.testing, zarr
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


def run(script: str, folder: Path) -> str:
    names = {module: lacking_on_windows(module) for module in SYSTEM_MODULES}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + textwrap.dedent(script), json.dumps(names), json.dumps(NOT_ON_WINDOWS)],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'gpu'}:{ROOT / 'tools'}", "NUMBA_CACHE_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_is_read_where_posix_calls_are_missing(tmp_path: Path) -> None:
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
        """,
        tmp_path,
    )

    assert printed.splitlines() == ["36.0", "(1, 4)", "0"]


def test_changes_are_written_to_files_where_posix_calls_are_missing(tmp_path: Path) -> None:
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
        """,
        tmp_path,
    )

    assert printed.splitlines() == ["0", "7 True", "conflict"]
    assert pq.read_table(next((tmp_path / "files" / "t").iterdir())).num_rows == 9
    assert (tmp_path / "elsewhere").read_bytes() == b"not mine"


def test_a_local_folder_is_refused_where_it_is_not_safe(tmp_path: Path) -> None:
    printed = run(
        """
        from cnr_store import Store, Unsupported
        try:
            Store.create("here")
        except Unsupported as error:
            print(error.kind, "object store" in str(error))
        """,
        tmp_path,
    )

    assert printed.split() == ["unsupported", "True"]
    assert not (tmp_path / "here").exists()
