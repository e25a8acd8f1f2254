"""Saves and loads of `torch.distributed.checkpoint` (DCP) in a store: each save is one version, and costs what changed.

It never pickles, and never waits for another rank in a hook of DCP but the last. Open `writer` first, then `layout`
(what is stored as what) and `attempt` (why a save has a thread).

::

    writer = CnrStorageWriter("/data/run")                     # one for the run
    dcp.save(state, checkpoint_id="step-300", storage_writer=writer)
    dcp.async_save(state, checkpoint_id="step-400", storage_writer=writer).result()
    dcp.load(state, storage_reader=CnrStorageReader("/data/run"))
"""

from __future__ import annotations

from cnr_store.integrations.dcp.reader import CnrStorageReader
from cnr_store.integrations.dcp.stager import CnrStager
from cnr_store.integrations.dcp.writer import CnrStorageWriter

__all__ = ["CnrStorageReader", "CnrStorageWriter", "CnrStager"]
