"""What a training is told of a save that failed: whether its rows are kept, and whether a later one can save them."""

from __future__ import annotations

from cnr_store.errors import CommitStateUnknown, Fenced, RankLost


def failure_message(error: BaseException) -> str:
    """Return what a failed save means for the training. Pure."""
    if isinstance(error, CommitStateUnknown):
        return f"whether a checkpoint was committed is not known yet ({error}); it is looked up before the next save"
    if isinstance(error, RankLost):
        return f"this rank has lost the others, and does not know whether the last checkpoint was committed ({error})"
    if isinstance(error, Fenced):
        return f"a checkpoint was not saved, nor will a later one of this training be: {error}"
    return f"a checkpoint was not saved ({error}); its rows are saved with the next one"
