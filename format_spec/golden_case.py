"""One golden store while it is written, and the formulas of section 5 that say what its versions hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cnr_store import Store


def lattice(values, scale):
    scale = np.float32(scale)
    return scale * (np.rint(values / scale).astype(np.float32) + np.float32(0))  # a code has no sign of zero


def rounded(values, bits):
    """float_bits of fp32, by arithmetic on the pattern."""
    pattern = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
    size, drop = pattern & 0x7FFFFFFF, 23 - bits
    if drop:
        half = (1 << (drop - 1)) - 1 + (size >> drop & 1)
        size = np.minimum((size + half) >> drop << drop, (0x7F7FFFFF >> drop) << drop)
    return ((pattern & 0x80000000) | size).astype(np.uint32).view(np.float32)


class Golden:
    """One case: a store that is written, and the arrays that each checked version holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store.create(str(folder / "store"), fsync=False, threads=1)
        self.writer = self.store.writer(run_id="golden")
        self.versions: dict[str, dict] = {}
        self.branches: dict[str, dict[str, dict]] = {}
        (folder / "expected").mkdir()

    def expect(self, version, tables, *, dense=None, documents=None, scalars=None, branch=None) -> None:
        """Note what ``version`` holds; ``tables`` is name to {"values": ..., slot: ..., "keys": ...}."""
        held: dict[str, object] = {"tables": {}, "dense": {}, "documents": documents or {}, "scalars": scalars or {}}
        for name, found in tables.items():
            held["tables"][name] = {key: self._save(array) for key, array in found.items()}
        for name, array in (dense or {}).items():
            held["dense"][name] = self._save(array)
        versions = self.versions if branch is None else self.branches.setdefault(branch, {})
        versions[str(version)] = held

    def _save(self, array) -> str:
        array = np.asarray(array)
        if array.size <= 4:
            return {"dtype": array.dtype.name, "shape": list(array.shape), "hex": array.tobytes().hex()}
        name = f"{len(list((self.folder / 'expected').iterdir())):03d}.npy"
        for path in sorted((self.folder / "expected").iterdir()):
            old = np.load(path)
            if old.dtype == array.dtype and old.shape == array.shape and old.tobytes() == array.tobytes():
                return path.name
        np.save(self.folder / "expected" / name, array)
        return name

    def close(self) -> None:
        self.writer.close()
        self.store.close()
        held = {"versions": self.versions} | ({"branches": self.branches} if self.branches else {})
        text = json.dumps(held, indent=1, sort_keys=True)
        (self.folder / "expected.json").write_text(text + "\n")
