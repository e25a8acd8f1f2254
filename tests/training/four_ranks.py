"""Runs of four ranks that one of them may end, for the tests of several files, and the run that nobody disturbed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launcher import Server

STEPS = 4
"""Steps, and saves, of a training that is killed. It is resumed for one more."""


class FourRanks(Server):
    """The process that forks the ranks of each run."""

    def __init__(self) -> None:
        super().__init__("tests.training.ranks_program")

    def run(self, folder: Path, name: str, steps: int = STEPS, **job: Any) -> list[int | None]:
        """Exit codes of the four ranks; None for one that hung."""
        codes: list[int | None] = self.ask(folder=str(folder), name=name, steps=steps, **job)
        return codes


@dataclass
class Calm:
    """A run that nobody disturbed, one step longer than the others: its values, and each rank's storage calls."""

    folder: Path
    calls: list[list[str]]

    def of_saves(self, rank: int) -> int:
        """How many calls the saves of `STEPS` steps take."""
        last_put = ".receipt.json.zst" if rank else "_segment.json.zst"
        ends = [index for index, call in enumerate(self.calls[rank]) if last_put in call and "put" in call]
        last = ends[STEPS - 1]
        return last + 1 if rank else next(i for i in range(last, len(self.calls[0])) if "hint" in self.calls[0][i]) + 1

    def index(self, rank: int, part: str, occurrence: int) -> int:
        found = [index for index, call in enumerate(self.calls[rank]) if part in call and not call.startswith("read")]
        return found[occurrence - 1]


def outputs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
