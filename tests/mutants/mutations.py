"""The kept list of mutations: one ``.toml`` file beside this module for each area.

An entry ``[[mutation]]`` breaks one safety rule in one place:

- ``name``: what the broken code does, in a few words with dashes; its own in the whole list;
- ``file``: the source, from the repository's root;
- ``old``: text that stands in it exactly once, to whole lines or less;
- ``new``: what stands there instead (nothing, where the rule is left out);
- ``why``: the rule in plain words, with the statement of the specification if there is one;
- ``tests``: files or node ids of pytest; at least one of these tests must fail;
- ``small``: true if it is in the tier of CI.

An entry ``[[equivalent]]`` (``name``, ``file``, ``old``, ``new``, ``argument``) was tried, changes nothing that can be
seen, and says why. It is only checked to apply still.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One line of the library, written wrongly."""

    area: str
    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    is_small: bool
    is_equivalent: bool

    def applied(self, source: str) -> str:
        """Return the source with the mutation in it.

        Raises
        ------
        ValueError
            ``old`` does not stand in it exactly once, or what comes out is the same or no Python.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: `old` stands {count} times in {self.file}; it must stand there once")
        mutated = source.replace(self.old, self.new)
        if mutated == source:
            raise ValueError(f"{self.name}: `new` is `old`")
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: with `new` in it, {self.file} is no Python: {error}") from error
        return mutated


def read_mutations(folder: Path) -> list[Mutation]:
    """Return the entries of all areas, in the order of files and lines."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for entry in document.pop("mutation", []):
            entry.setdefault("small", False)
            found.append(
                Mutation(
                    path.stem,
                    is_small=entry.pop("small"),
                    tests=tuple(entry.pop("tests")),
                    is_equivalent=False,
                    **entry,
                )
            )
        for entry in document.pop("equivalent", []):
            why = entry.pop("argument")
            found.append(Mutation(path.stem, why=why, tests=(), is_small=False, is_equivalent=True, **entry))
        if document:
            raise ValueError(f"{path.name}: unknown sections: {', '.join(document)}")
    return found
