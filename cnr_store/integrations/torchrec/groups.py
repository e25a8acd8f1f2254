"""Makes TorchRec forget the process groups that it keeps in its modules, so that models can be built on new ones.

Why this module exists: a rank that outlives another one makes its process group anew. TorchRec keeps the groups within
and across hosts for the life of the process, and runs one collective in the first model of a process only. Without this
call the survivors would use groups that are gone, or wait for ever for the process in place of the lost one.
"""

from __future__ import annotations

from torchrec.distributed import collective_utils, comm

from cnr_store.integrations.torchrec.names import private

_GROUPS = ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D")


def forget_process_groups() -> None:
    """Call it on ranks that survived, after ``destroy_process_group`` and before they build their model again.

    Raises
    ------
    Unsupported
        This version of TorchRec keeps its groups elsewhere. Nothing was changed.
    """
    for name in _GROUPS:
        private(comm, name)
    private(collective_utils, "_INITIALIZED")
    for name in _GROUPS:
        setattr(comm, name, None)
    collective_utils._INITIALIZED = False
