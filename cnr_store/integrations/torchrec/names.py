"""Imports TorchRec's names in one place.

Why this module exists: the lookups of a sharded module are private in TorchRec, and their names changed between
releases. A missing name must raise an error with the version; otherwise changed rows would not be marked.
"""

from __future__ import annotations

from typing import Any

from cnr_store.errors import MissingDependency, Unsupported

TESTED = "1.8.0"

try:
    import torchrec
except ImportError as error:
    raise MissingDependency(
        'sharded tables need torchrec; pip install "cnr-store[torchrec]", then torchrec and fbgemm-gpu',
        found="torchrec",
    ) from error

try:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
    from torchrec.distributed.model_parallel import get_unwrapped_module
    from torchrec.distributed.types import ShardedModule, ShardingEnv2D
    from torchrec.modules.mc_modules import ManagedCollisionModule
    from torchrec.optim.fused import FusedOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
except ImportError as error:
    raise Unsupported(
        f"torchrec {getattr(torchrec, '__version__', '?')} lacks a name that cnr_store needs ({error}); cnr_store was "
        f"tested with torchrec {TESTED}",
        found=getattr(torchrec, "__version__", None),
        expected=TESTED,
    ) from error

SHARDED_COLLECTIONS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of TorchRec or FBGEMM.

    Raises
    ------
    Unsupported
        This version does not have it.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        version = getattr(torchrec, "__version__", "?")
        raise Unsupported(
            f"{type(owner).__name__} of torchrec {version} has no {name!r}, which is needed to find its lookups; "
            f"cnr_store was tested with torchrec {TESTED}",
            found=version,
            expected=TESTED,
        ) from error


__all__ = [
    "SHARDED_COLLECTIONS",
    "CombinedOptimizer",
    "EmbeddingComputeKernel",
    "EmbeddingLocation",
    "FusedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "ManagedCollisionModule",
    "OptimizerWrapper",
    "ShardedFeatureProcessedEmbeddingBagCollection",
    "ShardedModule",
    "ShardingEnv2D",
    "get_unwrapped_module",
    "private",
]
