"""The model and data side of ``cnr demo``: click logs, a small DLRM, its optimizers and its metrics.

Nothing in this package knows a store. It trains a model whose state is plain tensors, in time order and
bit-deterministically, so that whoever saves and restores that state can be held to the uninterrupted run.
"""
