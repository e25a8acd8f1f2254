"""The examples of the README and of docs/gpu.md run as they stand; a second run of the first continues it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_and_continues(tmp_path: Path) -> None:
    # The others are parts of a training of the reader's own: tests/training/test_readme_attach.py.
    example = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]

    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "(2, 32)"
    assert len(list((tmp_path / "ten-lines-store" / "commits").iterdir())) >= 8


def test_the_collectors_alone_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "gpu.md").read_text(), flags=re.DOTALL)

    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([2, 16])"


def test_the_readme_starts_with_the_two_commands() -> None:
    first = README.read_text().split("##")[0]

    assert first.index("make demo") < first.index("make test")
