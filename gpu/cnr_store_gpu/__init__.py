"""Which rows changed, and their staging out of the training step: collectors, bitmap, buffers, kernels.

A package of its own because it runs inside the training step, on the device, and must know nothing about
stores: it imports `cnr_store.types` and `cnr_store.errors` only. Every Triton kernel has a torch reference
next to it, so all of it works on a CPU too.
"""

from __future__ import annotations

__all__: list[str] = []
