"""Reports a failed save to the training: whether its rows are kept, and whether a later save can write them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from cnr_store.errors import BackgroundSaveFailed, CommitStateUnknown, Fenced, RankLost
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.options import OnError


def failure_message(error: BaseException) -> str:
    """Return what a failed save means for the training. Pure."""
    if isinstance(error, CommitStateUnknown):
        return f"whether a checkpoint was committed is not known yet ({error}); it is looked up before the next save"
    if isinstance(error, RankLost):
        return f"this rank has lost the others, and does not know whether the last checkpoint was committed ({error})"
    if isinstance(error, Fenced):
        return f"a checkpoint was not saved, nor will a later one of this training be: {error}"
    return f"a checkpoint was not saved ({error}); its rows are saved with the next one"


def raise_failure(error: BaseException | None) -> None:
    """Raise the error of a failed save; return if there is no error.

    Raises
    ------
    BackgroundSaveFailed
        With its cause. An error that is not an `Exception` (Ctrl-C) is raised unchanged.
    """
    if error is None:
        return
    if not isinstance(error, Exception):
        raise error
    raise BackgroundSaveFailed(failure_message(error)) from error


@dataclass(frozen=True, slots=True)
class FailureReports:
    """Raises or warns about failed saves, as ``on_error`` selects."""

    ranks: Ranks
    on_error: OnError

    def report(self, error: BaseException | None) -> None:
        """Raise or warn on this rank alone."""
        try:
            raise_failure(error)
        except BackgroundSaveFailed as failure:
            self._raise_or_warn(failure)

    def report_together(self, error: BaseException | None) -> None:
        """As `report`, but an error of one rank is reported on all, so that they all save next or all do not."""
        try:
            self.raise_together(error)
        except BackgroundSaveFailed as failure:
            self._raise_or_warn(failure)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise an error of one rank on all ranks, independently of ``on_error``."""
        together(self.ranks, lambda: raise_failure(error))

    def _raise_or_warn(self, failure: BackgroundSaveFailed) -> None:
        if self.on_error == "raise":
            raise failure
        warnings.warn(str(failure), RuntimeWarning, stacklevel=4)
