"""The writer of a training: opened by the first save or a restore, closed when it cannot commit any more."""

from __future__ import annotations

from dataclasses import dataclass, field

from cnr_store.runtime.ranks import Ranks
from cnr_store.segment.shards import Placement
from cnr_store.store import Store
from cnr_store.training.continuing import TakeOver
from cnr_store.training.options import StoreOptions
from cnr_store.write.writer import Writer


@dataclass(slots=True, eq=False)
class TrainingWriter:
    """Holds at most one writer. All ranks call every method but `close` together.

    Attributes
    ----------
    current
        None before the first save, during a restore, and after a commit that conflicted with another one.
    """

    store: Store
    options: StoreOptions
    ranks: Ranks
    placement: Placement | None
    current: Writer | None = field(default=None, init=False)

    def open(self, take_over: TakeOver | None) -> Writer:
        """Close the current writer and return a new one; the caller makes it `current`. Blocks."""
        self.close()
        options = self.options
        return self.store.writer(
            mirror=options.mirror, mirror_folder=options.mirror_folder, bytes_per_s=options.bytes_per_s,
            ranks=self.ranks, shards=self.placement, succession=take_over,
        )  # fmt: skip

    def close(self) -> None:
        """Close the writer, if there is one."""
        if self.current is not None:
            self.current.close()
            self.current = None

    @property
    def mirror_nbytes(self) -> int:
        """Bytes that the code mirrors take now."""
        return 0 if self.current is None else self.current.mirror_nbytes
