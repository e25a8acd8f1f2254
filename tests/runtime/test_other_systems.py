"""What works where the system lacks POSIX calls: imports, and reading a store that is not a local folder."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_POSIX = """
import os, sys
sys.modules["fcntl"] = None  # an import raises ImportError, as on Windows
for name in ("O_DIRECTORY", "O_CLOEXEC", "O_PATH", "O_NOFOLLOW", "O_NONBLOCK", "posix_fallocate"):
    delattr(os, name)
os.supports_dir_fd = set()
"""


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + textwrap.dedent(script)],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'gpu'}:{ROOT / 'tools'}", "NUMBA_CACHE_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_is_read_where_posix_calls_are_missing(tmp_path: Path) -> None:
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
        """,
        tmp_path,
    )

    assert printed.split() == ["36.0", "(1,", "4)"]


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
