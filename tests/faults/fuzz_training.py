"""Doors of a training: a damaged checkpoint of a module, optimizers, a reader and generators is restored.

Apart from the others, for it takes torch.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from cnr_store.training import load
from tests.faults.fuzz_doors import Visit, Wrong
from tests.faults.fuzz_stores import Sample, held_by, opened, read_all, same_names
from tests.training.runs import Training, manager_of

SAVES = 4


class Reader:
    """Counts batches."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "names": ("a", b"b"), "part": {1: 2.5}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state  # anything


def trained(folder: Path, kind: str) -> Sample:
    """A training that saved several times."""
    root = folder / kind
    training, reader = Training(kind), Reader()
    with same_names(3):
        manager = manager_of(root, training, reader=reader, extras={"more": Reader()})
        manager.restore()
        for number in range(SAVES):
            training.train(number)
            reader.at += 1
            manager.step()
            manager.save(wait=True)
        manager.close()
    return Sample(kind, read_all(root), held_by(root))


def training_samples(folder: Path) -> list[Sample]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trained(folder, kind) for kind in ("adam", "rowwise_adagrad", "sparse_adam")]


class TrainingVisit(Visit):
    """Restores into a fresh training."""

    def restore(self) -> None:
        self._restore(strict=True)

    def restore_what_fits(self) -> None:
        self._restore(strict=False)

    def restore_or_fall_back(self) -> None:
        self._restore(fallback=True)

    def _restore(self, **options: Any) -> None:
        root = self.fresh()
        training, reader = Training(self.case.sample.name), Reader()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager = manager_of(root, training, reader=reader, extras={"more": Reader()})
            try:
                if manager.restore(**options) is not None:
                    training.train(17)
                    manager.step()
                    manager.save(wait=True)
            finally:
                manager.close()

    def load(self) -> None:
        """Restore weights alone; if the store only lost bytes, they are the saved ones."""
        training = Training(self.case.sample.name)
        with opened(self.shared) as store:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = load(store, training.model)
            if not self.case.is_damage:
                return
            snapshot = store.snapshot(found.version)
            for name, tensor in training.model.state_dict().items():
                stored = snapshot.table(name).read() if name in snapshot else snapshot.read_dense(name)
                if stored.tobytes() != tensor.detach().numpy().tobytes():
                    raise Wrong(f"{name} is loaded otherwise than it is stored")


TRAINING_DOORS = ("restore", "restore_what_fits", "restore_or_fall_back", "load")
