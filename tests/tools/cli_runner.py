"""Runs the command line in this process and parses its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from typer.testing import CliRunner

from cnr_store_tools.cli import app

RunCode = Callable[[str], CompletedProcess[str]]
"""Runs Python code in a process of its own that has imported the command."""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output; fails if there is anything else."""
        return json.loads(self.out)


def cnr(*arguments: object, columns: int = 400) -> Outcome:
    """Run a command. ``columns``: width of the terminal; the default wraps no path."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])
    return Outcome(result.exit_code, result.stdout, result.stderr)
